"""Finding the communicators of a process in its memory.

A communicator of 2.21 and later has a magic word at its start and at its end.
Likely places come first: mappings of moderate size and the heap, where one large
allocation lies, then the starts of pages in the large ones, then all the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from nccluprobe import memory
from nccluprobe.inspect.pages import PAGE, Present, Region, regions
from nccluprobe.nccl.comm_struct import CommState, read_comm
from nccluprobe.nccl.layout import MAGIC, Layout

_CHUNK = 4 << 20
_WORD = 8
#: Mappings up to this size are read through before the larger ones.
_MODERATE = 64 << 20
#: An allocation of its own begins here in its first page (glibc's malloc, others).
_HEAD = 24
#: So much in large mappings takes long: the starts of their pages come first.
_MUCH = 3 << 30
_MOST_HITS = 100_000


@dataclass(frozen=True)
class Budget:
    """Bounds of the search in one process."""

    bytes: int = 16 << 30
    seconds: float = 3.0


@dataclass
class Found:
    """What was found, and how much was looked at.

    ``complete`` is false when a bound was reached: then there may be more.
    """

    comms: list[tuple[CommState, Layout]] = field(default_factory=list)
    complete: bool = True
    searched: int = 0
    swapped: int = 0
    seconds: float = 0.0
    skipped: int = 0
    #: Why it is not complete.
    why: str | None = None


class Search:
    """One search in one process, and later readings of what it found."""

    def __init__(self, pid: int, layouts: Sequence[Layout], budget: Budget) -> None:
        self._pid = pid
        self._layouts = [layout for layout in layouts if layout.searchable]
        self._budget = budget
        self._began = time.monotonic()
        self._deadline = self._began + budget.seconds
        self._seen: set[int] = set()
        self._hits = 0
        self._buffer = np.empty(_CHUNK, np.uint8)
        self._words = self._buffer.view("<u8")
        self._equal = np.empty(_CHUNK // _WORD, bool)
        self.found = Found()
        self.present = Present(pid)

    def close(self) -> None:
        """Reading is over."""
        self.present.close()

    def run(self) -> Found:
        """Search; OSError when the process may not be read, or is gone."""
        found = self.found
        looked = regions(self._pid, self._deadline)
        found.skipped = looked.skipped
        if not looked.complete:
            self._stop("mappings: time is up")
        runs = []
        for region in looked.readable:
            runs.append((region, self.present.add(region)))
            if self._late():
                break
        found.swapped = self.present.swapped
        if self._layouts:
            self._pass(runs)
        found.seconds = time.monotonic() - self._began
        found.comms.sort(key=lambda c: c[0].address)
        return found

    def _pass(self, runs: list[tuple[Region, list[tuple[int, int]]]]) -> None:
        moderate = [r for r in runs if r[0].size <= _MODERATE or r[0].name == "[heap]"]
        large = [r for r in runs if r not in moderate]
        much = sum(end - start for _, there in large for start, end in there)
        heads = large if much > _MUCH else []
        for steps in (
            (self._through(run) for _, there in moderate for run in there),
            (self._heads(run) for _, there in heads for run in there),
            (self._through(run) for _, there in large for run in there),
        ):
            for step in steps:
                for _ in step:
                    if self._late():
                        return

    def _late(self) -> bool:
        if time.monotonic() > self._deadline:
            self._stop(f"time is up ({self._budget.seconds:g} s)")
        elif self.found.searched > self._budget.bytes:
            self._stop(f"the bound of {self._budget.bytes >> 20} MB is reached")
        elif self._hits > _MOST_HITS:
            self._stop("too many places look like communicators")
        return not self.found.complete

    def _stop(self, why: str) -> None:
        self.found.complete = False
        self.found.why = self.found.why or why

    # -- reading

    def _through(self, run: tuple[int, int]) -> Iterator[None]:
        """Every word of a run."""
        start, end = run
        while start < end:
            size = min(_CHUNK, end - start)
            got = self._fetch([(start, size)], size) // _WORD
            self.found.searched += size
            self._compare(start, got)
            # What could not be read any more is gone: on with the rest.
            start += max(got * _WORD // PAGE * PAGE, PAGE) if got * _WORD < size else size
            yield

    def _heads(self, run: tuple[int, int]) -> Iterator[None]:
        """The first words of every page of a run."""
        start, end = run
        step = memory.MOST_PIECES * PAGE
        for first in range(start, end, step):
            pages = range(first, min(first + step, end), PAGE)
            size = len(pages) * _HEAD
            got = self._fetch([(page, _HEAD) for page in pages], size)
            words = self._words[: got // _WORD]
            for index in np.flatnonzero(words == np.uint64(MAGIC)).tolist():
                page, word = divmod(index, _HEAD // _WORD)
                self._candidate(first + page * PAGE + word * _WORD)
            yield

    def _fetch(self, pieces: list[tuple[int, int]], size: int) -> int:
        return memory.read_into(self._pid, pieces, self._buffer.ctypes.data, size)

    def _compare(self, start: int, words: int) -> None:
        equal = np.equal(self._words[:words], np.uint64(MAGIC), out=self._equal[:words])
        if not equal.any():
            return
        for index in np.flatnonzero(equal).tolist():
            self._candidate(start + index * _WORD)
            if self._hits > _MOST_HITS:
                return

    def _candidate(self, address: int) -> None:
        self._hits += 1
        if address in self._seen:
            return
        for layout in self._layouts:
            state = read_comm(self.read, address, layout)
            if state is not None:
                self._seen.add(address)
                self.found.comms.append((state, layout))
                return

    def read(self, address: int, size: int) -> bytes | None:
        """Bytes that were present when we looked; None for all others."""
        if not self.present.covers(address, size):
            return None
        return memory.read(self._pid, address, size)

    def again(self) -> list[CommState | None]:
        """The communicators found, read anew, in the same order."""
        return [read_comm(self.read, s.address, layout) for s, layout in self.found.comms]
