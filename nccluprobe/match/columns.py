"""A queue of rows as contiguous numpy columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nccluprobe.match.model import NO_SEQ, Int32, Int64

_FIRST = 64


class Row(NamedTuple):
    """One call, before it takes effect."""

    sig: int
    t: int
    idx: int
    ord: int
    rc: int
    group: int
    seq: int = NO_SEQ
    site: int = 0


class Columns:
    """Entered calls of one endpoint that are not closed yet, oldest first.

    Appending and dropping from the front cost O(1) per row, amortised; memory
    follows what is held.
    """

    __slots__ = ("_head", "_idx", "_ord", "_seq", "_sig", "_site", "_t", "_tail")

    def __init__(self) -> None:
        self._head = 0
        self._tail = 0
        self._site: Int64 | None = None
        self._allocate(_FIRST)

    def _allocate(self, capacity: int) -> None:
        old = None if self._tail == 0 else (self.sig, self.t, self.idx, self.ord, self.seq)
        n = self._tail - self._head
        if self._site is not None:
            held = self._site[self._head : self._tail]
            self._site = np.zeros(capacity, np.int64)
            self._site[:n] = held
        self._sig: Int32 = np.empty(capacity, np.int32)
        self._t: Int64 = np.empty(capacity, np.int64)
        self._idx: Int64 = np.empty(capacity, np.int64)
        self._ord: Int64 = np.empty(capacity, np.int64)
        self._seq: Int64 = np.empty(capacity, np.int64)
        if old is not None:
            self._sig[:n], self._t[:n], self._idx[:n], self._ord[:n], self._seq[:n] = old
        self._head, self._tail = 0, n

    def __len__(self) -> int:
        return self._tail - self._head

    @property
    def sig(self) -> Int32:
        """Signature ids."""
        return self._sig[self._head : self._tail]

    @property
    def t(self) -> Int64:
        """Entry times."""
        return self._t[self._head : self._tail]

    @property
    def idx(self) -> Int64:
        """call_idx."""
        return self._idx[self._head : self._tail]

    @property
    def ord(self) -> Int64:
        """Ordinals among the communicator's collectives."""
        return self._ord[self._head : self._tail]

    @property
    def seq(self) -> Int64:
        """The library's counter at entry, NO_SEQ where it is not known."""
        return self._seq[self._head : self._tail]

    @property
    def site(self) -> Int64 | None:
        """Ids of call sites, 0 where not known; None: of no row."""
        return None if self._site is None else self._site[self._head : self._tail]

    def extend(
        self,
        sig: Int32,
        t: Int64,
        idx: Int64,
        order: Int64,
        seq: Int64 | None = None,
        site: Int64 | None = None,
    ) -> None:
        """Append rows."""
        n = len(sig)
        if self._tail + n > len(self._sig):
            held = len(self)
            capacity = len(self._sig)
            while held + n > capacity // 2:
                capacity *= 2
            self._allocate(capacity)
        end = self._tail + n
        self._sig[self._tail : end] = sig
        self._t[self._tail : end] = t
        self._idx[self._tail : end] = idx
        self._ord[self._tail : end] = order
        self._seq[self._tail : end] = NO_SEQ if seq is None else seq
        if site is not None and self._site is None:
            self._site = np.zeros(len(self._sig), np.int64)
        if self._site is not None:
            self._site[self._tail : end] = 0 if site is None else site
        self._tail = end

    def insert(self, at: int, sig: int, t: int, n: int) -> None:
        """Insert ``n`` rows that stand for calls that were not made or not seen."""
        tail = (
            self.sig[at:].copy(),
            self.t[at:].copy(),
            self.idx[at:].copy(),
            self.ord[at:].copy(),
            self.seq[at:].copy(),
            None if self.site is None else self.site[at:].copy(),
        )
        self._tail = self._head + at
        minus = np.full(n, -1, np.int64)
        self.extend(np.full(n, sig, np.int32), np.full(n, t, np.int64), minus, minus)
        self.extend(*tail)

    def delete(self, at: int, n: int = 1) -> None:
        """Remove ``n`` rows at a position."""
        for column in (self.sig, self.t, self.idx, self.ord, self.seq, self.site):
            if column is None:
                continue
            column[at:-n] = column[at + n :].copy()
        self._tail -= n

    def drop(self, n: int) -> None:
        """Forget the ``n`` oldest rows."""
        self._head += n
        capacity = len(self._sig)
        if self._head == self._tail:
            self._head = self._tail = 0
            if capacity > 16 * _FIRST:
                self._allocate(_FIRST)
        elif self._head > capacity // 2:
            held = len(self)
            self._allocate(max(_FIRST, 2 * held) if held * 8 < capacity else capacity)
