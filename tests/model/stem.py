"""What each thread of a run has done, and where it stands."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

from model.device import Comm
from model.engine import Engine
from model.ops import (
    Await,
    Call,
    End,
    Group,
    Host,
    Instruction,
    Leave,
    Op,
    Post,
    Program,
    Stop,
    StreamWait,
    Sync,
)
from model.replay import Counting

#: (when it began, what), of one thread.
Code = list[tuple[float, Instruction]]
#: After all that has begun.
LAST = float("inf")
#: A wait for a stream that was shorter is left out, in seconds.
SHORT_S = 1e-3
#: No rank of a program without a fault is outside NCCL for longer, in seconds.
PHASE_S = 60.0


@dataclass
class Base:
    """A traced run, and what is fixed by its trace."""

    run: Counting
    program: Program
    #: (rank, the program's name of it) -> communicator.
    comms: dict[tuple[int, str], Comm]
    #: What each thread has not begun: it may be part of another program, or not.
    rest: list[list[list[Instruction]]]
    #: (rank, thread) of those whose code is over.
    over: set[tuple[int, int]]
    #: Operations of a rank whose code was looked through.
    memo: dict[int, tuple[list[Code], list[tuple[float, Op, Comm]]]] = field(default_factory=dict)

    def streams(self, rank: int) -> list[Instruction]:
        """A synchronisation with each stream of the rank."""
        return [Sync(s) for s in sorted(self.run.procs[rank].streams)]


@dataclass
class Tails:
    """(rank, thread) -> what it does after its stem."""

    of: dict[tuple[int, int], list[Instruction]] = field(default_factory=dict)

    def work(self, rank: int) -> bool:
        """Whether the rank has to make a call yet."""
        made = (what for (r, _), tail in self.of.items() if r == rank for what in tail)
        return any(not isinstance(what, (Sync, Post)) for what in made)

    def first(self, rank: int) -> Op | None:
        """The first operation that the rank has to make."""
        made = (what for (r, _), tail in self.of.items() if r == rank for what in tail)
        return next((op for what in made for op in operations(what)), None)

    def key(self) -> Hashable:
        return tuple((k, tuple(v)) for k, v in sorted(self.of.items()))


@dataclass
class Stem:
    """Threads of all ranks: rank -> thread -> what it has done."""

    code: list[list[Code]]
    #: What is supposed of calls that were lost, in words.
    note: str = ""

    def copy(self, rank: int) -> Stem:
        """The same, with code of this rank that may be changed."""
        code = list(self.code)
        code[rank] = [list(thread) for thread in code[rank]]
        return Stem(code, self.note)

    def program(self, base: Base, tails: Tails, hang: tuple[int, int] | None = None) -> Program:
        """The whole program, ``hang`` being a collective that does not end on the device."""
        made = copy.copy(base.program)
        made.code = [
            [
                [what for _, what in code] + tails.of.get((r, t), [])
                for t, code in enumerate(threads)
            ]
            for r, threads in enumerate(self.code)
        ]
        made.device_hangs = set() if hang is None else {hang}
        return made

    def calls(self, base: Base, rank: int) -> list[tuple[float, Op, Comm]]:
        """Operations of a rank in their order, of all its threads."""
        code = self.code[rank]
        if id(code) not in base.memo:
            every = sorted(itertools.chain(*code), key=lambda x: x[0])
            made = [
                (t, op, base.comms[rank, op.comm])
                for t, what in every
                for op in operations(what)
                if (rank, op.comm) in base.comms
            ]
            base.memo[id(code)] = (code, made)
        return base.memo[id(code)][1]


def operations(what: Instruction) -> tuple[Op, ...]:
    if isinstance(what, Call):
        return (what.op,)
    return what.ops if isinstance(what, Group) else ()


def look(program: Program, seed: int) -> Base:
    """Runs a program, and keeps what its threads did and what they did not come to."""
    run = Counting(program, seed)
    run.run()
    comms = {(p.rank, name): e.comm for p in run.procs for name, e in p.known.items()}
    rest: list[list[list[Instruction]]] = []
    over = set()
    for r, threads in enumerate(program.code):
        rest.append([])
        for t, code in enumerate(threads):
            rest[r].append(code[len(run.began.get((r, t), [])) :])
            if r not in program.never_started and run.procs[r].threads[t].done:
                over.add((r, t))
    return Base(run, program, comms, rest, over)


def stem_of(base: Base) -> Stem:
    """What was done.  What no trace shows once it is over is not kept: that it was for a stream
    that a host waited, and that a stream waited for another."""
    code: list[list[Code]] = []
    for r, threads in enumerate(base.program.code):
        code.append([])
        for t, instructions in enumerate(threads):
            began = base.run.began.get((r, t), [])
            kept: Code = []
            for i, (at, what) in enumerate(zip(began, instructions, strict=False)):
                last = i + 1 == len(began)
                if (last and (r, t) not in base.over) or not isinstance(what, (Sync, StreamWait)):
                    kept.append((at, what))
                elif not last and began[i + 1] - at > SHORT_S:
                    kept.append((at, Host(began[i + 1] - at, *base.program.sync_state)))
            code[r].append(kept)
    return Stem(code)


def agreed(run: Engine) -> bool:
    """Whether the calls of a run that has come to its end fit together, all of them."""
    slots: dict[Comm, dict[int, list[Op]]] = defaultdict(lambda: defaultdict(list))
    pairs: dict[tuple[Comm, int, int], tuple[list[int], list[int]]]
    pairs = defaultdict(lambda: ([], []))
    for proc in run.procs:
        for record in proc.records:
            if (op := record.op) is None:
                continue
            e = proc.endpoints[record.fields["comm"]]
            if op.peer is None:
                slots[e.comm][e.rank].append(op)
            else:
                me, peer = e.rank, op.peer
                pair = (e.comm, me, peer) if op.api == "ncclSend" else (e.comm, peer, me)
                pairs[pair][op.api == "ncclRecv"].append(op.bytes)
    for comm, made in slots.items():
        first = [op.signature for op in made[0]]
        if any([op.signature for op in made[r]] != first for r in range(comm.nranks)):
            return False
    return all(sends == recvs for sends, recvs in pairs.values())


def away(stem: Stem) -> list[tuple[int, int, Host]]:
    """Threads that are outside NCCL for ever, which no program without a fault is: rank, thread."""
    return [
        (r, t, what)
        for r, threads in enumerate(stem.code)
        for t, code in enumerate(threads)
        if code and isinstance(what := code[-1][1], Host) and what.dt is None
    ]


def stances(base: Base, stem: Stem) -> Iterator[tuple[Base, Stem]]:
    """The same with threads that are away for ever in a wait that ends, if all is well.

    Nothing if that cannot be, as some rank was away for too long, is stopped,
    has been killed, or is away in the middle of a group.
    """
    code = [what for threads in stem.code for thread in threads for _, what in thread]
    if any(isinstance(w, Host) and (w.dt or 0.0) > PHASE_S for w in code):
        return
    if any(isinstance(w, Stop) or (isinstance(w, Group) and w.stall) for w in code):
        return
    if any(isinstance(w, Leave) and w != Leave(0) for w in code):
        return
    if any(isinstance(w, End) and w.how == "abort" for w in code) or base.program.never_started:
        return
    gone = away(stem)
    if not gone:
        yield base, stem
        return
    ((r, t, what),) = gone
    made = stem.copy(r)
    thread = made.code[r][t]
    thread.pop()
    if t:
        thread += [(LAST, sync) for sync in base.streams(r)]
        yield base, made
        return
    yield base, made
    yield replace(base, over=base.over | {(r, 0)}), made
    if what.syscall == "futex" or not base.program.host_state:
        waits = made.copy(r)
        waits.code[r][0].append((LAST, Await("work of another thread")))
        waits.code[r].append([(LAST, x) for x in base.streams(r)])
        # The thread that it waits for waits for the device.
        waits.code[r][-1].append((LAST, Post("work of another thread")))
        yield base, waits
