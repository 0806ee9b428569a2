"""The code of all ranks of a random program, while it is being built."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from model.ops import (
    COLLECTIVES,
    SIZE,
    End,
    Host,
    Init,
    Instruction,
    Op,
    Split,
    Sync,
)

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
