"""Errors that calls return, and the ends of communicators."""

from __future__ import annotations

from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Job, unix


def test_an_error_return() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for _ in range(2):
        comms[1].proc.call(comms[1], "ncclAllReduce", t, rc=5)
    cover(job.procs, t + 10)
    (f,) = analyze_job(job)
    assert f.hang_type == "nccl_error_exit"
    assert (f.details["comm_rank"], f.details["result"]) == (1, "ncclInvalidUsage")
    assert (f.details["times"], f.details["call_idx"]) == (2, 5)
    assert (f.severity, f.role) == ("error", "root_cause")


def test_one_error_on_all_ranks_is_one_finding() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    steps(comms, 3, start=t, rc=1)
    cover(job.procs, t + 10)
    (f,) = analyze_job(job)
    assert (f.details["error_comm_ranks"], f.details["times"]) == ([0, 1, 2, 3], 12)
    assert "and 3 more" in f.details["summary"]


def test_a_group_that_fails_long_after_another_communicator_ended_is_an_error() -> None:
    job = Job()
    comms = job.world(2)
    t = steps(comms, 5)
    for c in comms:
        c.proc.comm_end(c, t, "destroy")
    comms[0].proc.group([], t + 5, rc=3)
    cover(job.procs, t + 10)
    assert [f.details["api"] for f in analyze_job(job)] == ["ncclGroupEnd"]


def test_the_absence_after_an_error_return_is_a_consequence() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    comms[1].proc.call(comms[1], "ncclAllReduce", t, rc=5)
    steps([comms[0], comms[2]], 1, start=t)
    cover(job.procs, t + 70)
    found = {f.hang_type: f for f in analyze_job(job)}
    absence, error = found["collective_missing_enter"], found["nccl_error_exit"]
    assert (absence.role, absence.downstream_of) == ("downstream", error.id)
    assert error.role == "root_cause"


def test_calls_in_flight_at_an_abort_are_no_errors() -> None:
    job = Job()
    comms = job.world(2)
    t = steps(comms, 5)
    for c in comms:
        c.proc.call(c, "ncclAllReduce", t, dur=10.0, rc=3)
        c.proc.comm_end(c, t + 9.9, "abort")
        c.proc.call(c, "ncclCommAbort", t + 9.9, dur=0.2)
    cover(job.procs, t + 20)
    assert analyze_job(job) == []


def test_an_error_of_a_registration_is_a_notice() -> None:
    job = Job()
    comms = job.world(2)
    steps(comms, 5)
    comms[0].proc.call(comms[0], "ncclCommRegister", 3.0, rc=5)
    cover(job.procs, 20)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.severity) == ("nccl_error_exit", "notice")


def test_a_communicator_ended_under_its_waiters() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    steps(comms[:3], 1, start=t)
    comms[3].proc.comm_end(comms[3], t + 1, "abort")
    cover(job.procs, t + 10)
    (f,) = analyze_job(job)
    assert f.hang_type == "comm_ended_under_waiters"
    assert f.details["missing_comm_ranks"] == [3]
    assert f.details["missing_rank_status"][0]["comm_end"] == "abort"
    assert (f.severity, f.role) == ("error", "root_cause")


def test_all_abort_within_seconds() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    steps(comms[:3], 1, start=t)
    for r, c in enumerate(comms):
        c.proc.comm_end(c, t + 1 + 0.5 * (3 - r), "abort")
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_the_waiters_gave_up_first() -> None:
    """The watchdogs of the others abort after ten minutes; the one absent is still named."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    steps(comms[:3], 1, start=t)
    for c in comms[:3]:
        c.proc.comm_end(c, t + 600, "abort")
    comms[3].proc.comm_end(comms[3], t + 630, "abort")
    cover(job.procs, t + 640)
    (f,) = analyze_job(job)
    assert f.hang_type == "collective_missing_enter"
    assert f.details["missing_comm_ranks"] == [3]
    assert f.details["waited_s"] == 600.0


def test_a_communicator_that_ended_is_forgotten() -> None:
    job = Job()
    p = job.proc(0), job.proc(1)
    for i in range(50):
        comms = [x.comm(f"{i:016x}", r, 2, t=1.0 + i) for r, x in enumerate(p)]
        steps(comms, 3, start=1.1 + i)
        for c in comms:
            c.proc.comm_end(c, 1.9 + i)
    cover(job.procs, 60)
    run = Run(job)
    run.all()
    assert run.scan(unix(60)) == []
    matcher = run.analysis.matcher
    assert matcher.comms_seen == 50
    assert not matcher.comms
    assert not matcher.endpoints


def test_a_communicator_is_forgotten_when_all_have_left_it_and_no_trace_is_behind() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for c in comms:
        c.proc.comm_end(c, t)
    cover(job.procs, t + 1)
    run = Run(job)
    held = []
    for i in range(3):
        run.feed(i)
        run.scan(unix(t + 1))
        held.append(len(run.analysis.matcher.comms))
    assert held == [1, 1, 0]


def test_what_a_communicator_lacked_at_its_end_is_told_as_long_as_it_holds() -> None:
    """Rank 0 ends it and has made no send; rank 1, which waits for that, ends it later."""
    job = Job()
    comms = job.world(2)
    comms[1].proc.call(comms[1], "ncclRecv", 1.0, peer=0, count=1 << 24)
    for c, t in zip(comms, (30.0, 62.0), strict=True):
        c.proc.comm_end(c, t)
    cover(job.procs, 400)
    run = Run(job)
    run.all()
    for _ in range(3):
        run.scan()
        (f,) = run.analysis.matcher.book.all()
        assert (f.hang_type, f.state) == ("p2p_unmatched", "open")
        assert [who["rank"] for who in f.named] == [0]
