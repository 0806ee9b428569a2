"""Who did not come, and why."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import Run, analyze_job, cover, hang, steps
from support.tracegen import Host, Job, unix

from nccluprobe.match.options import SECOND


def test_the_published_example_field_by_field() -> None:
    job, _, t = hang()
    (f,) = analyze_job(job)
    got = f.to_json()
    assert got["hang_type"] == "collective_missing_enter"
    assert got["run_id"] == "run"
    assert got["comm_uid_hash"] == "00000000000000aa"
    assert got["comm_seq"] == 42
    assert got["detected_at_unix_ns"] == unix(t + 60.2)
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
    assert (got["state"], got["role"], got["severity"]) == ("open", "root_cause", "notice")


def test_healthy() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 200)
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_below_the_threshold_nothing_is_said() -> None:
    assert analyze_job(hang(waited=59.0)[0]) == []


def test_it_becomes_an_error_at_the_phase_timeout() -> None:
    (f,) = analyze_job(hang(waited=301.0)[0])
    assert f.severity == "error"


def test_two_absent_ranks_are_one_finding() -> None:
    """Both went silent after one call that all have entered: it may not end on their devices."""
    f, stall = analyze_job(hang(missing=(1, 3))[0])
    if f.hang_type != "collective_missing_enter":
        f, stall = stall, f
    assert f.details["missing_comm_ranks"] == [1, 3]
    assert (f.role, f.downstream_of) == ("downstream", stall.id)
    assert (stall.hang_type, stall.role, stall.named) == (
        "collective_all_ranks_stuck",
        "root_cause",
        [],
    )
    assert stall.comm_seq == 41
    assert "ranks 1,3" in stall.details["summary"]


def test_two_absent_ranks_whose_hosts_are_busy_elsewhere_are_named() -> None:
    job, comms, t = hang(missing=(1, 3), covered=False)
    for c in comms:
        away = {"main": "syscall", "syscall": "read"} if c.proc.rank in (1, 3) else {}
        c.proc.cover(0.0, t + 61, **away)
    (f,) = analyze_job(job)
    assert f.role == "root_cause"
    assert sorted(c["rank"] for c in f.named) == [1, 3]


def test_ranks_that_run_ahead_queue_behind_the_first_open_slot() -> None:
    job, comms, t = hang(covered=False)
    steps(comms[:3], 10, start=t + 0.1)
    cover(job.procs, t + 61)
    (f,) = analyze_job(job)
    assert (f.comm_seq, f.details["queued_behind"]) == (42, 10)


def test_a_rank_blocked_behind_the_absent_one_is_not_blamed() -> None:
    job, comms, t = hang(covered=False)
    steps(comms[:2], 5, start=t + 0.1)  # rank 2 stopped at the first open slot
    cover(job.procs, t + 61)
    (f,) = analyze_job(job)
    assert f.details["missing_comm_ranks"] == [3]


@pytest.mark.parametrize(("more", "named"), [(30.0, []), (61.0, [1])])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "queued"])
def test_who_was_held_by_another_is_missing_since_it_was_set_free(
    inside: bool, more: float, named: list[int]
) -> None:
    """Rank 1 waits in X for rank 2, and is missed in Y meanwhile and afterwards."""
    job = Job()
    xs = job.world(3)
    y0, y1 = (xs[r].proc.comm("00000000000000bb", r, 2) for r in (0, 1))
    for c in (*xs, y0, y1):
        c.proc.call(c, "ncclAllReduce", 0.8)
    for r, at in enumerate((1.0, 1.0, 101.0)):
        xs[r].proc.call(xs[r], "ncclAllReduce", at, dur=100.0 if r == 1 and inside else 1e-5)
    y0.proc.call(y0, "ncclAllReduce", 2.0)
    cover(job.procs, 101.0 + more)
    found = [f for f in analyze_job(job) if f.hang_type == "collective_missing_enter"]
    assert [c["rank"] for f in found for c in f.named] == named


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ({"how": "exited", "code": 0}, "rank_exited"),
        ({"how": "exited", "code": 1}, "rank_exit_or_crash_suspected"),
        ({"how": "signaled", "signal": 9}, "rank_exit_or_crash_suspected"),
        ({"how": "signaled", "signal": 15}, "rank_exit_or_crash_suspected"),
        ({"how": "gone", "code": None}, "rank_exited"),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_an_absent_rank_that_ended_is_an_error_at_once(
    end: dict[str, Any], reason: str, inside: bool
) -> None:
    job, comms, t = hang(covered=False)
    p = comms[3].proc
    if inside:
        p.call(comms[3], "ncclCommRegister", t + 1.0, dur=1.0, rc=None)
    p.cover(0.5, t + 2.0)
    p.end(t + 2.0, in_flight=int(inside), **end)
    cover(job.procs[:3], t + 10)
    (f,) = analyze_job(job)
    assert f.hang_type == "collective_missing_enter"
    assert f.details["reason"] == reason
    assert f.details["missing_comm_ranks"] == [3]
    assert f.details["missing_rank_status"][0]["heartbeat"] == "absent"
    assert f.details["missing_rank_status"][0]["signal"] == end.get("signal")
    assert (f.severity, f.role) == ("error", "root_cause")


def test_a_rank_that_ended_inside_the_collective_had_entered() -> None:
    job, comms, t = hang(missing=(3,), covered=False)
    p = comms[3].proc
    p.call(comms[3], "ncclAllReduce", t, dur=2.0, rc=None)
    p.cover(0.5, t + 2.0)
    p.end(t + 2.0, how="signaled", signal=9, in_flight=1)
    steps(comms[:3], 1, start=t + 0.5)
    cover(job.procs[:3], t + 10)
    (f,) = analyze_job(job)
    assert (f.comm_seq, f.details["missing_comm_ranks"]) == (43, [3])
    assert f.details["reason"] == "rank_exit_or_crash_suspected"


@pytest.mark.parametrize("destroy", [False, True])
def test_ranks_that_leave_at_the_end_one_by_one(destroy: bool) -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 50)
    for r, c in enumerate(comms):
        if destroy:
            c.proc.comm_end(c, t + 10 * r)
        c.proc.cover(0.5, t + 100 * r)
        c.proc.end(t + 100 * r + 0.1)
    assert analyze_job(job) == []


def test_a_whole_job_that_is_stopped_in_a_step_is_no_hang() -> None:
    job, comms, t = hang(missing=(2, 3), covered=False)
    for r, c in enumerate(comms):
        c.proc.cover(0.5, t + 1)
        c.proc.end(t + 1 + 0.3 * (3 - r), how="signaled", signal=15)
    assert analyze_job(job) == []


def test_afterwards_the_crash_is_named_though_all_have_ended() -> None:
    job, comms, t = hang(covered=False)
    comms[3].proc.cover(0.5, t + 1)
    comms[3].proc.end(t + 1, how="signaled", signal=11)
    for c in comms[:3]:
        c.proc.cover(0.5, t + 600)
        c.proc.end(t + 600, how="signaled", signal=6)
    (f,) = analyze_job(job)
    assert f.details["missing_comm_ranks"] == [3]
    assert (f.details["reason"], f.severity) == ("rank_exit_or_crash_suspected", "error")


def test_the_victims_of_a_crash_are_not_blamed() -> None:
    """Rank 0 dies with a call queued that nobody else had come to yet."""
    job, comms, t = hang(missing=(1, 2, 3), covered=False)
    comms[0].proc.cover(0.5, t + 1)
    comms[0].proc.end(t + 1, how="signaled", signal=11)
    for c in comms[1:]:
        c.proc.cover(0.5, t + 30)
        c.proc.end(t + 30, how="signaled", signal=15)
    assert analyze_job(job) == []


@pytest.mark.parametrize(("waited", "severity"), [(100, "notice"), (400, "error")])
def test_all_inside_names_no_rank(waited: int, severity: str) -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    for c in comms:
        c.proc.enter(c, "ncclAllReduce", t)
    cover(job.procs, t + waited)
    (f,) = analyze_job(job)
    assert f.hang_type == "collective_all_ranks_stuck"
    assert (f.severity, f.details["confidence"], f.culprits) == (severity, "inferred", ())


@pytest.mark.parametrize("traced", [2, 3])
def test_inside_a_send_is_not_inside_the_collective_before(traced: int) -> None:
    job = Job()
    comms = job.world(2, nranks=traced)
    t = steps(comms, 5)
    for r, c in enumerate(comms):
        c.proc.enter(c, "ncclSend", t, peer=1 - r, count=10**7)
    cover(job.procs, t + 400)
    kinds = [f.hang_type for f in analyze_job(job)]
    assert "p2p_order_inversion" in kinds
    assert not {"collective_all_ranks_stuck", "waiting_for_unobserved"} & set(kinds)


def test_a_late_attached_communicator_without_base_is_not_judged() -> None:
    job = Job()
    comms = job.world(3)
    comms.append(job.proc(3).comm("00000000000000aa", 3, 4, learnt="struct"))
    steps(comms[:3], 90)
    steps(comms[3:], 5)
    cover(job.procs, 400)
    assert analyze_job(job) == []


def test_times_of_two_hosts_are_aligned_by_their_clock_lines() -> None:
    job = Job()
    a, b = Host("a"), Host("b", mono=77_000_000_000)
    comms = [job.proc(r, a if r < 2 else b).comm("00000000000000aa", r, 4) for r in range(4)]
    t = steps(comms, 5)
    steps(comms[:3], 1, start=t)
    cover(job.procs, t + 61)
    (f,) = analyze_job(job)
    assert f.details["waited_s"] == 61.0
    assert f.details["missing_rank_status"][0]["host"] == "b"


def test_written_once_resolved_and_written_again() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    steps(comms[:3], 1, start=t)
    steps(comms[3:], 1, start=t + 70)
    steps(comms[:3], 1, start=t + 80)
    cover(job.procs, t + 150)
    run = Run(job)
    written: list[tuple[str, str, int | None]] = []
    for at in range(0, int(t) + 151):
        run.until(at)
        written += [(f.hang_type, f.state, f.comm_seq) for f in run.scan(unix(at))]
    assert written == [
        ("collective_missing_enter", "open", 5),
        ("collective_missing_enter", "resolved", 5),
        ("collective_missing_enter", "open", 6),
    ]


def test_a_declared_idle_wait_is_no_finding() -> None:
    def job(root_absent: int) -> Job:
        made = Job()
        comms = made.world(4)
        t = steps(comms, 5)
        for r, c in enumerate(comms):
            if r != root_absent:
                c.proc.call(c, "ncclBroadcast", t, root=0)
        cover(made.procs, t + 400)
        return made

    assert analyze_job(job(0), idle_ok=("*aa",)) == []
    assert len(analyze_job(job(0))) == 1
    assert len(analyze_job(job(0), idle_ok=("bb*",))) == 1
    assert len(analyze_job(job(1), idle_ok=("*aa",))) == 1


def test_idle_is_learned_from_three_long_waits() -> None:
    job = Job()
    comms = job.world(4)
    t = 1.0
    for _ in range(3):
        for c in comms[1:]:
            c.proc.call(c, "ncclBroadcast", t, root=0)
        comms[0].proc.call(comms[0], "ncclBroadcast", t + 100, root=0)
        t += 100.5
    for c in comms[1:]:
        c.proc.call(c, "ncclBroadcast", t, root=0)
    cover(job.procs, t + 1000)
    assert [f for f in analyze_job(job) if f.hang_type == "collective_missing_enter"] == []


@pytest.mark.parametrize(("behind", "found"), [(1.4, ["open", "resolved"]), (1.7, [])])
def test_what_a_collector_told_just_before_the_limit_will_do(
    behind: float, found: list[str]
) -> None:
    """It tells once a second; a call that it was about to tell ends the finding."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    steps(comms[:3], 1, start=t)
    cover(job.procs[:3], t + 60.2)
    cover(job.procs[3:], t + 60.2 - behind)
    steps(comms[3:], 1, start=t + 60.3)
    for p in job.procs:
        p.coverage(t + 62)
    run = Run(job)
    states = []
    for at in (60.2, 62):
        run.until(t + at)
        states += [
            f.state for f in run.scan(unix(t + at)) if f.hang_type != "delayed_collective_enter"
        ]
    assert states == found


def test_a_finding_tells_the_limits_that_it_was_found_by() -> None:
    job, _, _ = hang()
    (f,) = analyze_job(job, error_after=120 * SECOND)
    limits = {"missing_after_s": 60.0, "late_after_s": 30.0, "error_after_s": 120.0}
    assert f.to_json()["limits"] == limits
