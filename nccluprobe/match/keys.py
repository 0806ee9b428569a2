"""Who is meant: a process, and one rank of one communicator in it."""

from __future__ import annotations

from typing import NamedTuple


class ProcessKey(NamedTuple):
    """A process: pids are reused, start times are not."""

    boot_id: str
    pid: int
    start: int


class EndpointKey(NamedTuple):
    """The unit of matching: one rank of one communicator in one process."""

    process: ProcessKey
    source: int
    comm_id: int
    comm_rank: int | None
