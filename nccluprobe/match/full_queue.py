"""Whether a host that does not come back from a call may stand before a full queue.

A stream takes about a thousand operations, a group as one; the next one is held until
one has ended.  Of ranks behind one operation that hangs, those are held that have queued
most: so it may be the device of all of them where the one that is held has made more than
any other has returned from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nccluprobe.match import model as m
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.p2p_pair import At
from nccluprobe.match.p2p_queue import GROUP, STREAM, Side, T
from nccluprobe.match.process import Process
from nccluprobe.match.tail import GROUP as CALL_GROUP
from nccluprobe.match.tail import STREAM as CALL_STREAM
from nccluprobe.match.tail import T as CALL_T

#: Fewer operations fill no queue.
_LEAST = 16


@dataclass
class Queued:
    """Newest operations of processes, by stream."""

    of_source: Mapping[int, list[Endpoint]]
    sides: Mapping[At, Side]
    _known: dict[tuple[int, bool], dict[int, m.Int64]] = field(default_factory=dict)

    def may_be_full(self, e: Endpoint, others: Iterable[Endpoint]) -> bool:
        """Whether one has queued more than any of the others since some time.

        ``e`` is inside its newest call; ``others`` are not held.
        """
        rows = e.tail.rows()
        if not len(rows):
            return False
        mine = self._streams(e).get(max(int(rows[-1, CALL_STREAM]), 0))
        if mine is None or len(mine) < _LEAST:
            return False
        since = mine[: len(mine) - _LEAST + 1]
        # What it lost may have been in this stream as well.
        count = len(mine) - np.arange(len(since)) + _lost(e.process, since)
        most = np.zeros(len(since), np.int64)
        for x in others:
            for times in self._streams(x, returned=True).values():
                most = np.maximum(most, len(times) - np.searchsorted(times, since))
        return bool((count > most).any())

    def _streams(self, e: Endpoint, returned: bool = False) -> dict[int, m.Int64]:
        """Stream -> entries of a process's operations in it, oldest first.

        ``returned``: of those only that it is not inside of.
        """
        source = e.process.source
        if (source, returned) not in self._known:
            parts: list[m.Int64] = []
            for x in self.of_source.get(source, ()):
                parts.append(x.tail.rows()[:, (CALL_STREAM, CALL_T, CALL_GROUP)])
                side = self.sides.get((source, x.info.id))
                if side is not None:
                    parts.append(side.recent()[:, (STREAM, T, GROUP)])
            rows = np.concatenate(parts) if parts else np.empty((0, 3), np.int64)
            rows = _whole(rows[np.argsort(rows[:, 1], kind="stable")])
            if returned:
                rows = rows[~_inside(e.process, rows)]
            streams = np.maximum(rows[:, 0], 0)
            self._known[source, returned] = {
                s: rows[streams == s, 1] for s in np.unique(streams).tolist()
            }
        return self._known[source, returned]


def _lost(p: Process, since: m.Int64) -> m.Int64:
    """How many calls of a process after each of some moments, oldest first, were lost at most."""
    found = np.full(len(since), p.without_place(), np.int64)
    for holes in p.losses.holes.values() if p.lost else ():
        for first, last, t in holes.gaps:
            found[: np.searchsorted(since, t)] += last - first + 1
    return found


def _whole(rows: m.Int64) -> m.Int64:
    """Of the operations of a group in one stream the first: columns are stream, entry, group."""
    grouped = np.flatnonzero(rows[:, 2] != 0)
    _, first = np.unique(rows[grouped][:, (0, 2)], axis=0, return_index=True)
    kept = rows[:, 2] == 0
    kept[grouped[first]] = True
    found: m.Int64 = rows[kept]
    return found


def _inside(p: Process, rows: m.Int64) -> NDArray[np.bool_]:
    """Which of the operations are those that a process is inside of."""
    calls = p.inside.values()
    single = [c.t for c in calls if not c.group]
    groups = [c.group for c in calls if c.group]
    return np.isin(rows[:, 1], single) | np.isin(rows[:, 2], groups)
