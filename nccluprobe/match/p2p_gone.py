"""Sends that a rank which crashed has never received.

A small send is buffered: who made it goes on, and may wait for nothing.  But a
crash is no end of a program in which somebody had still to be heard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import TRANSFERS, Endpoint
from nccluprobe.match.options import SECOND
from nccluprobe.match.p2p_loss import unseen
from nccluprobe.match.p2p_pair import At, Channel
from nccluprobe.match.p2p_queue import Side
from nccluprobe.match.status import ended_abruptly, last_sign
from nccluprobe.match.waits import Wait

#: Who still calls so long after a crash has gone on without who crashed.
_WENT_ON = 10 * SECOND


def unreceived(
    comm: Communicator, channels: Iterable[Channel], sides: Mapping[At, Side]
) -> list[Wait]:
    """The first send of each channel whose receiver crashed before it made the receive.

    Nobody need wait in them: they are no part of the graph.
    """
    found: list[Wait] = []
    for c in channels:
        src, dst = comm.endpoints.get(c.src), comm.endpoints.get(c.dst)
        if src is None or dst is None or not _is_left_by(src, dst):
            continue
        has = sides.get((src.info.source, src.info.id))
        theirs = sides.get((dst.info.source, dst.info.id))
        if has is None or not (has.placed and dst.info.from_start):
            continue
        queue = has.queue(True, c.dst)
        op = queue.at(max(queue.first, queue.complete))
        if op is None or unseen(dst, theirs, (False, c.src)):
            continue
        found.append(
            Wait(
                comm=comm,
                label=f"ncclSend #{op.ord} from rank {c.src}",
                first=op.t,
                entered=(src,),
                absent=(),
                at=(-3, c.src, c.dst),
                api=TRANSFERS[0],
                device=True,
                held=[dst],
            )
        )
    return found


def _is_left_by(src: Endpoint, dst: Endpoint) -> bool:
    """Whether one crashed in a communicator that the other keeps, and has not used since."""
    end = dst.process.end
    if end is None or src.end is not None or dst.end is not None:
        return False
    return ended_abruptly(dst.process) and last_sign(src) - end.t <= _WENT_ON
