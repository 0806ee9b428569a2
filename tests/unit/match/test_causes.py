"""Cause or consequence; jobs; order of arrival; memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Comm, Host, Job, unix

AR = "ncclAllReduce"


def grid(tp: int = 2, dp: int = 2) -> tuple[Job, list[Comm], dict[int, Comm], dict[int, Comm]]:
    """Ranks with a world, a tensor-parallel and a data-parallel communicator."""
    job = Job()
    world = job.world(tp * dp)
    tps, dps = {}, {}
    for r, c in enumerate(world):
        tps[r] = c.proc.comm(f"00000000000010{r // tp:02d}", r % tp, tp)
        dps[r] = c.proc.comm(f"00000000000020{r % tp:02d}", r // tp, dp)
    return job, world, tps, dps


def test_a_chain_has_one_cause() -> None:
    """Rank 3 stalls; rank 2 waits for it in TP, rank 0 waits for rank 2 in DP."""
    job, world, tps, dps = grid()
    t = steps([*world, *tps.values(), *dps.values()], 5)
    for r in (0, 1, 2):
        world[r].proc.call(tps[r], AR, t)
    for r in (0, 1):
        world[r].proc.call(dps[r], AR, t + 1)
    cover(job.procs, t + 70)
    found = analyze_job(job)
    by_comm = {f.comm_uid_hash: f for f in found}
    assert set(by_comm) == {"0000000000001001", "0000000000002000", "0000000000002001"}
    cause = by_comm["0000000000001001"]
    assert (cause.role, cause.details["missing_comm_ranks"]) == ("root_cause", [1])
    chain = by_comm["0000000000002000"]
    assert (chain.role, chain.downstream_of) == ("downstream", cause.id)
    assert chain.details["reason"] == "rank_waiting_elsewhere"
    assert chain.details["missing_rank_status"][0]["waits_in_comm"] == "0000000000001001"
    other = by_comm["0000000000002001"]  # rank 3 again, on another communicator
    assert (other.role, other.downstream_of) == ("downstream", cause.id)


@pytest.mark.parametrize("streams", [1, 2])
def test_ranks_that_wait_for_each_other_leave_the_cause_open(streams: int) -> None:
    """On one stream neither of the two may only be late: their calls exclude each other."""
    job = Job()
    p, q = job.proc(0), job.proc(1)
    x = [p.comm("00000000000000a0", 0, 2), q.comm("00000000000000a0", 1, 2)]
    y = [p.comm("00000000000000b0", 0, 2), q.comm("00000000000000b0", 1, 2)]
    steps(x, 5, stream=1)
    t = steps(y, 5, stream=streams)
    p.call(x[0], AR, t, stream=1)
    q.call(y[1], AR, t, stream=streams)
    cover(job.procs, t + 400)
    found = analyze_job(job)
    causes = [f for f in found if f.hang_type == "cross_comm_order_inversion"]
    assert [(f.role, f.named) for f in causes] == ([("root_cause", [])] if streams == 1 else [])
    found = [f for f in found if f not in causes]
    assert len(found) == 2
    assert {f.role for f in found} == {"downstream" if streams == 1 else "unknown"}
    assert {f.details["reason"] for f in found} == {"rank_waiting_elsewhere"}


def test_a_mismatch_is_the_cause_of_absences_elsewhere() -> None:
    job, world, tps, dps = grid()
    t = steps([*world, *tps.values(), *dps.values()], 5)
    world[0].proc.call(tps[0], AR, t, count=1)
    world[1].proc.call(tps[1], AR, t, count=2)
    for r in (2, 3):
        world[r].proc.call(tps[r], AR, t)
        world[r].proc.call(dps[r], AR, t + 1)
    cover(job.procs, t + 70)
    found = {f.comm_uid_hash: f for f in analyze_job(job)}
    cause = found["0000000000001000"]
    assert (cause.hang_type, cause.role) == ("collective_mismatch", "root_cause")
    assert found["0000000000002000"].downstream_of == cause.id
    assert found["0000000000002001"].downstream_of == cause.id


def test_a_rank_inside_a_receive_without_its_send_is_not_blamed() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    steps(comms[:2], 1, start=t)
    comms[2].proc.enter(comms[2], "ncclRecv", t, peer=0)
    cover(job.procs, t + 70)
    found = {f.hang_type: f for f in analyze_job(job)}
    f, cause = found["collective_missing_enter"], found["p2p_unmatched"]
    assert f.details["reason"] == "rank_waiting_elsewhere"
    assert f.details["missing_rank_status"][0]["inside"] == "ncclRecv"
    assert (f.role, f.downstream_of) == ("downstream", cause.id)
    assert [c["rank"] for c in cause.named] == [0]


def test_an_absence_because_of_an_initialisation_is_its_consequence() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    steps(comms[:2], 1, start=t)
    comms[2].proc.enter(None, "ncclCommInitRank", t, uid_hash="00000000000000dd", nranks=2, rank=0)
    cover(job.procs, t + 70)
    found = {f.hang_type: f for f in analyze_job(job)}
    cause = found["comm_init_missing_enter"]
    assert found["collective_missing_enter"].downstream_of == cause.id


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(2, 2), (2, 3), (4, 2), (3, 3)]), st.booleans())
def test_random_jobs_on_a_grid_of_communicators(
    seed: int, shape: tuple[int, int], stalls: bool
) -> None:
    """The rank that was told to stop is the only cause; a healthy job has none."""
    rng = random.Random(seed)
    job, world, tps, dps = grid(*shape)
    n = shape[0] * shape[1]
    members: dict[int, list[Comm]] = {r: [world[r], tps[r], dps[r]] for r in range(n)}
    program = [(rng.randrange(3), rng.random() < 0.3) for _ in range(60)]
    culprit, last = (rng.randrange(n), rng.randrange(60)) if stalls else (-1, 60)
    hashes = {
        (r, f): ("w", f"t{r // shape[0]}", f"d{r % shape[0]}")[f]
        for r in range(n)
        for f in range(3)
    }
    size = {h: sum(1 for x in hashes.items() if x[1] == h) for h in set(hashes.values())}
    at = [0] * n
    clock = [1.0 + 0.01 * r for r in range(n)]
    count: dict[tuple[str, int], int] = {}
    newest: dict[tuple[str, int], float] = {}
    waits: list[tuple[str, int] | None] = [None] * n
    made = [dict.fromkeys(size, 0) for _ in range(n)]
    progress = True
    while progress:
        progress = False
        for r in rng.sample(range(n), n):
            w = waits[r]
            if w is not None:
                if count.get(w, 0) < size[w[0]]:
                    continue
                clock[r] = max(clock[r], newest[w]) + 0.001
                waits[r] = None
            if at[r] >= len(program) or (r == culprit and at[r] >= last):
                continue
            family, sync = program[at[r]]
            h = hashes[r, family]
            clock[r] += rng.random() * 0.05
            members[r][family].proc.call(members[r][family], AR, clock[r])
            slot = (h, made[r][h])
            made[r][h] += 1
            count[slot] = count.get(slot, 0) + 1
            newest[slot] = max(newest.get(slot, 0.0), clock[r])
            waits[r] = slot if sync else None
            at[r] += 1
            progress = True
    cover(job.procs, max(clock) + 100)
    found = analyze_job(job)
    blamed = {
        s["global_rank"]
        for f in found
        if f.role == "root_cause"
        for s in f.details["missing_rank_status"]
        if s["reason"] != "rank_waiting_elsewhere"
    }
    everyone_done = all(a == len(program) for r, a in enumerate(at) if r != culprit)
    if not stalls or (everyone_done and not found):
        assert found == []
    elif any(f.role == "root_cause" and f.named for f in found):
        assert blamed == {culprit}
    elif any(f.role == "root_cause" for f in found):
        # Others have made all their calls and are as silent: it may be the device as well.
        assert {f.hang_type for f in found if f.role == "root_cause"} == {
            "collective_all_ranks_stuck"
        }
    else:
        # It queued calls before it stopped: without its host's state it looks
        # like one of those that wait.
        assert all(f.role == "unknown" or f.downstream_of for f in found)


def test_two_jobs_on_one_node_are_reported_apart() -> None:
    job = Job()
    for n, comm_hash in enumerate(("00000000000000a1", "00000000000000b2")):
        comms = [job.proc(r, pid=100 * (n + 1) + r).comm(comm_hash, r, 3) for r in range(3)]
        t = steps(comms, 5 + n)
        steps(comms[:2], 1, start=t)
    cover(job.procs, 70)
    found = analyze_job(job)
    assert [(f.comm_uid_hash, f.comm_seq) for f in found] == [
        ("00000000000000a1", 5),
        ("00000000000000b2", 6),
    ]
    assert [f.job for f in found] == ["00000000000000a1", "00000000000000b2"]
    assert [f.role for f in found] == ["root_cause", "root_cause"]


def test_each_job_is_judged_at_the_end_of_its_own_traces() -> None:
    """A job that ended well a day before another one is not silent."""
    job = Job()
    old = [job.proc(r, pid=100 + r).comm("00000000000000a1", r, 2) for r in range(2)]
    steps(old, 5)
    steps(old[:1], 1, start=2.0)
    for c in old:
        c.proc.cover(0.5, 20)
    new = [job.proc(r, pid=200 + r).comm("00000000000000b2", r, 2, t=90_000) for r in range(2)]
    steps(new, 5, start=90_001)
    for c in new:
        c.proc.cover(90_000, 90_100)
    assert analyze_job(job) == []


def test_one_job_whose_nodes_chose_different_run_ids_is_one_job() -> None:
    job = Job()
    hosts = [Host("a"), Host("b")]
    comms = [
        job.proc(r, hosts[r // 2], run_id=f"run-{r // 2}").comm("00000000000000aa", r, 4)
        for r in range(4)
    ]
    t = steps(comms, 5)
    steps(comms[:3], 1, start=t)
    cover(job.procs, t + 61)
    (f,) = analyze_job(job)
    assert f.details["missing_comm_ranks"] == [3]
    assert f.run_id == "run-0"


def test_two_claims_of_one_comm_rank_are_ambiguous_and_not_judged() -> None:
    job = Job()
    comms = job.world(3)
    twin = job.proc(None, pid=55).comm("00000000000000aa", 2, 3)
    t = steps([*comms, twin], 5)
    steps(comms[:2], 1, start=t)
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_communicators_with_one_hash_are_told_apart_by_instance() -> None:
    job = Job()
    first = job.world(3)
    second = [c.proc.comm("00000000000000aa", r, 3, instance=1) for r, c in enumerate(first)]
    steps(first, 7)
    t = steps(second, 5)
    steps(second[:2], 1, start=t)
    cover(job.procs, t + 61)
    (f,) = analyze_job(job)
    assert (f.comm_seq, f.details["instance"]) == (5, 1)


def _mixed_job() -> Job:
    """An absence, a delay, a mismatch and a consequence, on several communicators."""
    job, world, tps, dps = grid(2, 3)
    t = steps([*world, *tps.values(), *dps.values()], 20)
    for r, c in enumerate(world):
        c.proc.call(c, AR, t + (40 if r == 5 else 0))
    t = steps(world, 3, start=t + 41)
    for r, c in enumerate(world):
        c.proc.call(tps[r], AR, t, count=9 if r == 2 else 8)
    for r in (0, 2, 4):
        world[r].proc.call(dps[r], AR, t + 1)
    world[1].proc.group([(dps[1], AR, {}), (dps[1], AR, {})], t + 1.5)
    cover(job.procs, t + 70)
    return job


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_order_of_arrival_does_not_matter(seed: int) -> None:
    job = _mixed_job()

    def outcome(run: Run) -> list[dict[str, Any]]:
        run.scan()
        return sorted((f.to_json() for f in run.analysis.matcher.book.all()), key=lambda f: f["id"])

    plain = Run(job)
    plain.all()
    rng = random.Random(seed)
    shuffled = Run(job)
    while any(at < len(lines) for at, lines in zip(shuffled.at, shuffled.lines, strict=True)):
        left = [i for i, at in enumerate(shuffled.at) if at < len(shuffled.lines[i])]
        shuffled.feed(rng.choice(left), rng.choice([1, 2, 7, 50, None]))
    assert outcome(shuffled) == outcome(plain)
    assert len(plain.analysis.matcher.book.all()) >= 3


def test_memory_is_bounded_when_a_collector_is_silent_and_the_job_goes_on() -> None:
    job = Job()
    comms = job.world(3)
    steps(comms, 10)
    job.procs[2].cover(0.5, 3)
    steps(comms[:2], 20_000, start=2.0, step=0.05)
    cover(job.procs[:2], 1000)
    run = Run(job)
    most = 0
    for at in range(0, 1001, 10):
        run.until(at)
        assert run.scan(unix(at)) == []
        most = max(most, *(len(e.rows) for e in run.analysis.matcher.endpoints.values()))
    assert most < 4000


def test_a_collector_that_comes_back_is_waited_for_again() -> None:
    job = Job()
    comms = job.world(3)
    steps(comms[:2], 20_000, start=2.0, step=0.02)
    steps(comms[2:], 10, start=2.0, step=0.02)
    p = comms[2].proc
    p.cover(0.5, 2.1)
    # Its ring overflowed while the collector was stopped: most calls are lost.
    comms[2].ords = comms[2].idx = 19_000
    steps(comms[2:], 1000, start=382.0, step=0.02)
    p.cover(382, 900, lost_kernel=18_990)
    steps(comms[:2], 1, start=450.0)
    cover(job.procs[:2], 900)
    run = Run(job)
    found = []
    for at in range(0, 901, 5):
        run.until(at)
        found += [(f.state, f.comm_seq, f.severity) for f in run.scan(unix(at))]
    assert found == [("open", 20_000, "notice"), ("open", 20_000, "error")]
