"""The newest collectives of an endpoint, kept when their slots are closed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nccluprobe.match import model as m

#: Columns.
ORD, T, SIG, GROUP, IDX, RC, STREAM = range(7)
#: Result of a call that is still inside.
RC_INSIDE = -(1 << 40)
_UNKNOWN = np.full(64, -1, np.int64)
#: So many small batches are kept as they came.
_PARTS = 32


class Tail:
    """The newest collectives of an endpoint, as they were called: also those that failed."""

    KEPT = 64

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        #: Columns of batches as they came, or one table of all.
        self._parts: list[tuple[NDArray[Any], ...] | NDArray[np.int64]] = []

    def add(self, b: m.Batch) -> None:
        """Take the newest rows of a batch."""
        at = slice(-self.KEPT, None)
        stream = _UNKNOWN[: len(b)] if b.stream is None else b.stream[at].copy()
        columns = (b.ord, b.t_enter, b.sig, b.group, b.idx, b.rc)
        part = (*[c[at].copy() for c in columns], stream)
        if len(b) >= self.KEPT:
            self._parts = [part]
            return
        self._parts.append(part)
        if len(self._parts) > _PARTS:
            self.rows()

    def add_inside(self, e: m.Enter) -> None:
        """Take a call that is still inside: its stream is taken to be that of the one before."""
        if e.ord is None or e.sig is None:
            return
        rows = self.rows()
        before = int(rows[-1, STREAM]) if len(rows) else -1
        idx = -1 if e.idx is None else e.idx
        self._parts.append(np.array([(e.ord, e.t, e.sig, e.group, idx, RC_INSIDE, before)]))
        if len(self._parts) > _PARTS:
            self.rows()

    def rows(self) -> NDArray[np.int64]:
        """All that is held, in order of arrival."""
        if len(self._parts) == 1 and isinstance(self._parts[0], np.ndarray):
            return self._parts[0]
        tables = [np.empty((0, 7), np.int64)]
        tables += [
            p if isinstance(p, np.ndarray) else np.column_stack(p).astype(np.int64)
            for p in self._parts
        ]
        joined: NDArray[np.int64] = np.concatenate(tables)[-self.KEPT :].copy()
        self._parts = [joined]
        return joined

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
