"""Who did not come."""

from __future__ import annotations

from support.analysis import analyze_job, cover, steps
from support.tracegen import Job, unix


def _hang(
    n: int = 4, missing: tuple[int, ...] = (3,), calls: int = 42, waited: float = 60.2
) -> Job:
    job = Job()
    comms = job.world(n)
    t = steps(comms, calls)
    for r, c in enumerate(comms):
        if r not in missing:
            c.proc.call(c, "ncclAllReduce", t)
    cover(job.procs, t + waited)
    return job


def test_the_published_example_field_by_field() -> None:
    job = _hang()
    (f,) = analyze_job(job)
    got = f.to_json()
    assert got["hang_type"] == "collective_missing_enter"
    assert got["run_id"] == "run"
    assert got["comm_uid_hash"] == "00000000000000aa"
    assert got["comm_seq"] == 42
    assert got["detected_at_unix_ns"] == unix(1.0 + 42 * 0.1 + 60.2)
    d = got["details"]
    assert d["api"] == "ncclAllReduce"
    assert d["expected_nranks"] == 4
    assert d["entered_comm_ranks"] == [0, 1, 2]
    assert d["missing_comm_ranks"] == [3]
    (status,) = d["missing_rank_status"]
    assert status["comm_rank"] == 3
    assert status["global_rank"] == 3
    assert status["heartbeat"] == "alive"
    assert status["heartbeat_age_s"] == 0.0
    assert status["probe_dropped_events"] == 0
    assert d["waited_s"] == 60.2
    assert d["reason"] == "rank_alive_but_not_entered"
    assert d["confidence"] == "observed"
    assert d["trace_event_loss_possible"] is False
    assert got["state"] == "open"
    assert got["role"] == "root_cause"
    assert got["severity"] == "notice"


def test_healthy() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 200)
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_below_the_threshold_nothing_is_said() -> None:
    assert analyze_job(_hang(waited=59.0)) == []


def test_it_becomes_an_error_at_the_phase_timeout() -> None:
    (f,) = analyze_job(_hang(waited=301.0))
    assert f.severity == "error"
