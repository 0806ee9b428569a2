"""Which signatures something that is kept still refers to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match import tail
from nccluprobe.match.communicator import Communicator, LateSlot
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.p2p import P2P
from nccluprobe.match.p2p_pair import Pair
from nccluprobe.match.p2p_queue import SIG, Op, Side


def held(
    endpoints: Iterable[Endpoint],
    comms: Iterable[Communicator],
    p2p: P2P,
    waits: Iterable[LateSlot],
) -> m.Int64:
    """Ids in the signature table, some more than once; ``waits``: long waits not judged so far."""
    columns: list[m.Int64 | m.Int32] = []
    single: list[int] = [w.sig for w in waits]
    every = {id(e): e for e in endpoints}
    for comm in comms:
        every |= {id(e): e for e in comm.endpoints.values()}
        columns.append(comm.history)
        single += _of_comm(comm)
    for e in every.values():
        columns += (e.rows.sig, e.tail.rows()[:, tail.SIG])
        single += _of_endpoint(e)
    for side in p2p.sides.values():
        columns += [rows[:, SIG] for queue in side.queues.values() for rows in queue.parts]
        columns += [rows[:, SIG] for rows in side.tail]
        single += [op.sig for op in _pending(side)]
    pairs = p2p.pairs
    for pair in (*pairs.disputed.values(), *pairs.decided, *pairs.other_type.values()):
        single += [op.sig for op in _ops(pair)]
    return np.concatenate([np.array(single, np.int64), *columns])


def _of_comm(comm: Communicator) -> Iterator[int]:
    # ``last_sig`` is the last of the history.
    yield from (zero.sig for zero in comm.zero_calls.values())
    yield from (w.sig for w in comm.fresh_late)


def _of_endpoint(e: Endpoint) -> Iterator[int]:
    if e.oldest is not None:
        yield e.oldest[2]
    yield from (row.sig for row in e._pending.values())


def _pending(side: Side) -> Iterator[Op]:
    for lane in side._pending.values():
        yield from (op for op, _ in lane.values())


def _ops(pair: Pair) -> tuple[Op, ...]:
    return (pair.send, pair.recv, *pair.extra)
