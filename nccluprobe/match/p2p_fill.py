"""Lost sends and receives, worked out from what their peers wait for.

A hole in the ordinals of a rank's calls says that it made a call there, and not
which.  When peers stand in operations that this rank seems to lack, in just as
many as it has such holes, at the same place among the collectives of the
communicator, then these are what was lost.  Peers that lack more than there are
holes for lack at least one that was never made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match import p2p_queue as q
from nccluprobe.match import tail
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.p2p_pair import At, Channel
from nccluprobe.match.p2p_queue import Lane, Op, Side
from nccluprobe.match.p2p_short import group_of, step_of
from nccluprobe.match.p2p_steps import Steps

#: More holes than this are not looked at.
_MOST = 256
#: (fewest, most) collectives before a call.
Epoch = tuple[int, int]
#: A channel, and whether a send of it is lacking, or a receive.
Half = tuple[Channel, bool]


@dataclass
class Wanted:
    """An operation that one rank has made, and the other not, so far as is seen."""

    lane: Lane
    order: int
    op: Op
    epoch: Epoch
    #: Whether no collective of the peer before it can have been lost that is not counted.
    exact: bool


@dataclass
class Holes:
    """What may be missing of one endpoint's sends and receives."""

    places: list[int] = field(default_factory=list)
    #: Of these, so many are known for something else, it is not known which.
    taken: int = 0
    #: Places that are known for something else.
    known: set[int] = field(default_factory=set)
    #: There are too many to be looked at.
    many: bool = False

    @property
    def free(self) -> int:
        return len(self.places) - self.taken


def holes_of(e: Endpoint, side: Side) -> Holes:
    """Ordinals at which an endpoint made calls that are not known otherwise."""
    known = e.process.losses.holes.get(e.info.id)
    if known is None or known.broken:
        return Holes(many=known is not None)
    gaps = [(a, b) for a, b, t in known.gaps if t < e.process.through]
    if sum(b - a + 1 for a, b in gaps) > _MOST:
        return Holes(many=True)
    filled = e.process.losses.filled.get(e.info.id, ())
    left = [i for a, b in gaps for i in range(a, b + 1) if i not in filled]
    every = set(left)
    calls, rows = e.tail.rows(), side.recent()
    first = e.info.from_start
    demands = _demands(calls, tail.ORD, tail.IDX, first and len(calls) < tail.Tail.KEPT)
    lanes = rows[:, q.PEER] * 2 + rows[:, q.SEND]
    for lane in np.unique(lanes).tolist():
        demands += _demands(rows[lanes == lane], q.ORD, q.IDX, first and len(rows) < q.TAIL)
    open_ = []
    for a, b, n in sorted(demands, key=lambda d: d[1] - d[0]):
        inside = [i for i in left if a < i < b]
        if len(inside) <= n:
            left = [i for i in left if not a < i < b]
        else:
            open_.append(n)
    return Holes(left, min(len(left), sum(open_)), every.difference(left))


def _demands(rows: q.Table, order: int, idx: int, whole: bool) -> list[tuple[int, int, int]]:
    """Calls missing in one sequence: between which calls, and how many.

    ``whole``: all calls are remembered, so that one that is not the first shows what is before.
    """
    if not len(rows):
        return []
    rows = rows[np.argsort(rows[:, order], kind="stable")]
    found = []
    if whole and rows[0, order] > 0:
        found.append((-1, int(rows[0, idx]), int(rows[0, order])))
    for i in np.flatnonzero(np.diff(rows[:, order]) > 1).tolist():
        a, b = rows[i], rows[i + 1]
        found.append((int(a[idx]), int(b[idx]), int(b[order] - a[order]) - 1))
    return found


def epoch_of(e: Endpoint, idx: int) -> Epoch | None:
    """How many collectives an endpoint made before a call; None: not remembered."""
    rows = e.tail.rows()
    if not len(rows):
        return (0, 0)
    rows = rows[np.argsort(rows[:, tail.ORD], kind="stable")]
    at = int(np.searchsorted(rows[:, tail.IDX], idx))
    low = 0 if at == 0 else int(rows[at - 1, tail.ORD]) + 1
    if at == 0 and rows[0, tail.ORD] > 0 and len(rows) >= tail.Tail.KEPT:
        return None
    high = int(rows[at, tail.ORD]) if at < len(rows) else low
    return (low, max(low, high))


@dataclass
class Filled:
    """What became of the operations that ranks seem to lack."""

    #: Channels in which lost operations were put in.
    changed: list[Channel] = field(default_factory=list)
    #: Halves of which more is lacking than was lost.
    lacking: set[Half] = field(default_factory=set)
    #: Of these, the ones of steps in which their rank has left out one at least.
    short: set[Half] = field(default_factory=set)


def fill(
    comm: Communicator,
    channels: Iterable[Channel],
    sides: Mapping[At, Side],
    size: Callable[[m.Int64], m.Int64],
    before: int,
) -> Filled:
    """Put lost operations where peers wait for them.

    ``size``: bytes by signature; ``before``: only for what was called before, unix ns.
    """
    wanted: dict[int, list[tuple[Channel, Wanted]]] = {}
    for channel in channels:
        for send in (True, False):
            rank, peer = (channel.src, channel.dst) if send else (channel.dst, channel.src)
            for w in _wanted(comm, rank, peer, send, sides, before):
                wanted.setdefault(rank, []).append((channel, w))
    found = Filled()
    steps = Steps(comm, sides, size)
    for rank, mine in wanted.items():
        e = comm.endpoints[rank]
        side = sides.get((e.info.source, e.info.id))
        if side is not None:
            _fill(e, side, mine, steps, found)
    return found


def _wanted(
    comm: Communicator, rank: int, peer: int, send: bool, sides: Mapping[At, Side], before: int
) -> list[Wanted]:
    """Operations that a peer has made and that a rank which lost calls seems to lack."""
    e, other = comm.endpoints.get(rank), comm.endpoints.get(peer)
    if e is None or other is None or not e.process.lost:
        return []
    side, theirs = (sides.get((x.info.source, x.info.id)) for x in (e, other))
    if theirs is None or not theirs.placed or not e.info.from_start:
        return []
    queue = theirs.queues.get((not send, rank))
    if queue is None or not queue.n:
        return []
    lane = (send, peer)
    if side is not None and lane in side.queues and side.queues[lane].n:
        return []
    found = []
    for row in queue.rows()[:_MOST].tolist():
        op = Op(*row)
        epoch = epoch_of(other, op.idx) if op.idx >= 0 and op.t < before else None
        if epoch is None:
            break
        exact = epoch[0] == epoch[1] and is_counted(other, op.idx)
        found.append(Wanted(lane, op.ord, op, epoch, exact))
    return found


def _fill(
    e: Endpoint,
    side: Side,
    wanted: list[tuple[Channel, Wanted]],
    steps: Steps,
    found: Filled,
) -> None:
    holes = holes_of(e, side)
    at = {h: epoch for h in holes.places if (epoch := epoch_of(e, h)) is not None}
    used: set[int] = set()
    # NCCL takes no send to oneself without its receive in the same group: that was made.
    for channel, w in (x for x in wanted if x[0].src == x[0].dst and holes.free > 0):
        near = min((h for h in at if h not in used), key=lambda h: abs(h - w.op.idx), default=None)
        if near is not None and side.restore(w.lane, w.order, w.op, near):
            used.add(near)
            found.changed.append(channel)
    others = [x for x in wanted if x[0].src != x[0].dst]
    others = _by_step(e, side, others, holes, steps, used, found)
    for epoch in sorted({w.epoch for _, w in others}):
        mine = [(c, w) for c, w in others if w.epoch == epoch]
        places = [h for h in holes.places if h not in used and h in at and _meet(at[h], epoch)]
        if not places:
            continue
        room = min(len(places), holes.free - len(used))
        if len(mine) > room:
            found.lacking.update((c, w.lane[0]) for c, w in mine)
            continue
        for (channel, w), h in zip(mine, places, strict=False):
            if side.restore(w.lane, w.order, w.op, h):
                used.add(h)
                found.changed.append(channel)


def _by_step(
    e: Endpoint,
    side: Side,
    wanted: list[tuple[Channel, Wanted]],
    holes: Holes,
    steps: Steps,
    used: set[int],
    found: Filled,
) -> list[tuple[Channel, Wanted]]:
    """Put in what was lost inside of the groups of steps; returns what is lacking besides."""
    if holes.many:
        return wanted
    of: dict[int, list[tuple[Channel, Wanted]]] = {}
    for channel, w in wanted:
        group = group_of(steps, w.op, w.lane[1], e)
        if group is not None:
            of.setdefault(group, []).append((channel, w))
    done: set[int] = set()
    unplaced = e.process.without_place()
    for group, mine in sorted(of.items()):
        step = step_of(e, side, group)
        if step is None:
            continue
        left = [h for h in holes.places if h not in used]
        if len(mine) > step.room(left, unplaced):
            found.short.update((c, w.lane[0]) for c, w in mine)
            done.update(id(w) for _, w in mine)
            continue
        inside = step.inside(left)
        if holes.taken or len(inside) != len(mine):
            continue
        for (channel, w), h in zip(mine, inside, strict=True):
            if side.restore(w.lane, w.order, w.op, h):
                used.add(h)
                done.add(id(w))
                found.changed.append(channel)
    rest = [x for x in wanted if id(x[1]) not in done]
    for epoch in {w.epoch for _, w in rest if w.exact}:
        # Where it has come to the collective behind, what was lost before it left a hole;
        # another thread may have made it later.
        end = call_at(e, epoch[1])
        mine = [(c, w) for c, w in rest if w.epoch == epoch and w.exact]
        places = [h for h in holes.places if h not in used and end is not None and h < end]
        room = sum((at := epoch_of(e, h)) is None or _meet(at, epoch) for h in places)
        if end is not None and len(mine) > room + unplaced:
            found.short.update((c, w.lane[0]) for c, w in mine)
    found.lacking |= found.short
    return rest


def call_at(e: Endpoint, order: int) -> int | None:
    """call_idx of a collective by its ordinal; None: not made, or not remembered."""
    rows = e.tail.rows()
    at = rows[rows[:, tail.ORD] == order, tail.IDX]
    return int(at[-1]) if len(at) and at[-1] >= 0 else None


def is_counted(e: Endpoint, idx: int) -> bool:
    """Whether all collectives of an endpoint before a call are seen, or shown by a later one."""
    rows = e.tail.rows()[:, tail.IDX]
    if len(rows) and rows.max() > idx:
        return True
    last = int(rows.max()) if len(rows) else -1
    holes = e.process.losses.holes.get(e.info.id)
    return holes is None or not (holes.broken or any(last < b < idx for _, b, _ in holes.gaps))


def _meet(a: Epoch, b: Epoch) -> bool:
    return a[0] <= b[1] and b[0] <= a[1]
