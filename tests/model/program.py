"""Random programs that are valid by construction.

A program is built step by step for all ranks; whatever a step waits for is in
it or before it, in the order in which all its ranks make their calls, so a
program without a fault runs to its end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from model.ops import (
    COLLECTIVES,
    SIZE,
    Await,
    Call,
    End,
    Group,
    Host,
    Init,
    Instruction,
    Kernel,
    Leave,
    Op,
    Post,
    Program,
    Split,
    StreamWait,
    Sync,
)

SIZES = (2, 2, 3, 4, 4, 5, 6, 8, 8, 8, 12, 16, 16, 24, 32, 64)
COUNTS = (1, 7, 256, 1024, 4096, 65536, 1 << 20)
MAX_COMMS = 8


@dataclass
class Set:
    """Communicators of one making: several with disjoint members, or one.

    ``name``: what each member calls its own.  ``parts``: members (global
    ranks) of each communicator, by rank in it.
    """

    name: str
    parts: list[list[int]]
    stream: int
    #: Fixed calls of the training loop on it.
    habit: Op | None = None

    def size(self, part: list[int]) -> int:
        return len(part)


@dataclass
class Builder:
    rng: random.Random
    n: int
    main: list[list[Instruction]] = field(init=False)
    aux: list[list[Instruction]] = field(init=False)
    sets: list[Set] = field(default_factory=list)
    comms: int = 0
    made: int = 0
    pairs: set[tuple[str, int, int]] = field(default_factory=set)
    #: Calls that this many ranks make at least before the last step.
    streams: int = 1

    def __post_init__(self) -> None:
        self.main = [[] for _ in range(self.n)]
        self.aux = [[] for _ in range(self.n)]

    # -- pieces

    def op(self, name: str, size: int, stream: int) -> Op:
        """A random collective that all members can make."""
        api = self.rng.choice(
            ["ncclAllReduce"] * 5 + ["ncclAllGather", "ncclReduceScatter"] * 2 + list(COLLECTIVES)
        )
        has_op, has_root = COLLECTIVES[api]
        return Op(
            api,
            name,
            self.rng.choice(COUNTS),
            self.rng.choice(["float32"] * 3 + ["bfloat16"] * 3 + list(SIZE)),
            self.rng.choice(["sum"] * 4 + ["max", "avg"]) if has_op else None,
            self.rng.randrange(size) if has_root else None,
            None,
            stream,
        )

    def each(self, chosen: Set) -> list[tuple[list[int], Op]]:
        """One operation per communicator of a set; most often alike."""
        ops = []
        smallest = min(len(p) for p in chosen.parts)
        like = self.op(chosen.name, smallest, chosen.stream)
        if chosen.habit is not None and self.rng.random() < 0.7:
            like = chosen.habit
        for part in chosen.parts:
            same = self.rng.random() < 0.9
            ops.append((part, like if same else self.op(chosen.name, len(part), chosen.stream)))
        return ops

    def jitter(self, scale: float) -> Host:
        syscall = self.rng.random() < 0.3
        return Host(
            self.rng.expovariate(1 / scale),
            "syscall" if syscall else "running",
            self.rng.choice(["read", "futex", "poll", "openat"]) if syscall else None,
        )

    def pick(self, at_least: int = 2) -> Set | None:
        fit = [s for s in self.sets if min(len(p) for p in s.parts) >= at_least]
        return self.rng.choice(fit) if fit else None

    # -- communicators

    def world(self) -> None:
        for r in range(self.n):
            self.main[r].append(Init("world", self.n, r))
        self.sets.append(Set("world", [list(range(self.n))], 0))
        self.comms = 1

    def colors(self, way: str, size: int) -> list[int]:
        """Colour of each rank of a parent of this size."""
        width = self.rng.choice([d for d in range(2, size) if size % d == 0] or [size])
        if way == "block":
            return [i // width for i in range(size)]
        if way == "stride":
            return [i % max(1, size // width) for i in range(size)]
        if way == "half":
            return [int(i >= size // 2) for i in range(size)]
        if way == "some":
            kept = set(self.rng.sample(range(size), max(1, size * 2 // 3)))
            return [0 if i in kept else -1 for i in range(size)]
        return [0] * size

    def split(self) -> None:
        if self.comms >= MAX_COMMS:
            return
        parent = self.rng.choice(self.sets)
        self.made += 1
        name = f"c{self.made}"
        way = self.rng.choice(["block", "stride", "half", "some", "dup", "init"])
        stream = self.rng.randrange(self.streams)
        parts: list[list[int]] = []
        for part in parent.parts:
            size = len(part)
            colors = self.colors(way, size)
            reverse = self.rng.random() < 0.1
            made: dict[int, list[int]] = {}
            for r, color in zip(part, colors, strict=True):
                if color >= 0:
                    made.setdefault(color, []).append(r)
            for members in made.values():
                if reverse:
                    members.reverse()
            if way == "init":
                for i, r in enumerate(part):
                    self.main[r].append(Init(name, size, i, f"{name}@{part[0]}"))
                parts.append(part)
                continue
            for i, r in enumerate(part):
                key = -i if reverse else i
                self.main[r].append(Split(parent.name, colors[i], key, name))
            parts += made.values()
        self.comms += 1
        parts = [p for p in parts if p]
        if any(len(p) > 1 for p in parts):
            self.sets.append(Set(name, parts, stream))

    def destroy(self) -> None:
        own = [s for s in self.sets if s.name != "world"]
        if not own:
            return
        gone = self.rng.choice(own)
        self.sets.remove(gone)
        for part in gone.parts:
            for r in part:
                self.main[r].append(Sync(gone.stream))
                self.main[r].append(End(gone.name))

    # -- steps

    def collective(self) -> None:
        chosen = self.pick(1)
        if chosen is None:
            return
        times = self.rng.choice([1, 1, 1, 2, 4, 8])
        ops = self.each(chosen)
        for part, op in ops:
            for r in part:
                if self.rng.random() < 0.3:
                    self.main[r].append(Kernel(chosen.stream, self.rng.expovariate(200)))
                self.main[r] += [Call(op)] * times

    def group(self) -> None:
        chosen = self.pick()
        if chosen is None:
            return
        for part in chosen.parts:
            k = self.rng.choice([2, 2, 3, 5])
            like = [self.op(chosen.name, len(part), chosen.stream) for _ in range(k)]
            for r in part:
                self.main[r].append(Group(tuple(like)))

    def group_of_two(self) -> None:
        """A group over two communicators that all of its ranks have."""
        one, two = self.pick(), self.pick()
        if one is None or two is None or one is two:
            return
        # The second one's members must all be in the group, so take it whole.
        mine: list[list[Op]] = [[] for _ in range(self.n)]
        for chosen in (one, two):
            for part, op in self.each(chosen):
                for r in part:
                    mine[r].append(op)
        for r in range(self.n):
            if mine[r]:
                self.main[r].append(Group(tuple(mine[r])))

    def message(self, chosen: Set, api: str, peer: int, count: int) -> Op:
        return Op(api, chosen.name, count, "uint8", None, None, peer, chosen.stream)

    def warm(self, chosen: Set, part: list[int], pairs: list[tuple[int, int]]) -> None:
        """First messages of pairs (ranks in the communicator), in one group per rank."""
        new = [p for p in pairs if (chosen.name, part[p[0]], part[p[1]]) not in self.pairs]
        ops: dict[int, list[Op]] = {}
        for src, dst in new:
            self.pairs.add((chosen.name, part[src], part[dst]))
            ops.setdefault(src, []).append(self.message(chosen, "ncclSend", dst, 64))
            ops.setdefault(dst, []).append(self.message(chosen, "ncclRecv", src, 64))
        for i, mine in ops.items():
            self.main[part[i]].append(Group(tuple(mine)))

    def ring(self) -> None:
        chosen = self.pick()
        if chosen is None:
            return
        count = self.rng.choice([64, 4096, 1 << 20])
        for part in chosen.parts:
            k = len(part)
            for i, r in enumerate(part):
                send = self.message(chosen, "ncclSend", (i + 1) % k, count)
                recv = self.message(chosen, "ncclRecv", (i - 1) % k, count)
                pair = (send, recv) if self.rng.random() < 0.7 else (recv, send)
                self.main[r].append(Group(pair))
                self.pairs.add((chosen.name, r, part[(i + 1) % k]))

    def pipeline(self) -> None:
        chosen = self.pick()
        if chosen is None:
            return
        count = self.rng.choice([1024, 1 << 18])
        batches = self.rng.choice([1, 2, 4])
        for part in chosen.parts:
            for _ in range(batches):
                for i, r in enumerate(part):
                    if i > 0:
                        self.main[r].append(Call(self.message(chosen, "ncclRecv", i - 1, count)))
                    self.main[r].append(Kernel(chosen.stream, 0.002))
                    if i + 1 < len(part):
                        self.main[r].append(Call(self.message(chosen, "ncclSend", i + 1, count)))
                        self.pairs.add((chosen.name, r, part[i + 1]))

    def uneven(self) -> None:
        """All-to-all by sends of different sizes; empty pairs are left out by both."""
        chosen = self.pick()
        if chosen is None:
            return
        for part in chosen.parts:
            k = len(part)
            dense = min(1.0, 6 / k)
            sizes = {
                (s, d): self.rng.choice([16, 5000, 300_000])
                for s in range(k)
                for d in range(k)
                if self.rng.random() < dense
            }
            for i, r in enumerate(part):
                ops: list[Op] = []
                for j in range(k):
                    if (i, j) in sizes:
                        ops.append(self.message(chosen, "ncclSend", j, sizes[i, j]))
                    if (j, i) in sizes:
                        ops.append(self.message(chosen, "ncclRecv", j, sizes[j, i]))
                if ops:
                    self.main[r].append(Group(tuple(ops)))
                self.pairs |= {(chosen.name, r, part[d]) for s, d in sizes if s == i}

    def head_to_head(self) -> None:
        """Two peers send to each other, then receive; both sends fit into buffers."""
        chosen = self.pick()
        if chosen is None:
            return
        for part in chosen.parts:
            pairs = [(i, i + 1) for i in range(0, len(part) - 1, 2)]
            both = [p for i, j in pairs for p in ((i, j), (j, i))]
            self.warm(chosen, part, both)
            for i, j in pairs:
                for a, b in ((i, j), (j, i)):
                    self.main[part[a]] += [
                        Call(self.message(chosen, "ncclSend", b, 2048)),
                        Call(self.message(chosen, "ncclRecv", b, 2048)),
                    ]

    def exchange(self) -> None:
        """Two peers exchange large messages: one sends first, the other receives first."""
        chosen = self.pick()
        if chosen is None:
            return
        for part in chosen.parts:
            pairs = [(i, i + 1) for i in range(0, len(part) - 1, 2)]
            self.warm(chosen, part, [p for i, j in pairs for p in ((i, j), (j, i))])
            for i, j in pairs:
                send = Call(self.message(chosen, "ncclSend", j, 1 << 20))
                recv = Call(self.message(chosen, "ncclRecv", j, 1 << 20))
                self.main[part[i]] += [send, recv]
                send = Call(self.message(chosen, "ncclSend", i, 1 << 20))
                recv = Call(self.message(chosen, "ncclRecv", i, 1 << 20))
                self.main[part[j]] += [recv, send]

    def sync(self) -> None:
        stream = self.rng.randrange(self.streams)
        some = self.rng.random() < 0.2
        for r in range(self.n):
            if not some or self.rng.random() < 0.5:
                self.main[r].append(Sync(stream))

    def compute(self) -> None:
        scale = self.rng.choice([0.001, 0.02, 0.5])
        for r in range(self.n):
            self.main[r].append(self.jitter(scale))

    def wait(self) -> None:
        if self.streams > 1:
            a, b = self.rng.sample(range(self.streams), 2)
            for r in range(self.n):
                self.main[r].append(StreamWait(a, b))

    def slow(self) -> None:
        """Checkpoint or compile: one or all ranks are away for up to 50 s."""
        dt = self.rng.uniform(5, 50)
        who = range(self.n) if self.rng.random() < 0.5 else [self.rng.randrange(self.n)]
        state = self.rng.choice(
            [("running", None), ("syscall", "write"), ("uninterruptible", None)]
        )
        for r in who:
            self.main[r].append(Host(dt * self.rng.uniform(0.8, 1.0), *state))

    def nothing(self) -> None:
        """All pass a zero count: the library runs nothing."""
        chosen = self.pick()
        if chosen is not None:
            for part in chosen.parts:
                for r in part:
                    self.main[r].append(
                        Call(Op("ncclAllReduce", chosen.name, 0, "float32", "sum", None, None,
                                chosen.stream))
                    )  # fmt: skip

    def backward(self) -> None:
        """A second thread makes collectives of one set, the main thread those of another."""
        one, two = self.pick(), self.pick()
        if one is None or two is None or one is two or one.stream == two.stream:
            return
        self.made += 1
        start, end = f"s{self.made}", f"e{self.made}"
        threads: list[list[list[Instruction]]] = [[[] for _ in range(self.n)] for _ in range(2)]
        for code, chosen in zip(threads, (one, two), strict=True):
            for part, op in self.each(chosen):
                times = self.rng.choice([1, 3])
                for r in part:
                    code[r] += [self.jitter(0.005), *[Call(op)] * times]
        for r in range(self.n):
            self.main[r] += [Post(start), *threads[0][r], Await(end)]
            self.aux[r] += [Await(start), *threads[1][r], Post(end)]


STEPS: list[tuple[float, Callable[[Builder], None]]] = [
    (8, Builder.collective),
    (2, Builder.group),
    (1, Builder.group_of_two),
    (1.5, Builder.ring),
    (1.5, Builder.pipeline),
    (1.5, Builder.uneven),
    (1, Builder.head_to_head),
    (1, Builder.exchange),
    (3, Builder.sync),
    (4, Builder.compute),
    (1, Builder.wait),
    (0.15, Builder.slow),
    (0.2, Builder.nothing),
    (1.5, Builder.backward),
    (0.6, Builder.split),
    (0.15, Builder.destroy),
]


def generate(seed: int, budget: int = 12_000) -> Program:
    """A random valid program; ``budget``: about how many calls all ranks make together."""
    rng = random.Random(f"program {seed}")
    b = Builder(rng, rng.choice(SIZES))
    b.streams = rng.choice([1, 2, 2, 3])
    b.world()
    for _ in range(rng.choice([0, 1, 2, 3, 4])):
        b.split()
    for chosen in b.sets:
        smallest = min(len(p) for p in chosen.parts)
        chosen.habit = b.op(chosen.name, smallest, chosen.stream)
    target = max(20, min(rng.choice([50, 100, 200, 400]), budget // b.n))
    weights = [w for w, _ in STEPS]
    loop: list[Callable[[Builder], None]] = []
    while max(calls(code) for code in b.main) < target:
        if not loop or rng.random() < 0.3:
            loop = rng.choices([s for _, s in STEPS], weights, k=rng.choice([1, 3, 6]))
        for step in loop:
            step(b)
    finish(b)
    return Program(
        b.n,
        [[m, a] if a else [m] for m, a in zip(b.main, b.aux, strict=True)],
        depth=rng.choice([1022, 1022, 256, 32]),
        lazy_connect=rng.random() < 0.8,
        counters=rng.random() < 0.6,
        per_host=rng.choice([4, 8, 8]),
        sync_state=rng.choice(
            [("running", None), ("running", None), ("syscall", "poll"), ("syscall", "ioctl")]
        ),
        mismatch_hangs=rng.random() < 0.7,
        host_state=rng.random() < 0.92,
    )


def calls(code: list[Instruction]) -> int:
    """How many operations a thread makes."""
    return sum(len(i.ops) if isinstance(i, Group) else isinstance(i, Call) for i in code)


def finish(b: Builder) -> None:
    """The end of the job: all work is waited for; with destroy or without; exit."""
    destroy = b.rng.random() < 0.6
    stagger = b.rng.choice([0.001, 0.1, 3.0])
    leaves = b.rng.random() < 0.8
    for r in range(b.n):
        b.main[r] += [Sync(s) for s in range(b.streams)]
    for chosen in b.sets[::-1]:
        if destroy:
            for part in chosen.parts:
                for r in part:
                    b.main[r].append(End(chosen.name))
    for r in range(b.n):
        b.main[r].append(b.jitter(stagger))
        if leaves:
            b.main[r].append(Leave(0))
