"""Ranks that leave the job: an orderly end is silent, whoever leaves others waiting is named."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Comm, Job, S, unix

from nccluprobe.match.finding import Finding

IDLE: dict[str, Any] = {"idle_ok": ("*aa",)}
OPTIONS = pytest.mark.parametrize("options", [IDLE, {}], ids=["declared", "undecided"])


def blamed(found: list[Finding]) -> set[int]:
    named = [d for f in found if f.role == "root_cause" and f.state == "open" for d in f.named]
    return {d["rank"] for d in named}


def followers_wait(n: int = 4) -> tuple[Job, list[Comm], float]:
    job = Job()
    comms = job.world(n)
    t = steps(comms, 5)
    for c in comms[1:]:
        c.proc.call(c, "ncclBroadcast", t, root=0)
    return job, comms, t


def leave(c: Comm, t: float, how: str) -> None:
    if how in ("abort", "destroy", "revoke"):
        c.proc.comm_end(c, t, how)
    elif how == "crash":
        c.proc.end(t, code=1)
    else:
        c.proc.end(t, code=0)


@OPTIONS
@pytest.mark.parametrize("how", ["abort", "revoke", "crash", "exit"])
def test_a_follower_that_leaves_an_idle_communicator_is_named(
    how: str, options: dict[str, Any]
) -> None:
    job, comms, t = followers_wait()
    for r, c in enumerate(comms):
        c.proc.cover(0.5, t + (99 if r == 2 and how in ("crash", "exit") else 400))
    leave(comms[2], t + 100, how)
    (f,) = analyze_job(job, **options)
    assert (f.hang_type, f.severity) == ("comm_ended_under_waiters", "error")
    assert blamed([f]) == {2}
    assert f.details["left_comm_ranks"] == [2]


@pytest.mark.parametrize("root_first", [True, False])
@pytest.mark.parametrize("how", ["exit", "destroy"])
def test_an_idle_job_that_is_shut_down_is_silent_at_any_moment(how: str, root_first: bool) -> None:
    job, comms, t = followers_wait()
    order = comms if root_first else comms[::-1]
    for i, c in enumerate(order):
        gone = t + 600 + 0.5 * i
        c.proc.cover(0.5, gone - 0.5)
        if how == "destroy":
            leave(c, gone - 0.3, how)
        leave(c, gone, "exit")
    run = Run(job, None)
    run.analysis.matcher.options = run.analysis.matcher.options.__class__(**IDLE)
    written = []
    for at in range(int(t) + 590, int(t) + 612):
        run.until(at)
        written += run.scan(unix(at))
    assert written == []
    assert analyze_job(job, **IDLE) == []


def test_followers_that_leave_long_before_an_idle_root_are_no_hang() -> None:
    job, comms, t = followers_wait()
    for c in comms[1:]:
        c.proc.cover(0.5, t + 600)
        leave(c, t + 600.5, "exit")
    comms[0].proc.cover(0.5, t + 700)
    leave(comms[0], t + 700.5, "exit")
    assert analyze_job(job, **IDLE) == []


@pytest.mark.parametrize("destroy", [False, True])
def test_a_call_after_the_others_have_come_to_an_orderly_end_is_one_too_many(
    destroy: bool,
) -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    steps(comms[3:], 1, start=t)
    for c in comms[:3]:
        if destroy:
            c.proc.comm_end(c, t + 1, "destroy")
        c.proc.cover(0.5, t + 2)
        leave(c, t + 2.5, "exit")
    cover(job.procs[3:], t + 400)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.details["reason"]) == ("skipped_or_extra_call", "call_extra")
    assert blamed([f]) == {3}


@pytest.mark.parametrize(
    "end", [{"how": "signaled", "signal": 15}, {"in_flight": 1}], ids=["told to end", "in a call"]
)
def test_a_call_after_ends_that_are_not_orderly_is_not_one_too_many(end: dict[str, Any]) -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    steps(comms[3:], 1, start=t)
    for c in comms[:3]:
        c.proc.cover(0.5, t + 2)
        c.proc.end(t + 2.5, **end)
    cover(job.procs[3:], t + 400)
    (f,) = analyze_job(job)
    assert f.hang_type == "collective_missing_enter"
    assert blamed([f]) == {0, 1, 2}


@pytest.mark.parametrize("n", [4, 5])
def test_who_may_only_have_made_the_call_too_many_is_not_named(n: int) -> None:
    """Rank 1 has lost a record: beside others that surely did not come it may have come."""
    job = Job()
    comms = job.world(n)
    t = steps(comms, 5)
    steps(comms[-1:], 1, start=t)
    for c in comms[:-1]:
        lost = int(c is comms[1])
        c.proc.cover(0.5, t - 0.1)
        c.proc.cover(t + 1, t + 2, lost_kernel=lost)
        leave(c, t + 2.5, "exit")
    cover(job.procs[-1:], t + 400)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.details["reason"]) == ("skipped_or_extra_call", "call_extra")
    assert blamed([f]) == {n - 1}


@pytest.mark.parametrize(
    ("others", "calls", "named"),
    [(2.6, 1, []), (2.6, 2, [1]), (60.0, 1, [1]), (None, 1, [1])],
    ids=["with others", "two calls", "long before others", "alone"],
)
def test_one_of_two_that_ended_and_one_call(
    others: float | None, calls: int, named: list[int]
) -> None:
    """Rank 1 ends in order, and rank 0 calls on their own communicator; when do others end?"""
    job = Job()
    world = job.world(4)
    pair = [world[r].proc.comm("00000000000000bb", r, 2) for r in (0, 1)]
    t = steps(pair, 3, start=steps(world, 5))
    steps(pair[:1], calls, start=t)
    for c in world:
        end = 2.5 if c is world[1] else others
        if c is world[0] or end is None:
            c.proc.cover(0.5, t + 400)
        else:
            c.proc.cover(0.5, t + end - 0.1)
            leave(c, t + end, "exit")
    (f,) = analyze_job(job)
    assert (f.role, f.details["reason"], f.details["confidence"]) == (
        "root_cause",
        "rank_exited",
        "inferred",
    )
    assert [c["rank"] for c in f.named] == named


@pytest.mark.parametrize("how", ["crash", "abort"])
def test_the_greater_part_did_not_end_in_an_orderly_way(how: str) -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    steps(comms[3:], 1, start=t)
    for c in comms[:3]:
        leave(c, t + 2.5, how)
        c.proc.cover(0.5, t + (2 if how == "crash" else 400))
    cover(job.procs[3:], t + 400)
    assert blamed(analyze_job(job)) == {0, 1, 2}


def test_one_that_the_others_wait_for_and_that_left_is_no_sign_of_a_call_too_many() -> None:
    """Who came late to a call whose member has left waits there, and comes to no other."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5, stream=0)
    others = [c.proc.comm("00000000000000bb", r, 4) for r, c in enumerate(comms)]
    for r, c in enumerate(others):
        c.proc.call(c, "ncclAllGather", t + (3 if r in (1, 3) else 0), stream=0)
    comms[2].proc.call(comms[2], "ncclAllReduce", t + 0.1, stream=0)
    cover(job.procs[1:], t + 400)
    job.procs[0].cover(0.5, t + 0.5)
    job.procs[0].end(t + 0.5)
    assert blamed(analyze_job(job)) == {0}


def test_one_that_leaves_early_is_named_and_not_those_who_go_on() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    steps(comms[:3], 1, start=t)
    comms[3].proc.cover(0.5, t + 2)
    leave(comms[3], t + 2.5, "exit")
    cover(job.procs[:3], t + 400)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.details["reason"]) == ("collective_missing_enter", "rank_exited")
    assert blamed([f]) == {3}


def test_an_old_communicator_that_is_left_level_is_silent() -> None:
    """Elastic: all go on with a new one, and never end the old one."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 20)
    new = [c.proc.comm("00000000000000bb", r, 3, t=t) for r, c in enumerate(comms[:3])]
    comms[3].proc.cover(0.5, t)
    leave(comms[3], t + 0.5, "exit")
    t = steps(new, 200, start=t + 1)
    cover(job.procs[:3], t + 400)
    assert analyze_job(job) == []


def test_a_restart_under_one_label_is_silent() -> None:
    job = Job()
    for life in range(3):
        t0 = 100.0 * life
        procs = [job.proc(r, pid=2000 + 10 * life + r) for r in range(3)]
        comms = [p.comm(f"00000000000000a{life}", r, 3, t=t0 + 1) for r, p in enumerate(procs)]
        t = steps(comms, 20, start=t0 + 2)
        steps(comms[: 2 - life], 1, start=t)
        for r, p in enumerate(procs):
            p.cover(t0 + 0.5, t + 1)
            p.end(t + 1.5 + 0.2 * r, how="signaled", signal=15)
    assert analyze_job(job) == []


def test_who_queued_a_receive_and_left_is_not_seen_to_be_the_cause() -> None:
    """It may have been done, but for rank 1, which sends to nobody."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for c in (comms[0], comms[2]):
        c.proc.call(c, "ncclRecv", t, peer=1, count=1 << 22)
    comms[0].proc.cover(0.5, t + 2)
    leave(comms[0], t + 2.5, "exit")
    cover(job.procs[1:], t + 400)
    (f,) = [f for f in analyze_job(job) if f.hang_type == "comm_ended_under_waiters"]
    assert f.details["confidence"] == "inferred"


def crossed(job: Job) -> tuple[list[Comm], float]:
    """Rank 1 is inside a call of the second communicator, the others inside one of the first."""
    first = job.world(4)
    t = steps(first, 5)
    second = [c.proc.comm("00000000000000bb", r, 4) for r, c in enumerate(first)]
    t = steps(second, 5, start=t)
    for r, (x, y) in enumerate(zip(first, second, strict=True)):
        c = y if r == 1 else x
        c.proc.enter(c, "ncclAllReduce", t)
    return first, t


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_a_deadlock_that_is_killed_as_a_whole_is_one(how: str) -> None:
    """Who ended a moment before the others, and waited itself, has not left them."""
    job = Job()
    comms, t = crossed(job)
    for i, c in enumerate(comms):
        c.proc.cover(0.5, t + 7.4, main="nccl")
        if how == "killed":
            c.proc.end(t + 7.5 + 0.01 * i, how="signaled", signal=9)
        else:
            c.proc.end(t + 7.5 + 0.5 * i, code=0)
    limits = {"missing_after": 3 * S, "error_after": 5 * S}
    found = analyze_job(job, **limits)
    (cause,) = [f for f in found if f.role == "root_cause"]
    assert cause.hang_type == "cross_comm_order_inversion"
    assert blamed(found) == {1}


@pytest.mark.parametrize("end", [{"code": 0}, {"how": "signaled", "signal": 15}])
def test_who_left_others_behind_is_the_cause_though_it_waited_a_moment_itself(
    end: dict[str, Any],
) -> None:
    """Rank 2 did not come to the call of rank 1 in the two seconds that it was there."""
    job = Job()
    xs = job.world(3)
    ys = [x.proc.comm("00000000000000bb", r, 2) for r, x in enumerate(xs[1:])]
    for c in (*xs, *ys):
        c.proc.call(c, "ncclAllReduce", 1.0, stream=0)
    for c in (xs[0], ys[0]):
        c.proc.call(c, "ncclAllReduce", 2.0, stream=0)
    for p in job.procs:
        p.cover(0.5, 4 if p.rank == 1 else 400)
    job.procs[1].end(4, **end)
    assert blamed(analyze_job(job)) == {1}


def test_who_is_killed_in_a_short_wait_leaves_those_who_stay() -> None:
    """Rank 1 would have waited in vain, but it is the one that is gone."""
    job = Job()
    comms, t = crossed(job)
    comms[1].proc.cover(0.5, t + 1, main="nccl")
    comms[1].proc.end(t + 1.5, how="signaled", signal=9)
    cover([c.proc for c in comms if c is not comms[1]], t + 400, main="nccl")
    assert blamed(analyze_job(job)) == {1}


def test_who_left_and_lacked_nothing_is_not_the_cause() -> None:
    """Rank 0 took part in nothing that is open: it is rank 1 that does not send."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    comms[2].proc.call(comms[2], "ncclRecv", t, peer=1, count=1 << 22)
    comms[0].proc.cover(0.5, t + 2)
    leave(comms[0], t + 2.5, "exit")
    cover(job.procs[1:], t + 400)
    (f,) = analyze_job(job)
    assert (f.hang_type, blamed([f])) == ("p2p_unmatched", {1})


def test_what_is_due_from_one_that_left_stands_behind_what_it_left() -> None:
    """Rank 0 left before its part of a call could run; the receives stand behind that call."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 3, stream=7)
    comms[0].proc.call(comms[0], "ncclAllReduce", t, stream=7)
    for r in (1, 2):
        comms[r].proc.call(comms[r], "ncclAllReduce", t + 3, stream=7)
        comms[r].proc.call(comms[r], "ncclRecv", t + 3.1, peer=0, count=1 << 20, stream=7)
        comms[r].proc.cover(0.5, 400)
    comms[0].proc.cover(0.5, t + 1)
    comms[0].proc.end(t + 1)
    assert blamed(analyze_job(job)) == {0}
