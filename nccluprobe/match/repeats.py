"""Lines that a trace holds twice, or not in the order in which they were written.

Where one thread makes the calls, entries rise from line to line, and so nothing can be
there twice: only where they do not, calls are compared.  Pure, and of one source.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from nccluprobe.match import model as m
from nccluprobe.match.callrows import DATA, Calls
from nccluprobe.trace import scanner as c

#: A line and its number.
Numbered = tuple[dict[str, Any], int]
Mask = NDArray[np.bool_]

#: A call that comes again is known by so many calls before it, and all of its chunk.
_KEPT = 64
_KEPT_COVERAGE = 64
_NOTHING = np.empty((c.COLUMNS, 0), np.int64)
#: What tells calls apart; the last two are only there for those with a number.
_FIELDS = (c.T, c.THREAD, c.CODE, c.DUR, c.RC, c.GROUP, c.COMM, c.IDX)


class Repeats:
    """What is remembered of one source, to know what comes again."""

    def __init__(self) -> None:
        self._entered = -1  # newest entry, by the clock of the trace
        self._kept = _NOTHING  # the newest calls
        # Of coverage lines: through and time.
        self._told: dict[tuple[int, int], None] = {}
        self._newest = (-1, -1)

    def calls(self, calls: Calls) -> tuple[Calls, int, int]:
        """The calls without those that came before, and how many: twice, and out of order."""
        table, twice, back = calls.table, 0, 0
        t = table[c.T]
        if t[0] <= self._entered or not bool((t[1:] > t[:-1]).all()):
            again = self._again(table)
            if again is not None:
                twice = int(again.sum())
                calls = _without(calls, again)
                table = calls.table
            back = self._back(table)
        if len(calls):
            t = table[c.T]
            self._entered = max(self._entered, int(t.max()))
            kept = table[:, -_KEPT:]
            if kept.shape[1] < _KEPT:
                kept = np.concatenate((self._kept, kept), axis=1)[:, -_KEPT:]
            self._kept = kept.copy()
        return calls, twice, back

    def _again(self, table: m.Int64) -> Mask | None:
        """Which calls are there a second time; None: none is."""
        t = table[c.T]
        in_order = np.sort(t)
        late = t[t <= self._entered]
        inner = bool((in_order[1:] == in_order[:-1]).any())
        if not inner and not set(late.tolist()) & set(self._kept[c.T].tolist()):
            return None
        seen = set(_names(self._kept))
        found = np.zeros(len(t), np.bool_)
        for i, call in enumerate(_names(table)):
            found[i] = call in seen
            seen.add(call)
        return found if found.any() else None

    def _back(self, table: m.Int64) -> int:
        """Calls that had ended before the call began that is a line before, of one thread."""
        table = np.concatenate((self._kept[:, -1:], table), axis=1)
        t, thread, dur = table[c.T], table[c.THREAD], table[c.DUR, 1:]
        before = (thread[1:] == thread[:-1]) & (dur >= 0) & (t[1:] + dur < t[:-1])
        return int(before.sum())

    def coverage(self, rows: list[Numbered]) -> tuple[list[Numbered], int, int]:
        """Rare lines with those of coverage in order; how many: twice, and out of order.

        One that is older than what was read before says nothing any more, and is left out.
        A field that is damaged in one of them takes the word from none of the others.
        """
        at = [i for i, (row, _) in enumerate(rows) if row["kind"] == "coverage"]
        told: list[tuple[Any, Any]] = [(rows[i][0].get("through"), rows[i][0].get("t")) for i in at]
        if any(type(x) is not int for both in told for x in both):
            return rows, 0, 0
        twice = back = 0
        before = newest = self._newest
        fresh: list[tuple[Any, int]] = []
        for i, both in zip(at, told, strict=True):
            if both in self._told:
                twice += 1
                continue
            self._told[both] = None
            if _is_older(both, newest):
                back += 1
            else:
                newest = both
            if not _is_older(both, before):
                fresh.append((both, i))
        while len(self._told) > _KEPT_COVERAGE:
            del self._told[next(iter(self._told))]
        if twice or back:
            fresh.sort()
            covers = set(at)
            others = [row for i, row in enumerate(rows) if i not in covers]
            rows = others + [rows[i] for _, i in fresh]
        if fresh:
            self._newest = fresh[-1][0]
        return rows, twice, back


def _is_older(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] <= other[0] and one[1] <= other[1]


def _names(table: m.Int64) -> Iterator[tuple[int, ...]]:
    for call in table[_FIELDS, :].T.tolist():
        yield tuple(call if call[2] >= DATA else call[:-2])


def _without(calls: Calls, again: Mask) -> Calls:
    keep = ~again
    return Calls(
        calls.table[:, keep],
        None if calls.site is None else calls.site[keep],
        list(dict.fromkeys(calls.rare)),
        list({orjson.dumps(row): row for row in calls.rows}.values()),
    )
