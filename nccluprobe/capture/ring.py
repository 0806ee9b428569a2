"""Readers of the BPF ring buffer.

Records have one size, so whole stretches of the ring are copied at once and
only the 8-byte headers between them are dropped.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from nccluprobe.record import SIZE

_HEADER = 8
_STRIDE = (_HEADER + SIZE + 7) // 8 * 8
_BUSY = 1 << 31
_DISCARDED = 1 << 30
#: Records per chunk: the producer gets room again after each.
_CHUNK = 8192


class Ring(Protocol):
    """A reader of the ring."""

    #: Entries that were no record of ours, so far.
    unknown: int

    def chunks(self) -> Iterator[bytes]:
        """Whole records, oldest first, until the ring is empty."""
        ...

    def fill(self) -> float:
        """How full the ring is, 0 to 1; 0 when that cannot be told."""
        ...

    def close(self) -> None:
        """Unmap it."""
        ...


class MappedRing:
    """The ring mapped into memory; x86-64, where plain loads are ordered."""

    def __init__(self, fd: int, size: int) -> None:
        page = mmap.PAGESIZE
        self.unknown = 0
        self._size = size
        self._consumer_map = mmap.mmap(
            fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=0
        )
        # The data is mapped twice in a row, so that no record wraps around.
        self._producer_map = mmap.mmap(
            fd, page + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page
        )
        self._consumer = np.frombuffer(self._consumer_map, np.uint64, 1)
        self._producer = np.frombuffer(self._producer_map, np.uint64, 1)
        self._data = np.frombuffer(self._producer_map, np.uint8, 2 * size, page)
        self._words = np.frombuffer(self._producer_map, np.uint32, size // 2, page)

    def fill(self) -> float:
        """How full the ring is, 0 to 1."""
        return (int(self._producer[0]) - int(self._consumer[0])) / self._size

    def chunks(self) -> Iterator[bytes]:
        """Whole records, oldest first, until the ring is empty or an entry is busy."""
        # Not beyond what is there now: a fast producer must not hold us for ever.
        end = int(self._producer[0])
        while True:
            at = int(self._consumer[0])
            there = min((end - at) // _STRIDE, _CHUNK)
            if at >= end:
                return
            start = at % self._size
            heads = self._words[start // 4 : (start + max(there, 1) * _STRIDE) // 4 : _STRIDE // 4]
            other = np.flatnonzero(heads != SIZE)
            good = int(other[0]) if other.size else there
            if good:
                rows = self._data[start : start + good * _STRIDE].reshape(good, _STRIDE)
                chunk = rows[:, _HEADER : _HEADER + SIZE].tobytes()
                self._consumer[0] = at + good * _STRIDE
                yield chunk
                continue
            head = int(heads[0])
            if head & _BUSY:
                return
            if not head & _DISCARDED:
                self.unknown += 1
            length = head & (_DISCARDED - 1)
            self._consumer[0] = at + (_HEADER + length + 7) // 8 * 8

    def close(self) -> None:
        """Unmap it."""
        del self._consumer, self._producer, self._data, self._words
        self._consumer_map.close()
        self._producer_map.close()


class BccRing:
    """The ring through BCC's own reader, where loads need barriers (aarch64)."""

    def __init__(self, bpf: Any, name: str) -> None:
        self.unknown = 0
        self._bpf = bpf
        self._got: list[bytes] = []
        bpf[name.encode()].open_ring_buffer(self._take)

    def _take(self, _ctx: object, data: int, size: int) -> int:
        if size == SIZE:
            self._got.append(ctypes.string_at(data, size))
        else:
            self.unknown += 1
        return 0

    def fill(self) -> float:
        """Not known here."""
        return 0.0

    def chunks(self) -> Iterator[bytes]:
        """All records, as one chunk."""
        self._bpf.ring_buffer_consume()
        got, self._got = self._got, []
        if got:
            yield b"".join(got)

    def close(self) -> None:
        """Nothing of its own to free."""


def open_ring(bpf: Any, name: str, fd: int, size: int) -> Ring:
    """The reader for this machine."""
    if platform.machine() == "x86_64":
        return MappedRing(fd, size)
    return BccRing(bpf, name)
