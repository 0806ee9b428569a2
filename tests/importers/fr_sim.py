"""A small discrete-event model of ranks that queue NCCL work on CUDA streams.

A host queues operations and goes on; an operation runs when what is before it in
its stream is done, and ends when all that it needs from other ranks runs as well.
Hosts may stop, devices may die: the rest follows.  Times in seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterable
from typing import Any

from importers.fr_parts import NEVER, Entry, Fault, Group, Part, Slot, Transfer


class Sim:
    """The job.  ``faults``: by rank; ``cut``: slots of these groups end at no time from then on."""

    def __init__(
        self, ranks: int, faults: dict[int, Fault], cut: dict[Group, float] | None = None
    ) -> None:
        self.now = 0.0
        self.faults = faults
        self.cut = cut or {}
        self.hosts = {r: Host(self, r) for r in range(ranks)}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._slots: dict[tuple[Any, ...], Slot] = {}

    def at(self, t: float, what: Callable[[], None]) -> None:
        """Do something then."""
        self._count += 1
        heapq.heappush(self._events, (t, self._count, what))

    def run(self, until: float = NEVER) -> None:
        """Until nothing more happens."""
        for h in self.hosts.values():
            self.at(0.0, h.step)
        while self._events:
            t, _, what = heapq.heappop(self._events)
            if t > until:
                break
            self.now = t
            what()

    def stuck(self) -> bool:
        """Whether something that was queued is not done."""
        parts = (e.part for h in self.hosts.values() for e in h.entries)
        return any(p is not None and p.done == NEVER for p in parts)

    def slot(self, key: tuple[Any, ...], needed: int, length: float) -> Slot:
        """The slot of this name."""
        found = self._slots.get(key)
        if found is None:
            found = self._slots[key] = Slot(needed, length)
        return found

    # -- devices -----------------------------------------------------------

    def dead(self, rank: int, t: float) -> bool:
        """Whether the device of a rank runs nothing new at this time."""
        f = self.faults.get(rank)
        return f is not None and f.kind in ("gpu", "kill", "sleep") and t >= f.at

    def put(self, part: Part, before: Iterable[Part]) -> None:
        """Queue a part behind others."""
        for p in {id(x): x for x in before}.values():
            if p.done > self.now:
                part.waits += 1
                p.after.append(lambda: self._one_less(part))
        if not part.waits:
            self._ready(part)

    def _one_less(self, part: Part) -> None:
        part.waits -= 1
        if not part.waits:
            self._ready(part)

    def _ready(self, part: Part) -> None:
        if self.dead(part.rank, self.now):
            return
        part.ready = self.now
        if not part.slots:
            self.at(self.now + part.length, lambda: self._finish(part))
        for s in part.slots:
            self._check(s)

    def _check(self, s: Slot) -> None:
        if s.broken or len(s.what) > 1:
            return
        running = [r for r, p in s.parts.items() if p.ready <= self.now]
        if s.root is not None and s.eager:
            if s.root in running:
                for r in running:
                    if r not in s.done_for:
                        self.at(self.now + s.length, lambda r=r: self._meet(s, [r]))  # type: ignore[misc]
        elif len(running) == s.needed and not s.met:
            s.met = True
            self.at(self.now + s.length, lambda: self._meet(s, running))

    def _meet(self, s: Slot, ranks: list[int]) -> None:
        if any(self.dead(r, self.now) and self.faults[r].kind != "sleep" for r in ranks):
            s.broken = True  # a device died in its midst
            return
        for r in ranks:
            if r in s.done_for:
                continue
            s.done_for.add(r)
            p = s.parts[r]
            if all(r in x.done_for for x in p.slots):
                self._finish(p)

    def _finish(self, part: Part) -> None:
        if part.done <= self.now or (
            self.dead(part.rank, self.now) and self.faults[part.rank].kind != "sleep"
        ):
            return
        part.done = self.now
        for what in part.after:
            what()
        part.after.clear()


Program = Generator[Any, None, None]


class Host:
    """One rank's process: its program, its streams, its recorder."""

    def __init__(self, sim: Sim, rank: int) -> None:
        self.sim = sim
        self.rank = rank
        self.program: Program | None = None
        self.entries: list[Entry] = []
        self.seq: dict[str, int] = {}
        self.p2p: dict[str, int] = {}
        self.ops: dict[str, int] = {}
        #: Last number given out per group, as PyTorch's status has it, with its part.
        self.works: dict[str, list[tuple[int, Part]]] = {}
        self.stopped_at: float | None = None
        self._streams: dict[Any, Part] = {}
        self._tail: list[Part] = []  # what the compute stream waits for
        self._pairs: dict[Any, int] = {}
        self.timeout_ms = 180_000

    # -- what programs call ------------------------------------------------

    def collective(
        self,
        g: Group,
        name: str,
        inputs: list[int],
        outputs: list[int] | None = None,
        dtype: str = "BFloat16",
        wait: bool = True,
        root: int | None = None,
        length: float = 5e-4,
        timeout_ms: int = 0,
    ) -> Part:
        """Queue a collective; ``wait``: the compute stream waits for it."""
        wrong = self._goes_wrong(("size", "op", "skip", "extra")) if len(g.ranks) > 1 else None
        if wrong == "size":
            inputs, outputs = [7, *inputs], [7, *(outputs or inputs)]
        elif wrong == "op":
            name = "broadcast" if name != "broadcast" else "all_reduce"
        elif wrong == "skip":
            return Part(self.rank, self.sim.now, done=self.sim.now)
        elif wrong == "extra":
            self.collective(g, name, inputs, outputs, dtype, wait, root, length, timeout_ms)
        seq = self.seq[g.name] = self.seq.get(g.name, 0) + 1
        self.ops[g.name] = self.ops.get(g.name, 0) + 1
        s = self.sim.slot((g, seq), len(g.ranks), length)
        uneven = name.startswith("all_to_all")
        s.what.add((name, None if uneven else (tuple(inputs), tuple(outputs or inputs))))
        if root is not None:
            s.root, s.eager = g.ranks[root], True
        part = self._queue((g,), [s])
        cut = self.sim.cut.get(g, NEVER)
        s.broken |= self.sim.now >= cut
        self._record(g, name, [inputs], [outputs or inputs], dtype, False, part, timeout_ms)
        self.works.setdefault(g.name, []).append((seq, part))
        if wait:
            self.wait(part)
        return part

    def coalesced(self, g: Group, calls: list[tuple[str, list[int], list[int]]]) -> Part:
        """Collectives put together: one number, and an entry at the end that has the state."""
        seq = self.seq[g.name] = self.seq.get(g.name, 0) + 1
        s = self.sim.slot((g, seq), len(g.ranks), 1e-3)
        s.what.add(tuple((n, tuple(i)) for n, i, _ in calls))
        s.broken |= self.sim.now >= self.sim.cut.get(g, NEVER)
        part = self._queue((g,), [s])
        for name, inputs, outputs in calls:
            self.ops[g.name] = self.ops.get(g.name, 0) + 1
            self._record(g, name, [inputs], [outputs], "BFloat16", False, None, 0)
        self._record(g, "coalesced", [], [], "", False, part, 0)
        self.works.setdefault(g.name, []).append((seq, part))
        self.wait(part)
        return part

    def transfer(self, g: Group, t: Transfer) -> Part:
        """A send or receive by itself: a stream per pair."""
        if self._goes_wrong(("unsent",)):
            return Part(self.rank, self.sim.now, done=self.sim.now)
        self.p2p[g.name] = self.p2p.get(g.name, 0) + 1
        self.ops[g.name] = self.ops.get(g.name, 0) + 1
        me = g.ranks.index(self.rank)
        pair = (g, min(me, t.peer), max(me, t.peer))
        part = self._queue(pair, [self._pair(pair, g, me, t)])
        name = f"send {me}->{t.peer}" if t.send else f"recv {me}<-{t.peer}"
        shape = list(t.shape)
        self._record(g, name, [shape], [shape], "BFloat16", True, part, 0)
        self.works.setdefault(g.name, []).append((self.p2p[g.name], part))
        return part

    def batch(self, g: Group, ts: list[Transfer]) -> Part:
        """Sends and receives put together: one kernel on the group's stream."""
        if self._goes_wrong(("unsent",)):
            return Part(self.rank, self.sim.now, done=self.sim.now)
        self.p2p[g.name] = self.p2p.get(g.name, 0) + 1
        me = g.ranks.index(self.rank)
        part = self._queue((g,), [self._pair((g,), g, me, t) for t in ts])
        for t in ts:
            self.ops[g.name] = self.ops.get(g.name, 0) + 1
            name = f"send {me}->{t.peer}" if t.send else f"recv {me}<-{t.peer}"
            shape = list(t.shape)
            self._record(g, name, [shape], [shape], "BFloat16", True, None, 0)
        self._record(g, "coalesced", [], [], "", False, part, 0)  # measured: PyTorch 2.11
        self.works.setdefault(g.name, []).append((self.p2p[g.name], part))
        return part

    def compute(self, length: float) -> None:
        """A kernel on the compute stream."""
        part = Part(self.rank, self.sim.now, [], length)
        self.sim.put(part, self._tail)
        self._tail = [part]

    def wait(self, part: Part) -> None:
        """The compute stream waits for a part."""
        if len(self._tail) > 4:
            self._tail = [p for p in self._tail if p.done > self.sim.now]
        self._tail.append(part)

    # -- inside ------------------------------------------------------------

    def _goes_wrong(self, kinds: tuple[str, ...]) -> str | None:
        f = self.sim.faults.get(self.rank)
        if f is None or f.kind not in kinds or self.sim.now < f.at or self.stopped_at is not None:
            return None
        self.stopped_at = self.sim.now
        return f.kind

    def _pair(self, stream: Any, g: Group, me: int, t: Transfer) -> Slot:
        a, b = (me, t.peer) if t.send else (t.peer, me)
        key = (stream, a, b, t.send)
        n = self._pairs[key] = self._pairs.get(key, 0) + 1
        s = self.sim.slot((stream, "p2p", a, b, n), 2, 8e-4)
        s.broken |= self.sim.now >= self.sim.cut.get(g, NEVER)
        return s

    def _queue(self, stream: Any, slots: list[Slot]) -> Part:
        part = Part(self.rank, self.sim.now, slots)
        for s in slots:
            s.parts[self.rank] = part
        last = self._streams.get(stream)
        before = self._tail if last is None else [*self._tail, last]
        self._streams[stream] = part
        self.sim.put(part, before)
        return part

    def _record(
        self,
        g: Group,
        name: str,
        inputs: list[list[int]],
        outputs: list[list[int]],
        dtype: str,
        is_p2p: bool,
        part: Part | None,
        timeout_ms: int,
    ) -> None:
        seq, p2p, op = (x.get(g.name, 0) for x in (self.seq, self.p2p, self.ops))
        self.entries.append(
            Entry(
                g,
                seq,
                p2p,
                op,
                name,
                inputs,
                outputs,
                dtype,
                is_p2p,
                self.sim.now,
                part,
                timeout_ms or self.timeout_ms,
                len(self.entries),
            )
        )

    def step(self) -> None:
        """Go on to the next thing that takes time."""
        f = self.sim.faults.get(self.rank)
        now = self.sim.now
        if f is not None and now >= f.at and self._stops(f):
            return
        assert self.program is not None
        try:
            what = next(self.program)
        except StopIteration:
            return
        if isinstance(what, float):
            self.sim.at(self.sim.now + what, self.step)
            return
        parts = list(self._tail) if what == "sync" else list(what)
        if what == "all":
            parts = [*self._tail, *self._streams.values()]
        self._until(parts)

    def _stops(self, f: Fault) -> bool:
        if f.kind not in ("hang", "gpu", "kill", "late") or (f.kind, f.stop) == ("gpu", "sync"):
            return False
        if f.kind == "late":
            if self.stopped_at is None:
                self.stopped_at = self.sim.now
                self.sim.at(self.sim.now + f.length, self.step)
                return True
            return False
        self.stopped_at = self.sim.now
        return True

    def _until(self, parts: list[Part]) -> None:
        """The host waits for parts of its device."""
        f = self.sim.faults.get(self.rank)
        if f is not None and f.kind == "gpu" and self.sim.now >= f.at:
            self.stopped_at = self.sim.now
            return
        left = [p for p in parts if p.done > self.sim.now]
        if not left:
            self.sim.at(self.sim.now + 2e-5, self.step)
            return
        left[0].after.append(lambda: self._until(left))
