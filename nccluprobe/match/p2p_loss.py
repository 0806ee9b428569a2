"""Whether a send or receive may have been made though no record of it is seen.

A lost call leaves a hole in the ordinals of its communicator.  Most holes are
known for something else: a collective whose neighbours are seen, or a message
of another direction or peer.  What is left may be the one in question.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match import p2p_queue as q
from nccluprobe.match import tail
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.hosts import Host, host_of
from nccluprobe.match.p2p_pair import Channel
from nccluprobe.match.p2p_queue import Lane, Side
from nccluprobe.match.p2p_units import Unit


def unseen(e: Endpoint, side: Side | None, lane: Lane) -> int:
    """How many more operations of one direction and peer may have been made than are seen."""
    idx, t = (-1, 0) if side is None else side.newest.get(lane, (-1, 0))
    p = e.process
    most = p.lost_since(t)
    if not most:
        return 0
    here = p.losses.after(e.info.id, idx)
    if here:
        here = max(0, here - _of_calls(e, idx) - (0 if side is None else _of_others(side, idx)))
    return min(most, here + p.unplaced())


def may_have(
    comm: Communicator,
    side: Side | None,
    unit: Unit,
    e: Endpoint,
    lacking: Collection[tuple[Channel, bool]],
) -> bool:
    """Whether an endpoint may have made, unseen, what a unit waits for.

    ``lacking``: channels, and whether sends, of which more is lacking than was lost.
    """
    if _connects(unit, e):
        return False
    rank = unit.endpoint.comm_rank or 0
    for half in halves(comm, unit, e):
        lane = (half[1], rank)
        if half not in lacking and (
            unseen(e, side, lane) or (side is not None and side.hole(lane))
        ):
            return True
    return False


def awaits_end(side: Side | None, unit: Unit) -> bool:
    """Whether a half that a unit waits for is queued in a group whose end may have been lost."""
    if side is None or not side.queued:
        return False
    p = side.endpoint.process
    if not p.unplaced() or p.inside_now() is not None:
        return False
    rank = unit.endpoint.comm_rank or 0
    mine = (o.op for o in unit.ops if o.peer is side.endpoint)
    return any(side.awaits((not op.send, rank), op.ord) for op in mine)


def halves(comm: Communicator, unit: Unit, e: Endpoint) -> Iterator[tuple[Channel, bool]]:
    """Channels in which a unit waits for an endpoint, and whether for sends."""
    rank = unit.endpoint.comm_rank or 0
    for o in unit.ops:
        if o.peer is e:
            ends = (rank, o.op.peer) if o.op.send else (o.op.peer, rank)
            yield Channel(comm.key, *ends), not o.op.send


def _connects(unit: Unit, e: Endpoint) -> bool:
    """Whether a thread is inside its first operations with a peer that is in another call.

    These make the connection, for which both have to come, and return then.
    """
    first = e is not unit.endpoint and all(o.peer is e and o.op.ord == 0 for o in unit.ops)
    return first and unit.hard is not None and host_of(e) is Host.INSIDE


def hidden(e: Endpoint, side: Side | None) -> int:
    """How many calls of an endpoint were lost of which nobody knows what they were.

    Without those before the oldest call that is remembered, where others are forgotten.
    """
    p = e.process
    if not p.lost:
        return 0
    calls, last = e.tail.rows()[:, tail.IDX], e.last_t
    firsts = [int(calls[0]) if len(calls) >= tail.Tail.KEPT else -1]
    if side is not None:
        rows, last = side.recent(), max(last, side.last_t)
        firsts.append(int(rows[0, q.IDX]) if len(rows) >= q.TAIL else -1)
    after = min(firsts)
    here = p.losses.after(e.info.id, after) - _of_calls(e, after)
    newer = min(p.lost_since(last) or 0, p.without_place())
    return max(0, here) + newer


def guessed(unit: Unit) -> bool:
    """Whether operations of a unit's directions and peers are known by holes only."""
    return any(unit.side.queue(bool(o.op.send), o.op.peer).lost for o in unit.ops)


def _of_calls(e: Endpoint, after: int) -> int:
    """Collectives that are missing between others after a call."""
    rows = e.tail.rows()
    whole = e.info.from_start and len(rows) < tail.Tail.KEPT
    return _between(rows[:, tail.ORD], rows[:, tail.IDX], after, whole)


def _of_others(side: Side, after: int) -> int:
    """Sends and receives that are missing between others of their direction and peer."""
    rows = side.recent()
    whole = side.placed and len(rows) < q.TAIL
    lanes = rows[:, q.PEER] * 2 + rows[:, q.SEND]
    found = 0
    for lane in np.unique(lanes).tolist():
        mine = rows[lanes == lane]
        found += _between(mine[:, q.ORD], mine[:, q.IDX], after, whole)
    return found


def _between(order: m.Int64, idx: m.Int64, after: int, whole: bool) -> int:
    """How many ordinals are missing between two of them, the first not before a call.

    ``whole``: all are remembered: what is missing before the first one was made, too.
    """
    if not len(order):
        return 0
    at = np.argsort(order, kind="stable")
    order, idx = order[at], idx[at]
    late = idx[:-1] >= after
    found = int(np.maximum(order[1:] - order[:-1] - 1, 0)[late].sum())
    return found + (int(order[0]) if whole and after < 0 else 0)
