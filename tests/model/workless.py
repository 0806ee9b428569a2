"""A rank that has no work for the others: nothing is broken, be it for hours.

A server's root waits for a request, and its followers for what it broadcasts or
scatters; a stage of a pipeline for what is sent to it.  That is so only if all that
anybody waits for is data of this one rank, and it waits for nobody itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from model.device import Endpoint, Item
from model.engine import Engine
from model.ops import Host, Op
from model.process import Thread
from model.rivals import Rival
from model.stem import Base, Stem, away, operations

#: States in which a main thread may wait for a request.
_WAITS = {("running", None), ("syscall", "futex"), ("syscall", "poll"), ("syscall", "read")}
_FROM_ROOT = ("ncclBroadcast", "ncclScatter")


def workless(base: Base, stem: Stem, horizon: float) -> Iterator[Rival]:
    """The program in which the one rank that is away has work again only after ``horizon``."""
    if any(p.ended is not None or p.frozen for p in base.run.procs):
        return
    gone = away(stem)
    if len(gone) > 1:
        return
    for r, proc in enumerate(base.run.procs):
        if not proc.threads or not only_data_of(base.run, r):
            continue
        made = stem.copy(r)
        _, main, syscall = proc.states[-1]
        t, began, what = 0, proc.states[-1][0], Host(None, main, syscall)
        if gone:
            ((r_, t, what),) = gone
            if r_ != r:
                continue
            began, _ = made.code[r][t].pop()
        elif (r, 0) not in base.over:
            continue
        if t == 0 and base.program.host_state and (what.main, what.syscall) not in _WAITS:
            continue
        made.code[r][t].append((began, Host(horizon + 1.0 - began, what.main, what.syscall)))
        words = f"nothing is broken: the others wait for data of rank {r}, which has none to send"
        yield Rival("none", frozenset(), words, made, made)


def only_data_of(run: Engine, r: int) -> bool:
    """Whether somebody waits, and all that anybody waits for is what this rank is to send."""
    if any(stream.live for stream in run.procs[r].streams.values()):
        return False
    waits = 0
    for proc in run.procs:
        if proc.rank == r:
            continue
        for thread in proc.threads:
            if thread.inside is not None:
                if not _connects(thread, r):
                    return False
                waits += 1
        for stream in proc.streams.values():
            head = stream.live[0] if stream.live else None
            if head is None or head.state != "running":
                continue
            if head.endpoint is None or not _lacks_only(head, head.endpoint, r):
                return False
            waits += 1
    return waits > 0


def _connects(thread: Thread, r: int) -> bool:
    """Whether it is inside the first call of a communicator or pair, for data of the rank."""
    ops = operations(thread.at) if thread.at is not None else ()
    known = thread.proc.known
    return bool(ops) and all(_is_data(op, known[op.comm], r) for op in ops)


def _lacks_only(item: Item, endpoint: Endpoint, r: int) -> bool:
    comm, rank = endpoint.comm, endpoint.rank
    for op, number in zip(item.ops, item.numbers, strict=True):
        if op.p2p:
            assert op.peer is not None
            sends = op.api == "ncclSend"
            channel = comm.channel(rank, op.peer) if sends else comm.channel(op.peer, rank)
            mine, other = channel.sends, channel.recvs
            if not sends:
                mine, other = other, mine
            if number not in mine or (sends and number in channel.sent):
                continue
            if number in other or not _is_data(op, endpoint, r):
                return False
            continue
        slot = comm.slots[number]
        if rank in slot.over:
            continue
        absent = [comm.members[i] for i in range(comm.nranks) if i not in slot.started]
        if slot.broken or absent != [r] or not _is_data(op, endpoint, r):
            return False
    return True


def _is_data(op: Op, endpoint: Endpoint, r: int) -> bool:
    """Whether it is a call that brings data of the rank."""
    members = endpoint.comm.members
    if op.p2p:
        assert op.peer is not None
        return op.api == "ncclRecv" and members[op.peer] == r
    return op.root is not None and op.signature[0] in _FROM_ROOT and members[op.root] == r
