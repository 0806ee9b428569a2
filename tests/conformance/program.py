"""A tiny language for programs that use NCCL: what each rank's host does, in order.

A program has communicators by name and one list of steps per rank.  ``model``
runs it by NCCL's semantics; ``stage`` runs it on the stand-in with real probes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from nccluprobe.nccl.api import BY_NAME, Api, Role
from nccluprobe.nccl.enums import DATATYPE_BYTES

#: Communicator of all ranks, and a second one of the same ranks.
WORLD, OTHER = "world", "other"

_DEFAULTS: dict[Role, tuple[str, Any]] = {
    Role.COUNT: ("count", 1024),
    Role.DATATYPE: ("datatype", "float32"),
    Role.OP: ("op", "sum"),
    Role.ROOT: ("root", 0),
    Role.PEER: ("peer", 0),
}


@dataclass(frozen=True)
class Call:
    """One collective, send or receive; ``args`` has what its api takes, all of it."""

    comm: str
    name: str
    args: Mapping[str, Any]
    stream: int = 0

    @cached_property
    def api(self) -> Api:
        return BY_NAME[self.name]

    @property
    def bytes(self) -> int:
        size: int = self.args["count"] * DATATYPE_BYTES[self.args["datatype"]]
        return size

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """What NCCL needs to be equal at all members."""
        return (self.api.canonical, *sorted(self.args.items()))

    def but(self, **args: Any) -> Call:
        """The same call with other arguments."""
        return replace(self, args={**self.args, **args})


@dataclass(frozen=True)
class Group:
    """Calls between GroupStart and GroupEnd; ``ended`` False: GroupEnd never comes."""

    calls: tuple[Call, ...]
    ended: bool = True


@dataclass(frozen=True)
class Sync:
    """The host waits until the device has done all that it was given."""


@dataclass(frozen=True)
class Work:
    """The host does something else for so many seconds."""

    seconds: float


#: A host whose process has got a signal that stops it.
STOPPED = "stopped"


@dataclass(frozen=True)
class Stop:
    """The host never comes back from something that is not NCCL, such as a data loader.

    ``inside``: the system call it is in, None when it computes, or STOPPED.  In a
    futex it may, to one who looks from outside, wait for the device or for work as well.
    """

    inside: str | None = "futex"


@dataclass(frozen=True)
class Exit:
    """The process ends at once."""

    code: int | None = 0
    signal: int | None = None


@dataclass(frozen=True)
class End:
    """Destroy or abort of a communicator."""

    comm: str
    how: str = "destroy"


Step = Call | Group | Sync | Work | Stop | Exit | End


@dataclass
class Program:
    """What every rank does."""

    ranks: list[list[Step]]
    comms: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        everybody = tuple(range(len(self.ranks)))
        self.comms = {WORLD: everybody, OTHER: everybody, **self.comms}

    @property
    def size(self) -> int:
        return len(self.ranks)


def call(name: str, comm: str = WORLD, stream: int = 0, **args: Any) -> Call:
    """A call with plain values for what is not given."""
    own = {key: value for role, (key, value) in _DEFAULTS.items() if role in BY_NAME[name].args}
    unknown = args.keys() - own.keys()
    assert not unknown, f"{name} takes no {unknown}"
    return Call(comm, name, {**own, **args}, stream)


def send(peer: int, comm: str = WORLD, **args: Any) -> Call:
    return call("ncclSend", comm, peer=peer, **args)


def recv(peer: int, comm: str = WORLD, **args: Any) -> Call:
    return call("ncclRecv", comm, peer=peer, **args)


def group(*calls: Call) -> Group:
    return Group(calls)


def synced(steps: Iterable[Step]) -> list[Step]:
    """The host waits for the device after each call, as with ``loss.item()``.

    Not where it goes away right after it.
    """
    todo = list(steps)
    found: list[Step] = []
    for step, after in zip(todo, [*todo[1:], None], strict=True):
        found.append(step)
        if isinstance(step, Call | Group) and not isinstance(after, Stop | Exit):
            found.append(Sync())
    return found


def same(n: int, steps: Sequence[Step]) -> list[list[Step]]:
    """One program for all ranks, a list for each."""
    return [list(steps) for _ in range(n)]
