"""Idle waits, each with the hang that looks like it."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Comm, Job, unix

from nccluprobe.match.finding import Finding

IDLE: dict[str, Any] = {"idle_ok": ("*aa",)}


def server(n: int = 4, lessons: int = 0, size: int = 1024) -> tuple[Job, list[Comm], float]:
    """Followers that wait for rank 0; ``lessons`` times it let them wait for 100 s."""
    job = Job()
    comms = job.world(n)
    t = steps(comms, 5)
    for i in range(lessons):
        wait(comms, t, count=size + i)
        comms[0].proc.call(comms[0], "ncclBroadcast", t + 100, root=0, count=size + i)
        t += 101
    return job, comms, t


def wait(comms: list[Comm], t: float, **args: Any) -> None:
    for c in comms[1:]:
        c.proc.call(c, "ncclBroadcast", t, root=0, **args)


def absences(found: list[Finding]) -> list[Finding]:
    return [f for f in found if f.hang_type == "collective_missing_enter" and f.state == "open"]


def blamed(found: list[Finding]) -> set[int]:
    return {
        d["rank"]
        for f in found
        if f.role == "root_cause" and f.state == "open" and f.severity == "error"
        for d in f.named
    }


def test_declared() -> None:
    job, comms, t = server()
    wait(comms, t)
    cover(job.procs, t + 4000)
    assert analyze_job(job, **IDLE) == []


def test_neither_declared_nor_learned_is_not_decidable_and_never_dropped() -> None:
    job, comms, t = server()
    wait(comms, t)
    cover(job.procs, t + 4000)
    (f,) = analyze_job(job)
    assert (f.severity, f.role, f.culprits) == ("notice", "unknown", ())
    assert "not decidable" in f.details["note"]
    assert f.details["waited_s"] > 3900
    (status,) = f.details["missing_rank_status"]
    assert (status["comm_rank"], status["main_thread"]) == (0, "running")


@pytest.mark.parametrize("lessons", [2, 3])
def test_learned_from_three_earlier_waits(lessons: int) -> None:
    job, comms, t = server(lessons=lessons)
    wait(comms, t, count=1030)
    cover(job.procs, t + 1000)
    found = absences(analyze_job(job))
    if lessons == 3:
        assert found == []
    else:
        assert [f.details["idle"] for f in found] == ["undecided"]
        assert [(f.severity, f.role) for f in found] == [("notice", "unknown")]


def test_a_wait_of_another_size_class_is_not_what_was_learned() -> None:
    job, comms, t = server(lessons=3)
    wait(comms, t, count=1 << 20)
    cover(job.procs, t + 1000)
    (f,) = absences(analyze_job(job))
    assert f.details["idle"] == "undecided"


def test_waits_for_a_late_follower_teach_nothing() -> None:
    job, comms, t = server()
    for _ in range(3):
        for c in comms[:3]:
            c.proc.call(c, "ncclBroadcast", t, root=0)
        comms[3].proc.call(comms[3], "ncclBroadcast", t + 100, root=0)
        t += 101
    wait(comms, t)
    cover(job.procs, t + 1000)
    (f,) = absences(analyze_job(job))
    assert f.details["idle"] == "undecided"


def test_an_idle_root_that_comes_is_not_late() -> None:
    late = "delayed_collective_enter"
    for options, lessons in (({}, 3), (IDLE, 0)):
        job, comms, t = server(lessons=lessons)
        before = sum(f.hang_type == late for f in analyze_job(job, **options))
        wait(comms, t)
        comms[0].proc.call(comms[0], "ncclBroadcast", t + 200, root=0)
        steps(comms, 5, start=t + 201)
        cover(job.procs, t + 210)
        found = [f for f in analyze_job(job, **options) if f.hang_type == late]
        assert len(found) == before
    job, comms, t = server()
    wait(comms, t)
    comms[0].proc.call(comms[0], "ncclBroadcast", t + 200, root=0)
    cover(job.procs, t + 210)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.severity, f.role) == (late, "notice", "unknown")
    assert (f.named, f.details["idle"]) == ([], "undecided")


def test_an_undecided_wait_that_ends_well_is_resolved_and_no_delay_as_well() -> None:
    job, comms, t = server()
    wait(comms, t)
    comms[0].proc.call(comms[0], "ncclBroadcast", t + 200, root=0)
    steps(comms, 5, start=t + 201)
    cover(job.procs, t + 260)
    run = Run(job)
    states = []
    for at in (t + 100, t + 250):
        run.until(at)
        states += [(f.hang_type, f.state) for f in run.scan(unix(at))]
    assert states == [
        ("collective_missing_enter", "open"),
        ("collective_missing_enter", "resolved"),
    ]


def test_who_waits_elsewhere_for_a_moment_is_idle_all_the_same() -> None:
    job, comms, t = server()
    ys = [c.proc.comm("00000000000000bb", r, 2) for r, c in enumerate(comms[1:3])]
    for c in ys:
        c.proc.call(c, "ncclAllReduce", 1.0)
    wait(comms, t)
    ys[0].proc.call(ys[0], "ncclAllReduce", t + 390)
    cover(job.procs, t + 400)
    (f,) = analyze_job(job)
    assert (f.severity, f.details["idle"]) == ("notice", "undecided")


def test_a_wait_that_lacks_more_than_the_root_is_no_idle_one() -> None:
    job, comms, t = server()
    wait(comms[:3], t)
    for c in comms:
        away = {"main": "syscall", "syscall": "read"} if c.proc.rank in (0, 3) else {}
        c.proc.cover(0.0, t + 400, **away)
    found = analyze_job(job, **IDLE)
    assert blamed(found) == {0, 3}


@pytest.mark.parametrize("api", ["ncclReduce", "ncclGather", "ncclAllReduce"])
def test_only_who_needs_the_roots_data_waits_idly(api: str) -> None:
    job, comms, t = server()
    for c in comms[1:]:
        c.proc.call(c, api, t, **({} if api == "ncclAllReduce" else {"root": 0}))
    cover(job.procs, t + 400)
    assert blamed(analyze_job(job, **IDLE)) == {0}


# -- hung twins ------------------------------------------------------------

MODES = pytest.mark.parametrize(
    ("options", "lessons"), [(IDLE, 0), ({}, 3), ({}, 0)], ids=["declared", "learned", "undecided"]
)


@MODES
@pytest.mark.parametrize("main", ["stopped", "uninterruptible", "dead"])
def test_twin_the_root_is_held(main: str, options: dict[str, Any], lessons: int) -> None:
    job, comms, t = server(lessons=lessons)
    wait(comms, t)
    cover(job.procs[1:], t + 400)
    comms[0].proc.cover(0.5, t + 20)
    comms[0].proc.cover(t + 21, t + 400, main=main)
    found = analyze_job(job, **options)
    assert blamed(found) == {0}
    assert len(absences(found)) == 1


def test_a_root_that_waits_for_its_disk_for_a_moment_is_not_held() -> None:
    job, comms, t = server()
    wait(comms, t)
    cover(job.procs[1:], t + 400)
    comms[0].proc.cover(0.5, t + 398)
    comms[0].proc.cover(t + 399, t + 400, main="uninterruptible")
    assert analyze_job(job, **IDLE) == []


@MODES
def test_twin_the_root_is_inside_another_call(options: dict[str, Any], lessons: int) -> None:
    job, comms, t = server(lessons=lessons)
    wait(comms, t)
    comms[0].proc.enter(comms[0], "ncclCommRegister", t + 1)
    cover(job.procs, t + 400)
    found = analyze_job(job, **options)
    assert [f.severity for f in absences(found)] == ["error"]


@MODES
@pytest.mark.parametrize("how", ["exit", "crash", "abort"])
def test_twin_the_root_has_left(how: str, options: dict[str, Any], lessons: int) -> None:
    job, comms, t = server(lessons=lessons)
    wait(comms, t)
    p = comms[0].proc
    if how == "abort":
        p.comm_end(comms[0], t + 10, "abort")
        cover([p], t + 400)
    else:
        p.cover(0.5, t + 10)
        p.end(t + 10, code=0 if how == "exit" else 1)
    cover(job.procs[1:], t + 400)
    assert blamed(analyze_job(job, **options)) == {0}


@MODES
@pytest.mark.parametrize("absent", [0, 2])
def test_twin_another_communicator_of_these_ranks_is_blocked(
    absent: int, options: dict[str, Any], lessons: int
) -> None:
    """Rank ``absent`` does not come to a second communicator either."""
    job = Job()
    comms = job.world(4)
    others = [c.proc.comm("00000000000000bb", c.proc.rank, 4) for c in comms]
    t = steps(others, 5)
    for _ in range(lessons):
        wait(comms, t)
        comms[0].proc.call(comms[0], "ncclBroadcast", t + 100, root=0)
        t += 101
    for c, o in zip(comms, others, strict=True):
        if c.proc.rank != absent:
            c.proc.call(o, "ncclAllReduce", t)
    wait(comms, t + 1)
    cover(job.procs, t + 400)
    found = analyze_job(job, **options)
    assert {f.severity for f in absences(found)} == {"error"}
    assert all("idle" not in f.details for f in absences(found))
    if absent == 0:
        assert blamed(found) == {0}


def test_other_ranks_that_are_blocked_do_not_matter() -> None:
    job, comms, t = server(n=4)
    wait(comms, t)
    for r in range(4, 7):
        job.proc(r)
    rest = [p.comm("00000000000000bb", i, 3) for i, p in enumerate(job.procs[4:])]
    steps(rest[:2], 1, start=t)
    cover(job.procs, t + 400)
    found = analyze_job(job, **IDLE)
    assert {f.comm_uid_hash for f in found} == {"00000000000000bb"}


def test_two_declared_communicators_do_not_block_each_other() -> None:
    job, comms, t = server()
    others = [c.proc.comm("00000000000000bb", c.proc.rank, 4) for c in comms]
    wait(comms, t)
    wait(others, t)
    cover(job.procs, t + 400)
    assert analyze_job(job, idle_ok=("*aa", "*bb")) == []
    assert blamed(analyze_job(job)) == {0}


def test_twin_an_error_of_the_root() -> None:
    job, comms, t = server()
    comms[0].proc.call(comms[0], "ncclAllGather", t, rc=5)
    wait(comms, t)
    cover(job.procs, t + 400)
    found = analyze_job(job, **IDLE)
    assert {f.hang_type for f in found} == {"nccl_error_exit", "collective_missing_enter"}
    assert blamed(found) == {0}


def test_waiters_that_have_gone_on_to_other_calls_are_not_undecided() -> None:
    job, comms, t = server()
    wait(comms, t)
    wait(comms, t + 0.1)
    cover(job.procs, t + 400)
    (f,) = analyze_job(job)
    assert f.details["idle"] == "undecided"
    steps(comms[1:], 2, start=t + 0.2)
    assert blamed(analyze_job(job)) == {0}


# -- receives that wait for work -------------------------------------------


def receiver(lessons: int, main: str = "running") -> Job:
    """Rank 1 receives what rank 0 sends when there is work; at the end there is none."""
    job = Job()
    comms = job.world(2)
    t = 1.0
    for _ in range(lessons):
        comms[1].proc.call(comms[1], "ncclRecv", t, peer=0)
        comms[0].proc.call(comms[0], "ncclSend", t + 100, peer=1)
        t += 101
    comms[1].proc.call(comms[1], "ncclRecv", t, peer=0)
    for c in comms:
        c.proc.cover(0.0, t + 400, main=main if c.proc.rank == 0 else "running")
    return job


@pytest.mark.parametrize("lessons", [0, 2, 3])
def test_receives_learn_as_well(lessons: int) -> None:
    found = [f for f in analyze_job(receiver(lessons)) if f.state == "open"]
    if lessons == 3:
        assert found == []
        return
    (f,) = found
    assert (f.hang_type, f.details["idle"]) == ("p2p_unmatched", "undecided")
    assert (f.severity, f.role, f.culprits) == ("notice", "unknown", ())
    assert "the sender is outside NCCL" in f.details["note"]


@pytest.mark.parametrize("n", [2, 4])
def test_several_may_wait_for_one_sender(n: int) -> None:
    job = Job()
    comms = job.world(n)
    t = steps(comms, 5)
    for c in comms[1:]:
        c.proc.call(c, "ncclRecv", t, peer=0)
    cover(job.procs, t + 400)
    found = analyze_job(job)
    assert [(f.severity, f.role) for f in found] == [("notice", "unknown")] * (n - 1)
    job.procs[0].cover(t + 400, t + 420, main="stopped")
    assert blamed(analyze_job(job)) == {0}


@pytest.mark.parametrize("twin", ["exit", "crash", "inside", "sends left", "chain", "collective"])
def test_twin_a_sender_that_is_not_free(twin: str) -> None:
    job = Job()
    comms = job.world(3 if twin in ("chain", "collective") else 2)
    pair = [c.proc.comm("00000000000000bb", c.proc.rank, 2) for c in comms[:2]]
    t = steps(comms, 5)
    steps(pair, 5)
    if twin == "sends left":  # buffered: the receiver waits for nothing before its receive
        pair[1].proc.call(pair[1], "ncclSend", t, peer=0, count=16)
    if twin == "inside":
        pair[0].proc.enter(pair[0], "ncclCommRegister", t + 1)
    pair[1].proc.call(pair[1], "ncclRecv", t + 1, peer=0)
    if twin == "chain":
        comms[2].proc.call(comms[2], "ncclRecv", t + 1, peer=1)
    if twin == "collective":
        steps(comms[1:], 1, start=t + 2)
    for p in job.procs:
        p.cover(0.5, t + (20 if p.rank == 0 and twin in ("exit", "crash") else 400))
    if twin in ("exit", "crash"):
        job.procs[0].end(t + 20.5, code=0 if twin == "exit" else 1)
    found = analyze_job(job)
    assert "error" in {f.severity for f in found}
    assert blamed(found) <= {0} and (blamed(found) == {0} or twin == "inside")


@pytest.mark.parametrize(
    ("syscall", "named"),
    [("epoll_wait", set()), ("futex", set()), ("read", {0}), ("write", {0}), ("wait4", {0})],
)
def test_a_sender_that_waits_for_work_is_told_from_one_that_is_held_up(
    syscall: str, named: set[int]
) -> None:
    job = receiver(0)
    t = max(when for when, _, _ in job.procs[0].lines) / 1e9 - 5000
    job.procs[0].cover(t + 1, t + 20, main="syscall", syscall=syscall)
    job.procs[1].cover(t + 1, t + 20)
    assert blamed(analyze_job(job)) == named


def test_a_stopped_sender_is_no_idle_one() -> None:
    assert blamed(analyze_job(receiver(5, main="stopped"))) == {0}


def test_receives_on_a_communicator_that_was_declared_wait_silently() -> None:
    assert analyze_job(receiver(0), idle_ok=("*",)) == []
