"""Which of two ranks is wrong when one made a send or receive that the other did not."""

from __future__ import annotations

from collections.abc import Mapping

from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.p2p_habit import PERIODS, odd_one
from nccluprobe.match.p2p_pair import At, Pairs
from nccluprobe.match.p2p_queue import IDX, ORD, PEER, SEND, Op, Side
from nccluprobe.match.p2p_shape import shape_says


def odd_of(
    comm: Communicator,
    sides: Mapping[At, Side],
    pairs: Pairs,
    has: Side,
    lacks: Endpoint,
    op: Op,
) -> Endpoint | None:
    """Of two, one of which made an operation that the other did not: who left its way."""
    odd = odd_one(has, sides.get((lacks.info.source, lacks.info.id)), pairs.wires.size)
    if odd is not None:
        return odd.endpoint
    lane = (bool(op.send), op.peer)
    says = shape_says(comm, sides, has, lacks, op)
    if says is None:
        says = count_says(comm, sides, has, lane)
        if says == "extra" and not _was_even(has, op):
            return None
    return None if says is None else has.endpoint if says == "extra" else lacks


def _was_even(side: Side, op: Op) -> bool:
    """Whether all directions had as many, several times, before an operation that is over.

    Else the step that it is in may have one direction only, or its end is still to come.
    """
    rows = side.recent()
    before = rows[rows[:, IDX] < op.idx]
    made = {(bool(r[SEND]), r[PEER]): r[ORD] + 1 for r in before.tolist()}
    ends = [made.get(lane, 0) for lane, queue in side.queues.items() if queue.end]
    if op.ord < PERIODS or any(n != op.ord for n in ends):
        return False
    e = side.endpoint
    over = e.end is not None or e.process.ended or (rows[:, IDX] > op.idx).any()
    return bool(over) or (e.last_idx is not None and e.last_idx > op.idx)


def count_says(
    comm: Communicator, sides: Mapping[At, Side], has: Side, lane: tuple[bool, int]
) -> str | None:
    """Whether a side made one ``extra``, or its peer ``skipped`` one, by what the others did.

    Only where all others, in all directions, have made as many.
    """
    send, peer = lane
    rank = has.endpoint.comm_rank
    ends: list[int] = []
    lacks = 0
    for e in comm.endpoints.values():
        side = sides.get((e.info.source, e.info.id))
        for (s, p), queue in side.queues.items() if side is not None else ():
            if side is has and (s, p) == lane:
                continue
            if e.comm_rank == peer and (s, p) == (not send, rank):
                lacks = queue.end
            elif queue.end:
                ends.append(queue.end)
    own = has.queue(*lane).end
    if len(ends) < 2 or len(set(ends)) > 1 or own <= lacks:
        return None
    most = ends[0]
    return "extra" if most == lacks else "skipped" if most == own else None


def orderly(e: Endpoint) -> bool:
    """Whether it ended the communicator, or its process, as a program does that is done."""
    if e.end is not None:
        return e.end.orderly
    end = e.process.end
    return end is not None and end.how == "exited" and end.code == 0


def of_step(
    comm: Communicator, own: Endpoint, gone: tuple[Endpoint, ...]
) -> tuple[Endpoint, ...] | None:
    """Who is wrong where a peer has gone past a whole step of sends and receives to a collective.

    It left out the step, unless most have made the collective: then who waits may have left
    out that one, and nobody is named.  None: nobody has gone past.
    """
    if not gone:
        return None
    made = sum(e.entered > own.entered for e in comm.members())
    return gone if comm.key.nranks > 2 and 2 * made <= comm.key.nranks else ()
