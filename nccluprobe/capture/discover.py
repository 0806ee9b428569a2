"""Finding the processes that the user wants and the copies of NCCL that they map.

``Discovery.poll`` is called a few times a second.  The kernel's mapping events
say which processes to look at; a sweep over /proc every few seconds finds what
they missed.  Without the events the sweep runs five times a second.  Maps are
read only for processes that match, and only when something about them changed.
"""

from __future__ import annotations

import os
import platform
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from nccluprobe.capture.elf import ElfError, NcclImage, scan
from nccluprobe.capture.maps import (
    FileId,
    Mapping,
    OpenFile,
    open_mapping,
    open_path,
    read_maps,
    stat_mapping,
)
from nccluprobe.capture.mmap_events import MmapBatch, MmapEvents
from nccluprobe.capture.processes import (
    Glance,
    ProcessKey,
    ProcessMatcher,
    exec_pages,
    glance,
    is_running,
)
from nccluprobe.errors import ExitCode, NccluprobeError

__all__ = ["Discovery", "DiscoveryEvents", "FoundFile", "ProcessKey", "ProcessMatcher"]

_SWEEP = 5.0  # seconds between sweeps, with the kernel's events
_FAST_SWEEP = 0.2  # and without
_REREAD = 60.0  # the maps of every matching process, whatever else says nothing changed
_REMEMBERED = 16384  # files examined

#: A file as stat shows it: enough to know it again, and to see that it changed.
_Seen = tuple[int, int, int, int]


@dataclass(frozen=True)
class FoundFile:
    """A copy of NCCL, reported once.  The receiver owns ``file.fd`` and closes it.

    ``pid`` and ``file.path`` are one example of who maps it; pid is 0 for a
    file that was given by the user.  Keep the descriptor open as long as the
    file counts as known, or call ``Discovery.forget``: an inode number that
    nobody holds may be used again for another file.
    """

    file: OpenFile
    image: NcclImage
    pid: int


@dataclass
class DiscoveryEvents:
    """What a poll found.

    ``uses`` pairs processes with the copies of NCCL that they map, once each.
    ``changed`` are known files that were overwritten in place: probes on them
    are now at wrong instructions and must go; the file as it is now follows in
    ``new_files``.  ``unreadable`` are matching processes whose mapped files may
    not be read, once each.  ``brief`` are pids of children of matching processes
    that had ended before anyone could look at them.
    """

    new_processes: list[ProcessKey] = field(default_factory=list)
    gone: list[ProcessKey] = field(default_factory=list)
    new_files: list[FoundFile] = field(default_factory=list)
    uses: list[tuple[ProcessKey, FileId]] = field(default_factory=list)
    changed: list[FileId] = field(default_factory=list)
    unreadable: list[ProcessKey] = field(default_factory=list)
    brief: list[int] = field(default_factory=list)


@dataclass
class _Process:
    key: ProcessKey
    image: tuple[bytes, ...]
    comm: str
    matched: bool = False
    dirty: bool = False
    pages: bytes = b""
    read_at: float = 0.0
    known: set[Mapping] = field(default_factory=set)
    uses: set[FileId] = field(default_factory=set)
    refused: bool = False


class Discovery:
    """Keeps track of matching processes and of NCCL files.

    ``extra_libs`` are files that the user named: they are reported by the first
    poll, and one that is not a copy of NCCL raises ``NccluprobeError`` here.
    """

    def __init__(
        self,
        matcher: ProcessMatcher,
        extra_libs: Iterable[str] = (),
        events: bool = True,
    ) -> None:
        self._matcher = matcher
        self._processes: dict[int, _Process] = {}
        # What was examined: the identity of a copy of NCCL, None for anything else.
        self._examined: OrderedDict[_Seen, FileId | None] = OrderedDict()
        self._files: list[FoundFile] = []  # reported; their descriptors are not ours
        self._next_sweep = 0.0
        self._given: list[FoundFile] = []
        #: Why the kernel's mapping events are not in use, None when they are.
        self.fallback: str | None = None if events else "switched off"
        for path in extra_libs:
            self._give(path)
        self._events: MmapEvents | None = None
        if events:
            try:
                self._events = MmapEvents()
            except (OSError, ValueError) as err:
                self.fallback = str(err)

    def close(self) -> None:
        """Stop listening.  Files already reported stay open; they are the receiver's."""
        if self._events is not None:
            self._events.close()
            self._events = None
        for found in self._given:
            os.close(found.file.fd)
        self._given = []

    def forget(self, file_id: FileId) -> None:
        """Report this file anew when it is met again (its probes were removed)."""
        self._files = [f for f in self._files if f.file.id != file_id]
        for seen in [s for s, known in self._examined.items() if known == file_id]:
            del self._examined[seen]

    @property
    def busy(self) -> bool:
        """Whether processes are left that the last poll had no time for."""
        return any(p.dirty for p in self._processes.values())

    @property
    def processes(self) -> list[ProcessKey]:
        """The matching processes, as of the last poll."""
        return [p.key for p in self._processes.values() if p.matched]

    def poll(self, now: float | None = None, budget: float = 0.25) -> DiscoveryEvents:
        """What is new.  ``now``: seconds of any steady clock.

        Takes no longer than about ``budget`` seconds; what was not reached is
        looked at in the next poll.
        """
        now = time.monotonic() if now is None else now
        deadline = time.monotonic() + budget
        out = DiscoveryEvents(new_files=self._given)
        self._given = []
        batch = self._events.poll() if self._events is not None else MmapBatch()
        if batch.lost or now >= self._next_sweep:
            began = time.monotonic()
            self._sweep(now, batch.lost, out)
            # Never more than a tenth of a processor, however many processes there are.
            pause = _SWEEP if self._events is not None else _FAST_SWEEP
            self._next_sweep = now + max(pause, 10 * (time.monotonic() - began))
        self._apply(batch, out)
        for process in list(self._processes.values()):
            if process.dirty and time.monotonic() < deadline:
                self._look(process, now, deadline, out)
        return out

    # Processes

    def _apply(self, batch: MmapBatch, out: DiscoveryEvents) -> None:
        for pid in batch.forks | batch.execs | batch.mapped:
            known = self._processes.get(pid)
            if known is None or pid in batch.execs or pid in batch.forks:
                known = self._meet(pid, out)
            parent = self._processes.get(batch.parents.get(pid, 0))
            if known is None and parent is not None and parent.matched:
                # What it was is not to be seen any more; it began as its parent is.
                out.brief.append(pid)
            if known is not None and known.matched and pid in batch.mapped:
                known.dirty = True
        for pid in batch.exits:
            # The first thread may end before the others: only /proc tells.
            if pid in self._processes and not is_running(glance(pid)):
                self._leave(pid, out)

    def _meet(self, pid: int, out: DiscoveryEvents, seen: Glance | None = None) -> _Process | None:
        """Bring the table up to date about one process."""
        seen = seen or glance(pid)
        known = self._processes.get(pid)
        if seen is None or not is_running(seen):
            if known is not None:
                self._leave(pid, out)
            return None
        if known is not None and known.key != seen.key:
            self._leave(pid, out)
            known = None
        if known is None:
            known = self._processes[pid] = _Process(seen.key, seen.image, seen.comm)
            self._judge(known, seen, out)
        elif known.image != seen.image:
            # exec: another program under the same pid
            known.image, known.comm = seen.image, seen.comm
            known.known.clear()
            known.uses.clear()
            known.pages = b""
            was = known.matched
            known.matched = False
            self._judge(known, seen, out, was)
        elif known.comm != seen.comm:
            known.comm = seen.comm
            if not known.matched:
                self._judge(known, seen, out)
        return known

    def _judge(
        self, process: _Process, seen: Glance, out: DiscoveryEvents, was: bool = False
    ) -> None:
        if self._matcher.matches(seen):
            process.matched = process.dirty = True
            if not was:
                out.new_processes.append(process.key)
        elif was:
            process.dirty = False
            out.gone.append(process.key)

    def _leave(self, pid: int, out: DiscoveryEvents) -> None:
        process = self._processes.pop(pid)
        if process.matched:
            out.gone.append(process.key)

    def _sweep(self, now: float, everything: bool, out: DiscoveryEvents) -> None:
        """Look at all processes once: a read of stat each, more only for matching ones."""
        present = set()
        for name in os.listdir("/proc"):  # noqa: PTH208
            if not name.isdigit():
                continue
            pid = int(name)
            seen = glance(pid)
            if seen is None:
                continue
            present.add(pid)
            known = self._meet(pid, out, seen)
            if known is None or not known.matched or known.dirty:
                continue
            overdue = now - known.read_at >= _REREAD
            known.dirty = everything or overdue or exec_pages(pid) != known.pages
        for pid in self._processes.keys() - present:
            self._leave(pid, out)

    # Files

    def _look(self, process: _Process, now: float, deadline: float, out: DiscoveryEvents) -> None:
        """Go through the mapped files of a matching process."""
        pid = process.key.pid
        process.pages = exec_pages(pid)  # before the maps: a later change is seen later
        process.read_at = now
        try:
            mappings = read_maps(pid)
        except OSError:
            process.dirty = False
            self._refused(process, out)
            return
        process.known &= set(mappings)
        for mapping in mappings:
            if mapping in process.known:
                continue
            if time.monotonic() >= deadline:
                return  # still dirty: goes on in the next poll
            try:
                file_id = self._examine(pid, mapping, out)
            except OSError:
                self._refused(process, out)
                continue
            process.known.add(mapping)
            if file_id is not None and file_id not in process.uses:
                process.uses.add(file_id)
                out.uses.append((process.key, file_id))
        process.dirty = False

    def _refused(self, process: _Process, out: DiscoveryEvents) -> None:
        """A file could not be opened: not permitted, unless unmapped or ended meanwhile."""
        if not process.refused and is_running(glance(process.key.pid)):
            process.refused = True
            out.unreadable.append(process.key)

    def _examine(self, pid: int, mapping: Mapping, out: DiscoveryEvents) -> FileId | None:
        """The identity of the mapped file if it is a copy of NCCL, else None.

        OSError when it cannot be opened.
        """
        status = stat_mapping(pid, mapping)
        seen = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if seen in self._examined:
            self._examined.move_to_end(seen)
            return self._examined[seen]
        file = open_mapping(pid, mapping)
        try:
            image = scan(file.fd)
        except ElfError:
            image = None
        found = None
        if image is None:
            os.close(file.fd)
        else:
            found = self._add(FoundFile(file, image, pid), out)
        self._examined[seen] = found
        if len(self._examined) > _REMEMBERED:
            self._examined.popitem(last=False)
        return found

    def _add(self, found: FoundFile, out: DiscoveryEvents) -> FileId:
        """Report the file unless it is known under another path; its lasting identity."""
        for other in self._files:
            if not found.file.same_file(other.file):
                continue
            if found.image.functions == other.image.functions:
                os.close(found.file.fd)
                return other.file.id
            out.changed.append(other.file.id)
            self.forget(other.file.id)
            break
        self._files.append(found)
        out.new_files.append(found)
        return found.file.id

    def _give(self, path: str) -> None:
        try:
            file = open_path(path)
        except OSError as err:
            raise NccluprobeError(
                f"--lib {path}: {err.strerror}; give the path of a copy of libnccl.so",
                ExitCode.NOT_NCCL,
            ) from err
        reason = "it does not define NCCL's functions"
        here = platform.machine()
        image: NcclImage | None = None
        try:
            image = scan(file.fd)
        except ElfError as err:
            reason = str(err)
        if image is not None and image.machine != here:
            reason = f"it is for {image.machine}, this machine is {here}"
            image = None
        if image is None:
            os.close(file.fd)
            raise NccluprobeError(
                f"--lib {path}: not a copy of NCCL ({reason}); "
                "give the libnccl.so, or the library that NCCL is linked into",
                ExitCode.NOT_NCCL,
            )
        given = DiscoveryEvents()
        self._add(FoundFile(file, image, 0), given)
        self._given += given.new_files
