"""What NCCL does with a program: which calls complete, where each host and device stops.

The model is blocking and knows nothing of the matcher.

- A call queues a kernel on the rank's stream and returns.  Kernels of one
  stream, and those of one communicator, run one after the other.
- A collective's kernel ends when those of all members run and agree; if they
  differ it never ends, or (``passes``) it ends with wrong data.  A call with
  count 0 is discarded.
- The k-th send between two ranks of a communicator meets the k-th receive.  A
  small send ends by itself while a buffer is free.  All sends and receives of a
  group run in one kernel per communicator.
- The first collective of a communicator, and the first send or receive between
  two ranks, wait in the call (in GroupEnd) for the peers.
- A stream takes ``DEPTH`` kernels; the next call waits inside.
- An abort or an exit takes the rank's kernels away; nobody else is told.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from conformance.program import Call, End, Exit, Group, Program, Step, Stop, Sync, Work
from nccluprobe.nccl.api import Kind

DEPTH = 1021
BUFFER = 64 * 1024
BUFFERS = 8
#: Seconds: between two calls, of a call, of a kernel.
STEP, CALL, KERNEL = 1e-3, 1e-5, 2e-4


@dataclass
class Seen:
    """A call of one host: entry, and return if it did."""

    name: str
    at: float
    comm: str | None = None
    call: Call | None = None
    group: int | None = None
    gpos: int | None = None
    left: float | None = None
    how: str | None = None  # destroy or abort


@dataclass
class Host:
    """One rank's host: what it called, and since when it is where."""

    calls: list[Seen] = field(default_factory=list)
    #: (time, where): run, nccl, cuda (waits for the device), gone, or a system call.
    states: list[tuple[float, str]] = field(default_factory=lambda: [(0.0, "run")])
    exit: tuple[float, Exit] | None = None

    def state(self, t: float) -> str:
        return [where for at, where in self.states if at <= t][-1]


@dataclass(eq=False)
class _Kernel:
    rank: int
    calls: list[tuple[Call, int]]  # with the ordinal that pairs it
    queues: list[Hashable]
    running: bool = False
    ended: bool = False
    ending: bool = False


class Model:
    """Runs a program to where nothing moves any more."""

    def __init__(self, program: Program, passes: bool = False, start: float = 1.0) -> None:
        self.program = program
        self.passes = passes
        self.now = start
        self.hosts = [Host() for _ in program.ranks]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._n = itertools.count()
        self._blocked: dict[int, tuple[Callable[[], bool], Callable[[], None]]] = {}
        self._queues: dict[Hashable, deque[_Kernel]] = defaultdict(deque)
        self._ordinals: dict[Hashable, int] = defaultdict(int)
        self._meet: dict[Hashable, dict[int, _Kernel]] = defaultdict(dict)
        self._open: dict[int, list[_Kernel]] = defaultdict(list)
        self._met: set[Hashable] = set()
        self._groups: dict[int, int] = defaultdict(int)
        for rank in range(program.size):
            # Hosts are never quite level.
            self._at(start + 3.7e-5 * ((rank * 7 + 3) % program.size), self._stepper(rank, 0))

    def run(self) -> Model:
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
            self._wake()
        return self

    def hung(self, rank: int) -> bool:
        """Whether this host waits for something that never comes."""
        return rank in self._blocked

    # --- hosts ---

    def _at(self, t: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (t, next(self._n), act))

    def _stepper(self, rank: int, pc: int) -> Callable[[], None]:
        return lambda: self._step(rank, pc)

    def _step(self, rank: int, pc: int) -> None:
        host, steps = self.hosts[rank], self.program.ranks[rank]
        if pc == len(steps):
            host.states.append((self.now, "futex"))  # the next epoch never begins here
            return
        step: Step = steps[pc]
        after = self._stepper(rank, pc + 1)
        if isinstance(step, Call):
            self._collect(rank, [self._enter(rank, step.name, call=step)], after)
        elif isinstance(step, Group):
            self._grouped(rank, step, after)
        elif isinstance(step, Sync):
            self._wait(rank, "cuda", lambda: not self._open[rank], after)
        elif isinstance(step, Work):
            self._at(self.now + step.seconds, after)
        elif isinstance(step, Stop):
            host.states.append((self.now, step.inside or "run"))
        elif isinstance(step, Exit):
            host.exit = (self.now, step)
            host.states.append((self.now, "gone"))
            self._drop(rank, None)
        else:
            self._end(rank, step, after)

    def _enter(self, rank: int, name: str, at: float | None = None, **more: object) -> Seen:
        seen = Seen(name, self.now if at is None else at)
        for key, value in more.items():
            setattr(seen, key, value)
        if seen.call is not None:
            seen.comm = seen.call.comm
        self.hosts[rank].calls.append(seen)
        return seen

    def _grouped(self, rank: int, step: Group, after: Callable[[], None]) -> None:
        self._groups[rank] += 1
        number, at = self._groups[rank], self.now
        self._enter(rank, "ncclGroupStart").left = at + CALL
        calls = []
        for i, c in enumerate(step.calls):
            at += 2 * CALL
            seen = self._enter(rank, c.name, at, call=c, group=number, gpos=i)
            seen.left = at + CALL
            calls.append(seen)
        if not step.ended:
            self.hosts[rank].states.append((at + CALL, "futex"))
            return
        end = self._enter(
            rank, "ncclGroupEnd", at + 2 * CALL, group=number, gpos=len(step.calls)
        )  # fmt: skip
        self._collect(rank, [*calls, end], after)

    def _collect(self, rank: int, seen: list[Seen], after: Callable[[], None]) -> None:
        """Takes effect: waits in the last of these calls for peers and for room, then queues."""
        calls = [s.call for s in seen if s.call is not None and s.call.args["count"] > 0]
        for c in calls:
            self._met |= set(self._mine(rank, c))
        needs = {need for c in calls for need in self._peers(rank, c)}
        streams = {c.stream for c in calls}

        def ready() -> bool:
            room = all(len(self._queues["stream", rank, s]) < DEPTH for s in streams)
            return room and needs <= self._met

        def go() -> None:
            seen[-1].left = max(self.now, seen[-1].at) + CALL
            self._queue(rank, calls)
            self._at(seen[-1].left + STEP, after)

        self._wait(rank, "nccl", ready, go, delay=0.0)

    def _mine(self, rank: int, c: Call) -> list[Hashable]:
        """What peers wait for in their first call."""
        if c.api.kind is Kind.COLLECTIVE:
            return [("coll", c.comm, rank)]
        return [(c.api.direction, c.comm, rank, self._peer(c))]

    def _peers(self, rank: int, c: Call) -> list[Hashable]:
        if c.api.kind is Kind.COLLECTIVE:
            return [("coll", c.comm, r) for r in self.program.comms[c.comm]]
        other = "recv" if c.api.direction == "send" else "send"
        return [(other, c.comm, self._peer(c), rank)]

    def _peer(self, c: Call) -> int:
        """The peer's rank in the job."""
        peer: int = c.args["peer"]
        return self.program.comms[c.comm][peer]

    def _wait(
        self,
        rank: int,
        where: str,
        ready: Callable[[], bool],
        after: Callable[[], None],
        delay: float = STEP,
    ) -> None:
        if ready():
            self._at(self.now + delay, after)
            return
        self.hosts[rank].states.append((self.now, where))

        def woken() -> None:
            self.hosts[rank].states.append((self.now, "run"))
            self._at(self.now + delay, after)

        self._blocked[rank] = (ready, woken)

    def _wake(self) -> None:
        for rank, (ready, woken) in list(self._blocked.items()):
            if ready():
                del self._blocked[rank]
                woken()

    def _end(self, rank: int, step: End, after: Callable[[], None]) -> None:
        name = "ncclCommAbort" if step.how == "abort" else "ncclCommDestroy"
        seen = self._enter(rank, name, comm=step.comm, how=step.how)
        if step.how == "abort":
            self._drop(rank, step.comm)

        def leave() -> None:
            seen.left = self.now + CALL
            self._at(self.now + STEP, after)

        def idle() -> bool:
            return not any(step.comm in _comms(k) for k in self._open[rank])

        self._wait(rank, "nccl", idle, leave, delay=0.0)

    # --- devices ---

    def _queue(self, rank: int, calls: list[Call]) -> None:
        plans: list[list[Call]] = []
        p2p: dict[Hashable, list[Call]] = {}
        for c in calls:
            if c.api.kind is Kind.COLLECTIVE:
                plans.append([c])
            elif (plan := p2p.get((c.comm, c.stream))) is not None:
                plan.append(c)
            else:
                plans.append(p2p.setdefault((c.comm, c.stream), [c]))
        for plan in plans:
            numbered = []
            for c in plan:
                meet = self._meeting(rank, c)
                key = (meet, rank if c.api.kind is Kind.COLLECTIVE else c.api.direction)
                numbered.append((c, self._ordinals[key]))
                self._ordinals[key] += 1
            queues: list[Hashable] = [("stream", rank, plan[0].stream), (rank, plan[0].comm)]
            kernel = _Kernel(rank, numbered, queues)
            for q in queues:
                self._queues[q].append(kernel)
            self._open[rank].append(kernel)
            self._begin(kernel)

    def _meeting(self, rank: int, c: Call) -> Hashable:
        if c.api.kind is Kind.COLLECTIVE:
            return ("coll", c.comm)
        peer = self._peer(c)
        return (c.comm, rank, peer) if c.api.direction == "send" else (c.comm, peer, rank)

    def _begin(self, kernel: _Kernel) -> None:
        """Runs, if it is first in all of its queues."""
        if kernel.running or any(self._queues[q][0] is not kernel for q in kernel.queues):
            return
        kernel.running = True
        met = [kernel]
        for c, n in kernel.calls:
            place = self._meet[self._meeting(kernel.rank, c), n]
            place[kernel.rank] = kernel
            # The last member of a collective ends it; before, there is nothing to look at.
            if c.api.kind is Kind.P2P or len(place) == len(self.program.comms[c.comm]):
                met += place.values()
        for k in dict.fromkeys(met):
            self._try_end(k)

    def _try_end(self, kernel: _Kernel) -> None:
        if not kernel.ending and all(self._done(kernel, c, n) for c, n in kernel.calls):
            kernel.ending = True
            self._at(self.now + KERNEL, lambda: self._ended(kernel))

    def _done(self, kernel: _Kernel, c: Call, n: int) -> bool:
        """Whether this call's part of a running kernel is done."""
        meet = self._meeting(kernel.rank, c)
        place = self._meet[meet, n]
        if c.api.kind is Kind.COLLECTIVE:
            members = self.program.comms[c.comm]
            if len(place) < len(members):
                return False
            signs = {k.calls[0][0].signature for k in place.values()}
            return self.passes or len(signs) == 1
        other = place.get(self._peer(c))
        if c.api.direction == "send" and other is None:
            taken = n - self._ordinals["taken", meet]
            return c.bytes <= BUFFER and taken < BUFFERS
        if other is None:
            return False
        twin = next(x for x, i in other.calls if i == n and self._meeting(other.rank, x) == meet)
        same = (twin.bytes, twin.args["datatype"]) == (c.bytes, c.args["datatype"])
        small_send = c.api.direction == "send" and c.bytes <= BUFFER
        return self.passes or same or small_send

    def _ended(self, kernel: _Kernel) -> None:
        if kernel.ended:
            return
        kernel.ended = True
        for c, _ in kernel.calls:
            if c.api.direction == "recv":
                self._ordinals["taken", self._meeting(kernel.rank, c)] += 1
                for k in self._open[self._peer(c)]:
                    if k.running:
                        self._try_end(k)
        self._open[kernel.rank].remove(kernel)
        for q in kernel.queues:
            self._queues[q].remove(kernel)
        for q in kernel.queues:
            if self._queues[q]:
                self._begin(self._queues[q][0])

    def _drop(self, rank: int, comm: str | None) -> None:
        for kernel in list(self._open[rank]):
            if comm is None or comm in _comms(kernel):
                for c, n in kernel.calls:
                    self._meet[self._meeting(rank, c), n].pop(rank, None)
                kernel.ending = True
                self._ended(kernel)


def _comms(kernel: _Kernel) -> set[str]:
    return {c.comm for c, _ in kernel.calls}
