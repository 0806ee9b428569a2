"""One process looked at: what it is, what it does, its communicators."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import nccluprobe
from nccluprobe import procinfo
from nccluprobe.collect.lines import hex_hash
from nccluprobe.inspect.libraries import Copy, Libraries
from nccluprobe.inspect.search import Budget, Found, Search
from nccluprobe.inspect.threads import NcclStacks, ThreadState, threads
from nccluprobe.nccl.comm_struct import CommState
from nccluprobe.trace.schema import SCHEMA_VERSION

Line = dict[str, Any]


@dataclass
class Looked:
    """A process, as ``inspect`` saw it; ``line`` is what --json writes."""

    pid: int
    info: procinfo.ProcInfo
    state: procinfo.ProcState
    copies: list[Copy]
    threads: list[ThreadState] = field(default_factory=list)
    found: Found = field(default_factory=Found)
    #: The communicators at the last reading, and whether their counters had moved.
    comms: list[tuple[CommState, bool]] = field(default_factory=list)
    t: int = 0
    unix: int = 0
    notes: list[str] = field(default_factory=list)

    def line(self) -> Line:
        """Its ``inspect`` line."""
        info, ranks = self.info, self.info.ranks
        line: Line = {
            "kind": "inspect",
            "schema": SCHEMA_VERSION,
            "t": self.t,
            "unix": self.unix,
            "host": info.host,
            "boot_id": info.boot_id,
            "pid": self.pid,
            "ns_pid": info.ns_pid,
            "start": info.start_ns,
            "exe": info.exe,
            "rank": ranks.rank,
            "rank_source": ranks.source,
            "world_size": ranks.world_size,
            "local_rank": ranks.local_rank,
            "probe_version": nccluprobe.__version__,
            "alive": self.state.alive,
            "main": self.state.main,
            "cpu": self.state.cpu_ns,
            "threads": [_thread(t) for t in self.threads],
            "libs": [_copy(c) for c in self.copies],
            "comms": [_comm(state, moving) for state, moving in self.comms],
            "complete": self.found.complete,
            "searched": self.found.searched,
            "took": int(self.found.seconds * 1e9),
            "notes": self.notes,
        }
        if self.state.syscall is not None:
            line["syscall"] = self.state.syscall
        if ranks.job:
            line["job"] = ranks.job
        return line


def _thread(thread: ThreadState) -> Line:
    line: Line = {"tid": thread.tid, "name": thread.name, "state": thread.state}
    optional = {"syscall": thread.syscall, "wchan": thread.wchan, "api": thread.api}
    line.update((k, v) for k, v in optional.items() if v is not None)
    return line


def _copy(copy: Copy) -> Line:
    layout = copy.layout
    return {
        "path": copy.path,
        "nccl_version": copy.image.version,
        "build_id": copy.image.build_id,
        "layout": None if layout is None else layout.method,
        "confidence": None if layout is None else layout.confidence,
    }


def _comm(state: CommState, moving: bool) -> Line:
    line: Line = {
        "hash": None if state.hash is None else hex_hash(state.hash),
        "comm_rank": state.rank,
        "nranks": state.nranks,
        "dev": state.device,
        "name": state.name,
        "seqs": None if state.seqs is None else list(state.seqs),
        "async_error": state.async_error,
        "moving": moving,
    }
    optional = {
        "init_state": state.init_state,
        "finalized": state.finalized,
        "destroyed": state.destroyed,
    }
    line.update((k, v) for k, v in optional.items() if v)
    return line


class Inspector:
    """Looks at processes one after another, then reads all counters at one time."""

    def __init__(self, budget: Budget | None = None) -> None:
        self._budget = budget or Budget()
        self._libraries = Libraries()
        self._searches: list[tuple[Looked, Search]] = []

    def maps_nccl(self, pid: int) -> bool:
        """Whether the process maps a copy of NCCL; PermissionError when it may not be told."""
        return bool(self._libraries.of(pid))

    def look(self, pid: int) -> Looked:
        """Search one process.  ProcessLookupError or PermissionError when that cannot be."""
        info = procinfo.read(pid)
        copies = self._libraries.of(pid)
        looked = Looked(pid, info, procinfo.read_state(pid), copies)
        for copy in copies:
            if copy.layout is None:
                looked.notes.append(f"{copy.path}: layout refused, {copy.refused}")
            elif not copy.layout.searchable:
                version = copy.image.version or "of unknown version"
                looked.notes.append(
                    f"NCCL {version}: communicators have no magic to be found by (2.21 and later)"
                )
        layouts = list(dict.fromkeys(c.layout for c in copies if c.layout is not None))
        if not copies:
            looked.notes.append("no copy of NCCL is mapped")
            looked.t, looked.unix = time.clock_gettime_ns(time.CLOCK_MONOTONIC), time.time_ns()
            return looked
        search = Search(pid, layouts, self._budget)
        self._searches.append((looked, search))
        looked.found = search.run()
        if not looked.found.complete:
            looked.notes.append(f"the search is not complete: {looked.found.why}")
        if looked.found.swapped:
            looked.notes.append(f"{looked.found.swapped >> 20} MB are swapped out: not searched")
        return looked

    def finish(self) -> None:
        """Read what was found once more, all as close together as can be."""
        for looked, search in self._searches:
            stacks = NcclStacks(looked.pid, looked.copies, search.read)
            looked.state = procinfo.read_state(looked.pid)
            looked.threads = threads(looked.pid, stacks)
            stacks.close()
        for looked, search in self._searches:
            looked.t = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            looked.unix = time.time_ns()
            try:
                again = search.again()
            except OSError:
                again = [None] * len(looked.found.comms)
                looked.notes.append("the process ended meanwhile")
            for (first, _), last in zip(looked.found.comms, again, strict=True):
                if last is not None:
                    looked.comms.append((last, last.seqs != first.seqs))
                elif looked.state.alive:
                    looked.notes.append("a communicator was destroyed meanwhile")
        for _, search in self._searches:
            search.close()
        self._searches.clear()


def look_at(pids: Iterable[int], budget: Budget | None = None) -> list[Looked]:
    """All these processes; those that cannot be looked at are left out."""
    inspector = Inspector(budget)
    found = []
    for pid in pids:
        try:
            found.append(inspector.look(pid))
        except OSError:
            continue
    inspector.finish()
    return found
