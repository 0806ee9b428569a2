"""In a circle of waits: the one rank that is at odds with several others.

One fault is likelier than several.  Where all others stand in one call and a single rank
stands elsewhere, in calls that two or more of them lack, it has left that call out; where
a single rank stands in a call that all have made, and two or more wait elsewhere for it
and for nobody besides, it has come there a call too early.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nccluprobe.match import tail
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.process import Actor
from nccluprobe.match.waits import Wait, seen_in


def sits(w: Wait) -> set[Actor]:
    """Who sits in a wait: of a call that all have made, whom nothing before it holds up."""
    if w.device:
        return {e.actor for e in w.entered if e.actor in (w.heads or ())}
    return {e.actor for e in w.entered} - {e.actor for e in w.absent}


def at_odds(cycle: Sequence[Wait], waits: Sequence[Wait]) -> tuple[Actor, list[Wait]] | None:
    """The rank that is at odds with several, and the calls that it alone has made.

    ``cycle``: the circle; ``waits``: all waits.  The list is empty for a rank that others
    lack.  None: there is no such rank.
    """
    open_ = [w for w in waits if w.seq is not None and w.absent and not _is_full(w)]
    for w in cycle:
        if w.seq is None or w.device or not _is_full(w):
            continue
        here, away = sits(w), {e.actor for e in w.absent}
        if len(away) == 1 and len(here) > 2:
            ahead = [x for x in open_ if {e.actor for e in x.entered} == away and not x.weak]
            lacked = {e.actor for x in ahead for e in x.absent}
            if len(lacked) > 1 and lacked <= here:
                return next(iter(away)), ahead
        if len(here) == 1 and len(away) > 2 and _is_lacked_alone(here, waits):
            return next(iter(here)), []
    return None


def _is_lacked_alone(one: set[Actor], waits: Sequence[Wait]) -> bool:
    """Whether two or more, each in another call, lack this rank, and nobody lacks another."""
    lacking = [w for w in waits if w.absent and not w.device and not _is_full(w)]
    if any({e.actor for e in w.absent} != one or w.weak or w.doubtful for w in lacking):
        return False
    return len({e.actor for w in lacking for e in w.entered}) > 1 and len(lacking) > 1


def _is_full(w: Wait) -> bool:
    """Whether all have made it: who is absent is held up before it."""
    return bool(w.absent) and {e.actor for e in w.absent} <= {e.actor for e in w.entered}


def left_out(waits: Sequence[Wait], actors: frozenset[Actor]) -> tuple[Actor, ...]:
    """Who left out the one collective of a cycle, as no one send or receive explains it.

    Of those that have made it two or more are lacked in sends and receives: one of these
    alone would have kept nobody else from going on.
    """
    calls = [w for w in waits if w.seq is not None and not w.device]
    if len(calls) != 1:
        return ()
    few, many = ({e.actor for e in x} for x in (calls[0].absent, seen_in(calls[0])))
    lacked = {e.actor for w in waits if w.p2p for e in w.absent}
    alone = is_smaller(few, many) and few <= actors and len(many & lacked) > 1
    return tuple(sorted(few, key=repr)) if alone else ()


def may_have_left_out(odd: Wait, cycle: Sequence[Wait]) -> bool:
    """Whether who is absent from a collective may have left it out, and made a circle by that.

    Not where it stands with others in an earlier call: what it left out after that one holds
    nobody there.  And who leaves out one of the calls in a group makes the others.
    """
    away = {e.actor for e in odd.absent}
    others = {e.actor for e in odd.entered} - away
    for w in cycle:
        heads = w.heads or set()
        before = w.device and w.seq is not None and w.comm is odd.comm and w.at < odd.at
        if before and away <= heads and others & heads:
            return False
    return not all(_goes_on_in_group(e, odd.at[0]) for e in seen_in(odd))


def _goes_on_in_group(e: Endpoint, slot: int) -> bool:
    """Whether an endpoint made the call after one in the same group."""
    rows = e.tail.rows()
    slots = rows[:, tail.ORD] + (e.entered - e.next_ord)
    first, then = (rows[slots == n][-1:, tail.GROUP] for n in (slot, slot + 1))
    return bool(len(first) and len(then) and first[0] and first[0] == then[0])


def is_smaller(few: Collection[Actor], many: Collection[Actor]) -> bool:
    """Whether a side is so much smaller that it is the one that differs."""
    return len(few) < len(many) and (len(few) == 1 or 2 * len(few) <= len(many))
