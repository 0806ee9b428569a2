"""Absences, where a part of the job is not observed, or records of it were lost."""

from __future__ import annotations

import pytest
from support.analysis import Run, analyze_job, cover, hang, steps
from support.tracegen import Job


@pytest.mark.parametrize("waited", [30.0, 400.0])
def test_a_silent_collector_in_a_healthy_job_blames_nobody(waited: float) -> None:
    """SIGSTOP or SIGKILL of one collector: its trace ends, the job goes on."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 50)
    comms[3].proc.cover(0.5, t)
    steps(comms[:3], int(waited), start=t, step=1.0)
    cover(job.procs[:3], t + waited)
    assert analyze_job(job) == []


def test_a_call_that_has_returned_is_none_that_a_rank_is_inside_of() -> None:
    job, comms, t = hang(covered=False)
    one = comms[3].proc
    other = one.comm("00000000000000bb", 0, 2)
    first = one.enter(other, "ncclReduce", t)
    one.add(t + 5, {**first, "kind": "call", "dur": 5_000_000_000, "rc": 0})
    one.enter(other, "ncclBroadcast", t + 4, thread=7)
    cover(job.procs, t + 100)
    run = Run(job)
    run.until(t + 4.5)
    run.all()
    run.scan()
    found = run.analysis.matcher.book.all()
    (f,) = [f for f in found if f.hang_type == "collective_missing_enter"]
    assert f.details["missing_rank_status"][0]["inside"] == "ncclBroadcast"


def test_tracing_that_was_ended_in_the_hang_still_speaks_for_it() -> None:
    """Ctrl-C of attach, then analyze."""
    job, _, t = hang(waited=100)
    for p in job.procs:
        p.end(t + 100.1, how="detached", code=None)
    (f,) = analyze_job(job)
    assert f.details["reason"] == "rank_alive_but_not_entered"
    (status,) = f.details["missing_rank_status"]
    assert status["heartbeat"] == "alive"
    assert "queued_in_open_group" not in status
    assert f.role == "root_cause"


def test_a_rank_whose_tracing_ended_early_is_not_observed() -> None:
    job, comms, t = hang(covered=False)
    comms[3].proc.cover(0.5, t + 1)
    comms[3].proc.end(t + 1.1, how="detached", code=None)
    cover(job.procs[:3], t + 400)
    (f,) = analyze_job(job)
    assert (f.details["reason"], f.role) == ("rank_not_observed", "unknown")


def test_a_silent_collector_while_the_others_wait() -> None:
    job, comms, t = hang(covered=False)
    comms[3].proc.cover(0.5, t + 1)
    cover(job.procs[:3], t + 400)
    (f,) = analyze_job(job)
    assert f.details["reason"] == "rank_not_observed"
    assert (f.severity, f.role, f.details["confidence"]) == ("notice", "unknown", "none")
    (status,) = f.details["missing_rank_status"]
    assert status["heartbeat"] == "stale"
    assert status["probe_dropped_events"] is None
    assert f.coverage["collector_silent_comm_ranks"] == [3]
    assert any("collector silent" in note for note in f.coverage["notes"])


def test_a_member_without_coverage_lines_is_never_alive() -> None:
    job, _, t = hang(covered=False)
    cover(job.procs[:3], t + 100)
    (f,) = analyze_job(job)
    assert f.details["missing_rank_status"][0]["heartbeat"] == "unavailable"
    assert f.details["reason"] == "rank_not_observed"


def test_lost_events_lower_the_confidence() -> None:
    job, comms, t = hang(covered=False)
    comms[3].proc.cover(0.5, t - 1)
    comms[3].proc.cover(t + 1, t + 400, lost_kernel=7)
    cover(job.procs[:3], t + 400)
    (f,) = analyze_job(job)
    assert f.details["reason"] == "probe_event_loss_possible"
    assert f.details["missing_rank_status"][0]["probe_dropped_events"] == 7
    assert f.details["trace_event_loss_possible"] is True
    assert (f.severity, f.details["confidence"]) == ("notice", "reduced")


def test_losses_before_the_window_do_not_count() -> None:
    job, comms, t = hang(covered=False)
    comms[3].proc.cover(0.5, t + 60.2, lost_kernel=7)
    cover(job.procs[:3], t + 60.2)
    (f,) = analyze_job(job)
    assert f.details["missing_rank_status"][0]["probe_dropped_events"] == 0
    assert f.details["reason"] == "rank_alive_but_not_entered"


def test_a_call_behind_a_hole_shows_that_others_were_made() -> None:
    """No coverage tells of the loss so far."""
    job, comms, t = hang(waited=100)
    late = comms[3].proc
    late.call(comms[3], "ncclAllReduce", t + 100.5, lost=True)
    late.call(comms[3], "ncclAllGather", t + 100.6)
    (f,) = analyze_job(job)
    assert (f.severity, f.role) == ("notice", "unknown")
    assert f.details["reason"] == "probe_event_loss_possible"


def test_a_lost_record_leaves_a_hole_and_no_absence() -> None:
    job = Job()
    comms = job.world(4)
    steps(comms, 10)
    comms[2].proc.call(comms[2], "ncclAllReduce", 2.0, lost=True)
    steps([comms[0], comms[1], comms[3]], 1, start=2.0)
    steps(comms, 10, start=3.0)
    cover(job.procs[:2] + job.procs[3:], 100)
    job.procs[2].cover(0.5, 100, lost_kernel=1)
    assert analyze_job(job) == []


def test_partial_view_of_a_healthy_job() -> None:
    job = Job()
    comms = job.world(8, nranks=512)
    t = steps(comms, 100)
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_partial_view_one_observed_rank_absent() -> None:
    job, _, _ = hang(n=8, missing=(5,), nranks=512)
    (f,) = analyze_job(job)
    assert f.details["missing_comm_ranks"] == [5]
    assert f.details["expected_nranks"] == 512
    assert f.details["unobserved_comm_ranks"] == 504


def test_waiting_for_unobserved() -> None:
    job = Job()
    comms = job.world(8, nranks=512)
    t = steps(comms, 5)
    for c in comms:
        c.proc.enter(c, "ncclAllReduce", t)
    cover(job.procs, t + 400)
    (f,) = analyze_job(job)
    assert f.hang_type == "waiting_for_unobserved"
    assert (f.severity, f.details["confidence"]) == ("notice", "reduced")
    assert f.details["missing_comm_ranks"] == []
    assert f.comm_seq == 5
