"""The kernel's own notice of new executable mappings, processes and their ends.

A dummy perf event per processor, in plain Python: no BPF, no polling of /proc.
It gives a record for every executable mapping (PERF_RECORD_MMAP2), exec, fork
and exit on the machine, whichever process it is; discovery looks closer at
those that matter.  When a ring overflowed or may have, or a record makes no sense,
the batch says ``lost`` and the caller looks at everything once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
from dataclasses import dataclass, field
from pathlib import Path

_PERF_TYPE_SOFTWARE = 1
_PERF_COUNT_SW_DUMMY = 9
_ATTR_SIZE = 112  # PERF_ATTR_SIZE_VER5: known to kernels since 4.1
_MMAP, _COMM, _TASK, _WATERMARK = 1 << 8, 1 << 9, 1 << 13, 1 << 14
_MMAP2, _COMM_EXEC = 1 << 23, 1 << 24
_FD_CLOEXEC = 8
_SYSCALL = {"x86_64": 298, "aarch64": 241}
_HEAD, _TAIL = 1024, 1032  # in the first page of the ring
_PAGES = 16
#: No record is longer: a path of at most PATH_MAX, and less than 256 bytes beside it.
_LONGEST = 4096 + 256

_LOST, _COMM_RECORD, _EXIT, _FORK, _MMAP2_RECORD = 2, 3, 4, 7, 10
_MISC_COMM_EXEC = 1 << 13


@dataclass
class MmapBatch:
    """What happened since the last poll: process ids by what they did."""

    mapped: set[int] = field(default_factory=set)
    execs: set[int] = field(default_factory=set)
    forks: set[int] = field(default_factory=set)
    parents: dict[int, int] = field(default_factory=dict)  # of those in forks
    exits: set[int] = field(default_factory=set)
    lost: bool = False


class MmapEvents:
    """Dummy perf events on all processors.  OSError from the constructor: refused.

    Needs CAP_PERFMON (or CAP_SYS_ADMIN, or perf_event_paranoid of -1).
    Processors that come online later are not covered; the caller's slow sweep is.
    """

    def __init__(self) -> None:
        self._rings: list[_Ring] = []
        try:
            for cpu in online_cpus():
                self._rings.append(_Ring(cpu))
        except OSError:
            self.close()
            raise
        if not self._rings:
            raise OSError("no processor is online")

    def poll(self) -> MmapBatch:
        """Take all records; never blocks."""
        batch = MmapBatch()
        for ring in self._rings:
            ring.drain(batch)
        return batch

    def fds(self) -> list[int]:
        """Descriptors that become readable when records are there."""
        return [ring.fd for ring in self._rings]

    def close(self) -> None:
        for ring in self._rings:
            ring.close()
        self._rings = []


def online_cpus() -> list[int]:
    """Numbers of the processors that are online."""
    found: list[int] = []
    text = Path("/sys/devices/system/cpu/online").read_text().strip()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


class _Ring:
    def __init__(self, cpu: int) -> None:
        self.fd = _open(cpu)
        self._size = _PAGES * mmap.PAGESIZE
        try:
            self._map = mmap.mmap(self.fd, self._size + mmap.PAGESIZE)
        except OSError:
            os.close(self.fd)
            raise

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)

    def drain(self, batch: MmapBatch) -> None:
        # An aligned 8-byte load.  On x86-64 the data is visible once the head
        # is; on aarch64 Python can give no such order, and a record that makes
        # no sense is treated like a lost one.
        (head,) = struct.unpack_from("@Q", self._map, _HEAD)
        (tail,) = struct.unpack_from("@Q", self._map, _TAIL)
        if head == tail:
            return
        # The kernel tells of what did not fit only before the next record that
        # does, and a processor that is idle now writes none: a ring without room
        # for the longest record may have lost some already.
        if head - tail > self._size - _LONGEST:
            batch.lost = True
        if head - tail <= self._size:
            parse_records(self._bytes(tail, head), batch)
        struct.pack_into("@Q", self._map, _TAIL, head)

    def _bytes(self, tail: int, head: int) -> bytes:
        base, start, length = mmap.PAGESIZE, tail % self._size, head - tail
        first = min(length, self._size - start)
        data = self._map[base + start : base + start + first]
        return data + self._map[base : base + length - first]


def parse_records(data: bytes, batch: MmapBatch) -> None:
    """Add the records in ``data`` to the batch; nonsense sets ``lost``."""
    at = 0
    while at < len(data):
        if at + 8 > len(data):
            batch.lost = True
            return
        kind, misc, size = struct.unpack_from("<IHH", data, at)
        if size < 8 or at + size > len(data):
            batch.lost = True
            return
        if kind == _LOST:
            batch.lost = True
        elif size >= 16:
            _one(kind, misc, data[at : at + size], batch)
        at += size


def _one(kind: int, misc: int, record: bytes, batch: MmapBatch) -> None:
    (pid,) = struct.unpack_from("<I", record, 8)
    if kind == _MMAP2_RECORD:
        batch.mapped.add(pid)
    elif kind == _COMM_RECORD:
        if misc & _MISC_COMM_EXEC:
            batch.execs.add(pid)
    elif kind in (_FORK, _EXIT) and len(record) >= 24:
        # pid, ppid, tid, ptid: threads come and go too; only processes matter
        ppid, tid = struct.unpack_from("<II", record, 12)
        if tid != pid:
            return
        if kind == _FORK:
            batch.forks.add(pid)
            batch.parents[pid] = ppid
        else:
            batch.exits.add(pid)


def _open(cpu: int) -> int:
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(f"perf_event_open is not known for {platform.machine()}")
    flags = _MMAP | _MMAP2 | _COMM | _COMM_EXEC | _TASK | _WATERMARK
    attr = bytearray(_ATTR_SIZE)
    struct.pack_into("<IIQ", attr, 0, _PERF_TYPE_SOFTWARE, _ATTR_SIZE, _PERF_COUNT_SW_DUMMY)
    struct.pack_into("<Q", attr, 40, flags)
    struct.pack_into("<I", attr, 48, _PAGES * mmap.PAGESIZE // 4)  # wake up at a quarter
    buffer = (ctypes.c_char * _ATTR_SIZE).from_buffer(attr)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(
        libc.syscall(
            ctypes.c_long(number),
            ctypes.byref(buffer),
            ctypes.c_int(-1),
            ctypes.c_int(cpu),
            ctypes.c_int(-1),
            ctypes.c_ulong(_FD_CLOEXEC),
        )
    )
    if fd < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"perf_event_open: {os.strerror(error)}")
    return fd
