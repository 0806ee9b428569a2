"""What the collector needs of its surroundings, as protocols.

The processes' side is ``procinfo.py`` and ``collect/exits.py``; tests
use fakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nccluprobe.collect.clock import Reading


class Ranks(Protocol):
    """What the launcher told a process."""

    @property
    def rank(self) -> int | None: ...
    @property
    def world_size(self) -> int | None: ...
    @property
    def local_rank(self) -> int | None: ...
    @property
    def source(self) -> str: ...
    @property
    def job(self) -> str | None: ...


class ProcInfo(Protocol):
    """Who a process is, read once when its file is made."""

    @property
    def start_ns(self) -> int: ...
    @property
    def start_ticks(self) -> int: ...
    @property
    def exe(self) -> str | None: ...
    @property
    def ns_pid(self) -> int | None: ...
    @property
    def uid(self) -> int: ...
    @property
    def gid(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def boot_id(self) -> str: ...
    @property
    def ranks(self) -> Ranks: ...


class ProcState(Protocol):
    """How a process is, read once a second."""

    @property
    def alive(self) -> bool: ...
    @property
    def main(self) -> str: ...
    @property
    def syscall(self) -> str | None: ...
    @property
    def cpu_ns(self) -> int: ...
    @property
    def start_ticks(self) -> int: ...


class Exit(Protocol):
    """How a process ended: "exited", "signaled" or "gone".  ``t_ns`` is CLOCK_MONOTONIC."""

    @property
    def pid(self) -> int: ...
    @property
    def how(self) -> str: ...
    @property
    def code(self) -> int | None: ...
    @property
    def signal(self) -> int | None: ...
    @property
    def t_ns(self) -> int: ...


class Exec(Protocol):
    """A watched process began another program."""

    @property
    def pid(self) -> int: ...
    @property
    def t_ns(self) -> int: ...


class ExitWatcher(Protocol):
    """Tells when watched processes end."""

    def watch(self, pid: int, start: int | None = None) -> bool:
        """Begin to watch; False: there is no such process (any more)."""
        ...

    def poll(self) -> Sequence[Exit]:
        """Ends since the last poll."""
        ...

    def take_execs(self) -> Sequence[Exec]:
        """Execs since the last call."""
        ...


class Procs(Protocol):
    """What /proc says."""

    def read(self, pid: int) -> ProcInfo:
        """ProcessLookupError when there is none."""
        ...

    def read_state(self, pid: int) -> ProcState:
        """What it does now."""
        ...


class Clock(Protocol):
    """The host's clocks."""

    def mono(self) -> int: ...

    def reading(self) -> Reading: ...


class Notify(Protocol):
    """Takes one-line messages: ``kind`` is process, library, communicator, end or problem."""

    def __call__(self, kind: str, text: str, /) -> None: ...
