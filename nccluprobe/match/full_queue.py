"""Whether a host that does not come back from a call may stand before a full queue.

A stream takes about a thousand operations; the next one is held until one has ended.
Of ranks behind one operation that hangs, those are held that have queued most: so it
may be the device of all of them where the one that is held has made more than any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.p2p_pair import At
from nccluprobe.match.p2p_queue import STREAM, Side, T
from nccluprobe.match.tail import STREAM as CALL_STREAM
from nccluprobe.match.tail import T as CALL_T

#: Fewer operations fill no queue.
_LEAST = 16


@dataclass
class Queued:
    """Newest operations of processes, by stream."""

    of_source: Mapping[int, list[Endpoint]]
    sides: Mapping[At, Side]
    _known: dict[int, dict[int, m.Int64]] = field(default_factory=dict)

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
        count = len(mine) - np.arange(len(since))
        most = np.zeros(len(since), np.int64)
        for x in others:
            for times in self._streams(x).values():
                most = np.maximum(most, len(times) - np.searchsorted(times, since))
        return bool((count > most).any())

    def _streams(self, e: Endpoint) -> dict[int, m.Int64]:
        """Stream -> entries of a process's operations in it, oldest first."""
        source = e.process.source
        if source not in self._known:
            parts: list[m.Int64] = []
            for x in self.of_source.get(source, ()):
                parts.append(x.tail.rows()[:, (CALL_STREAM, CALL_T)])
                side = self.sides.get((source, x.info.id))
                if side is not None:
                    parts.append(side.recent()[:, (STREAM, T)])
            rows = np.concatenate(parts) if parts else np.empty((0, 2), np.int64)
            streams = np.maximum(rows[:, 0], 0)
            self._known[source] = {
                s: np.sort(rows[streams == s, 1]) for s in np.unique(streams).tolist()
            }
        return self._known[source]
