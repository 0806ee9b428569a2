"""Several tracers of one process: a daemon that was started again, two side by side."""

from __future__ import annotations

import pytest
from support.analysis import analyze_job
from support.tracegen import Comm, Job, Proc

HASH = "00000000000000aa"
AR = "ncclAllReduce"
STEP = 0.01


def first_trace(job: Job, rank: int, upto: int, end: float, how: str) -> Proc:
    """Seen from init; the tracer is stopped ("detached") or killed ("killed") at ``end``."""
    p = job.proc(rank)
    c = p.comm(HASH, rank, 3)
    calls(c, 0, upto)
    p.cover(0.5, end)
    if how == "detached":
        p.end(end, "detached", None)
    return p


def second_trace(job: Job, rank: int, start: int, upto: int, end: float = 400) -> Proc:
    """Attached to the same process in mid-life."""
    p = job.proc(rank)
    c = p.comm(HASH, rank, 3, 1 + start * STEP, learnt="struct", seqs=[0, 0, 0, 0, start])
    calls(c, start, upto)
    p.cover(1 + start * STEP, end)
    return p


def calls(c: Comm, start: int, upto: int) -> None:
    for i in range(start, upto):
        c.proc.call(c, AR, 1 + i * STEP, seq=i)


@pytest.mark.parametrize("how", ["detached", "killed"])
@pytest.mark.parametrize("second_is_read_first", [False, True])
def test_a_hang_after_a_restart_of_the_daemon_is_found(
    how: str, second_is_read_first: bool
) -> None:
    job = Job()
    for r in range(3):
        first_trace(job, r, 100, 2, how)
    for r in range(3):
        second_trace(job, r, 150, 247 if r == 2 else 250)
    if second_is_read_first:
        job.procs.reverse()
    (f,) = analyze_job(job)
    assert (f.hang_type, f.comm_seq) == ("collective_missing_enter", 247)
    assert (f.details["missing_comm_ranks"], f.severity) == ([2], "error")
    assert f.details["reason"] == "rank_alive_but_not_entered"


def test_one_of_two_daemons_was_restarted() -> None:
    """The other ranks go on in the numbers that they have."""
    job = Job()
    for r in (1, 2):
        p = job.proc(r)
        calls(p.comm(HASH, r, 3), 0, 247 if r == 2 else 250)
        p.cover(0.5, 400)
    first_trace(job, 0, 100, 2, "killed")
    second_trace(job, 0, 150, 250)
    (f,) = analyze_job(job)
    assert (f.comm_seq, f.details["missing_comm_ranks"]) == (247, [2])
    assert f.details["entered_comm_ranks"] == [0, 1]


def test_a_healthy_job_with_a_gap_between_two_daemons_has_no_finding() -> None:
    job = Job()
    for r in range(3):
        first_trace(job, r, 100 - r, 2, "killed")  # they were not at the same call
        second_trace(job, r, 150 + r, 250)
    assert analyze_job(job) == []


def test_two_daemons_side_by_side_give_one_finding() -> None:
    job = Job()
    for r in range(3):
        p = job.proc(r)
        calls(p.comm(HASH, r, 3), 0, 247 if r == 2 else 250)
        p.cover(0.5, 400)
        second_trace(job, r, 150, 247 if r == 2 else 250)
    (f,) = analyze_job(job)
    assert (f.comm_seq, f.details["missing_comm_ranks"]) == (247, [2])
    assert f.coverage["base"] == "exact"
