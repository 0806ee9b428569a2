"""Which of two peers has left its own habits: a program's operations repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from nccluprobe.match import model as m
from nccluprobe.match.p2p_queue import IDX, ORD, PEER, SEND, SIG, Side

#: So many periods make a habit.
PERIODS = 3


def break_of(side: Side, size: Callable[[m.Int64], m.Int64] | None = None) -> int | None:
    """call_idx of the operation with which an endpoint left its habit.

    ``size``: None: whatever the sizes are.  -1: it kept to it; None: no habit is known.
    """
    rows = side.recent()
    if not _shows_complete(side, rows):
        return None
    if len(rows) < (2 * PERIODS if size is not None else PERIODS + 1):
        return None
    lanes = rows[:, PEER] * 2 + rows[:, SEND]
    kinds = np.stack([lanes, lanes if size is None else size(rows[:, SIG])], axis=1)
    at = first_break(kinds)
    return at if at is None or at < 0 else int(rows[at, IDX])


def _shows_complete(side: Side, rows: NDArray[np.int64]) -> bool:
    """Whether what is complete is seen, too: what is only open is no row of calls."""
    if side.endpoint.completed is None:
        return True  # all calls are
    ends = {lane: q.complete for lane, q in side.queues.items()}
    told = rows[:, (SEND, PEER, ORD)].tolist()
    return any(order < ends.get((bool(send), peer), 0) for send, peer, order in told)


def first_break(kinds: NDArray[np.int64]) -> int | None:
    """Index of the first row that ends the longest periodic run from the start.

    -1: all rows repeat; None: nothing does.
    """
    best: int | None = None
    for period in range(1, len(kinds) // PERIODS + 1):
        same = (kinds[period:] == kinds[:-period]).all(axis=1)
        if same.all():
            return -1
        end = period + int(np.argmin(same))
        if end >= PERIODS * period and (best is None or end > best):
            best = end
    return best


def odd_one(
    a: Side | None,
    b: Side | None,
    size: Callable[[m.Int64], m.Int64],
    at: tuple[int, int] | None = None,
) -> Side | None:
    """The one of two that left its habit while the other kept to its own.

    ``at``: call_idx of the operations in question; then it must have left it there.
    """
    if a is None or b is None:
        return None
    breaks = (break_of(a, size), break_of(b, size))
    if at is not None:
        left = [x is not None and x == y for x, y in zip(breaks, at, strict=True)]
        kept = [x is not None and x != y for x, y in zip(breaks, at, strict=True)]
    else:
        left = [x is not None and x >= 0 for x in breaks]
        kept = [x == -1 for x in breaks]
    if left[0] and kept[1]:
        return a
    if left[1] and kept[0]:
        return b
    return None


def usual(values: Iterable[int]) -> int | None:
    """The value that more than half of at least two others have."""
    count = Counter(values)
    total = sum(count.values())
    if total < 2:
        return None
    value, times = count.most_common(1)[0]
    return value if 2 * times > total else None
