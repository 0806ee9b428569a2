"""Ranks whose calls stand at another place than those of all others."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import analyze_job, blamed, cover, steps
from support.messages import AR, BIG, RECV, SEND
from support.tracegen import Comm, Job

from nccluprobe.match.finding import Finding


def exchange(c: Comm, peer: int, t: float, **more: Any) -> None:
    """A send to a peer and a receive from it, in one group."""
    calls = [(c, api, {"peer": peer, "count": BIG, "stream": 0}) for api in (SEND, RECV)]
    c.proc.group(calls, t, **more)


def causes(found: list[Finding]) -> set[str]:
    return {f.hang_type for f in found if f.role == "root_cause"}


@pytest.mark.parametrize("inside", [True, False])
def test_who_stands_in_sends_where_all_others_made_a_call_has_left_it_out(inside: bool) -> None:
    job = Job()
    world = job.world(5)
    more = [c.proc.comm("00000000000000bb", r, 5) for r, c in enumerate(world)]
    for c in (*world, *more):
        c.proc.call(c, AR, 1.0 + (c in more), stream=0)
    for r in (0, 2, 3, 4):
        more[r].proc.call(more[r], AR, 3.0, stream=0)
    exchange(world[1], 0, 3.0, **({"state": "inside"} if inside else {}))
    cover(job.procs, 400)
    found = analyze_job(job)
    assert (blamed(found), causes(found)) == ({1}, {"collective_missing_enter"})


@pytest.mark.parametrize("what", ["first", "other", "few", "single"])
def test_else_its_peer_may_have_left_out_its_halves(what: str) -> None:
    """``first``: two others exchange before that call.  ``other``: they came to it from another
    call than the one that stands in the sends did.  ``few``: too few others made it.
    ``single``: of sends and receives there is one that is open."""
    job = Job()
    n = 3 if what == "few" else 5
    world = job.world(n)
    more = [c.proc.comm("00000000000000bb", r, n) for r, c in enumerate(world)]
    for c in (*world, *more):
        c.proc.call(c, AR, 1.0 + (c in more), stream=0)
    if what == "first":
        exchange(world[2], 3, 2.5)
        exchange(world[3], 2, 2.5)
    if what == "other":
        alone = world[1].proc.comm("00000000000000cc", 0, 2)
        alone.proc.call(alone, AR, 2.5, stream=9)
    for r in set(range(n)) - {1}:
        more[r].proc.call(more[r], AR, 3.0, stream=0)
    if what == "single":
        world[1].proc.enter(world[1], RECV, 3.0, peer=0, count=BIG, stream=0)
    else:
        exchange(world[1], 0, 3.0, state="inside")
    cover(job.procs, 400)
    assert "collective_missing_enter" not in causes(analyze_job(job))


@pytest.mark.parametrize(("alike", "named"), [(True, {0}), (False, set())])
def test_who_called_between_two_calls_what_no_other_did_is_named(
    alike: bool, named: set[int]
) -> None:
    """Rank 0 left out a call of all; pairs stand for each other where one split made them."""
    job = Job()
    world = job.world(6)
    made = {"learnt": "split", "parent": 0, "child": 1} if alike else {}
    pairs = [c.proc.comm(f"00000000000000c{r // 2}", r % 2, 2, **made) for r, c in enumerate(world)]
    for t, comms in ((1.0, pairs), (2.0, world), (3.0, world)):
        for c in comms:
            c.proc.call(c, AR, t, stream=0)
    for r, c in enumerate(world):
        for t in (4.0, 4.1) if r == 0 else ():
            pairs[r].proc.call(pairs[r], AR, t, stream=0)
        c.proc.call(c, AR, 5.0, stream=0)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert (blamed(found), causes(found)) == (named, {"cross_comm_order_inversion"})


@pytest.mark.parametrize(("alike", "named"), [(True, {1}), (False, set())])
def test_who_stands_in_the_next_call_where_all_others_made_one_has_left_it_out(
    alike: bool, named: set[int]
) -> None:
    """Rank 1 waits for rank 4 in a call of their pair, which comes after one of all."""
    job = Job()
    world = job.world(6)
    made = {"learnt": "split", "parent": 0, "child": 1} if alike else {}
    pairs = [c.proc.comm(f"00000000000000c{r % 3}", r // 3, 2, **made) for r, c in enumerate(world)]
    for t, comms in ((1.0, pairs), (2.0, world), (3.0, [*world[:1], *world[2:]])):
        for c in comms:
            c.proc.call(c, AR, t, stream=0)
    pairs[1].proc.call(pairs[1], AR, 3.5, stream=0)
    cover(job.procs, 400)
    assert blamed(analyze_job(job)) == named


def test_a_full_queue_behind_a_call_that_was_left_out_does_not_hide_it() -> None:
    """Rank 2 lacks a call, and what it has queued since stands behind a receive after that."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5, stream=7)
    for r in (0, 1, 3):
        comms[r].proc.call(comms[r], AR, t, stream=7)
    for r, api, peer in ((1, SEND, 2), (2, RECV, 1)):
        comms[r].proc.call(comms[r], api, t + 0.1, peer=peer, count=BIG, stream=7)
    t = steps(comms, 20, start=t + 0.2, step=0.01, stream=7)
    for c in comms:
        c.proc.enter(c, AR, t, stream=7)
    cover(job.procs, t + 400)
    found = analyze_job(job)
    assert (blamed(found), causes(found)) == ({2}, {"collective_missing_enter"})


def test_who_lacks_a_call_may_stand_before_one_that_another_has_left_out() -> None:
    """Rank 1 left out a call of X: what it calls on Y stands before the like of its peers."""
    job = Job()
    xs = job.world(3)
    ys = [c.proc.comm("00000000000000bb", r, 3) for r, c in enumerate(xs)]
    for t, comms in ((1.0, ys), (2.0, xs), (3.0, xs)):
        for c in comms:
            c.proc.call(c, AR, t, stream=0)
    for r, calls in enumerate(((xs, ys), (ys, xs), (xs,))):
        for i, comms in enumerate(calls):
            comms[r].proc.call(comms[r], AR, 4.0 + i, stream=0)
    for r in (0, 1):
        xs[r].proc.call(xs[r], AR, 6.0, stream=0)
    cover(job.procs, 400)
    assert blamed(analyze_job(job)) == {1}
