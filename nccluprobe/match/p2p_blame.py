"""Which of two ranks is wrong when one made a send or receive that the other did not."""

from __future__ import annotations

from collections.abc import Mapping

from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.p2p_habit import odd_one
from nccluprobe.match.p2p_pair import At, Pairs
from nccluprobe.match.p2p_queue import Op, Side
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
    says = shape_says(comm, sides, has, lacks, op) or count_says(comm, sides, has, lane)
    return None if says is None else has.endpoint if says == "extra" else lacks


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
        return e.end.how in ("destroy", "finalize")
    end = e.process.end
    return end is not None and end.how == "exited" and end.code == 0
