"""How a program can go on, from where a run stands, to a good end.

All ranks' calls of one communicator have to agree, call by call, and so do the
sends and receives of each pair.  So what a rank still has to make is known:
what others have made there and it has not.  Only the order is open, and here
it is the order in which the others made them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from model.device import Comm
from model.ops import Await, Call, Group, Init, Instruction, Leave, Op, Post, Split, Sync
from model.stem import Base, Stem, Tails


class Due(NamedTuple):
    """What a rank has to make yet.  ``at``: when the first of the others did."""

    at: float
    what: Op | Instruction
    #: Rank -> when it made it.
    made: dict[int, float]
    #: Who else has to.
    others: Collection[int] = ()


def lacking(base: Base, stem: Stem) -> list[list[tuple[float, Op]]] | None:
    """What each rank has to make yet, with when others did; None: their calls contradict."""
    left = _lacking(base, stem)
    if left is None:
        return None
    return [[(x.at, x.what) for x in mine if isinstance(x.what, Op)] for mine in left]


def _lacking(base: Base, stem: Stem) -> list[list[Due]] | None:
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
    left: list[list[Due]] = [[] for _ in stem.code]
    for comm, made in slots.items():
        longest = max(made.values(), key=len)
        for r in comm.members:
            mine = made.get(r, [])
            for (_, x), (_, y) in zip(mine, longest, strict=False):
                if x is not y and x.signature != y.signature:
                    return None
            for k in range(len(mine), len(longest)):
                times = {x: ops[k][0] for x, ops in made.items() if len(ops) > k}
                others = [x for x in comm.members if x not in times and x != r]
                left[r].append(Due(min(times.values()), longest[k][1], times, others))
    for (comm, src, dst), (sends, recvs) in pairs.items():
        for (_, x), (_, y) in zip(sends, recvs, strict=False):
            if x.bytes != y.bytes:
                return None
        for t, op in sends[len(recvs) :]:
            half = _half(op, "ncclRecv", src)
            left[comm.members[dst]].append(Due(t, half, {comm.members[src]: t}))
        for t, op in recvs[len(sends) :]:
            half = _half(op, "ncclSend", dst)
            left[comm.members[src]].append(Due(t, half, {comm.members[dst]: t}))
    return left


def _half(op: Op, api: str, peer: int) -> Op:
    return Op(api, op.comm, op.count, op.dtype, None, None, peer, op.stream)


def complete(
    base: Base, stem: Stem, grouped: bool, away: frozenset[int] = frozenset()
) -> Tails | None:
    """How all ranks can go on.  None: their calls contradict, or one that has ended lacks some.

    ``grouped``: a rank makes the sends and receives of a communicator that
    come next to each other as one group.  ``away``: ranks that are, and so do not
    stand in a wait for their devices.
    """
    left = _lacking(base, stem)
    if left is None:
        return None
    tails = Tails()
    for r, mine in enumerate(left):
        todo = _ordered([*mine, *_makings(base, stem, r)])
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
        work = _joined([x.what for x in todo], grouped)
        waits = [] if r in away else syncs
        if r in away:
            work = _apart(base, stem, r, work)
        tails.of[r, 0] = [*waits, *posts.pop(0, []), *work, *syncs]
        for t, what in posts.items():
            tails.of[r, t] = what
    return tails


def _ordered(todo: list[Due]) -> list[Due]:
    """In the orders in which others made them, or have to; where these leave it open, by time."""
    before: dict[int, set[int]] = defaultdict(set)
    for rank in {r for x in todo for r in x.made}:
        mine = sorted((x.made[rank], i) for i, x in enumerate(todo) if rank in x.made)
        for (_, i), (_, k) in itertools.pairwise(mine):
            before[k].add(i)
        for k, x in enumerate(todo):
            if rank in x.others:
                before[k].add(mine[-1][1])
    left = dict(enumerate(todo))
    found: list[Due] = []
    while left:
        free = [i for i in left if not before[i] & left.keys()] or list(left)
        found.append(left.pop(min(free, key=lambda i: (left[i].at, i))))
    return found


def _stands(what: Instruction) -> bool:
    return isinstance(what, (Sync, Await))


def _joined(todo: list[Op | Instruction], grouped: bool) -> list[Instruction]:
    made: list[Instruction] = []
    for what in todo:
        last = made[-1] if made else None
        if not isinstance(what, Op):
            made.append(what)
        elif not (grouped and what.p2p):
            made.append(Call(what))
        elif isinstance(last, Group) and last.ops[0].comm == what.comm:
            made[-1] = Group((*last.ops, what))
        else:
            made.append(Group((what,)))
    return made


def _apart(base: Base, stem: Stem, rank: int, work: list[Instruction]) -> list[Instruction]:
    """The same on a stream of its own where the communicator was not used so far.

    On which one the rank would use it no trace tells.
    """
    used = {op.comm for _, op, _ in stem.calls(base, rank)}
    stream = 1 + max(base.run.procs[rank].streams, default=0)

    def moved(op: Op) -> Op:
        return op if op.comm in used else replace(op, stream=stream)

    return [
        Call(moved(what.op))
        if isinstance(what, Call)
        else replace(what, ops=tuple(map(moved, what.ops)))
        if isinstance(what, Group)
        else what
        for what in work
    ]


def _makings(base: Base, stem: Stem, rank: int) -> list[Due]:
    """Communicators that others are making with this rank, which its program was to make."""
    found: list[Due] = []
    mine = [what for code in stem.code[rank] for _, what in code]
    rest = [what for code in base.rest[rank] for what in code]
    begun: dict[str, dict[int, float]] = defaultdict(dict)
    splits: dict[Comm, list[dict[int, float]]] = {}
    for r, threads in enumerate(stem.code):
        counts: dict[Comm, int] = defaultdict(int)
        for t, what in itertools.chain(*threads):
            if isinstance(what, Init):
                begun[what.uid or what.comm][r] = t
            elif isinstance(what, Split):
                comm = base.comms[r, what.parent]
                times = splits.setdefault(comm, [])
                if counts[comm] >= len(times):
                    times.append({})
                times[counts[comm]][r] = t
                counts[comm] += 1
    have: dict[Comm, int] = defaultdict(int)
    for what in mine:
        if isinstance(what, Split):
            have[base.comms[rank, what.parent]] += 1
    for what in rest:
        if isinstance(what, Init) and (what.uid or what.comm) in begun:
            came = begun[what.uid or what.comm]
            found.append(Due(min(came.values()), what, came))
        elif isinstance(what, Split) and (parent := base.comms.get((rank, what.parent))):
            k = have[parent]
            have[parent] += 1
            if k < len(splits.get(parent, [])):
                there = splits[parent][k]
                found.append(Due(min(there.values()), what, there))
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
