"""Which of the newest operations have surely ended, for all endpoints at once.

The run of ``device`` looks at single operations.  Of thousands of ranks nearly
all of them are of no interest: everybody came.  Here the streams are run in
columns, in rounds: all that stands at a head and whose partners stand there too
ends.  What is not plain stays, and all behind it: somebody is inside the call,
lacks it, had died by then, passed count 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match import p2p_queue as q
from nccluprobe.match import tail as c
from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.device_ops import NEVER, SMALL, Ran, death_of
from nccluprobe.match.device_rounds import Bools, Ints, Lists, Rounds
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.options import SECOND
from nccluprobe.match.p2p_pair import At, Channel, is_unplaced
from nccluprobe.match.p2p_queue import Side
from nccluprobe.match.process import Who
from nccluprobe.match.signature import SignatureTable
from nccluprobe.nccl.enums import IN_PROGRESS

#: Fewer endpoints are run without this.
_FEW = 64
#: About so many operations are looked at.
_MOST = 1 << 20


@dataclass
class _Ends:
    """What is gathered of endpoints; the columns of the parts."""

    endpoints: list[Endpoint] = field(default_factory=list)
    sides: list[Side | None] = field(default_factory=list)
    comm: list[int] = field(default_factory=list)
    who: list[int] = field(default_factory=list)
    calls: list[Ints] = field(default_factory=list)
    calls_of: list[int] = field(default_factory=list)
    messages: list[Ints] = field(default_factory=list)
    messages_of: list[int] = field(default_factory=list)
    #: Of communicators: slots that all have entered, oldest end less a margin, zeros are dropped.
    entered: list[int] = field(default_factory=list)
    limit: list[int] = field(default_factory=list)
    drops: list[bool] = field(default_factory=list)
    #: When work of a process was taken away first.
    deaths: dict[Who, int] = field(default_factory=dict)


@dataclass
class _Parts:
    """One row per operation of an endpoint, in the order in which ``device`` adds them."""

    end: Ints
    call: Bools
    place: Ints  # ord of a call, call_idx of a message
    t: Ints
    idx: Ints
    group: Ints
    stream: Ints
    meeting: Ints
    free: Bools  # needs nobody
    barred: Bools  # does not begin

    def take(self, at: Ints) -> _Parts:
        return _Parts(**{name: column[at] for name, column in vars(self).items()})


def ran(
    comms: Iterable[Communicator],
    sides: Mapping[At, Side],
    size: Callable[[m.Int64], m.Int64],
    faults: Mapping[Channel, tuple[int, Finding]],
    table: SignatureTable,
    disputed: frozenset[CommKey],
) -> Ran:
    """What of the newest operations of these communicators has surely ended."""
    all_comms = list(comms)
    if sum(len(comm.endpoints) for comm in all_comms) < _FEW:
        return Ran()
    ends = _gather(all_comms, sides, disputed)
    made = [
        _calls(ends, table),
        _messages(ends, all_comms, sides, size, faults),
    ]
    blocked = np.concatenate([b for _, b in made])
    rows = [p for p, _ in made]
    rows[1].meeting += len(made[0][1])
    joined = _Parts(**{n: np.concatenate([getattr(r, n) for r in rows]) for n in vars(rows[0])})
    if not len(joined.end):
        return Ran()
    minor = np.where(joined.call, -joined.place, joined.place)
    joined = joined.take(np.lexsort((minor, joined.call, joined.end)))
    done = _run(joined, ends, blocked)
    return _told(joined, ends, done)


def _told(parts: _Parts, ends: _Ends, done: Bools) -> Ran:
    found = Ran(left=int((~done).sum()))
    n = len(ends.endpoints)
    for call in (True, False):
        first = np.full(n, NEVER)
        left = ~done & (parts.call == call)
        np.minimum.at(first, parts.end[left], parts.place[left])
        for e, side, least in zip(ends.endpoints, ends.sides, first.tolist(), strict=True):
            if call:
                found.calls[id(e)] = least
            elif side is not None:
                found.messages[id(side)] = least
    return found


# -- gathering -------------------------------------------------------------


def _gather(
    comms: list[Communicator], sides: Mapping[At, Side], disputed: frozenset[CommKey]
) -> _Ends:
    ends = _Ends()
    who: dict[Who, int] = {}
    most = max(16, _MOST // max(1, sum(len(comm.endpoints) for comm in comms)))
    for number, comm in enumerate(comms):
        entered, limit = NEVER, NEVER
        for rank, e in comm.endpoints.items():
            at = len(ends.endpoints)
            death = death_of(e)
            if death is not None:
                limit = min(limit, death - SECOND)
                ends.deaths[e.process.who] = min(ends.deaths.get(e.process.who, death), death)
            side = sides.get((e.info.source, e.info.id))
            if side is not None and not side.placed:
                side = None
            ends.endpoints.append(e)
            ends.sides.append(side)
            ends.comm.append(number)
            ends.who.append(who.setdefault(e.process.who, len(who)))
            if side is not None and len(rows := side.recent()[-most:]):
                ends.messages.append(rows)
                ends.messages_of.append(at)
            if e.slotted and rank not in comm.unwatched:
                entered = min(entered, e.entered)
                if comm.key not in disputed and len(rows := e.tail.rows()[-most:]):
                    ends.calls.append(rows)
                    ends.calls_of.append(at)
        ends.entered.append(entered)
        ends.limit.append(limit)
        ends.drops.append(comm.discards_zero)
    return ends


def _each(tables: list[Ints], of: list[int], width: int) -> tuple[Ints, Ints]:
    """All rows in one table, and whose each is."""
    if not tables:
        return np.empty((0, width), np.int64), np.empty(0, np.int64)
    return np.concatenate(tables), np.repeat(np.array(of, np.int64), [len(x) for x in tables])


def _numbers(*columns: Ints) -> tuple[Ints, Ints]:
    """Small numbers for the rows of some columns; where each number is found first."""
    key = np.zeros(len(columns[0]), np.int64)
    if not len(key):
        return key, key
    size = 1
    for column in columns:
        low = int(column.min())
        span = int(column.max()) - low + 1
        if size * span >= 1 << 62:
            known, small = np.unique(column, return_inverse=True)
            low, span, column = 0, len(known), small
        if size * span >= 1 << 62:
            known, key = np.unique(key, return_inverse=True)
            size = len(known)
        key = key * span + (column - low)
        size *= span
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    return number, first


def _moved(order: Ints, end: Ints, of: list[Endpoint], failed: Bools) -> Ints:
    """By how much slots that were left out move each call; marks calls that have no slot."""
    moved = np.zeros(len(order), np.int64)
    for at, e in enumerate(of):
        if not e.tail.discarded and not e.tail.gaps:
            continue
        mine = end == at
        failed |= mine & np.isin(order, list(e.tail.discarded))
        for o, n in e.tail.gaps.items():
            moved[mine & (order < o)] += n
    return moved


def _calls(ends: _Ends, table: SignatureTable) -> tuple[_Parts, Bools]:
    rows, end = _each(ends.calls, ends.calls_of, 7)
    of = ends.endpoints
    following = np.array([e.next_ord for e in of], np.int64)
    shift = np.array([e.entered - e.next_ord for e in of], np.int64)
    over = np.array([e.done or 0 for e in of], np.int64)
    order = np.lexsort((rows[:, c.ORD], end))  # stable: of a call seen twice the newer is last
    order = order[rows[order, c.ORD] < following[end[order]]]
    rows, end = rows[order], end[order]
    last = np.ones(len(rows), np.bool_)
    last[:-1] = (end[1:] != end[:-1]) | (rows[1:, c.ORD] != rows[:-1, c.ORD])
    rows, end = rows[last], end[last]
    rc = rows[:, c.RC]
    inside = rc == c.RC_INSIDE
    failed = ~np.isin(rc, (0, IN_PROGRESS, m.RC_NONE, c.RC_INSIDE))
    moved = _moved(rows[:, c.ORD], end, of, failed)
    if failed.any():
        total = np.cumsum(failed)
        newest = np.searchsorted(end, end, side="right") - 1
        later = total[newest] - total
    else:
        later = np.zeros(len(rows), np.int64)
    slot = rows[:, c.ORD] + shift[end] + later - moved
    keep = ~failed & (slot >= over[end]) & (rows[:, c.SIG] != m.SIG_LOST)
    rows, end, slot, inside = rows[keep], end[keep], slot[keep], inside[keep]
    comm = np.array(ends.comm, np.int64)[end]
    meeting, first = _numbers(comm, slot)
    blocked = slot[first] >= np.array(ends.entered, np.int64)[comm[first]]
    if table.any_zero:
        zero = np.fromiter((table.is_zero(s) for s in rows[:, c.SIG].tolist()), bool, len(rows))
        zero &= np.array(ends.drops, np.bool_)[comm]
        blocked[meeting[zero]] = True
    barred = inside.copy()
    for at in np.flatnonzero(inside).tolist():
        barred[at] = of[int(end[at])].inside() is not None
    return _Parts(
        end=end,
        call=np.ones(len(rows), np.bool_),
        place=rows[:, c.ORD],
        t=rows[:, c.T],
        idx=rows[:, c.IDX],
        group=rows[:, c.GROUP],
        stream=rows[:, c.STREAM],
        meeting=meeting,
        free=np.zeros(len(rows), np.bool_),
        barred=barred,
    ), blocked


def _messages(
    ends: _Ends,
    comms: list[Communicator],
    sides: Mapping[At, Side],
    size: Callable[[m.Int64], m.Int64],
    faults: Mapping[Channel, tuple[int, Finding]],
) -> tuple[_Parts, Bools]:
    rows, end = _each(ends.messages, ends.messages_of, q.WIDTH)
    comm = np.array(ends.comm, np.int64)[end]
    keep = (rows[:, q.PEER] >= 0) & (
        rows[:, q.PEER] < np.array([x.key.nranks for x in comms], np.int64)[comm]
    )
    inside = np.zeros(len(rows), np.bool_)
    for at in ends.messages_of:
        side = ends.sides[at]
        if side is None or not (side.queued or side.inside_any):
            continue
        low, high = np.searchsorted(end, at), np.searchsorted(end, at, side="right")
        for i in range(int(low), int(high)):
            op = q.Op(*rows[i].tolist())
            keep[i] &= not side.is_pending(op)
            inside[i] = side.is_inside(op)
    rows, end, comm, inside = rows[keep], end[keep], comm[keep], inside[keep]
    own = np.array([e.comm_rank or 0 for e in ends.endpoints], np.int64)[end]
    send = rows[:, q.SEND] != 0
    peer = rows[:, q.PEER]
    src, dst = np.where(send, own, peer), np.where(send, peer, own)
    lane, first_of_lane = _numbers(comm, src, dst)
    meeting, first = _numbers(lane, rows[:, q.ORD])
    width = size(rows[:, q.SIG])
    free = send & (width >= 0) & (width <= SMALL)
    blocked = np.zeros(len(first), np.bool_)
    alone = (np.bincount(meeting, minlength=len(first)) == 1)[meeting] & ~free
    seen: dict[tuple[int, bool], int] = {}
    for i in np.flatnonzero(alone).tolist():
        key = int(lane[i]), bool(send[i])
        ready = seen.get(key)
        if ready is None:
            other = comms[int(comm[i])].endpoints.get(int(peer[i]))
            ready = seen[key] = _answered(other, sides, not send[i], int(own[i]))
        blocked[meeting[i]] |= int(rows[i, q.ORD]) >= ready
    if faults:
        known = {x.key: i for i, x in enumerate(comms)}
        lanes = {
            (int(comm[i]), int(src[i]), int(dst[i])): int(lane[i]) for i in first_of_lane.tolist()
        }
        for channel, (since, _) in faults.items():
            hit = lanes.get((known.get(channel.comm, -1), channel.src, channel.dst))
            if hit is not None:
                wrong = (lane == hit) & (rows[:, q.ORD] >= since)
                blocked[meeting[wrong]] = True
                free &= ~wrong
    return _Parts(
        end=end,
        call=np.zeros(len(rows), np.bool_),
        place=rows[:, q.IDX],
        t=rows[:, q.T],
        idx=rows[:, q.IDX],
        group=rows[:, q.GROUP],
        stream=rows[:, q.STREAM],
        meeting=meeting,
        free=free,
        barred=inside,
    ), blocked


def _answered(other: Endpoint | None, sides: Mapping[At, Side], send: Any, rank: int) -> int:
    """How many of a lane the other side has made."""
    if other is None or is_unplaced(other):
        return NEVER
    theirs = sides.get((other.info.source, other.info.id))
    queue = None if theirs is None else theirs.queues.get((bool(send), rank))
    return 0 if queue is None else queue.end


def _run(p: _Parts, ends: _Ends, blocked: Bools) -> Bools:
    """Which parts have ended."""
    n = len(p.end)
    source = np.array([e.info.source for e in ends.endpoints], np.int64)
    grouped = np.flatnonzero(p.group)
    group, first = _numbers(source[p.end[grouped]], p.group[grouped])
    # An operation by itself is its own node; those of a group are the first one's.
    node = np.arange(n)
    node[grouped] = grouped[first][group]
    first = np.flatnonzero(node == np.arange(n))
    small = np.empty(n, np.int64)
    small[first] = np.arange(len(first))
    node = small[node]
    t, idx = p.t[first].copy(), p.idx[first]
    barred = np.zeros(len(first), np.bool_)
    barred[node[p.barred]] = True
    at = np.flatnonzero(p.group[first])
    ends_of = [e.process.groups for e in ends.endpoints]
    columns = (at, p.end[first[at]], p.group[first[at]])
    for i, owner, number in zip(*(x.tolist() for x in columns), strict=True):
        end = ends_of[owner].get(number)
        if end is not None:
            t[i] = end.t
            barred[i] |= end.open
    own = [ends.deaths.get(e.process.who, NEVER) - SECOND for e in ends.endpoints]
    limits = np.minimum(np.array(ends.limit, np.int64)[ends.comm], own)[p.end]
    limit = np.full(len(first), NEVER)
    np.minimum.at(limit, node, limits)
    turn = np.empty(len(first), np.int64)
    turn[np.lexsort((first, idx, t))] = np.arange(len(first))
    stream, _ = _numbers(np.array(ends.who, np.int64)[p.end], np.maximum(p.stream, 0))
    _, pair = np.unique(node * (int(stream.max()) + 1) + stream, return_index=True)
    by_turn = pair[np.argsort(turn[node[pair]], kind="stable")]
    n_streams = int(stream.max()) + 1
    rounds = Rounds(
        queues=Lists(stream[by_turn], node[by_turn], n_streams),
        streams=Lists(node[pair], stream[pair], len(first)),
        parts=Lists(node, np.arange(n), len(first)),
        members=Lists(p.meeting, np.arange(n), len(blocked)),
        node=node,
        meeting=p.meeting,
        free=p.free,
        barred=barred,
        limit=limit,
    )
    return rounds.run(t, blocked)[node]
