"""Which process a file of the preload library belongs to.

The library knows its process as its own pid namespace numbers it; the traces
speak of the numbers outside.  A pid alone proves nothing, as it may be another
process's by now: the start time must agree.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nccluprobe import procinfo
from nccluprobe.capture.preload_layout import Header

#: The library's start time is off by a tick when a time namespace shifts it.
_SLACK = 1


@dataclass
class Process:
    """A living process; ``pid`` is its number here, ``inner`` the one it knows."""

    pid: int
    inner: int
    start_ticks: int
    _tids: dict[int, int] = field(default_factory=dict)

    def host_tid(self, tid: int) -> int:
        """A thread's number here, by the one the process knows."""
        if self.pid == self.inner:
            return tid
        if tid not in self._tids:
            for name in _names(f"/proc/{self.pid}/task"):
                with contextlib.suppress(OSError, ValueError):
                    self._tids[_ns_pids(f"/proc/{self.pid}/task/{name}/status")[-1]] = int(name)
        return self._tids.get(tid, tid)

    def has_thread(self, tid: int) -> bool:
        """Whether the thread lives; True when nobody can tell."""
        host = self.host_tid(tid)
        return Path(f"/proc/{self.pid}/task/{host}").exists() or not is_same(self)

    def maps(self, inode: int) -> bool:
        """Whether the process still maps the file: a new program does not."""
        try:
            text = Path(f"/proc/{self.pid}/maps").read_bytes()
        except OSError:
            return True
        return b" %d " % inode in text or not text


def is_same(process: Process) -> bool:
    """Whether the process is alive and no other one with its number."""
    try:
        state = procinfo.read_state(process.pid)
    except (OSError, ValueError):
        return False
    return state.alive and abs(state.start_ticks - process.start_ticks) <= _SLACK


def find_process(header: Header, inode: int) -> Process | None:
    """The living process that writes the file; None when it is gone."""
    if header.boot_id and header.boot_id != procinfo.boot_id():
        return None
    found = _candidate(header.pid, header)
    if found is None or not found.maps(inode):
        # In a pid namespace of its own: looked for by the number it has there.
        found = None
        for name in _names("/proc"):
            if name.isdecimal() and int(name) != header.pid:
                with contextlib.suppress(OSError, ValueError):
                    numbers = _ns_pids(f"/proc/{name}/status")
                    if len(numbers) > 1 and numbers[-1] == header.pid:
                        found = _candidate(int(name), header)
                        if found is not None and found.maps(inode):
                            break
                        found = None
    return found


def _candidate(pid: int, header: Header) -> Process | None:
    try:
        state = procinfo.read_state(pid)
    except (OSError, ValueError):
        return None
    if not state.alive or abs(state.start_ticks - header.start_ticks) > _SLACK:
        return None
    return Process(pid, header.pid, state.start_ticks)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names, and often
    except OSError:
        return []


def _ns_pids(path: str) -> list[int]:
    for line in Path(path).read_text().splitlines():
        if line.startswith("NSpid:"):
            return [int(word) for word in line.split()[1:]]
    return []


class Headers(Protocol):
    """Knows what the files say."""

    def header_of(self, pid: int) -> tuple[Header, bool] | None:
        """What the latest file of a process says, and whether it is alive."""
        ...


class RecordedProcs:
    """/proc for the collector, and the files' own words on processes that are gone."""

    def __init__(self, source: Headers) -> None:
        self._source = source

    def read(self, pid: int) -> procinfo.ProcInfo:
        """Who the process is or was; ProcessLookupError when nobody knows."""
        said = self._source.header_of(pid)
        if said is None:
            raise ProcessLookupError(f"no process {pid}")
        header, alive = said
        if alive:
            with contextlib.suppress(OSError, ValueError):
                return procinfo.read(pid)
        ticks = header.start_ticks
        return procinfo.ProcInfo(
            pid=pid,
            start_ns=ticks * (1_000_000_000 // os.sysconf("SC_CLK_TCK")),
            start_ticks=ticks,
            exe=header.exe or None,
            ns_pid=header.pid,
            uid=header.uid,
            gid=header.gid,
            host=header.host,
            boot_id=header.boot_id,
            ranks=procinfo.ranks_of(header.environ),
            environ_read=True,
        )

    def read_state(self, pid: int) -> procinfo.ProcState:
        """What it does now."""
        said = self._source.header_of(pid)
        if said is not None and not said[1]:
            return procinfo.ProcState(False, "dead", None, 0, 0)
        return procinfo.read_state(pid)
