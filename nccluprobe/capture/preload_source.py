"""The preload front as the collector sees it: all files of one folder."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nccluprobe.capture import preload_layout, preload_library
from nccluprobe.capture.preload_layout import Header, LayoutError
from nccluprobe.capture.preload_processes import Process, find_process, is_same
from nccluprobe.capture.preload_ring import Busy, RingFile
from nccluprobe.capture.source import Library, Losses

SUFFIX = ".ring"
_LOOK_NS = 20_000_000  # between looks for new files
_ALIVE_NS = 200_000_000  # between looks whether processes live
_EXEC_NS = 5_000_000_000  # and whether they still map their file
_LINGER_NS = 3_000_000_000  # a dead process's file, for the collector's last questions
_LOOK_TWICE_NS = 1_000_000_000  # the collector looks twice at a call that is inside
_NEVER_NS = 1 << 62
_MAX_FILES = 16384


@dataclass
class _Ring:
    file: RingFile
    process: Process | None
    opened: int
    dead_at: int = 0
    next_look: int = 0
    next_maps: int = 0
    forgotten: bool = False


class PreloadSource:
    """Drains the files that the preload library makes in a folder; a ``Source``.

    ``keep``: leave the files of dead processes where they are.
    """

    front = "preload"
    exits = True

    def __init__(
        self, folder: Path, *, keep: bool = False, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._folder = os.fspath(folder)
        self._keep = keep
        self._say = say
        self._rings: dict[str, _Ring] = {}
        self._by_key: dict[tuple[int, int], _Ring] = {}
        self._skipped: dict[str, int] = {}
        self._libraries: dict[int, Library] = {}
        self._lib_ids: dict[tuple[int, int, str], int] = {}
        self._next_epoch = 1
        self._next_look = 0
        self._gone = Losses()

    # -- files

    def poll(self, now: int | None = None) -> None:
        """Look for new files, and for processes that ended."""
        now = _mono() if now is None else now
        if now >= self._next_look:
            self._next_look = now + _LOOK_NS
            self._discover(now)
        for ring in list(self._rings.values()):
            if now >= ring.next_look:
                ring.next_look = now + _ALIVE_NS
                self._check(ring, now)
            if ring.dead_at and now >= ring.dead_at + _LINGER_NS and not ring.file.pending():
                self._drop(ring)

    def look_again(self) -> None:
        """The next poll looks for new files, however lately that was done."""
        self._next_look = 0
        self._skipped = {n: t for n, t in self._skipped.items() if t > _mono() + 10**10}

    def _discover(self, now: int) -> None:
        for name in _files(self._folder):
            if name not in self._rings and now >= self._skipped.get(name, 0):
                self._open(name, now)

    def _open(self, name: str, now: int) -> None:
        path = f"{self._folder}/{name}"
        self._skipped[name] = now + 1_000_000_000
        # Asked before the file is read: its magic is written last, so one that has it
        # now is whole, and one that gets it while we read is not taken for damaged.
        begun = _begun(path)
        try:
            file = RingFile(path, self._next_epoch)
        except Busy:
            return
        except LayoutError as error:
            if not begun:
                self._skipped[name] = now + _LOOK_NS
            else:
                self._skipped[name] = now + 3_600_000_000_000
                self._say(f"{path}: {error}: left alone")
            return
        except OSError:
            return
        del self._skipped[name]
        self._next_epoch += 1
        ring = _Ring(file, find_process(file.header, file.inode), now)
        file.lib_of = lambda i: self._lib_of(ring, i)
        if ring.process is not None:
            file.pid = ring.process.pid
            file.host_tid = ring.process.host_tid
        else:
            self._died(ring, now)
        ring.next_maps = now + _EXEC_NS
        self._rings[name] = ring
        self._by_key[file.pid, file.epoch] = ring
        self._meet_copies(ring)

    def _check(self, ring: _Ring, now: int) -> None:
        process = ring.process
        if process is None or ring.dead_at:
            return
        alive = is_same(process)
        if alive and now >= ring.next_maps:
            ring.next_maps = now + _EXEC_NS
            alive = process.maps(ring.file.inode)
        if not alive:
            self._died(ring, now)
            return
        self._meet_copies(ring)
        for tid in ring.file.threads_inside():
            if not process.has_thread(tid):
                ring.file.thread_died(tid)

    def _meet_copies(self, ring: _Ring) -> None:
        """Look at copies of NCCL that are new, before their first record comes."""
        before = len(ring.file.header.copies)
        with contextlib.suppress(LayoutError):
            ring.file.refresh()
        for index in range(0 if ring.next_look == 0 else before, len(ring.file.header.copies)):
            self._lib_of(ring, index)

    def _died(self, ring: _Ring, now: int) -> None:
        ring.dead_at = now
        ring.file.dead = True

    def _drop(self, ring: _Ring) -> None:
        """The process is gone, and so are its records."""
        file = ring.file
        key = (file.pid, file.epoch)
        lost, blind, overwritten = file.counts()
        for table, n in (
            (self._gone.by_process, lost),
            (self._gone.blind, blind),
            (self._gone.overwritten, overwritten),
        ):
            if n and not ring.forgotten:
                table[key] = n
        file.close(remove=not self._keep)
        self._by_key.pop(key, None)
        name = file.path[len(self._folder) + 1 :]
        self._rings.pop(name, None)
        if self._keep:  # read once
            self._skipped[name] = _NEVER_NS

    # -- Source

    def drain(self) -> Iterator[bytes]:
        """All records now in the rings; those of a process in the order of their ends."""
        now = _mono()
        self.poll(now)
        for ring in list(self._rings.values()):
            with contextlib.suppress(OSError, ValueError):
                chunk = ring.file.take(now)
                if chunk:
                    yield chunk

    def in_flight(self) -> bytes:
        """Records (t_exit 0) of all calls that are inside now; see ``Source``."""
        found = []
        for ring in self._rings.values():
            with contextlib.suppress(OSError, ValueError):
                found.append(ring.file.in_flight())
        return b"".join(found)

    def losses(self) -> Losses:
        """Counts so far."""
        losses = Losses(
            dict(self._gone.by_process), dict(self._gone.blind), dict(self._gone.overwritten)
        )
        for key, ring in self._by_key.items():
            with contextlib.suppress(OSError, LayoutError):
                lost, blind, overwritten = ring.file.counts()
                losses.by_process.update({key: lost} if lost else {})
                losses.blind.update({key: blind} if blind else {})
                losses.overwritten.update({key: overwritten} if overwritten else {})
        return losses

    def library(self, lib: int) -> Library | None:
        """The copy of NCCL that a record speaks of."""
        return self._libraries.get(lib)

    def deny(self, pid: int, epoch: int) -> None:
        """Record nothing more of this process."""
        ring = self._by_key.get((pid, epoch))
        if ring is not None:
            with contextlib.suppress(OSError):
                ring.file.deny()

    def forget(self, pid: int, epoch: int) -> None:
        """The process is gone: its file goes, when all of it was read."""
        ring = self._by_key.get((pid, epoch))
        if (
            ring is not None
            and ring.file.threads_inside()
            and _mono() < ring.opened + _LOOK_TWICE_NS
        ):
            return  # the collector has not looked at its calls inside yet
        for table in (self._gone.by_process, self._gone.blind, self._gone.overwritten):
            table.pop((pid, epoch), None)
        if ring is not None:
            ring.forgotten = True
            if ring.dead_at and not ring.file.pending():
                self._drop(ring)

    def close(self) -> None:
        """Let go of all files; those of dead processes that were read are removed."""
        for ring in list(self._rings.values()):
            if ring.dead_at and not ring.file.pending():
                self._drop(ring)
            else:
                ring.file.close(remove=False)
        self._rings.clear()
        self._by_key.clear()

    # -- who they are

    @property
    def open_files(self) -> int:
        """Files that are being read."""
        return len(self._rings)

    @property
    def folder(self) -> str:
        """Where the files are."""
        return self._folder

    def living(self) -> int:
        """Processes that have a file and live."""
        return sum(1 for ring in self._rings.values() if not ring.dead_at)

    def unfinished(self) -> bool:
        """Whether anything is to be read or, of dead processes, to be ended."""
        return any(
            ring.file.pending() or (ring.dead_at and not ring.forgotten)
            for ring in self._rings.values()
        )

    def header_of(self, pid: int) -> tuple[Header, bool] | None:
        """What the latest file of a process says of it, and whether it is alive."""
        rings = [r for (p, _), r in self._by_key.items() if p == pid]
        if not rings:
            return None
        last = max(rings, key=lambda r: (not r.dead_at, r.file.epoch))
        return last.file.header, not last.dead_at

    def _lib_of(self, ring: _Ring, index: int) -> int:
        file = ring.file
        if index >= len(file.header.copies):
            file.refresh()
            if index >= len(file.header.copies):
                return 0
        copy = file.header.copies[index]
        key = (copy.dev, copy.ino, copy.path)
        lib = self._lib_ids.get(key)
        if lib is None:
            lib = self._lib_ids[key] = len(self._lib_ids) + 1
            self._libraries[lib] = preload_library.describe(lib, copy, ring.process, self._folder)
        offsets = preload_library.offsets(self._libraries[lib].layout)
        if offsets is not None and not copy.known and not ring.dead_at:
            file.tell_layout(index, offsets)
        return lib


def _files(folder: str) -> list[str]:
    """Files in the folder and in folders right below it, relative to it."""
    found: list[str] = []
    below: list[str] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX):
                found.append(entry.name)
            elif entry.is_dir(follow_symlinks=False):
                below.append(entry.name)
    for name in below:
        with contextlib.suppress(OSError), os.scandir(f"{folder}/{name}") as entries:
            found += [f"{name}/{e.name}" for e in entries if e.name.endswith(SUFFIX)]
    return found[:_MAX_FILES]


def _mono() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def _begun(path: str) -> bool:
    with contextlib.suppress(OSError):
        # Not blocking: a FIFO of that name would hold the collector for ever.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:  # noqa: PTH123 - a descriptor
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return preload_layout.ready(file.read(8))
    return True
