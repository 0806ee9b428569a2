"""What is said of a process that cannot be looked at any more."""

from __future__ import annotations

import os
from dataclasses import dataclass

from nccluprobe.procinfo import boot_id


@dataclass(frozen=True)
class Ending:
    """How and when the process ended, and when its last records have surely come."""

    t: int
    how: str
    code: int | None
    signal: int | None
    finish_at: int


@dataclass(frozen=True)
class _NoRanks:
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    source: str = "unknown"
    job: str | None = None


class Vanished:
    """A process that was gone before it could be described."""

    def __init__(self, pid: int) -> None:
        uname = os.uname()
        self.pid = pid
        self.start_ns = 0
        self.start_ticks = 0
        self.exe: str | None = None
        self.ns_pid: int | None = None
        self.uid = os.geteuid()
        self.gid = os.getegid()
        self.host = uname.nodename
        self.boot_id = boot_id()
        self.ranks = _NoRanks()


@dataclass(frozen=True)
class Ended:
    """The state of a process that ended."""

    alive: bool = False
    main: str = "dead"
    syscall: str | None = None
    cpu_ns: int = 0
    start_ticks: int = 0
