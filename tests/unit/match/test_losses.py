"""Lost records: holes at known places, what has none, and what follows for who did not come."""

from __future__ import annotations

import numpy as np
import pytest
from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Comm, Job

from nccluprobe.match.absence import open_slot, wait_of
from nccluprobe.match.finding import Finding
from nccluprobe.match.losses import Holes
from nccluprobe.match.process import Process
from nccluprobe.match.status import unseen
from nccluprobe.match.suppose import SURE, Supposed, explains

AR = "ncclAllReduce"


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_holes_are_found_in_any_order_and_filled() -> None:
    holes = Holes()
    holes.take(column(0, 1, 2), column(10, 11, 12))
    assert (holes.top, holes.gaps) == (2, [])
    holes.take(column(6, 4), column(16, 14))
    holes.settle()
    assert holes.gaps == [(3, 3, 14), (5, 5, 16)]
    assert (holes.known(16), holes.known(17), holes.after(3)) == (1, 2, 1)
    holes.take(column(5), column(15))
    holes.settle()
    assert holes.gaps == [(3, 3, 14)]


def test_a_long_hole_is_filled_in_its_middle() -> None:
    holes = Holes()
    holes.take(column(9), column(90))
    holes.settle()
    holes.take(column(4, 5), column(40, 50))
    holes.settle()
    assert holes.gaps == [(0, 3, 90), (6, 8, 90)]
    assert (holes.known(91), holes.after(6)) == (7, 2)


def hang(lost: int, hole: bool, last: bool) -> tuple[Job, list[Comm], float]:
    """Three ranks, of which rank 2 makes one call less, and has lost ``lost`` records."""
    job = Job()
    comms = job.world(3)
    for i in range(10):
        for c in comms:
            drop = c is comms[2] and ((hole and i == 4) or (last and i == 9))
            c.proc.call(c, AR, 1 + i * 0.1, lost=drop)
    for c in comms[:2]:
        c.proc.call(c, AR, 2.5)
    for c in comms:
        c.proc.cover(0.5, 400, lost_kernel=lost if c is comms[2] else 0)
    return job, comms, 2.5


def test_who_has_lost_only_calls_at_known_places_has_not_come_for_sure() -> None:
    job, _, _ = hang(lost=1, hole=True, last=False)
    (f,) = analyze_job(job)
    assert f.details["reason"] == "rank_alive_but_not_entered"
    assert (f.role, f.severity, f.details["missing_comm_ranks"]) == ("root_cause", "error", [2])


def test_losses_are_told_from_holes() -> None:
    job, comms, _ = hang(lost=3, hole=True, last=False)
    comms[2].proc.lines.sort(key=lambda x: x[0])
    run = Run(job)
    run.all()
    run.scan()
    e = run.analysis.matcher.endpoints[2, 0]
    assert e.process.losses.without_place(e.process.lost, e.process.through) == 2
    # All were counted before its last call: none can be missing after it.
    assert unseen(e) == 0


def test_starts_and_ends_of_groups_are_accounted_for() -> None:
    job = Job()
    comms = job.world(2)
    t = steps(comms, 3)
    for c in comms:
        p = c.proc
        p.call(None, "ncclGroupStart", t, group=7, lost=c is comms[1])
        p.call(c, AR, t + 0.01, group=7, gpos=0)
        p.call(None, "ncclGroupEnd", t + 0.02, group=7, gpos=1, lost=c is comms[1])
        p.call(c, AR, t + 0.1)
    comms[0].proc.call(comms[0], AR, t + 1)
    comms[0].proc.cover(0.5, t + 400)
    comms[1].proc.cover(0.5, t + 0.5)
    comms[1].proc.cover(t + 2, t + 400, lost_kernel=2)
    (f,) = analyze_job(job)
    assert (f.details["reason"], f.role) == ("rank_alive_but_not_entered", "root_cause")


def test_a_lost_record_without_a_place_may_be_the_call() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for c in comms[:2]:
        c.proc.call(c, AR, t)
    for c in comms[:2]:
        c.proc.cover(0.5, t + 400)
    comms[2].proc.cover(0.5, t - 1)
    comms[2].proc.cover(t + 1, t + 400, lost_kernel=1)
    (f,) = analyze_job(job)
    assert (f.details["reason"], f.severity) == ("probe_event_loss_possible", "notice")


def test_one_lost_record_cannot_be_two_calls() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for c in comms[:2]:
        c.proc.call(c, AR, t)
        c.proc.call(c, AR, t + 0.1)
        c.proc.cover(0.5, t + 400)
    comms[2].proc.cover(0.5, t - 1)
    comms[2].proc.cover(t + 1, t + 400, lost_kernel=1)
    (f,) = analyze_job(job)
    assert (f.details["reason"], f.severity) == ("rank_alive_but_not_entered", "error")


def test_who_may_have_come_is_not_blamed_beside_who_has_not() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    for c in comms[:2]:
        c.proc.call(c, AR, t)
    for c in comms[:3]:
        c.proc.cover(0.5, t + 400)
    comms[3].proc.cover(0.5, t - 1)
    comms[3].proc.cover(t + 1, t + 400, lost_kernel=1)
    (f,) = analyze_job(job)
    assert [c["rank"] for c in f.named] == [2]
    assert (f.role, f.severity) == ("root_cause", "error")


def test_a_hole_that_others_wait_for_is_the_call() -> None:
    """Rank 1's call on the first communicator is lost; a call on it after that shows the hole."""
    job = Job()
    comms = job.world(3)
    pair = [c.proc.comm("00000000000000bb", i, 2, 0.0) for i, c in enumerate(comms[1:])]
    t = steps(comms, 5)
    for c in comms:
        c.proc.call(c, AR, t, lost=c is comms[1])
    comms[1].proc.call(comms[1], "ncclSend", t + 0.1, peer=0)
    comms[0].proc.call(comms[0], "ncclRecv", t + 0.1, peer=1)
    comms[1].proc.call(pair[0], AR, t + 0.2)
    for c in comms[:2]:
        c.proc.call(c, AR, t + 1)
    for c in comms:
        c.proc.cover(0.5, t + 400, lost_kernel=int(c is comms[1]))
    found = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert [c["rank"] for f in found for c in f.named] == [2]


@pytest.mark.parametrize("thread", [None, 7])
def test_a_call_that_others_have_gone_past_is_one_too_many(thread: int | None) -> None:
    """Rank 0 alone makes a call, and rank 1 waits for it in what comes behind it on its stream.

    Of calls that another thread makes it is not known which comes first in the program.
    """
    job = Job()
    comms = job.world(4)
    pair = [c.proc.comm("00000000000000bb", i, 2, 0.0) for i, c in enumerate(comms[:2])]
    t = steps(comms, 5)
    comms[0].proc.call(comms[0], AR, t)
    for c in pair:
        c.proc.call(c, AR, t + 0.1, thread=thread or c.proc.pid)
    cover(job.procs, t + 400, main="syscall", syscall="poll")
    (f,) = [f for f in analyze_job(job) if f.role == "root_cause"]
    expected = "skipped_or_extra_call" if thread is None else "collective_all_ranks_stuck"
    assert f.hang_type == expected
    assert [c["rank"] for c in f.named] == ([0] if thread is None else [])


@pytest.mark.parametrize(("lost", "named"), [(0, [0]), (1, [])])
def test_who_may_have_made_the_other_call_is_not_said_to_have_made_one_too_many(
    lost: int, named: list[int]
) -> None:
    """Rank 0 alone makes a call; rank 1 has made two others that lack rank 0, one perhaps not."""
    job = Job()
    comms = job.world(4)
    pair = [c.proc.comm("00000000000000bb", i, 2, 0.0) for i, c in enumerate(comms[:2])]
    t = steps(pair, 5, start=steps(comms, 5))
    comms[0].proc.call(comms[0], AR, t)
    for i in range(2):
        pair[1].proc.call(pair[1], AR, t + 0.1 + 0.1 * i)
    for c in comms:
        c.proc.cover(0.5, t - 0.05, main="syscall", syscall="poll")
        mine = lost if c is comms[0] else 0
        c.proc.cover(t + 1, t + 400, main="syscall", syscall="poll", lost_kernel=mine)
    found = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert [c["rank"] for f in found for c in f.named] == named


def test_known_holes_are_the_calls_that_all_who_are_ahead_have_made() -> None:
    """Rank 1 has lost two calls; a message and two collectives lack it, ranks 2 and 3 made one."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    for c in comms:
        c.proc.call(c, AR, t, lost=c is comms[1])
    comms[1].proc.call(comms[1], "ncclSend", t + 0.1, peer=0, lost=True)
    comms[0].proc.call(comms[0], "ncclRecv", t + 0.1, peer=1)
    comms[1].proc.call(comms[1], "ncclSend", t + 0.2, peer=3)
    comms[3].proc.call(comms[3], "ncclRecv", t + 0.2, peer=1)
    comms[0].proc.call(comms[0], AR, t + 1)
    for c in comms:
        c.proc.cover(0.5, t + 400, lost_kernel=2 * int(c is comms[1]))
    found = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert [f.hang_type for f in found] == ["collective_all_ranks_stuck"]
    (stuck,) = found
    assert stuck.details["entered_comm_ranks"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("lost", "alone", "halves", "made"),
    [
        (1, 0, 0, 1),
        (2, 0, 0, 2),
        (1, 1, 0, 0),
        (2, 1, 0, 1),
        (2, 2, 0, 0),
        (1, 2, 0, 1),
        (1, 0, 1, 0),
        (2, 0, 1, 1),
        (1, 0, 2, 0),
        (2, 1, 1, 0),
    ],
)
def test_a_lost_event_is_supposed_to_be_one_call_only(
    lost: int, alone: int, halves: int, made: int
) -> None:
    """Ranks 2 and 3 lack a call on two communicators, rank 3 perhaps, and calls that lack it alone.

    All of these are among what was lost, or it lacks them for sure.  ``halves``: sends to it.
    """
    job = Job()
    xs = job.world(4)
    more = [[c.proc.comm(h * 16, r, 4) for r, c in enumerate(xs)] for h in "bc"]
    t = 1.0
    for comms in (xs, *more):
        t = steps(comms, 3, start=t)
    for comms in (xs, more[0]):
        steps(comms[:2], 1, start=t)
    steps(more[1][:3], alone, start=t)
    for _ in range(halves):
        xs[0].proc.call(xs[0], "ncclSend", t + 0.2, peer=3)
    for c in xs:
        c.proc.cover(0.5, t - 0.05)
        c.proc.cover(t + 1, t + 400, lost_kernel=lost if c is xs[3] else 0)
    supposed, p = beside(job)
    assert (len(supposed), p.supposed, p.unplaced()) == (made, made, lost - made)
    supposed.undo()
    assert (p.supposed, p.unplaced()) == (0, lost)


def beside(job: Job) -> tuple[Supposed, Process]:
    """What is supposed of who may have come, and the process of rank 3."""
    run = Run(job)
    run.all()
    run.scan()
    matcher = run.analysis.matcher
    contexts = {key: matcher._context(comm) for key, comm in matcher.comms.items()}
    supposed = Supposed()
    supposed.beside(matcher.comms, contexts, matcher.p2p)
    return supposed, matcher.processes[3]


@pytest.mark.parametrize("other", [False, True])
def test_of_a_call_that_lacks_only_such_as_may_have_come_it_is_supposed_first(other: bool) -> None:
    """Ranks 2 and 3 lack a call on one communicator, ranks 1 and 3 on another: 2 for sure.

    ``other``: rank 1 lost an event as well as rank 3.
    """
    job = Job()
    xs = job.world(4)
    ys = [c.proc.comm("b" * 16, r, 4) for r, c in enumerate(xs)]
    t = steps(ys, 3, start=steps(xs, 3))
    steps(xs[:2], 1, start=t)
    steps(ys[::2], 1, start=t)
    for r, c in enumerate(xs):
        c.proc.cover(0.5, t - 0.05)
        c.proc.cover(t + 1, t + 400, lost_kernel=int(r == 3 or (r == 1 and other)))
    _, p = beside(job)
    assert p.supposed == int(not other)


@pytest.mark.parametrize("awaited", [False, True])
def test_a_lost_send_that_is_awaited_is_no_collective(awaited: bool) -> None:
    """Rank 3 lost a call before a later one; ranks 2 and 3 lack a collective, rank 0 a send."""
    job = Job()
    xs = job.world(4)
    t = steps(xs, 3)
    xs[3].proc.call(xs[3], "ncclSend", t, peer=0, lost=True)
    for c, api, peer in ((xs[3], "ncclSend", 1), (xs[1], "ncclRecv", 3)):
        c.proc.call(c, api, t + 0.1, peer=peer)
    if awaited:
        xs[0].proc.call(xs[0], "ncclRecv", t + 0.1, peer=3)
    steps(xs[:2], 1, start=t + 0.2)
    for c in xs:
        c.proc.cover(0.5, t - 0.05)
        c.proc.cover(t + 1, t + 400, lost_kernel=int(c is xs[3]))
    (f,) = [f for f in analyze_job(job) if f.hang_type == "collective_missing_enter"]
    assert f.details["missing_comm_ranks"] == ([2, 3] if awaited else [2])


@pytest.mark.parametrize(("lost", "made"), [(1, 0), (2, 2), (3, 0), (6, 2)])
def test_who_may_have_come_is_supposed_to_have_come_as_far_as_all_who_are_ahead(
    lost: int, made: int
) -> None:
    """Rank 2 lacks a call on two communicators, in which rank 0 is three calls ahead.

    Nor is it supposed where it may have made some more, and not all.
    """
    job = Job()
    xs = job.world(3)
    ys = [c.proc.comm("b" * 16, r, 3) for r, c in enumerate(xs)]
    t = steps(ys, 3, start=steps(xs, 3))
    for comms in (xs, ys):
        steps(comms[:1], 2, start=steps(comms[:2], 1, start=t))
    for c in xs:
        c.proc.cover(0.5, t - 0.05)
        c.proc.cover(t + 1, t + 400, lost_kernel=lost if c is xs[2] else 0)
    run = Run(job)
    run.all()
    run.scan()
    matcher, waits = run.analysis.matcher, []
    for comm in matcher.comms.values():
        o = open_slot(comm, matcher._context(comm))
        assert o is not None
        waits.append(wait_of(comm, o, None))
    supposed, p = Supposed(), matcher.processes[2]
    assert supposed.weak(waits) == bool(made)
    assert (len(supposed), p.supposed) == (made, made)


def test_a_cause_without_a_name_explains_more_than_one_that_may_have_come() -> None:
    def cause(hang_type: str, reason: str) -> Finding:
        details = {"reason": reason, "confidence": "inferred"}
        return Finding(("k",), hang_type, "run", "aa", 1, 0, details, "error", "root_cause")

    lost = cause("collective_missing_enter", "probe_event_loss_possible")
    lost.culprits = ("rank 1",)
    device = cause("collective_all_ranks_stuck", "all_silent_after")
    alive = cause("collective_missing_enter", "rank_alive_but_not_entered")
    sender = cause("p2p_unmatched", "rank_alive_but_not_entered")
    sender.culprits = alive.culprits = ("rank 2",)
    ways = [[], [lost], [lost, device], [device], [device, sender], [lost, device, alive]]
    assert [explains(found) for found in ways] == [0, 1, 1, 2, 2, SURE]
    sender.details["confidence"] = "reduced"
    alive.supposes = True
    assert explains([device, sender]) == explains([device, alive]) == 1
