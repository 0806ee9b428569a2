"""Rules of lost events that no other test would miss: those whose place is known excuse nobody."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Comm, Job

from nccluprobe.match.finding import Finding

AR, START, END = "ncclAllReduce", "ncclGroupStart", "ncclGroupEnd"


def behind(comms: list[Comm], t: float, **state: str | None) -> None:
    """Rank 1 does not come to a call, and its trace tells of one lost event."""
    for c in comms:
        if c.proc.rank != 1:
            c.proc.call(c, AR, t)
    one = comms[1].proc
    one.cover(0.5, t)
    one.cover(t + 0.5, 400, lost_kernel=1, **state)
    cover([c.proc for c in comms if c.proc is not one], 400)


def judged(
    job: Job, unreadable: int | None = None, first: float | None = None
) -> tuple[str, list[int]]:
    """Reason and blamed ranks of the one finding.

    ``unreadable``: a line of rank 1.  ``first``: what is written then is read before the rest.
    """
    run = Run(job)
    if first is not None:
        run.until(first)
    if unreadable is not None:
        run.lines[1][unreadable] = b"\xff" * 20
    run.all()
    run.scan()
    found: list[Finding] = run.analysis.matcher.book.all()
    (f,) = (f for f in found if f.hang_type == "collective_missing_enter")
    return f.details["reason"], [who["rank"] for who in f.named if f.role == "root_cause"]


@pytest.mark.parametrize("shown", ["start", "end", None])
def test_a_group_shows_that_it_lost_its_start_or_end(shown: str | None) -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 3)
    group: dict[str, Any] = {"group": 1}
    for c in comms:
        lost = shown if c.proc.rank == 1 else None
        c.proc.call(None, START, t, lost=lost == "start", **group)
        c.proc.call(c, AR, t + 0.01, **group)
        c.proc.call(None, END, t + 0.02, lost=lost == "end", **group)
    t = steps(comms, 3, start=t + 1)
    behind(comms, t)
    alive = ("rank_alive_but_not_entered", [1])
    assert judged(job) == (("probe_event_loss_possible", []) if shown is None else alive)


@pytest.mark.parametrize("unreadable", [None, 4])
def test_a_line_that_cannot_be_read_is_no_place_of_a_loss(unreadable: int | None) -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 9)
    behind(comms, t)
    assert judged(job, unreadable) == ("probe_event_loss_possible", [])


def test_a_call_that_is_told_late_was_not_lost() -> None:
    """It returned after calls of another thread that were made after it."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 3)
    for c in comms:
        c.proc.call(c, AR, t, dur=4.0 if c.proc.rank == 1 else 1e-5)
        c.proc.call(c, AR, t + 0.1, thread=7)
    behind(comms, t + 5)
    assert judged(job, first=t + 3) == ("probe_event_loss_possible", [])


def test_a_hole_is_the_place_of_a_loss() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 3)
    for c in comms:
        c.proc.call(c, AR, t, lost=c.proc.rank == 1)
    t = steps(comms, 3, start=t + 1)
    behind(comms, t)
    assert judged(job) == ("rank_alive_but_not_entered", [1])


def test_calls_that_make_communicators_are_no_holes() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 3)
    none = {"color": -1, "key": 0, "ord": 0, "new_comm": None}
    for c in comms:
        c.proc.call(c, "ncclCommSplit", t, **none)
    t = steps(comms, 3, start=t + 1)
    behind(comms, t)
    assert judged(job) == ("probe_event_loss_possible", [])


@pytest.mark.parametrize("all_came", [True, False])
def test_of_lost_calls_the_one_that_others_wait_for_was_made(all_came: bool) -> None:
    """Rank 2 called NCCL after it: so its record is the one that was lost."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for r, c in enumerate(comms):
        if r != 1 or all_came:
            c.proc.call(c, AR, t, lost=r == 2)
    comms[2].proc.call(comms[2], "ncclSend", t + 0.1, peer=0, count=8)
    comms[0].proc.call(comms[0], "ncclRecv", t + 0.1, peer=2, count=8)
    for p in job.procs:
        p.cover(0.5, t - 0.05)
        p.cover(t + 0.5, 400, lost_kernel=int(p.rank == 2))
    found = [f.details["missing_comm_ranks"] for f in analyze_job(job)]
    assert found == ([] if all_came else [[1]])


@pytest.mark.parametrize(
    ("main", "syscall", "named"),
    [("stopped", None, [1]), ("syscall", "read", [1]), ("syscall", "futex", [])],
)
def test_who_is_away_is_the_cause_though_it_may_have_come(
    main: str, syscall: str | None, named: list[int]
) -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    behind(comms, t, main=main, syscall=syscall)
    assert judged(job) == ("probe_event_loss_possible", named)


def test_who_may_have_come_is_not_missed_beside_one_that_surely_has_not() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    comms[0].proc.call(comms[0], AR, t)
    for p in job.procs:
        p.cover(0.5, t - 0.05)
        p.cover(t + 0.5, 400, lost_kernel=int(p.rank == 2))
    (f,) = analyze_job(job)
    assert f.details["missing_comm_ranks"] == [1]


def test_who_lost_one_event_and_is_missed_in_two_calls_is_named() -> None:
    job = Job()
    comms = job.world(3)
    others = [c.proc.comm("00000000000000bb", r, 3) for r, c in enumerate(comms)]
    t = steps(others, 3, start=steps(comms, 3))
    for c in others:
        if c.proc.rank != 1:
            c.proc.call(c, AR, t)
    behind(comms, t + 0.1)
    run = Run(job)
    run.all()
    run.scan()
    found = [f for f in run.analysis.matcher.book.all() if f.role == "root_cause"]
    assert {f.details["reason"] for f in found} == {"probe_event_loss_possible"}
    assert {who["rank"] for f in found for who in f.named} == {1}


@pytest.mark.parametrize("before", [0, 1])
def test_a_first_call_that_does_not_return_shows_that_one_has_not_come(before: int) -> None:
    job = Job()
    comms = job.world(3)
    others = [c.proc.comm("00000000000000bb", r, 3) for r, c in enumerate(comms)]
    t = steps(comms, 3)
    t = steps(others, before, start=t) if before else t
    for c in others:
        if c.proc.rank != 1:
            c.proc.enter(c, AR, t)
    one = others[1].proc
    one.cover(0.5, t)
    one.cover(t + 0.5, 400, lost_kernel=1)
    cover([c.proc for c in others if c.proc is not one], 400)
    assert judged(job) == ("probe_event_loss_possible", [] if before else [1])


def test_a_send_that_does_not_return_shows_nothing_of_the_first_collective() -> None:
    job = Job()
    comms = job.world(3)
    others = [c.proc.comm("00000000000000bb", r, 3) for r, c in enumerate(comms)]
    t = steps(comms, 3)
    for c in (others[0], others[2]):
        c.proc.call(c, AR, t)
    others[0].proc.enter(others[0], "ncclSend", t + 0.1, peer=2, count=10**7)
    others[2].proc.call(others[2], "ncclRecv", t + 0.1, peer=0, count=10**7)
    one = others[1].proc
    one.cover(0.5, t)
    one.cover(t + 0.5, 400, lost_kernel=1)
    cover([c.proc for c in others if c.proc is not one], 400)
    assert judged(job) == ("probe_event_loss_possible", [])


def test_places_of_losses_are_forgotten_with_the_communicator() -> None:
    job = Job()
    comms = job.world(2)
    others = [c.proc.comm("00000000000000bb", r, 2) for r, c in enumerate(comms)]
    t = steps(others, 5, start=steps(comms, 5))
    for c in others:
        c.proc.call(c, AR, t, lost=c.proc.rank == 1)
        c.proc.call(c, AR, t + 0.1)
        c.proc.comm_end(c, t + 1)
    cover(job.procs, t + 20, lost_kernel=1)
    run = Run(job)
    run.all()
    run.scan()
    for p in run.analysis.matcher.processes.values():
        assert set(p.losses.holes) == {comms[0].id}


@pytest.mark.parametrize(("lost", "confidence"), [(True, "reduced"), (False, "inferred")])
def test_who_may_wait_for_what_was_lost_is_no_cause_beyond_doubt(
    lost: bool, confidence: str
) -> None:
    """Rank 0 is outside NCCL, its call made; rank 1 may have made it too, and waits elsewhere."""
    job = Job()
    xs = job.world(2)
    ys = [x.proc.comm("00000000000000bb", r, 2) for r, x in enumerate(xs)]
    for c in (*xs, *ys):
        c.proc.call(c, "ncclAllReduce", 1.0, stream=int(c in ys))
    xs[0].proc.call(xs[0], "ncclAllReduce", 2.0, stream=0)
    ys[1].proc.enter(ys[1], "ncclAllReduce", 3.0, stream=1)
    for p in job.procs:
        p.cover(0.5, 1.6)
        p.cover(2.6, 400.0, lost_kernel=int(lost and p.rank == 1))
    (f,) = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert ([c["rank"] for c in f.named], f.details["confidence"]) == ([0], confidence)


@pytest.mark.parametrize("api", ["ncclSend", "ncclRecv"])
def test_that_a_rank_does_not_come_is_less_sure_while_a_third_may_hang_with_it(api: str) -> None:
    """Rank 1 may have answered rank 0, and waits for it; the device of rank 2 may hold both."""
    job = Job()
    xs = job.world(3)
    ys = [x.proc.comm("00000000000000bb", r, 2) for r, x in enumerate(xs[:2])]
    for c in (*xs, *ys):
        c.proc.call(c, AR, 1.0, stream=0)
    xs[0].proc.call(xs[0], api, 2.0, peer=1, count=1 << 24, stream=0)
    ys[1].proc.enter(ys[1], AR, 3.0, stream=0)
    for p in job.procs:
        p.cover(0.5, 1.6)
        p.cover(2.6, 400.0, lost_kernel=int(p.rank == 1))
    (f,) = [f for f in analyze_job(job) if f.hang_type == "collective_missing_enter"]
    assert f.details["missing_comm_ranks"] == [0]
    assert (f.role, f.details["confidence"]) == ("downstream", "reduced")


@pytest.mark.parametrize("also", [False, True])
def test_that_the_call_was_made_is_supposed_where_another_rank_is_a_cause_then(also: bool) -> None:
    """Rank 0 waits for rank 1, which may have come; rank 2 for rank 0, whose host is free.

    ``also``: rank 2 lacks a send of rank 1, too, which has lost two records.
    """
    job = Job()
    xs = job.world(3)
    ys = [x.proc.comm("00000000000000bb", r, 2) for r, x in enumerate(xs[::2])]
    for c in (*xs, *ys):
        c.proc.call(c, AR, 1.0, stream=0)
    for c in xs[::2]:
        c.proc.call(c, AR, 2.0, stream=0)
    ys[1].proc.call(ys[1], AR, 3.0, stream=1)
    if also:
        xs[2].proc.call(xs[2], "ncclRecv", 3.5, peer=1, count=1 << 24, stream=2)
    for p in job.procs:
        p.cover(0.5, 1.6)
        p.cover(2.6, 400.0, lost_kernel=(1 + also) * (p.rank == 1))
    (f,) = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert (f.role, [c["rank"] for c in f.named]) == ("root_cause", [0])
    assert f.details["confidence"] == "reduced"


def test_what_was_lost_before_a_later_send_leaves_no_doubt_of_one_that_does_not_come() -> None:
    """Of rank 0, on another communicator, something else than a call on one was lost."""
    job = Job()
    xs = job.world(3)
    ys = [x.proc.comm("00000000000000bb", r, 2) for r, x in enumerate(xs[:2])]
    for c in ys:
        c.proc.call(c, AR, 1.0)
    t = steps(xs, 5, start=1.1)
    ys[0].proc.call(ys[0], "ncclSend", t + 1, peer=1, count=8)
    ys[1].proc.call(ys[1], "ncclRecv", t + 1, peer=0, count=8)
    steps(xs[:2], 1, start=t + 1.5)
    for p in job.procs:
        p.cover(0.5, t)
        p.cover(t + 0.5, 400, lost_kernel=int(p.rank == 0))
    (f,) = analyze_job(job)
    assert ([c["rank"] for c in f.named], f.details["confidence"]) == ([2], "observed")


def test_a_receive_that_is_only_inferred_to_be_left_out_explains_no_more_than_a_hung_device() -> (
    None
):
    """Rank 2 may have made the call that stands behind its send, for which rank 1 has not come."""
    job = Job()
    comms = job.world(4)
    for c in comms:
        c.proc.call(c, AR, 1.0, stream=0)
    for r, c in enumerate(comms):
        if r != 2:
            c.proc.call(c, AR, 2.0, stream=0)
    comms[2].proc.call(comms[2], "ncclSend", 2.5, peer=1, count=1 << 24, stream=0)
    for p in job.procs:
        p.cover(0.5, 1.6)
        p.cover(2.6, 400.0, lost_kernel=int(p.rank == 2))
    (f,) = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert (f.hang_type, f.named) == ("collective_all_ranks_stuck", [])


@pytest.mark.parametrize("api", [AR, "ncclSend"])
def test_what_stands_only_behind_a_call_that_the_absent_rank_may_have_made_holds_nobody(
    api: str,
) -> None:
    """Rank 0 waits for rank 2's device, as that one does for rank 1, which waits for rank 0.

    So rank 1 has come, unseen: both go on, and rank 0 is the one that has not come.
    """
    job = Job()
    xs = job.world(3)
    ys = [x.proc.comm("00000000000000bb", r, 2) for r, x in enumerate(xs[:2])]
    zs = [x.proc.comm("00000000000000cc", r, 2) for r, x in enumerate(xs[::2])]
    for c in (*xs, *ys, *zs):
        c.proc.call(c, AR, 1.0, stream=0)
    for r, (x, z) in enumerate(zip(xs[::2], zs, strict=True)):
        if api == AR:
            x.proc.call(x, AR, 2.0, stream=0)
        z.proc.call(z, AR, 2.2, stream=1 - r)
    if api != AR:
        xs[2].proc.call(xs[2], api, 2.0, peer=1, count=1 << 24, stream=0)
    ys[1].proc.enter(ys[1], AR, 3.0, stream=0)
    for p in job.procs:
        state: dict[str, Any] = {"main": "syscall", "syscall": "read"} if p.rank == 2 else {}
        p.cover(0.5, 1.6)
        p.cover(2.6, 400.0, lost_kernel=int(p.rank == 1), **state)
    (f,) = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert ([c["rank"] for c in f.named], f.details["confidence"]) == ([0], "reduced")


@pytest.mark.parametrize("waiting", [2, 1])
def test_what_a_crashed_rank_lost_does_not_excuse_it(waiting: int) -> None:
    """Its last event may be the call: it ended under who waits there all the same."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for c in comms[:waiting]:
        c.proc.call(c, AR, t)
    cover(job.procs[:2], t + 400)
    comms[2].proc.cover(0.5, t - 1)
    comms[2].proc.coverage(t + 1, lost_kernel=1)
    comms[2].proc.end(t + 1, how="signaled", signal=11)
    (f,) = analyze_job(job)
    assert (f.role, f.severity, f.details["confidence"]) == ("root_cause", "error", "observed")
    assert f.details["reason"] == "rank_exit_or_crash_suspected"
    assert [c["rank"] for c in f.named] == [2]
