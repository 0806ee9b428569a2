"""Ends that nobody saw: a tracer that came later found the processes gone."""

from __future__ import annotations

import pytest
from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Comm, Job, Proc

from nccluprobe.match.options import SECOND

HASH = "00000000000000aa"
LATER = 5000.0


def killed(waited: float, ranks: int = 4) -> tuple[Job, list[Comm], float]:
    """Rank 3 does not come, and the tracer is killed ``waited`` seconds later."""
    job = Job()
    comms = job.world(ranks)
    t = steps(comms, 42)
    steps(comms[:-1], 1, start=t)
    cover(job.procs, t + waited)
    return job, comms, t


def witness(job: Job, of: Proc, found: float, gone: bool = True) -> Proc:
    """A second trace of a process, from ``found`` on, without a call."""
    assert of.rank is not None
    p = job.proc(of.rank, pid=of.pid)
    p.comm(HASH, of.rank, 4)
    p.cover(found, found + 1, alive=not gone)
    if gone:
        p.end(found, "gone", None)
    return p


@pytest.mark.parametrize("first", [False, True])
def test_the_wait_is_counted_to_the_last_sign_of_life(first: bool) -> None:
    job, comms, _ = killed(20)
    for c in comms:
        witness(job, c.proc, LATER)
    if first:
        job.procs.reverse()
    assert analyze_job(job) == []
    (f,) = analyze_job(job, missing_after=15 * SECOND)
    assert f.details["missing_comm_ranks"] == [3] and f.severity == "notice"
    assert f.details["waited_s"] == pytest.approx(20, abs=1.5)
    assert f.details["missing_rank_status"][0]["heartbeat"] == "absent"


def test_who_lives_goes_on_waiting() -> None:
    """The second tracer sees no call, and so nobody has come since."""
    job, comms, t = killed(20)
    for c in comms:
        witness(job, c.proc, t + 100, gone=False)
    (f,) = analyze_job(job)
    assert f.details["missing_comm_ranks"] == [3]
    assert f.details["waited_s"] == pytest.approx(101, abs=1.5)


def test_nobody_ended_first() -> None:
    """Of those whose end nobody saw, who made no call for long has not died before the others."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 42)
    steps(comms[:3], 1, start=t + 100)
    for p in job.procs:
        p.end(LATER, "gone", None)
    run = Run(job)
    run.all()
    run.scan()
    ends = {p.end.t for p in run.analysis.matcher.processes.values() if p.end is not None}
    assert len(ends) == 1
    assert run.analysis.matcher.book.all() == []


def test_an_end_that_was_seen_at_once_stays() -> None:
    job, _, t = killed(100)
    for p in job.procs:
        p.end(t + 101, "gone", None)
    run = Run(job)
    run.all()
    run.scan()
    ends = {p.end.t for p in run.analysis.matcher.processes.values() if p.end is not None}
    assert [round(end / SECOND) for end in ends] == [1_700_000_000 + round(t + 101)]
