"""What a rank's host does while others wait for it, as far as its trace tells."""

from __future__ import annotations

from enum import Enum

from nccluprobe.match.endpoint import Endpoint
from nccluprobe.nccl.api import TRACED, Kind

#: Calls that block until others come.
BLOCKING = frozenset(
    a.name
    for a in TRACED
    if a.kind in (Kind.COLLECTIVE, Kind.P2P, Kind.ONE_SIDED)
    or a.name == "ncclGroupEnd"
    or a.makes_comm
)
#: Main thread states in which nothing is waited for on the device.
_STOPPED = ("stopped", "uninterruptible")
#: System calls in which a thread may wait for the device: CUDA's own waits spin, poll,
#: yield or sleep on a futex; programs that poll an event sleep in between.  In any
#: other it waits for something else.
_CUDA_SYSCALLS = frozenset(
    {"poll", "ppoll", "ioctl", "futex", "sched_yield", "nanosleep", "clock_nanosleep", "(unknown)"}
)


class Host(Enum):
    """State of a host thread."""

    INSIDE = "inside"  # in a blocking NCCL call
    AWAY = "away"  # surely not waiting for the device
    OUTSIDE = "outside"  # outside NCCL: works, or waits for the device
    UNKNOWN = "unknown"


def may_wait(main: str | None, syscall: str | None) -> bool:
    """Whether a main thread in this state may wait for the device."""
    if main in _STOPPED:
        return False
    return main != "syscall" or syscall is None or syscall in _CUDA_SYSCALLS


def host_of(e: Endpoint) -> Host:
    """State of the host that makes this endpoint's calls."""
    who, lane = e.actor
    del who
    process = e.process
    inside = process.inside_of(lane)
    if inside is not None and inside.api in BLOCKING:
        return Host.INSIDE
    c = process.coverage
    if c is None or c.main in ("", "unknown"):
        return Host.UNKNOWN
    if c.main in _STOPPED:
        return Host.AWAY
    if c.main == "syscall" and c.syscall is not None and c.syscall not in _CUDA_SYSCALLS:
        return Host.AWAY
    return Host.OUTSIDE


def is_stopped(e: Endpoint) -> bool:
    """Whether its process is stopped: it cannot come, whatever it waits for."""
    c = e.process.coverage
    return not e.process.ended and c is not None and c.main == "stopped"
