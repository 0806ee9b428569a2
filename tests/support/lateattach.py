"""Made-up jobs that tracers join at any moment, and what is true of them.

Written without knowledge of the matcher: a world of ranks that make the same
calls, each with its own failures, losses and moment of attach; NCCL's counters
as facts/nccl.md has them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from support.tracegen import Comm, Job

#: Functions with a counter, in the order of ``seqNumber``.
COUNTED = ("ncclBroadcast", "ncclReduce", "ncclAllGather", "ncclReduceScatter", "ncclAllReduce")
UNCOUNTED = ("ncclAlltoAll", "ncclGather", "ncclScatter")
_ROOTED = ("ncclBroadcast", "ncclReduce", "ncclGather", "ncclScatter")
STEP = 0.01


@dataclass(frozen=True)
class Op:
    """One slot of the program."""

    api: str
    count: int
    root: int | None
    #: Runs, but moves no counter (captured, symmetric).
    quiet: bool = False

    @property
    def key(self) -> tuple[str, int, int | None]:
        return self.api, self.count, self.root


@dataclass
class Made:
    """One call of one rank, in the order in which it was made."""

    op: Op
    slot: int | None  # None: did not run
    group: int  # 0: none
    number: int  # the counter that the library shows at entry
    t: float
    true_number: int  # calls of this function that ran before


@dataclass
class Rank:
    """A rank: what it did, and what of it was seen."""

    rank: int
    made: list[Made] = field(default_factory=list)
    first: int = 0  # index of the first call seen
    lost: set[int] = field(default_factory=set)
    from_init: bool = False

    @property
    def seen(self) -> list[int]:
        return [i for i in range(self.first, len(self.made)) if i not in self.lost]

    @property
    def entered(self) -> int:
        """Slots that it has entered in truth."""
        return 1 + max((x.slot for x in self.made if x.slot is not None), default=-1)


@dataclass
class World:
    """A job with one communicator."""

    program: list[Op]
    groups: dict[int, int]  # slot at which a group begins -> its length
    ranks: list[Rank]
    counters: bool
    failed_groups: set[tuple[int, int]] = field(default_factory=set)


def _op(rng: random.Random, apis: list[str], counts: list[int]) -> Op:
    api = rng.choice(apis)
    root = rng.randrange(2) if api in _ROOTED else None
    return Op(api, rng.choice(counts), root)


def _program(rng: random.Random) -> list[Op]:
    apis = rng.sample(COUNTED, rng.randint(1, 4))
    if rng.random() < 0.3:
        apis += rng.sample(UNCOUNTED, rng.randint(1, 2))
    counts = [1 << rng.randint(4, 24) for _ in range(rng.choice((1, 2, 4, 12)))]
    n = rng.randint(60, 300)
    style = rng.random()
    if style < 0.45:
        unit = [_op(rng, apis, counts) for _ in range(rng.choice((1, 2, 3, 7, 12, 30)))]
        program = [unit[i % len(unit)] for i in range(n)]
        if rng.random() < 0.5:  # now and then something else, such as a checkpoint
            for _ in range(rng.randint(1, 4)):
                program[rng.randrange(n)] = _op(rng, apis, counts)
    else:
        program = [_op(rng, apis, counts) for _ in range(n)]
    if rng.random() < 0.15:
        start = rng.randrange(n)
        for i in range(start, min(n, start + rng.randint(1, 20))):
            program[i] = Op(program[i].api, program[i].count, program[i].root, quiet=True)
    return program


def _groups(rng: random.Random, n: int) -> dict[int, int]:
    share = rng.choice((0.0, 0.0, 0.1, 0.4, 1.0))
    found: dict[int, int] = {}
    at = 0
    while at < n:
        if rng.random() < share:
            size = min(rng.randint(1, 6), n - at)
            found[at] = size
            at += size
        else:
            at += 1
    return found


class _Maker:
    """Lets one rank run through the program."""

    def __init__(self, rng: random.Random, world: World, rank: Rank, stop: int) -> None:
        self.rng, self.world, self.rank, self.stop = rng, world, rank, stop
        self.counts = dict.fromkeys(COUNTED, 0)
        self.lag = rng.uniform(0, 5 * STEP)
        self.group = 0

    def run(self, failing: float) -> None:
        at = 0
        while at < self.stop:
            size = self.world.groups.get(at)
            if self.rng.random() < failing:
                self._fail(at)
            if size is None:
                self._call(at, 0, 0)
                self._count(at)
                at += 1
                continue
            self.group += 1
            end = min(at + size, self.stop)
            for i, slot in enumerate(range(at, end)):
                self._call(slot, self.group, i)
            for slot in range(at, end):
                self._count(slot)
            at = end

    def _t(self, slot: int, i: float = 0) -> float:
        return 1.0 + slot * STEP + self.lag + i * 1e-5

    def _call(self, slot: int, group: int, i: int) -> None:
        op = self.world.program[slot]
        shown = self.counts.get(op.api, 0)
        self.rank.made.append(Made(op, slot, group, shown, self._t(slot), shown))

    def _count(self, slot: int) -> None:
        op = self.world.program[slot]
        if op.api in self.counts and not op.quiet:
            self.counts[op.api] += 1

    def _fail(self, at: int) -> None:
        """Calls that return an error, alone or as a group: they do not run."""
        op = self.world.program[at]
        group = 0
        n = 1
        if self.rng.random() < 0.4:
            self.group += 1
            group, n = self.group, self.rng.randint(1, 3)
            self.world.failed_groups.add((self.rank.rank, group))
        for i in range(n):
            shown = self.counts.get(op.api, 0)
            t = self._t(at, i - 300)
            self.rank.made.append(Made(op, None, group, shown, t, shown))


def make(seed: int) -> World:
    """A random job."""
    rng = random.Random(seed)
    program = _program(rng)
    nranks = rng.randint(2, 4)
    world = World(program, _groups(rng, len(program)), [], counters=rng.random() < 0.85)
    hang = rng.randrange(nranks) if rng.random() < 0.4 else None
    failing = rng.choice((0.0, 0.0, 0.02))
    loss = rng.choice((0.0, 0.0, 0.0, 0.01, 0.05))
    ended = rng.randint(len(program) * 2 // 3, len(program))
    for r in range(nranks):
        rank = Rank(r)
        stop = max(10, ended - rng.randint(1, 30)) if r == hang else ended
        _Maker(rng, world, rank, stop).run(failing)
        how = rng.random()
        if how < 0.25:
            rank.from_init = True
        else:
            rank.first = rng.randrange(max(1, int(len(rank.made) * rng.choice((0.3, 0.6, 0.95)))))
        for i in range(rank.first, len(rank.made)):
            if rng.random() < loss:
                rank.lost.update(range(i, min(len(rank.made), i + rng.choice((1, 1, 3)))))
        world.ranks.append(rank)
    return world


def trace(world: World, until: float = 0.0) -> Job:
    """What the tracers write of it; ``until``: nothing more happens up to then."""
    job = Job()
    end = 2.0 + (len(world.program) + 20) * STEP
    for rank in world.ranks:
        proc = job.proc(rank.rank)
        more: dict[str, Any] = {}
        if not rank.from_init and world.counters:
            more["seqs"] = _shown(rank)
            more["base_seq"] = sum(more["seqs"])
        learnt = "init" if rank.from_init else "struct"
        t = 0.0 if rank.from_init else rank.made[rank.first].t - 1e-5
        comm = proc.comm("00000000000000aa", rank.rank, len(world.ranks), t, learnt=learnt, **more)
        _write(world, rank, comm)
        times = [0.5 * i for i in range(1, 2 + int(end / 0.5))]
        for at in [*times, *([until] if until else ())]:
            lost = sum(1 for i in rank.lost if rank.made[i].t <= at)
            proc.coverage(at, lost_kernel=lost)
    return job


def _shown(rank: Rank) -> list[int]:
    """The five counters that the library shows at the first call seen."""
    group = rank.made[rank.first].group
    counts = dict.fromkeys(COUNTED, 0)
    for x in rank.made[: rank.first]:
        ran = x.slot is not None and not x.op.quiet and x.op.api in counts
        if ran and not (group and x.group == group):
            counts[x.op.api] += 1
    return list(counts.values())


def _write(world: World, rank: Rank, comm: Comm) -> None:
    proc = comm.proc
    # A group that was open when the tracer came: it does not know of it.
    before = rank.made[rank.first - 1].group if rank.first else 0
    unseen = before if before and rank.made[rank.first].group == before else 0
    open_group, position = 0, 0
    for i in range(rank.first, len(rank.made) + 1):
        x = rank.made[i] if i < len(rank.made) else None
        if open_group and (x is None or x.group != open_group):
            last = rank.made[i - 1]
            failed = (rank.rank, open_group) in world.failed_groups
            args = {} if open_group == unseen else {"group": open_group, "gpos": position}
            proc.call(None, "ncclGroupEnd", last.t + 5e-4, rc=4 if failed else 0, **args)
            open_group = 0
        if x is None:
            break
        if x.group and x.group != open_group:
            open_group, position = x.group, 0
            if x.group != unseen:
                proc.call(None, "ncclGroupStart", x.t - 1e-6)
        args = {"count": x.op.count}
        if x.op.root is not None:
            args["root"] = x.op.root
        grouped = x.group and x.group != unseen
        if grouped:
            args |= {"group": x.group, "gpos": position}
            position += 1
        elif world.counters and x.op.api in COUNTED:
            args["seq"] = x.number
        rc = 0 if x.slot is not None or x.group else 4
        proc.call(comm, x.op.api, x.t + position * 1e-6, rc=rc, lost=i in rank.lost, **args)
