"""What the library's own counters say of a stream of calls.

NCCL counts five functions per communicator (``seqNumber[]``).  The value at the
entry of a call is the number of earlier calls of that function, wherever the
tracer came in.  It does not count every call: captured, symmetric and some
other calls leave it unmoved, it stands still while a group is open, and it may
be read late.  So a value is believed only when the counter then moved as the
calls say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match.signature import UNCOUNTED, UNSEEN
from nccluprobe.nccl.enums import SEQ_NAMES

FUNCTIONS = len(SEQ_NAMES)
_KEY = np.int64(1) << np.int64(48)  # function and number in one integer


@dataclass(frozen=True)
class Stream:
    """The calls of one rank that are held, in order."""

    #: (api, count, datatype, root) as a number; 0: lost, it may be anything.
    shape: m.Int32
    #: Which counter a call moves; UNCOUNTED, UNSEEN.
    function: m.Int32
    #: The counter at entry, NO_SEQ where it is not known.
    seq: m.Int64
    t: m.Int64
    #: The counters before the first call held, if somebody told.
    before: tuple[int, ...] | None = None
    #: Whether ``before`` is known not to miss calls of a group that was open.
    before_sure: bool = False
    #: So many calls before the first one held are known to be counted ones.
    clean_before: int = 0

    def __len__(self) -> int:
        return len(self.shape)

    @property
    def all_counted(self) -> bool:
        """Whether every call that is held moves a counter, as far as can be told."""
        return not bool((self.function == UNCOUNTED).any())


@dataclass(frozen=True)
class Anchors:
    """Calls whose number within their function is known."""

    rows: m.Int64
    keys: m.Int64

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def functions(self) -> m.Int64:
        """Function of each."""
        found: m.Int64 = self.keys // _KEY
        return found


def _keyed(rows: list[m.Int64], numbers: list[m.Int64], functions: list[int]) -> Anchors:
    if not rows:
        return Anchors(np.empty(0, np.int64), np.empty(0, np.int64))
    keys = [n + f * _KEY for n, f in zip(numbers, functions, strict=True)]
    return Anchors(np.concatenate(rows), np.concatenate(keys))


def seen_anchors(s: Stream, last: bool = False) -> Anchors:
    """Calls whose counter was read, and moved by what the calls after it say.

    ``last``: and the last of each function, when it can be right.
    """
    lost = np.cumsum(s.function == UNSEEN)
    rows: list[m.Int64] = []
    numbers: list[m.Int64] = []
    functions: list[int] = []
    for f in range(FUNCTIONS):
        mine = np.flatnonzero(s.function == f)
        order = np.flatnonzero(s.seq[mine] != m.NO_SEQ)
        if len(order) < 2:
            continue
        at = mine[order]
        n = s.seq[at]
        moved, calls = np.diff(n), np.diff(order)
        holes = lost[at[1:]] - lost[at[:-1]]
        # Over a hole: only if all that was lost moved this counter, too.
        good = moved == calls + holes
        possible = bool(calls[-1] <= moved[-1] <= calls[-1] + holes[-1])
        believed = np.append(good, last and possible)
        rows.append(at[believed].astype(np.int64))
        numbers.append(n[believed])
        functions.append(f)
    return _keyed(rows, numbers, functions)


def counted_anchors(s: Stream) -> Anchors:
    """All counted calls, numbered from what was told of the first one.

    Up to the first hole: what was lost is not known.
    """
    if s.before is None:
        return _keyed([], [], [])
    holes = np.flatnonzero(s.function == UNSEEN)
    n = int(holes[0]) if len(holes) else len(s)
    rows: list[m.Int64] = []
    numbers: list[m.Int64] = []
    functions: list[int] = []
    for f in range(FUNCTIONS):
        mine = np.flatnonzero(s.function[:n] == f).astype(np.int64)
        rows.append(mine)
        numbers.append(np.arange(len(mine), dtype=np.int64) + s.before[f])
        functions.append(f)
    return _keyed(rows, numbers, functions)


def origin(s: Stream) -> tuple[int, ...] | None:
    """The five counters before the first call held, by all that is known."""
    seen = seen_anchors(s)
    found = list(s.before) if s.before is not None else [-1] * FUNCTIONS
    for f in range(FUNCTIONS):
        at = seen.rows[seen.functions == f]
        if len(at):
            earlier = np.searchsorted(np.flatnonzero(s.function == f), at)
            values = s.seq[at] - earlier
            found[f] = max(0, int(values[0]))
    return None if -1 in found else tuple(found)


def votes(ref: Anchors, mine: Anchors) -> tuple[m.Int64, m.Int64]:
    """(shift, function) by every number that both sides have."""
    _, a, b = np.intersect1d(ref.keys, mine.keys, return_indices=True)
    return ref.rows[a] - mine.rows[b], ref.functions[a]


def surplus(ref: Stream, mine: Stream) -> list[tuple[bool, int]]:
    """Lost calls that did not run: they have an ordinal but no place among the others.

    Seen where the shift jumps over a hole.  (whether in ``mine``, row), the last first.
    """
    a, b = seen_anchors(ref, last=True), seen_anchors(mine, last=True)
    _, i, j = np.intersect1d(a.keys, b.keys, return_indices=True)
    order = np.argsort(b.rows[j], kind="stable")
    left, right = a.rows[i][order], b.rows[j][order]
    jumps = np.diff(left - right)
    found: list[tuple[bool, int]] = []
    for at in np.flatnonzero(jumps).tolist():
        own = bool(jumps[at] < 0)  # ``mine`` has rows too many
        s, rows = (mine, right) if own else (ref, left)
        start, end = int(rows[at]), int(rows[at + 1])
        holes = start + np.flatnonzero(s.function[start:end] == UNSEEN)
        n = abs(int(jumps[at]))
        if n <= len(holes):
            found += [(own, int(hole)) for hole in holes[:n]]
    return sorted(found, reverse=True)
