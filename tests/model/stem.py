"""What each thread of a run has done, and how a program can go on from there to a good end.

All ranks' calls of one communicator have to agree, call by call, and so do the
sends and receives of each pair.  So what a rank still has to make is known:
what others have made there and it has not.  Only the order is open, and here
it is the order in which the others made them.
"""

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
    Init,
    Instruction,
    Leave,
    Op,
    Post,
    Program,
    Split,
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


@dataclass
class Tails:
    """(rank, thread) -> what it does after its stem."""

    of: dict[tuple[int, int], list[Instruction]] = field(default_factory=dict)

    def key(self) -> Hashable:
        return tuple((k, tuple(v)) for k, v in sorted(self.of.items()))


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


def lacking(base: Base, stem: Stem) -> list[list[tuple[float, Op]]] | None:
    """What each rank has to make yet, with when others did; None: their calls contradict."""
    slots: dict[Comm, dict[int, list[tuple[float, Op]]]] = defaultdict(lambda: defaultdict(list))
    pairs: dict[tuple[Comm, int, int], tuple[list[tuple[float, Op]], list[tuple[float, Op]]]]
    pairs = defaultdict(lambda: ([], []))
    for r in range(len(stem.code)):
        for t, op, comm in stem.calls(base, r):
            if op.peer is None:
                slots[comm][r].append((t, op))
                continue
            me, peer = comm.members.index(r), op.peer
            pair = (comm, me, peer) if op.api == "ncclSend" else (comm, peer, me)
            pairs[pair][op.api == "ncclRecv"].append((t, op))
    left: list[list[tuple[float, Op]]] = [[] for _ in stem.code]
    for comm, made in slots.items():
        longest = max(made.values(), key=len)
        for r in comm.members:
            mine = made.get(r, [])
            for (_, x), (_, y) in zip(mine, longest, strict=False):
                if x is not y and x.signature != y.signature:
                    return None
            for k in range(len(mine), len(longest)):
                at = min(ops[k][0] for ops in made.values() if len(ops) > k)
                left[r].append((at, longest[k][1]))
    for (comm, src, dst), (sends, recvs) in pairs.items():
        for (_, x), (_, y) in zip(sends, recvs, strict=False):
            if x.bytes != y.bytes:
                return None
        for t, op in sends[len(recvs) :]:
            left[comm.members[dst]].append((t, _half(op, "ncclRecv", src)))
        for t, op in recvs[len(sends) :]:
            left[comm.members[src]].append((t, _half(op, "ncclSend", dst)))
    return left


def _half(op: Op, api: str, peer: int) -> Op:
    return Op(api, op.comm, op.count, op.dtype, None, None, peer, op.stream)


def complete(base: Base, stem: Stem, grouped: bool) -> Tails | None:
    """How all ranks can go on.  None: their calls contradict, or one that has ended lacks some.

    ``grouped``: a rank makes the sends and receives of a communicator that
    come next to each other as one group.  ``free``: ranks that may have ended,
    as that is what is broken.
    """
    left = lacking(base, stem)
    if left is None:
        return None
    tails = Tails()
    for r, mine in enumerate(left):
        todo: list[tuple[float, Instruction]] = list(_joined(sorted(mine, key=_when), grouped))
        todo += _makings(base, stem, r)
        gone = any(isinstance(what, Leave) for code in stem.code[r] for _, what in code)
        if gone:
            if todo:
                return None
            continue
        posts = _posts(stem, r)
        idle = (r, 0) in base.over and stem.code[r][0] and not _stands(stem.code[r][0][-1][1])
        if not todo and not any(posts.values()) and idle:
            continue
        syncs = base.streams(r)
        work = [what for _, what in sorted(todo, key=lambda x: x[0])]
        tails.of[r, 0] = [*syncs, *posts.pop(0, []), *work, *syncs]
        for t, what in posts.items():
            tails.of[r, t] = what
    return tails


def _when(what: tuple[float, Op]) -> float:
    return what[0]


def _stands(what: Instruction) -> bool:
    return isinstance(what, (Sync, Await))


def _joined(mine: list[tuple[float, Op]], grouped: bool) -> list[tuple[float, Instruction]]:
    made: list[tuple[float, Instruction]] = []
    for t, op in mine:
        last = made[-1][1] if made else None
        if grouped and op.p2p and isinstance(last, Group) and last.ops[0].comm == op.comm:
            made[-1] = (made[-1][0], Group((*last.ops, op)))
        else:
            made.append((t, Group((op,)) if grouped and op.p2p else Call(op)))
    return made


def _makings(base: Base, stem: Stem, rank: int) -> list[tuple[float, Instruction]]:
    """Communicators that others are making with this rank, which its program was to make."""
    found: list[tuple[float, Instruction]] = []
    mine = [what for code in stem.code[rank] for _, what in code]
    rest = [what for code in base.rest[rank] for what in code]
    begun: dict[str, float] = {}
    splits: dict[Comm, list[float]] = {}
    for r, threads in enumerate(stem.code):
        counts: dict[Comm, int] = defaultdict(int)
        for t, what in itertools.chain(*threads):
            if isinstance(what, Init):
                uid = what.uid or what.comm
                begun[uid] = min(t, begun.get(uid, t))
            elif isinstance(what, Split):
                comm = base.comms[r, what.parent]
                times = splits.setdefault(comm, [])
                times += [t] * (counts[comm] >= len(times))
                counts[comm] += 1
    have: dict[Comm, int] = defaultdict(int)
    for what in mine:
        if isinstance(what, Split):
            have[base.comms[rank, what.parent]] += 1
    for what in rest:
        if isinstance(what, Init) and (what.uid or what.comm) in begun:
            found.append((begun[what.uid or what.comm], what))
        elif isinstance(what, Split) and (parent := base.comms.get((rank, what.parent))):
            k = have[parent]
            have[parent] += 1
            if k < len(splits.get(parent, [])):
                found.append((splits[parent][k], what))
    return found


def _posts(stem: Stem, rank: int) -> dict[int, list[Instruction]]:
    """What the threads of a rank have to tell each other: where one stands in a wait."""
    told: dict[int, list[Instruction]] = defaultdict(list)
    threads = stem.code[rank]
    done = {what.sem for code in threads for _, what in code if isinstance(what, Post)}
    for t, code in enumerate(threads):
        if code and isinstance(what := code[-1][1], Await) and what.sem not in done:
            for other in range(len(threads)):
                if other != t:
                    told[other].append(Post(what.sem))
                    break
    return told


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
