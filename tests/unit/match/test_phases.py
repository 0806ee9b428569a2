"""Declared phases: what they excuse, and what they do not."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Job, Proc, unix

from nccluprobe.match.finding import Finding
from nccluprobe.match.options import SECOND, Options
from nccluprobe.match.phases import Phase, Phases

AR = "ncclAllReduce"


def _missing(away: tuple[int, ...], end: float = 500.0) -> Job:
    """Ranks that make 10 calls and then no more, while the others make one."""
    job = Job()
    comms = job.world(4)
    steps(comms, 10)
    for r, c in enumerate(comms):
        if r not in away:
            c.proc.call(c, AR, 5.0)
    cover(job.procs, end)
    return job


def _named(found: list[Finding]) -> list[list[int]]:
    return [[who["rank"] for who in f.named] for f in found if f.state == "open"]


def _told(job: Job, **options: Any) -> list[tuple[str, str]]:
    return [(f.severity, f.role) for f in analyze_job(job, **options) if f.state == "open"]


def test_a_phase_excuses_below_its_limit_and_not_above() -> None:
    job = _missing((2,))
    assert _told(job) == [("error", "root_cause")]
    job.procs[2].phase(4.0, "checkpoint")
    assert _told(job) == []
    assert _told(job, phase_limits=(("check*", 400 * SECOND),)) == [("error", "root_cause")]
    assert _told(job, phase_limits=(("data", 400 * SECOND),)) == []


def test_the_jobs_own_limit_holds_where_the_user_gives_none() -> None:
    job = _missing((2,))
    job.procs[2].phase(4.0, "checkpoint", limit=100)
    assert _told(job) == [("error", "root_cause")]
    assert _told(job, phase_limits=(("*", 900 * SECOND),)) == []


@pytest.mark.parametrize(
    ("ended", "told"),
    [(5.2, [("error", "root_cause")]), (300.0, [("notice", "root_cause")]), (490.0, [])],
)
def test_the_clock_starts_again_when_the_phase_is_over(
    ended: float, told: list[tuple[str, str]]
) -> None:
    job = _missing((2,))
    job.procs[2].phase(4.0, "checkpoint")
    job.procs[2].phase(ended, None)
    assert _told(job) == told


def test_who_is_in_a_phase_is_not_named_beside_another() -> None:
    job = _missing((1, 2))
    job.procs[2].phase(4.0, "data")
    found = analyze_job(job)
    assert _named(found) == [[1]]
    (f,) = found
    assert f.details["missing_comm_ranks"] == [1, 2] and f.severity == "error"
    assert [s.get("phase") for s in f.details["missing_rank_status"]] == [None, "data"]


def test_who_waits_in_a_phase_excuses_nobody_else() -> None:
    job = _missing((2,))
    for r in (0, 1, 3):
        job.procs[r].phase(4.0, "eval")
    assert _named(analyze_job(job)) == [[2]]


def test_a_promise_to_write_again_that_is_broken() -> None:
    job = _missing((2,))
    job.procs[2].phase(4.0, "data", every=30)
    assert _told(job) == [("error", "root_cause")]
    for t in range(30, 500, 30):
        job.procs[2].phase(float(t), "data", every=30)
    assert _told(job) == []


def test_a_phase_of_the_future_is_none() -> None:
    job = _missing((2,))
    job.procs[2].phase(4.0, "data", since=9000.0)
    assert _told(job) == [("error", "root_cause")]


def test_an_end_in_a_phase_is_found_at_once() -> None:
    job = Job()
    comms = job.world(3)
    steps(comms, 10)
    for c in comms[:2]:
        c.proc.call(c, AR, 5.0)
    comms[2].proc.phase(4.0, "checkpoint")
    cover(job.procs[:2], 40.0)
    cover(job.procs[2:], 20.0)
    comms[2].proc.end(20.5, how="signaled", signal=9)
    (f,) = analyze_job(job)
    assert (f.severity, f.role, _named([f])) == ("error", "root_cause", [[2]])


def test_a_communicator_that_is_ended_in_a_phase_is_found() -> None:
    job = _missing((2,), end=40.0)
    p = job.procs[2]
    p.phase(4.0, "checkpoint")
    p.comm_end(p.comms[0], 6.0, "abort")
    (f,) = analyze_job(job)
    assert (f.hang_type, f.severity) == ("comm_ended_under_waiters", "error")


def _crossed(declare: bool) -> Job:
    job = Job()
    a = job.world(2)
    b = [p.comm("00000000000000bb", r, 2) for r, p in enumerate(job.procs)]
    steps(a, 3)
    steps(b, 3)
    job.procs[0].enter(a[0], AR, 5.0)
    job.procs[1].enter(b[1], AR, 5.0)
    if declare:
        job.procs[1].phase(4.0, "checkpoint")
    for p in job.procs:
        p.cover(0.5, 5.9)
        p.cover(6.0, 100.0, main="nccl")
    return job


def test_a_wait_behind_a_phase_is_excused_and_a_wait_for_others_not() -> None:
    """Rank 1 declares a phase, but rank 3 is away without a word."""
    job = Job()
    world = job.world(4)
    pair = [job.procs[r].comm("00000000000000bb", n, 2) for n, r in enumerate((0, 2))]
    steps(world, 5)
    steps(pair, 5)
    for r in (0, 2):
        world[r].proc.call(world[r], AR, 5.0)
    job.procs[1].phase(4.0, "checkpoint")
    world[3].proc.call(world[3], AR, 5.0)
    cover(job.procs, 500.0)
    assert analyze_job(job) == []
    other = Job()
    world = other.world(4)
    steps(world, 5)
    for r in (0, 2):
        world[r].proc.call(world[r], AR, 5.0)
    other.procs[1].phase(4.0, "checkpoint")
    cover(other.procs, 500.0)
    assert _named(analyze_job(other)) == [[3]]


def test_ranks_that_wait_for_each_other_are_excused_by_nobody() -> None:
    plain = [f.hang_type for f in analyze_job(_crossed(False)) if f.severity == "error"]
    assert plain and "cross_comm_order_inversion" in plain


def test_a_rank_that_comes_late_from_a_phase_is_not_late() -> None:
    def job(declared: bool) -> Job:
        made = Job()
        comms = made.world(3)
        steps(comms, 10)
        for r, c in enumerate(comms):
            c.proc.call(c, AR, 50.0 if r == 1 else 5.0)
        steps(comms, 40, start=51.0)
        if declared:
            made.procs[1].phase(4.0, "eval")
            made.procs[1].phase(49.0, None)
        cover(made.procs, 60.0)
        return made

    assert [f.hang_type for f in analyze_job(job(False))] == ["delayed_collective_enter"]
    assert analyze_job(job(True)) == []


def _init(declare: bool) -> Job:
    job = Job()
    world = job.world(3)
    steps(world, 3)
    for p in job.procs[:2]:
        p.enter(None, "ncclCommInitRank", 5.0, uid_hash="00000000000000ee", nranks=3, rank=p.rank)
    for p in job.procs[:2]:
        p.cover(0.5, 4.0)
        p.cover(5.5, 400.0, main="nccl")
    if declare:
        job.procs[2].phase(4.5, "compile")
    job.procs[2].cover(0.5, 400.0)
    return job


def test_an_initialisation_that_waits_for_a_phase() -> None:
    assert [f.hang_type for f in analyze_job(_init(False))] == ["comm_init_missing_enter"]
    assert analyze_job(_init(True)) == []


def test_live_nothing_is_written_in_a_phase() -> None:
    job = _missing((2,), end=300.0)
    job.procs[2].phase(4.0, "checkpoint")
    job.procs[2].phase(290.0, None)
    run = Run(job)
    written = []
    for t in range(10, 300, 10):
        run.until(float(t))
        written += run.scan(unix(float(t)))
    assert written == []


def test_what_is_noted() -> None:
    phases = Phases()
    for p in (
        Phase(0, 1, "data", 10, 10),
        Phase(0, 2, "data", 10, 30, step=3),
        Phase(0, 3, "eval", 40, 40),
        Phase(0, 4, None, 50, 50),
        Phase(0, 5, None, 60, 60),
        Phase(0, 6, "data", 70, 70),
    ):
        phases.note(p)
    assert [(d.name, d.since, d.ended) for d in phases.declared] == [
        ("data", 10, 40),
        ("eval", 40, 50),
        ("data", 70, None),
    ]
    options = Options()
    assert phases.excused_until(0, 45, options) == 45
    assert phases.excused_until(52, 65, options) == 0
    assert phases.excused_until(52, 90, options) == 90
    assert phases.now(45) is None and phases.now(90) is not None


def test_a_broken_phase_line_costs_only_itself() -> None:
    job = _missing((2,), end=100.0)
    for bad in (
        {"kind": "state", "t": 1, "state": "phase"},
        {"kind": "state", "t": 1, "state": "phase", "phase": 7, "since": 5},
        {"kind": "state", "t": 1, "state": "phase", "phase": "x", "since": "5"},
        {"kind": "state", "t": 1, "state": "phase", "phase": "x", "since": 1, "limit": [1]},
    ):
        job.procs[2].add(6.0, bad)
    run = Run(job)
    run.all()
    run.scan()
    assert run.analysis.decoder.counts.bad_lines == 4
    assert len(run.analysis.matcher.book.all()) == 1


def test_phases_of_processes_without_one_cost_nothing() -> None:
    job = _missing((2,))
    assert isinstance(job.procs[0], Proc)
    run = Run(job)
    run.all()
    run.scan()
    assert all(not p.phases.declared for p in run.analysis.matcher.processes.values())
