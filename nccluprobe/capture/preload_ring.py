"""One process's file of the preload library: reading it while it is written.

Everything is read by ``pread``, never through a mapping: a file that its owner
cuts short is then an end of file here and no SIGBUS.

**What is exact.**  A ring has one writer, which fills the place ``head % n`` and
then raises ``head``.  After copying records up to ``head`` the head is read
again: what is older than ``head - n + 1`` may have been overwritten meanwhile
and counts as that, the rest is whole.  So each record is either delivered once
or counted once.

**Order.**  Records of several threads are delivered by their time of exit, and
only those that ended before the heads were read: a call that began after
another had returned never comes before it, not even one drain earlier.

**Position.**  What was taken is written into the file, one drain late: by then
the lines of the drain before are in the trace's file.  So a collector that
comes after a killed one goes on where the trace ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nccluprobe.capture import preload_layout as layout
from nccluprobe.record import (
    FLAG_NO_RETURN,
    KIND_CALL,
    KIND_IDENTITY,
    KIND_NAME,
    NAME_OFFSET,
    NAME_SIZE,
    SIZE,
)

_FOREVER = 1 << 63


class Busy(Exception):
    """Another collector reads the file."""


@dataclass
class _Reader:
    """Where we are in one slot's ring."""

    position: int
    overwritten: int
    saved: tuple[int, int]
    no_return: int = -1  # index of a record that we closed ourselves


def _one(rec: Any) -> np.ndarray[Any, Any]:
    rows = np.empty(1, layout.RECORD)
    rows[0] = rec
    return rows


def _named(birth: Any) -> np.ndarray[Any, Any]:
    rows = _one(birth["rec"])
    rows["kind"] = KIND_NAME
    name = np.frombuffer(bytes(birth["name"]).ljust(NAME_SIZE, b"\0"), "u1")
    rows.view("u1")[NAME_OFFSET : NAME_OFFSET + NAME_SIZE] = name
    return rows


class RingFile:
    """Reads one file.  ``epoch`` is the process's number for the collector."""

    def __init__(self, path: str, epoch: int) -> None:
        self.path = path
        self.epoch = epoch
        self.dead = False
        self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            info = os.fstat(self._fd)
            if not stat.S_ISREG(info.st_mode):
                raise layout.LayoutError("not a file")
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise Busy(path) from error
            self.inode = info.st_ino
            self._size = info.st_size
            self.header = self._header()
        except BaseException:
            os.close(self._fd)
            raise
        #: The process in our pid namespace; set by the owner once it is known.
        self.pid = self.header.pid
        self.host_tid: Callable[[int], int] = int
        self.lib_of: Callable[[int], int] = int
        self._readers: list[_Reader] = []
        self._introduced = False
        self._dead_threads: set[int] = set()

    def _header(self) -> layout.Header:
        return layout.parse(os.pread(self._fd, layout.HEADER_SIZE, 0), self._size)

    def refresh(self) -> None:
        """Read the header again: copies of NCCL come later."""
        self.header = self._header()

    # -- slots

    def _slots(self) -> np.ndarray[Any, Any]:
        """The slots in use, as they are now."""
        top = int.from_bytes(os.pread(self._fd, 4, layout.TOP_AT), "little")
        last = max(min(top, self.header.slots), len(self._readers))
        data = os.pread(self._fd, last * layout.SLOT.itemsize, self.header.slots_at)
        slots = np.frombuffer(data, layout.SLOT, len(data) // layout.SLOT.itemsize)
        last = len(slots)
        for i in range(len(self._readers), last):
            read, overwritten = int(slots["read"][i]), int(slots["overwritten"][i])
            read = min(read, int(slots["head"][i]))
            self._readers.append(_Reader(read, overwritten, (read, overwritten)))
        used_ones: np.ndarray[Any, Any] = slots[:last]
        return used_ones

    def _slot_at(self, i: int) -> int:
        return self.header.slots_at + i * layout.SLOT.itemsize

    def _head(self, i: int) -> int:
        return int.from_bytes(os.pread(self._fd, 8, self._slot_at(i) + 8), "little")

    def _records(self, i: int, first: int, count: int) -> np.ndarray[Any, Any]:
        places = self.header.ring_records
        base = self.header.rings_at + i * self.header.ring_bytes
        at = first % places
        upto = min(count, places - at)
        data = os.pread(self._fd, upto * SIZE, base + at * SIZE)
        if count > upto:
            data += os.pread(self._fd, (count - upto) * SIZE, base)
        rows: np.ndarray[Any, Any] = np.frombuffer(data, layout.RECORD, len(data) // SIZE).copy()
        return rows

    def _taken_over(self) -> bool:
        """Whether another collector has read some of it before us."""
        return any(r.saved[0] or r.overwritten for r in self._readers)

    # -- records

    def take(self, now: int) -> bytes:
        """Records that ended before ``now``, which was read before the call."""
        self._save()
        slots = self._slots()
        parts = []
        for i in range(len(slots)):
            part = self._take_slot(i, int(slots["head"][i]), _FOREVER if self.dead else now)
            if part.size:
                parts.append(part)
        parts += self._ended_inside(slots)
        if not self._introduced and (parts or self.dead or self._taken_over()):
            self._introduced = True
            births = self._births(parts)
            if births.size:
                rows = self._mapped(births).tobytes()
                return rows + self._merged(parts)
        return self._merged(parts)

    def _take_slot(self, i: int, head: int, upto: int) -> np.ndarray[Any, Any]:
        reader, places = self._readers[i], self.header.ring_records
        first = max(reader.position, head - places + 1)
        if first >= head:
            return np.empty(0, layout.RECORD)
        rows = self._records(i, first, head - first)
        # The one at the head is being written, in the place of the oldest.
        whole = max(first, self._head(i) - places + 1)
        reader.overwritten += min(whole, head) - reader.position
        rows = rows[min(whole - first, len(rows)) :]
        reader.position = min(whole, head)
        late = np.flatnonzero(rows["t_exit"] > upto)
        if late.size:
            rows = rows[: late[0]]
        if 0 <= reader.no_return - reader.position < len(rows):
            rows = np.delete(rows, reader.no_return - reader.position)
            reader.position += 1
        reader.position += len(rows)
        return rows

    def _merged(self, parts: list[np.ndarray[Any, Any]]) -> bytes:
        if not parts:
            return b""
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if len(parts) > 1:
            rows = rows[np.argsort(rows["t_exit"], kind="stable")]
        return self._mapped(rows).tobytes()

    def _mapped(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """With the numbers that hold outside the process."""
        rows["pid"] = self.pid
        rows["epoch"] = self.epoch
        for tid in np.unique(rows["tid"]):
            host = self.host_tid(int(tid))
            if host != tid:
                rows["tid"][rows["tid"] == tid] = host
        rows["lib"] = np.array([self.lib_of(i) for i in range(layout.COPIES)])[
            np.minimum(rows["lib"], layout.COPIES - 1)
        ]
        return rows

    def _births(self, parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """What made the communicators that live now, where its record is not to come."""
        if not self._taken_over():
            return np.empty(0, layout.RECORD)
        count = min(self.header.births, self._header().births_made)
        data = os.pread(self._fd, count * layout.BIRTH.itemsize, self.header.births_at)
        births = np.frombuffer(data, layout.BIRTH, len(data) // layout.BIRTH.itemsize)
        births = births[(births["seq"] % 2 == 0) & (births["seq"] > 0)]
        rows = np.concatenate(parts) if parts else np.empty(0, layout.RECORD)
        coming = set(rows["new_gen"].tolist())
        told = set(rows["comm_gen"][rows["kind"] == KIND_IDENTITY].tolist())
        wanted = set(rows["comm_gen"].tolist())
        chosen: list[np.ndarray[Any, Any]] = []
        for birth in births[np.argsort(births["gen"])][::-1]:
            gen = int(birth["gen"])
            if birth["closed"] and gen not in wanted:
                continue
            wanted.add(int(birth["rec"]["comm_gen"]))
            parts_of = []
            if gen not in coming and birth["rec"]["kind"]:
                parts_of.append(_one(birth["rec"]))
                if birth["name"]:
                    parts_of.append(_named(birth))
            if gen not in told and birth["identity"]["kind"]:
                parts_of.append(_one(birth["identity"]))
            chosen[:0] = parts_of
        return np.concatenate(chosen) if chosen else np.empty(0, layout.RECORD)

    def tell_layout(self, index: int, offsets: layout.Offsets) -> None:
        """Tell the process where the fields of a copy's struct are."""
        for at, data in layout.layout_writes(index, offsets):
            os.pwrite(self._fd, data, at)

    # -- calls inside

    def _inside(self, slots: np.ndarray[Any, Any]) -> list[tuple[int, np.ndarray[Any, Any]]]:
        found = []
        for i in np.flatnonzero(slots["seq"] % 2 == 1).tolist():
            head = int(slots["head"][i])
            rows = self._records(i, head, 1)
            again = np.frombuffer(
                os.pread(self._fd, layout.SLOT.itemsize, self._slot_at(i)), layout.SLOT
            )
            if rows.size and again.size and int(again["seq"][0]) == int(slots["seq"][i]):
                rows["t_exit"] = 0
                if rows["kind"][0] == KIND_CALL:
                    found.append((i, rows))
        return found

    def in_flight(self) -> bytes:
        """Records of the calls inside now."""
        slots = self._slots()
        found = [
            self._mapped(rows)
            for i, rows in self._inside(slots)
            if self._readers[i].no_return != int(slots["head"][i])
        ]
        return b"".join(rows.tobytes() for rows in found)

    def _ended_inside(self, slots: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Records of calls whose thread ended inside, as nobody else writes them."""
        if not self._dead_threads:
            return []
        found = []
        for i, rows in self._inside(slots):
            reader, head = self._readers[i], int(slots["head"][i])
            if int(rows["tid"][0]) in self._dead_threads and reader.no_return != head:
                reader.no_return = head
                rows["t_exit"] = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
                rows["flags"] |= FLAG_NO_RETURN
                found.append(rows)
        self._dead_threads.clear()
        return found

    def threads_inside(self) -> list[int]:
        """Threads that are inside a call, as the process numbers them."""
        slots = self._slots()
        return [int(t) for t in slots["tid"][slots["seq"] % 2 == 1]]

    def thread_died(self, tid: int) -> None:
        """A thread has ended; it may have been inside a call."""
        self._dead_threads.add(tid)

    # -- counts and ends

    def counts(self) -> tuple[int, int, int]:
        """Records lost, blind calls, records overwritten unread."""
        slots = self._slots()
        lost = self._header().lost + int(slots["lost"].sum())
        return lost, int(slots["blind"].sum()), sum(r.overwritten for r in self._readers)

    def pending(self) -> bool:
        """Whether there is something that was not taken."""
        slots = self._slots()
        return any(int(slots["head"][i]) > r.position for i, r in enumerate(self._readers))

    def deny(self) -> None:
        """Tell the process to record nothing more."""
        one = (1).to_bytes(4, "little")
        os.pwrite(self._fd, one, layout.DENIED_AT)
        for i in range(self.header.slots):
            os.pwrite(self._fd, one, self._slot_at(i) + layout.SLOT_DENIED_AT)

    def _save(self) -> None:
        for i, reader in enumerate(self._readers):
            now = (reader.position, reader.overwritten)
            if now != reader.saved:
                os.pwrite(self._fd, layout.READ.pack(*now), self._slot_at(i) + layout.READ_AT)
                reader.saved = now

    def close(self, *, remove: bool) -> None:
        """Save the position; ``remove``: the process is gone and all is taken."""
        with contextlib.suppress(OSError):
            self._save()
            if remove:
                os.unlink(self.path)  # noqa: PTH108 - not a Path on the hot path
        os.close(self._fd)
