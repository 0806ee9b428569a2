"""Which memory of a process may be read without changing the process.

Only private anonymous mappings, and of those only pages that are present:
reading an untouched page would make the process grow, one of a device could
hang or block, and one under userfaultfd would wait for its handler.
"""

from __future__ import annotations

import bisect
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

PAGE = os.sysconf("SC_PAGESIZE")

_HEAD = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) (r[w-][x-]p) [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ (\d+) *(.*)$"
)
#: Mapped from a device, page frames without a page, under userfaultfd (missing, wp, minor).
_REFUSED = frozenset((b"io", b"pf", b"mm", b"um", b"uw", b"ui"))
_SPECIAL = (b"[vvar", b"[vdso", b"[vsyscall", b"[uprobes")
_PRESENT, _SWAPPED, _SHARED = 1 << 63, 1 << 62, 1 << 61
_MAX_MAPPINGS = 200_000
_BATCH = 1 << 16  # pages looked up at once


@dataclass(frozen=True)
class Region:
    """A private anonymous mapping."""

    start: int
    end: int
    name: str

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Regions:
    """The mappings that may be read; ``skipped`` were left alone for their kind."""

    readable: list[Region]
    skipped: int
    complete: bool


def regions(pid: int, deadline: float) -> Regions:
    """Look through the mappings of a process, until ``deadline`` (time.monotonic)."""
    found: list[Region] = []
    skipped = 0
    head: re.Match[bytes] | None = None
    for count, line in enumerate(_lines(f"/proc/{pid}/smaps")):
        if line.startswith(b"VmFlags:"):
            if head is not None:
                if _REFUSED & set(line.split()[1:]):
                    skipped += 1
                else:
                    start, end = int(head[1], 16), int(head[2], 16)
                    found.append(Region(start, end, head[5].decode("utf-8", "replace")))
            head = None
            if time.monotonic() > deadline or count > 32 * _MAX_MAPPINGS:
                return Regions(found, skipped, False)
        elif b"-" in line[:17]:
            match = _HEAD.match(line)
            anonymous = match is not None and match[4] == b"0"
            special = match is not None and match[5].startswith(_SPECIAL)
            head = match if anonymous and not special else None
    return Regions(found, skipped, True)


def _lines(path: str) -> Iterator[bytes]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        rest = b""
        while data := os.read(fd, 1 << 20):
            lines = (rest + data).split(b"\n")
            rest = lines.pop()
            yield from lines
    finally:
        os.close(fd)


class Present:
    """Runs of present pages, as seen when they were asked for."""

    def __init__(self, pid: int) -> None:
        self._fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._starts: list[int] = []
        self._ends: list[int] = []
        #: Bytes of pages that are present, and of those that are swapped out.
        self.bytes = 0
        self.swapped = 0

    def close(self) -> None:
        os.close(self._fd)

    def add(self, region: Region) -> list[tuple[int, int]]:
        """(start, end) of the present runs of a region, which are remembered.

        Regions must be added in the order of their addresses.
        """
        runs: list[tuple[int, int]] = []
        for start in range(region.start, region.end, _BATCH * PAGE):
            end = min(start + _BATCH * PAGE, region.end)
            raw = os.pread(self._fd, (end - start) // PAGE * 8, start // PAGE * 8)
            entries = np.frombuffer(raw[: len(raw) // 8 * 8], "<u8")
            there = (entries & np.uint64(_PRESENT)) != 0
            there &= (entries & np.uint64(_SHARED)) == 0
            self.swapped += int(((entries & np.uint64(_SWAPPED)) != 0).sum()) * PAGE
            edges = np.flatnonzero(np.diff(there.astype(np.int8), prepend=0, append=0))
            for first, last in edges.reshape(-1, 2).tolist():
                low, high = start + first * PAGE, start + last * PAGE
                if runs and runs[-1][1] == low:
                    runs[-1] = (runs[-1][0], high)
                else:
                    runs.append((low, high))
        for low, high in runs:
            self.bytes += high - low
            if self._ends and self._ends[-1] == low:
                self._ends[-1] = high  # one mapping right after another
            else:
                self._starts.append(low)
                self._ends.append(high)
        return runs

    def covers(self, address: int, size: int) -> bool:
        """Whether all these bytes lie in runs that were added."""
        at = bisect.bisect_right(self._starts, address) - 1
        return at >= 0 and address + size <= self._ends[at]
