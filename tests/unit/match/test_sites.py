"""Call sites as evidence."""

from __future__ import annotations

import numpy as np
import pytest
from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Comm, Job

from nccluprobe.match.columns import Columns
from nccluprobe.match.finding import Finding
from nccluprobe.match.sitelog import majority

TRAIN, SAVE, EPOCH, ROOT = "a1" * 8, "b2" * 8, "c3" * 8, "d4" * 8


def blamed(found: list[Finding]) -> set[int]:
    named = [d for f in found if f.role == "root_cause" and f.state == "open" for d in f.named]
    return {d["rank"] for d in named}


def barrier(comms: list[Comm], t: float, site: str | None) -> None:
    more = {} if site is None else {"site": site}
    for c in comms:
        c.proc.call(c, "ncclAllReduce", t, count=1, **more)


def trained(n: int = 4, rounds: int = 12) -> tuple[Job, list[Comm], float]:
    job = Job()
    comms = job.world(n)
    t = steps(comms, rounds, site=TRAIN)
    barrier(comms, t, EPOCH)
    return job, comms, t + 0.1


def save(comms: list[Comm], t: float, sites: bool = True) -> None:
    """Rank 0 alone makes a barrier; the others pair it with that of the epoch's end."""
    barrier(comms[:1], t, SAVE if sites else None)
    barrier(comms[1:], t + 0.1, EPOCH if sites else None)
    barrier(comms[:1], t + 0.2, EPOCH if sites else None)


def away(job: Job, t: float) -> None:
    """All but rank 0 are in something that has nothing to do with the device."""
    cover(job.procs[:1], t)
    cover(job.procs[1:], t, main="syscall", syscall="read")


@pytest.mark.parametrize("known", [True, False])
def test_a_barrier_that_one_rank_makes_alone(known: bool) -> None:
    job, comms, t = trained()
    save(comms, t)
    (away if known else lambda job, t: cover(job.procs, t))(job, t + 400)
    found = analyze_job(job)
    assert blamed(found) == {0}
    cause = next(f for f in found if f.role == "root_cause")
    assert all(f.downstream_of == cause.id for f in found if f is not cause)
    absence = next(f for f in found if f.hang_type == "collective_missing_enter")
    assert (cause.hang_type, cause.severity) == ("skipped_or_extra_call", "error")
    assert (cause.comm_seq, cause.details["hangs_at_comm_seq"]) == (13, 14)
    assert cause.details["sites"] == [
        {"site": EPOCH, "comm_ranks": [1, 2, 3]},
        {"site": SAVE, "comm_ranks": [0]},
    ]
    assert SAVE in cause.details["summary"]
    assert (absence.role, absence.downstream_of) == ("downstream", cause.id)


def test_without_sites_the_same_looks_like_an_absence() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 12)
    save(comms, t, sites=False)
    away(job, t + 400)
    (f,) = analyze_job(job)
    assert f.hang_type == "collective_missing_enter"
    assert "sites" not in f.details


def test_sites_that_differ_while_nothing_hangs_are_nothing() -> None:
    job, comms, t = trained()
    barrier(comms[:1], t, SAVE)
    barrier(comms[1:], t + 0.1, EPOCH)
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_a_branch_that_the_root_always_takes_is_no_evidence() -> None:
    job, comms, t = trained()
    for _ in range(5):
        barrier(comms[:1], t, ROOT)
        barrier(comms[1:], t, EPOCH)
        t += 0.1
    barrier(comms[:1], t, EPOCH)
    away(job, t + 400)
    found = analyze_job(job)
    assert [f.hang_type for f in found] == ["collective_missing_enter"]
    assert blamed(found) == {1, 2, 3}


def test_the_greater_part_waits_for_one_that_took_another_branch_once() -> None:
    """The evidence is told; the one that does not come is absent all the same."""
    job, comms, t = trained()
    barrier(comms[:1], t, SAVE)
    barrier(comms[1:], t, EPOCH)
    barrier(comms[1:], t + 0.1, TRAIN)
    cover(job.procs, t + 400)
    (f,) = analyze_job(job)
    assert blamed([f]) == {0}
    assert f.details["sites"] == [{"site": TRAIN, "comm_ranks": [1, 2, 3]}]
    assert f.details["site_splits"][0]["comm_seq"] == 13


def test_a_mismatch_tells_where_the_calls_came_from() -> None:
    job, comms, t = trained()
    for r, c in enumerate(comms):
        odd = r == 2
        c.proc.call(c, "ncclAllReduce", t, count=9 if odd else 8, site=SAVE if odd else TRAIN)
    cover(job.procs, t + 20)
    (f,) = analyze_job(job)
    assert [c["sites"] for c in f.details["calls"]] == [[TRAIN], [SAVE]]


@pytest.mark.parametrize("every", [1, 3])
def test_sites_of_some_calls_only(every: int) -> None:
    job = Job()
    comms = job.world(3)
    for i in range(20):
        for c in comms:
            more = {"site": TRAIN} if i % every == 0 else {}
            c.proc.call(c, "ncclAllReduce", 1.0 + 0.1 * i, **more)
    cover(job.procs, 400)
    assert analyze_job(job) == []


def test_a_site_of_a_wrong_type_costs_only_its_line() -> None:
    job, _, t = trained()
    job.procs[0].lines[-1][2]["site"] = 5
    cover(job.procs, t)
    run = Run(job)
    run.all()
    assert run.analysis.decoder.counts.bad_lines == 1


def test_a_call_inside_has_a_site_too() -> None:
    job, comms, t = trained()
    barrier(comms[:1], t, SAVE)
    barrier(comms[1:], t + 0.1, EPOCH)
    comms[0].proc.enter(comms[0], "ncclAllReduce", t + 0.2, count=1, site=EPOCH)
    away(job, t + 400)
    assert blamed(analyze_job(job)) == {0}


def test_columns_keep_sites_in_their_rows() -> None:
    c = Columns()

    def add(n: int, site: int | None) -> None:
        at = np.arange(n, dtype=np.int64)
        sites = None if site is None else np.full(n, site, np.int64)
        c.extend(at.astype(np.int32), at, at, at, None, sites)

    add(100, None)
    assert c.site is None
    add(50, 7)
    add(30, None)
    c.drop(90)
    assert c.site is not None
    assert c.site.tolist() == [0] * 10 + [7] * 50 + [0] * 30
    c.insert(12, 0, 5, 2)
    c.delete(0, 10)
    assert c.site.tolist() == [7] * 2 + [0] * 2 + [7] * 48 + [0] * 30
    add(200, 9)
    assert c.site[-200:].tolist() == [9] * 200
    assert len(c.site) == len(c)


def test_majorities() -> None:
    assert majority({0: 1, 1: 2, 2: 2}) == 2
    assert majority({0: 1, 1: 2}) is None
    assert majority({0: 0, 1: 0}) is None
    assert majority({0: 2, 1: 0, 2: 0, 3: 0}) is None
