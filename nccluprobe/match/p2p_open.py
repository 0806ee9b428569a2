"""Open sends and receives of one direction and peer, oldest first."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int64]
#: Columns of a row.
ORD, SIG, T, IDX, GROUP, THREAD, PEER, SEND, STREAM = range(9)
WIDTH = 9

#: More open operations than this in one direction are not held.
_MAX_OPEN = 1 << 20
#: (is a send, peer)
Lane = tuple[bool, int]


class Op(NamedTuple):
    """One open send or receive; times in unix ns."""

    ord: int
    sig: int
    t: int
    idx: int
    group: int
    thread: int
    peer: int
    send: int
    stream: int = 0


class Queue:
    """Open operations of one direction and peer, oldest first."""

    __slots__ = ("complete", "first", "lost", "n", "odd", "parts")

    def __init__(self) -> None:
        self.parts: deque[Table] = deque()
        self.n = 0
        #: Position of the oldest that is held.
        self.first = 0
        #: Operations with an ``ord`` below this are known to be complete.
        self.complete = 0
        #: Some cannot be placed any more: not judged.
        self.odd = False
        #: Lost operations that are among them, or were.
        self.lost = 0

    def __len__(self) -> int:
        return self.n

    @property
    def end(self) -> int:
        """Position of the next operation."""
        return self.first + self.n

    def push(self, rows: Table) -> None:
        """Append rows."""
        self.parts.append(rows)
        self.n += len(rows)
        if self.n > _MAX_OPEN:
            self.drop(self.n)
            self.odd = True

    def rows(self) -> Table:
        """All that is held, as one table."""
        if not self.parts:
            return np.empty((0, WIDTH), np.int64)
        if len(self.parts) > 1:
            joined = np.concatenate(self.parts)
            self.parts.clear()
            self.parts.append(joined)
        return self.parts[0]

    def head(self, n: int) -> Table:
        """The ``n`` oldest."""
        part = self.parts[0]
        return part[:n] if len(part) >= n else self.rows()[:n]

    def at(self, position: int) -> Op | None:
        """One operation that is held."""
        i = position - self.first
        return Op(*self.rows()[i].tolist()) if 0 <= i < self.n else None

    def drop(self, n: int) -> None:
        """Forget the ``n`` oldest."""
        self.first += n
        self.n -= n
        while n:
            part = self.parts[0]
            if len(part) > n:
                self.parts[0] = part[n:]
                return
            n -= len(part)
            self.parts.popleft()

    def give_up(self) -> None:
        """Forget all that is held: it cannot be placed."""
        self.drop(self.n)

    def settle(self) -> None:
        """Do not keep whole batches alive for the few rows that stay open."""
        if self.parts and (len(self.parts) > 1 or self.parts[0].base is not None):
            rows = self.rows()
            if rows.base is not None:
                self.parts[0] = rows.copy()

    def take_out(self, at: int, n: int = 1) -> None:
        """Remove rows at an index: they did not run, or pair with nothing."""
        self.parts = deque([np.delete(self.rows(), slice(at, at + n), axis=0)])
        self.n = len(self.parts[0])

    def find(self, order: int) -> int | None:
        """Index of the row with this ``ord``."""
        rows = self.rows()
        at = int(np.searchsorted(rows[:, ORD], order))
        return at if at < self.n and int(rows[at, ORD]) == order else None
