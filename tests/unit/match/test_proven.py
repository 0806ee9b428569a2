"""Hosts inside calls that lack each other, and hosts outside NCCL beside them."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import analyze_job, cover, steps
from support.tracegen import Comm, Job

from nccluprobe.match.finding import Finding

SEND, RECV, SPLIT = "ncclSend", "ncclRecv", "ncclCommSplit"
BIG = 1 << 24


def splits(comms: list[Comm], t: float) -> None:
    """All of these are inside a split."""
    for c in comms:
        c.proc.enter(c, SPLIT, t, color=0, key=0, ord=0, new_comm=None)


def blamed(found: list[Finding]) -> set[int]:
    roots = [f for f in found if f.role == "root_cause" and f.state == "open"]
    return {who["rank"] for f in roots for who in f.named}


def kinds(found: list[Finding]) -> set[tuple[str, str]]:
    return {(f.hang_type, f.role) for f in found if f.state == "open"}


@pytest.mark.parametrize("away", [False, True])
def test_who_is_inside_a_split_has_gone_past_what_one_still_waits_in(away: bool) -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 3)
    comms[1].proc.call(comms[1], SEND, t, peer=2, count=BIG)
    splits([comms[r] for r in (0, 2, 3)], t + 1)
    state: dict[str, Any] = {"main": "syscall", "syscall": "read"} if away else {}
    cover([c.proc for c in comms if c is not comms[1]], 400)
    comms[1].proc.cover(0.5, 400, **state)
    assert blamed(analyze_job(job)) == ({1} if away else {2})


def test_hosts_that_lack_each_other_inside_calls_explain_who_waits_for_the_device() -> None:
    """Ranks 2 and 3 wait for what rank 0 has not launched, and rank 1 for all of them."""
    job = Job()
    world = job.world(4)
    t = steps(world, 3)
    some = [world[r].proc.comm("00000000000000bb", r, 4) for r in range(4)]
    sends = [(world[0], SEND, {"peer": r, "count": BIG}) for r in (1, 2, 3)]
    world[0].proc.group(sends, t, state="inside")
    for r in (2, 3):
        world[r].proc.call(world[r], RECV, t, peer=0, count=BIG)
    splits([some[1]], t + 1)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert blamed(found) == set()
    assert ("p2p_order_inversion", "root_cause") in kinds(found)


def test_a_queued_receive_of_a_rank_outside_nccl_does_not_say_that_it_went_away() -> None:
    job = Job()
    world = job.world(3)
    t = steps(world, 3)
    pair = [world[r].proc.comm("00000000000000bb", r, 2) for r in (0, 1)]
    world[0].proc.enter(world[0], SEND, t, peer=1, count=BIG)
    pair[1].proc.call(pair[1], RECV, t, peer=0, count=2 * BIG, stream=0x20)
    cover(job.procs, 400)
    assert kinds(analyze_job(job)) == {("p2p_unmatched", "unknown")}


def ring(c: Comm, t: float, n: int, but: str | None = None, **more: Any) -> None:
    """A send to the right and a receive from the left in a group, one of which is left out."""
    r = c.proc.rank
    calls = [(c, SEND, {"peer": (r + 1) % n}), (c, RECV, {"peer": (r - 1) % n})]
    c.proc.group([(x, api, a | {"count": BIG} | more) for x, api, a in calls if api != but], t)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("receive", {2}),
        ("ahead", {2}),
        ("call", {1}),
        ("uneven", set()),
        ("streams", {1}),
        ("away", {1}),
    ],
)
def test_a_half_behind_a_call_that_its_rank_has_not_made(what: str, named: set[int]) -> None:
    """Rounds of a ring and an AllReduce; the next receive of rank 2 takes the place of one.

    ``ahead``: the host of rank 1 has run ahead by one AllReduce.  ``call``: it left that out.
    ``uneven``: no two of the others make as much.  ``streams``: its calls have two streams.
    """
    job = Job()
    world = job.world(5)
    t = steps(world, 1, stream=7)
    for i in range(3):
        for r, c in enumerate(world):
            last = r == 1 and i > (1 if what == "ahead" else 0)
            if last and i == 2 and what != "call":
                continue  # it waits for its device
            but = RECV if (i, r) == (1, 2) and what != "call" else None
            ring(c, t + i, 5, but, stream=9 if last and what == "streams" else 7)
            if r in (3, 4) and what == "uneven":
                api = SEND if r == 3 else RECV
                c.proc.call(c, api, t + i + 0.1, peer=7 - r, count=BIG, stream=7)
            if not last:
                c.proc.call(c, "ncclAllReduce", t + i + 0.5, stream=7)
    cover([c.proc for c in world if c.proc.rank != 1], 400)
    state: dict[str, Any] = {"main": "syscall", "syscall": "read"} if what == "away" else {}
    world[1].proc.cover(0.5, 400, **state)
    found = analyze_job(job)
    assert blamed(found) == named
    reasons = {f.details["reason"] for f in found if f.role == "root_cause"}
    assert ("call_skipped" in reasons) == (what in ("receive", "ahead", "uneven"))


def test_a_host_inside_a_send_is_not_held_by_a_collective_that_has_returned() -> None:
    """Rank 0 sends to rank 2, which stays away; rank 1 waits for rank 0, and it for rank 1."""
    job = Job()
    comms = job.world(3)
    pair = [c.proc.comm("00000000000000bb", i, 2) for i, c in enumerate(comms[:2])]
    t = steps(pair, 5, start=steps(comms, 5))
    comms[0].proc.call(comms[0], "ncclAllReduce", t)
    comms[0].proc.enter(comms[0], "ncclSend", t + 0.1, peer=2)
    pair[1].proc.enter(pair[1], "ncclAllReduce", t)
    cover(job.procs, t + 400)
    found = analyze_job(job)
    assert [f.hang_type for f in found if "cycle" in f.details] == []
    assert blamed(found) == {2}


@pytest.mark.parametrize(("few", "named"), [(1, {0}), (2, {0, 1}), (3, set())])
def test_of_two_sides_the_much_smaller_one_is_named(few: int, named: set[int]) -> None:
    """Seven ranks: each side is inside a call that the other has not made."""
    job = Job()
    xs = job.world(7)
    ys = [c.proc.comm("00000000000000bb", r, 7) for r, c in enumerate(xs)]
    for t, comms in ((1.0, xs), (2.0, ys)):
        for c in comms:
            c.proc.call(c, "ncclAllReduce", t)
    for r, (x, y) in enumerate(zip(xs, ys, strict=True)):
        c = x if r < few else y
        c.proc.enter(c, "ncclAllReduce", 3.0)
    cover(job.procs, 400)
    assert blamed(analyze_job(job)) == named


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_of_two_that_stand_against_one_in_several_calls_the_one_is_named(calls: int) -> None:
    """Rank 0 left out a call of ranks 0 to 2, and went on to others, for which these lack."""
    job = Job()
    xs = job.world(4)
    ys = [c.proc.comm("b" * 16, r, 3) for r, c in enumerate(xs[:3])]
    zs = [[c.proc.comm(h * 16, r, 4) for r, c in enumerate(xs)] for h in "cde"[:calls]]
    for comms in (xs, ys, *zs):
        steps(comms, 3)
    for c in ys[1:]:
        c.proc.call(c, "ncclAllReduce", 2.0)
    for i, comms in enumerate(zs):
        for c in (comms[0], comms[3]):
            c.proc.call(c, "ncclAllReduce", 2.0 + 0.1 * i)
    cover(job.procs, 400)
    assert blamed(analyze_job(job)) == {0}


@pytest.mark.parametrize(("peers", "named"), [((1, 2), {0}), ((1,), set())])
def test_who_stands_in_sends_to_several_of_those_who_made_a_call_left_it_out(
    peers: tuple[int, ...], named: set[int]
) -> None:
    """Ranks 1 and 2 are inside their first call with rank 0, which is in a group, as rank 3 is."""
    job = Job()
    xs = job.world(4)
    ys = [c.proc.comm("b" * 16, r, 3) for r, c in enumerate(xs[:3])]
    for c in ys[1:]:
        c.proc.enter(c, "ncclAllReduce", 2.0)
    for r in (0, 3):
        ops: list[tuple[Comm, str, dict[str, Any]]] = [
            (xs[r], RECV, {"peer": p, "count": BIG}) for p in peers
        ]
        ops.append((xs[r], RECV if r else SEND, {"peer": 3 - r, "count": BIG}))
        xs[r].proc.group(ops, 2.0, state="inside")
    cover(job.procs, 400)
    assert blamed(analyze_job(job)) == named


def test_a_call_that_all_members_are_inside_of_is_held_by_what_stands_before_it() -> None:
    """Ranks 0 and 1 have full queues behind a call that rank 3 has not made."""
    job = Job()
    world = job.world(4)
    pair = [world[r].proc.comm("00000000000000bb", r, 2) for r in (0, 1)]
    steps(pair, 2, stream=7)
    t = steps(world, 3, 2.0, stream=7)
    for c in world[:3]:
        c.proc.call(c, "ncclAllReduce", t, stream=7)
    t = steps(pair, 8, t + 1, stream=7)
    for c in pair:
        c.proc.enter(c, "ncclAllReduce", t, stream=7)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert blamed(found) == {3}
    assert [kind for kind, role in kinds(found) if role == "root_cause"] == [
        "collective_missing_enter"
    ]


def test_calls_that_hosts_are_inside_of_stand_in_the_streams_that_they_name() -> None:
    """First calls of two threads, in any order: on two streams they do not exclude each other."""
    job = Job()
    world = job.world(4)
    more = [c.proc.comm("00000000000000bb", r, 4) for r, c in enumerate(world)]
    for r in range(3):
        calls = [(world[r], 5, 77), (more[r], 6, 78)]
        for i, (c, stream, thread) in enumerate(calls if r else calls[::-1]):
            c.proc.enter(c, "ncclAllReduce", 2.0 + i, stream=stream, thread=thread)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert blamed(found) == {3}
    assert "cross_comm_order_inversion" not in {f.hang_type for f in found}
