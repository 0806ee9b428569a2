"""The newest collectives of an endpoint, kept when their slots are closed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nccluprobe.match import model as m

#: Columns.
ORD, T, SIG, GROUP, IDX, RC, STREAM = range(7)
#: Result of a call that is still inside.
RC_INSIDE = -(1 << 40)
_WIDTH = 7
#: Rows of room at first, and at most: the newest move to the front when it is used up.
_FEW, _ROOM = 8, 96


class Tail:
    """The newest collectives of an endpoint, as they were called: also those that failed."""

    KEPT = 64

    __slots__ = ("_end", "_table", "discarded", "gaps", "over")

    def __init__(self) -> None:
        #: Ordinals of calls that were taken out of the slots: NCCL did not run them.
        self.discarded: set[int] = set()
        #: ord of a call -> so many slots before it were left out.
        self.gaps: dict[int, int] = {}
        #: Calls with an ``ord`` below this have surely ended on their devices.
        self.over = 0
        self._table: NDArray[np.int64] = np.empty((_FEW, _WIDTH), np.int64)
        self._end = 0

    def _room(self, n: int) -> NDArray[np.int64]:
        """Room for ``n`` rows more, at most KEPT, behind the newest that stay."""
        start, end = self._end, self._end + n
        if end > len(self._table):
            held = self._table[max(0, end - self.KEPT) : start]
            start, end = len(held), len(held) + n
            if end > len(self._table):
                self._table = np.empty((min(_ROOM, max(end, 2 * len(held))), _WIDTH), np.int64)
            self._table[:start] = held
        self._end = end
        return self._table[start:end]

    def add(self, b: m.Batch) -> None:
        """Take the newest rows of a batch."""
        at = slice(-self.KEPT, None)
        room = self._room(min(len(b), self.KEPT))
        room[:, ORD] = b.ord[at]
        room[:, T] = b.t_enter[at]
        room[:, SIG] = b.sig[at]
        room[:, GROUP] = b.group[at]
        room[:, IDX] = b.idx[at]
        room[:, RC] = b.rc[at]
        room[:, STREAM] = -1 if b.stream is None else b.stream[at]

    def add_inside(self, e: m.Enter) -> None:
        """Take a call that is still inside; its stream, if not told, as that of the one before."""
        if e.ord is None or e.sig is None:
            return
        stream = e.stream
        if stream is None:
            stream = int(self._table[self._end - 1, STREAM]) if self._end else -1
        idx = -1 if e.idx is None else e.idx
        self._room(1)[0] = (e.ord, e.t, e.sig, e.group, idx, RC_INSIDE, stream)

    def discard(self, ords: m.Int64) -> None:
        """Calls that have no slot; lost ones have no ordinal."""
        self.discarded |= {o for o in ords.tolist() if o >= 0}
        if len(self.discarded) > self.KEPT:
            self.discarded = set(sorted(self.discarded)[-self.KEPT :])

    def gap(self, order: int, n: int) -> None:
        """Slots before a call in which nothing was called."""
        self.gaps[order] = self.gaps.get(order, 0) + n
        if len(self.gaps) > self.KEPT:
            del self.gaps[min(self.gaps)]

    def rows(self) -> NDArray[np.int64]:
        """All that is held, in order of arrival; good until the next is added."""
        return self._table[max(0, self._end - self.KEPT) : self._end]

    @property
    def ord(self) -> m.Int64:
        """Ordinals."""
        return self.rows()[:, ORD]

    @property
    def t(self) -> m.Int64:
        """Entries, unix ns."""
        return self.rows()[:, T]

    @property
    def stream(self) -> m.Int64:
        """Streams; -1: not known."""
        return self.rows()[:, STREAM]
