"""What a rank may have called where the record of a call was lost.

A trace tells how many records were lost and when, and of the calls that are
left their numbers on their communicators.  In place of a lost one there may
have been any call that leaves these numbers: one whose partners come later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from model.device import SMALL
from model.ops import Call, Group, Op
from model.replay import Lost, gone
from model.stem import Base, Stem, operations
from model.tails import lacking

#: How many of the last lost calls of a rank are tried.
CALLS = 8


def others(base: Base, stem: Stem, rank: int, lost: Lost, own: bool) -> Iterator[Stem]:
    """The same with another call of the rank in place of one that was lost.

    It is one that others wait for, or, if ``own``, one that the rank has made before.
    """
    if not lost[rank]:
        return
    proc = base.run.procs[rank]
    left_out = gone(base.run, lost)
    instead = _due(base, stem, rank) + (_repeated(base, stem, rank) if own else [])
    #: Communicators, and what was called on them, of the calls after it that were not lost.
    after: set[tuple[str, ...]] = set()
    tried = 0
    for i in range(len(proc.records) - 1, -1, -1):
        record = proc.records[i]
        was = record.op
        if was is None or tried == CALLS:
            continue
        if id(record) not in left_out:
            after |= {(was.comm,), _numbered(was)}
            continue
        tried += 1
        thread, began = base.run.source[rank][i]
        place = next((n for n, (t, _) in enumerate(stem.code[rank][thread]) if t == began), None)
        fitting = _fitting(base, stem, rank, was, record.fields["ord"])
        for op in [*fitting, *instead] if place is not None else ():
            moved: set[tuple[str, ...]] = set()
            if op.comm != was.comm:
                moved |= {(op.comm,), (was.comm,)}
            if _numbered(op) != _numbered(was):
                moved |= {_numbered(op), _numbered(was)}
            if op != was and not moved & after:
                assert place is not None
                yield _with(stem, (rank, thread, place), record.fields.get("gpos"), op, was)


def _numbered(op: Op) -> tuple[str, ...]:
    """What is counted together: collectives of a communicator, sends or receives of a pair."""
    return (op.comm, op.api, str(op.peer)) if op.p2p else (op.comm, "")


def _fitting(base: Base, stem: Stem, rank: int, was: Op, number: int) -> list[Op]:
    """The same call with the arguments of those whom it met, which nobody can see to differ."""
    comm = base.comms[rank, was.comm]
    me = comm.members.index(rank)
    for r in comm.members if was.peer is None else [comm.members[was.peer]]:
        made = [
            op
            for _, op, c in stem.calls(base, r)
            if c is comm
            and op.p2p == was.p2p
            and (was.peer is None or (op.peer == me and op.api != was.api))
        ]
        if r == rank or number >= len(made) or made[number].signature[1:] == was.signature[1:]:
            continue
        like = made[number]
        if was.peer is None:
            return [like]
        return [replace(was, count=like.count, dtype=like.dtype)]
    return []


def _due(base: Base, stem: Stem, rank: int) -> list[Op]:
    """What the rank has not made, and others wait for."""
    left = lacking(base, stem)
    first: dict[tuple[str, ...], Op] = {}
    for _, op in left[rank] if left is not None else []:
        first.setdefault(_numbered(op), op)
    return list(first.values())


def _with(stem: Stem, place: tuple[int, int, int], k: int | None, op: Op, was: Op) -> Stem:
    rank, thread, i = place
    made = stem.copy(rank)
    t, what = stem.code[rank][thread][i]
    ops = list(operations(what))
    ops[k or 0] = op
    new = replace(what, ops=tuple(ops)) if isinstance(what, Group) else Call(op)
    made.code[rank][thread][i] = (t, new)
    peer = "" if op.peer is None else f" peer {op.peer}"
    instead = f"{op.api}{peer} of {op.count} on {op.comm}"
    peer = "" if was.peer is None else f" peer {was.peer}"
    made.note = f"; a lost call of rank {rank} was {instead}, not {was.api}{peer} on {was.comm}"
    return made


def _repeated(base: Base, stem: Stem, rank: int) -> list[Op]:
    """Calls that the rank has made before and that return at once: it may have made one more.

    Of each communicator the newest collective, and of each pair the newest
    receive and the newest send, if that is small enough to be buffered.
    """
    newest: dict[tuple[str, str, int | None], Op] = {}
    for _, op, _ in stem.calls(base, rank):
        kind = op.api if op.p2p else "collective"
        if op.count and (op.api != "ncclSend" or op.bytes <= SMALL):
            newest.pop((kind, op.comm, op.peer), None)
            newest[kind, op.comm, op.peer] = op
    return list(newest.values())[::-1]
