"""The fewer ones, where ranks that wait for each other are of two sides."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from nccluprobe.match.alone import is_smaller, may_have_left_out, sits
from nccluprobe.match.process import Actor
from nccluprobe.match.waits import Wait, seen_in


def on_one_communicator(waits: Sequence[Wait]) -> bool:
    """Whether a cycle is one of collectives, splits and the like of one communicator."""
    if any(w.device or w.p2p for w in waits):
        return False
    return len({w.comm.key for w in waits}) == 1


def odd_call(waits: Sequence[Wait]) -> Wait | None:
    """The one collective of a cycle that some have not made, when all else has been made."""
    open_ = [w for w in waits if not w.device]
    return open_[0] if len(open_) == 1 and open_[0].seq is not None else None


def minority(waits: Sequence[Wait], actors: frozenset[Actor]) -> tuple[Actor, ...]:
    """Of two sides of different size, the smaller one; of several ranks, only if half as large.

    Only those count that had to come to both: others had no choice of an order.
    """
    odd = odd_call(waits)
    if odd is not None:
        sides = [{e.actor for e in x} for x in (seen_in(odd), odd.absent)]
        few, many = sorted(sides, key=len)
        if few is sides[1] and not may_have_left_out(odd, waits):
            return ()
        return tuple(sorted(few, key=repr)) if is_smaller(few, many) and few <= actors else ()
    # What only the streams tell is between these, unless there is nothing else.
    pair = [w for w in waits if not w.device] or list(waits)
    if len(pair) != 2:
        # Of several collectives any two may be the ones that came in another order.
        pair = [w for w in pair if w.seq is not None and not w.device]
    found = {
        frozenset(few if is_smaller(few, many) else ())
        for few, many in (_sides(*two) for two in combinations(pair, 2))
        if few and not few & many
    }
    return tuple(sorted(found.pop(), key=repr)) if len(found) == 1 else ()


def _sides(a: Wait, b: Wait) -> list[set[Actor]]:
    """Of those that have to come to both of two waits, who sits in each; the smaller side first."""
    both = set.intersection(*({e.actor for e in (*w.entered, *w.absent)} for w in (a, b)))
    return sorted((sits(w) & both for w in (a, b)), key=len)
