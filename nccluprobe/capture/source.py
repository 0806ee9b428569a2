"""What every capture front offers to the collector.

The collector knows nothing of BPF or shared memory: it drains whole records,
asks which calls are still inside, and asks what was lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from nccluprobe.nccl.layout.model import Layout


@dataclass(frozen=True)
class Library:
    """A copy of NCCL, as numbered by the front (``Record.lib``).

    ``path`` is how a process sees it; ``version`` is like "2.28.9", None when
    it could not be read; ``build_id`` is hex or None.  ``layout`` is that of its
    ``struct ncclComm``, None when it was refused or not looked for.
    """

    lib: int
    path: str
    version: str | None
    build_id: str | None
    layout: Layout | None = None


@dataclass
class Losses:
    """Cumulative counts since the front began; they never fall.

    ``by_process`` maps (pid, epoch) to records lost because the ring was full;
    ``blind`` maps (pid, epoch) to calls without identity because a map was
    full.  ``unattributed`` could not be told by process.  ``overwritten`` maps
    (pid, epoch) to records overwritten before they were read (preload only).
    """

    by_process: dict[tuple[int, int], int] = field(default_factory=dict)
    blind: dict[tuple[int, int], int] = field(default_factory=dict)
    overwritten: dict[tuple[int, int], int] = field(default_factory=dict)
    unattributed: int = 0


class Source(Protocol):
    """One capture front, as the collector sees it."""

    #: "ebpf" or "preload"
    front: str
    #: False when only entries are probed.
    exits: bool

    def drain(self) -> Iterable[bytes]:
        """All records now in the ring, oldest first, each chunk a whole number of records."""
        ...

    def in_flight(self) -> bytes:
        """Records (t_exit 0) of all calls that are inside now.

        A record may be torn, as it is copied while the traced thread runs: the
        caller believes one only when two reads in a row agree.
        """
        ...

    def losses(self) -> Losses:
        """Counts so far."""
        ...

    def library(self, lib: int) -> Library | None:
        """The copy of NCCL that a record speaks of."""
        ...

    def deny(self, pid: int, epoch: int) -> None:
        """Record nothing more of this process (it does not match)."""
        ...

    def forget(self, pid: int, epoch: int) -> None:
        """The process is gone: free what is kept for it."""
        ...
