"""What the model of jobs is made of: groups, parts of streams, where they meet, faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NEVER = float("inf")


class Group(NamedTuple):
    """A process group: PyTorch's name and description, global ranks by group rank."""

    name: str
    desc: str
    ranks: tuple[int, ...]


class Transfer(NamedTuple):
    """One send or receive; ``peer``: rank in the group."""

    send: bool
    peer: int
    shape: tuple[int, ...] = (4096, 1, 5120)


@dataclass(eq=False)
class Part:
    """What one rank has put into a stream of its own.

    ``slots``: what it does together with others; none: a kernel of its own, of ``length``.
    """

    rank: int
    queued: float
    slots: list[Slot] = field(default_factory=list)
    length: float = 0.0
    waits: int = 0  # parts before it that are not done
    ready: float = NEVER
    done: float = NEVER
    after: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False)
class Slot:
    """Where parts of several ranks meet."""

    needed: int
    length: float
    #: Rank whose data the others get; None: everybody needs everybody.
    root: int | None = None
    #: Small data of the root goes out without the others.
    eager: bool = False
    parts: dict[int, Part] = field(default_factory=dict)
    what: set[Any] = field(default_factory=set)
    broken: bool = False
    met: bool = False
    done_for: set[int] = field(default_factory=set)


@dataclass
class Entry:
    """What the recorder keeps of an operation, with the part that it waits for."""

    group: Group
    seq: int
    p2p: int
    op: int
    name: str
    inputs: list[list[int]]
    outputs: list[list[int]]
    dtype: str
    is_p2p: bool
    created: float
    part: Part | None
    timeout_ms: int
    record: int = 0


class Fault(NamedTuple):
    """What goes wrong with a rank.

    ``hang``: the host stops at its first step after ``at``; what is queued runs on.
    ``gpu``: the device dies; the host stops at its next step of one kind ``stop``
    ("step" or "sync").  ``kill``: both at once.  ``sleep``: the device runs nothing new.
    ``late``: the host stops for ``length``.  ``size``, ``op``, ``skip``, ``extra``: its next
    collective of two or more ranks is another one, left out, made twice; ``unsent``: its
    next send or receive is left out.
    """

    kind: str
    at: float
    stop: str = "sync"
    length: float = NEVER
