"""What a log has told of a process as the matcher's items.

A process that drives several GPUs is one source for each: ranks are what is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from nccluprobe.importers.common import Numbers
from nccluprobe.importers.log_state import LogComm, LogProcess
from nccluprobe.match import model as m

#: Ids of streams that a process surely does not have.
_STREAMS = 1 << 32


def process_items(
    p: LogProcess, numbers: Numbers, through: int, untimed: str
) -> Iterator[list[m.Item]]:
    """Items of a process, a list for each GPU that it drives; all was read up to ``through``.

    ``untimed``: which times are assumed.
    """
    lanes = p.lanes
    if len(lanes) > 1 and (p.host, p.pid) in numbers.known:
        lanes = [None]  # what else tells of it knows one process
    if len(lanes) == 1:
        key = numbers.key("log", p.host, p.pid)
        yield list(_items(p, p.comms, None, key, numbers.take(), through, untimed))
        return
    of_lane: dict[int | None, list[LogComm]] = {d: [] for d in lanes}
    for comm in p.comms:
        of_lane[comm.device].append(comm)
    for device, comms in of_lane.items():
        start = 0 if device is None else device + 1
        key = m.ProcessKey(f"log {p.host}", p.pid, start)
        yield list(_items(p, comms, (device,), key, numbers.take(), through, untimed))


def _items(
    p: LogProcess,
    comms: list[LogComm],
    lane: tuple[int | None] | None,
    key: m.ProcessKey,
    source: int,
    through: int,
    untimed: str,
) -> Iterator[m.Item]:
    """``lane``: the device that it is about; None: all."""
    yield m.SourceOpened(source, p.name)
    yield m.ProcessInfo(
        source=source,
        key=key,
        run_id="nccl-log",
        host=p.host,
        rank=_rank(comms),
        front="nccl log",
        cannot_see=("groups",),
        untimed=untimed,
    )
    for comm in comms:
        yield m.CommInfo(
            source=source,
            id=comm.id,
            t=comm.t,
            hash=comm.hash,
            instance=comm.instance,
            comm_rank=comm.rank,
            nranks=comm.nranks,
            learnt="init" if comm.seen_init else "unknown",
        )
    for comm in comms:
        if comm.calls:
            yield _batch(source, comm)
        if comm.transfers:
            yield _p2p_batch(source, comm)
    for device, item in p.lifecycle:
        if lane is None or device == lane[0]:
            yield replace(item, source=source)
    begun = [(t, b) for (t, _), b in p.inits.items() if lane is None or b.device == lane[0]]
    for thread, b in begun:
        yield m.Enter(source, b.api, b.t, thread, uid_hash=b.uid, nranks=b.nranks, rank=b.rank)
    yield m.Coverage(
        source=source,
        t=through,
        through=through,
        lost=sum(n for d, n in p.lost.items() if lane is None or d is None or d == lane[0]),
        blind=0,
        in_flight=len(begun),
        alive=None,
        main="unknown",
    )
    yield m.Progress(source, through, caught_up=True)


def _rank(comms: list[LogComm]) -> int | None:
    """The rank in the first of the largest communicators; None: not known, or there are several."""
    known = [c for c in comms if c.rank is not None]
    if not known:
        return None
    world = max(known, key=lambda c: c.nranks)
    ranks = {c.rank for c in known if c.hash == world.hash and c.nranks == world.nranks}
    return world.rank if len(ranks) == 1 or world.hash is None else None


def _batch(source: int, comm: LogComm) -> m.Batch:
    columns = [np.array(c, np.int64) for c in zip(*comm.calls, strict=True)]
    order, idx, sig, t, thread, stream = columns
    return m.Batch(**_shared(source, comm, order, idx, sig, t, thread), stream=stream)


def _p2p_batch(source: int, comm: LogComm) -> m.P2PBatch:
    columns = [np.array(c, np.int64) for c in zip(*comm.transfers, strict=True)]
    send, peer, order, idx, sig, t, thread = columns
    # Groups do not show: two sends head to head may be one group with their receives, which
    # cannot hold up itself. So none waits for another: each has a stream of its own.
    return m.P2PBatch(
        **_shared(source, comm, order, idx, sig, t, thread),
        send=send.astype(np.bool_),
        peer=peer.astype(np.int32),
        stream=_STREAMS + comm.id * _STREAMS + idx,
    )


def _shared(
    source: int,
    comm: LogComm,
    order: m.Int64,
    idx: m.Int64,
    sig: m.Int64,
    t: m.Int64,
    thread: m.Int64,
) -> dict[str, Any]:
    """Columns of collectives, and of sends and receives: a line is a call that has returned."""
    return {
        "source": source,
        "comm": comm.id,
        "ord": order,
        "idx": idx,
        "sig": sig.astype(np.int32),
        "t_enter": t,
        "t_exit": t,
        "rc": np.zeros(len(idx), np.int32),
        "group": np.zeros(len(idx), np.int64),
        "thread": thread,
    }
