"""The host side of a rank: its process, threads, and the calls that a tracer sees."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from model.device import Endpoint, Latch, Stream
from model.ops import Instruction, Op

#: A thread: yields what it waits for, or seconds.
Gen = Generator[Latch | float, None, None]


@dataclass
class Record:
    """One call as a tracer sees it.  ``end`` None: still inside."""

    t: float
    thread: int
    api: str
    fields: dict[str, Any]
    end: float | None = None
    #: Line that a communicator's making or end adds: (kind, fields).
    comm_line: dict[str, Any] | None = None
    #: What the program called, of collectives, sends and receives.
    op: Op | None = None


@dataclass
class Thread:
    proc: Process
    index: int
    gen: Gen | None = None
    inside: Record | None = None
    #: Instruction it is at, for messages.
    at: Instruction | None = None
    done: bool = False


@dataclass
class Process:
    """A rank."""

    rank: int
    threads: list[Thread] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    streams: dict[int, Stream] = field(default_factory=dict)
    comms: dict[str, Endpoint] = field(default_factory=dict)
    #: The same, with those that have ended.
    known: dict[str, Endpoint] = field(default_factory=dict)
    endpoints: list[Endpoint] = field(default_factory=list)
    sems: dict[str, Latch] = field(default_factory=dict)
    groups: int = 0
    frozen: bool = False
    woken: list[Thread] = field(default_factory=list)
    #: When and how it ended: (t, code, signal).
    ended: tuple[float, int | None, int | None] | None = None
    #: What the main thread does: (since, main, syscall).
    states: list[tuple[float, str, str | None]] = field(default_factory=list)
    #: Intervals in which the process was stopped; the last may be open.
    stops: list[tuple[float, float | None]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.ended is not None or all(t.done for t in self.threads)
