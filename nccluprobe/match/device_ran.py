"""Which of the newest operations have surely ended, for all endpoints at once.

The run of ``device`` looks at single operations.  Of thousands of ranks nearly
all of them are of no interest: everybody came.  Here the streams are run in
columns, in rounds: all that stands at a head and whose partners stand there too
ends.  What is not plain stays, and all behind it: somebody is inside the call,
lacks it, had died by then, passed count 0.

What ended long ago is not looked at again: each endpoint keeps how far that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match import p2p_queue as q
from nccluprobe.match import tail as c
from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.device_columns import Ends, Parts, dense_ids, gather, side_of, stacked
from nccluprobe.match.device_ops import Left, Ran
from nccluprobe.match.device_rounds import NEVER, Bools, Ints, Lists, Rounds
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.options import SECOND
from nccluprobe.match.p2p_pair import SMALL, At, Channel, is_unplaced
from nccluprobe.match.p2p_queue import Side
from nccluprobe.match.signature import SignatureTable
from nccluprobe.nccl.enums import IN_PROGRESS

#: Fewer endpoints are run without this.
_FEW = 64
#: What ended so long before all that is known stays so: a death is told by then.
_SURE = 3 * SECOND


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
        return Ran(
            [Left(x, r, e, side_of(e, sides)) for x in all_comms for r, e in x.endpoints.items()]
        )
    ends = gather(all_comms, sides, disputed)
    calls, blocked = _calls(ends, table)
    messages, blocked_messages = _messages(ends, all_comms, sides, size, faults)
    messages.meeting += len(blocked)
    joined = _joined(calls, messages, len(ends.endpoints))
    if not len(joined.end):
        return _told(joined, ends, np.empty(0, np.int64), keep=False)
    over = _run(joined, ends, np.concatenate((blocked, blocked_messages)))
    return _told(joined, ends, over, keep=not (faults or disputed))


def note_ended(
    comms: Iterable[Communicator],
    sides: Mapping[At, Side],
    size: Callable[[m.Int64], m.Int64],
    faults: Mapping[Channel, tuple[int, Finding]],
    table: SignatureTable,
    disputed: frozenset[CommKey],
) -> None:
    """Note of each endpoint what has surely ended, so that ``ran`` has little left to do."""
    ran(comms, sides, size, faults, table, disputed)


def _joined(calls: Parts, messages: Parts, n: int) -> Parts:
    """The rows by endpoint: its messages, then its calls, the newest first."""
    n_calls, n_messages = (np.bincount(p.end, minlength=n) for p in (calls, messages))
    after = np.cumsum(n_calls + n_messages)
    nth = np.arange(len(messages.end)) - (np.cumsum(n_messages) - n_messages)[messages.end]
    at_messages = (after - n_calls - n_messages)[messages.end] + nth
    nth = np.arange(len(calls.end)) - (np.cumsum(n_calls) - n_calls)[calls.end]
    at_calls = after[calls.end] - 1 - nth
    columns = {}
    for name, column in vars(calls).items():
        joined = columns[name] = np.empty(len(calls.end) + len(messages.end), column.dtype)
        joined[at_calls] = column
        joined[at_messages] = getattr(messages, name)
    return Parts(**columns)


def _told(parts: Parts, ends: Ends, over: Ints, keep: bool) -> Ran:
    """What is left of each endpoint; ``keep``: remember what surely ended long ago.

    ``over``: when each part ended; NEVER.
    """
    done = over < NEVER
    calls, messages = (_least(parts, ends, call, done) for call in (True, False))
    found = Ran([], int((~done).sum()))
    for at in np.flatnonzero((calls < NEVER) | (messages < NEVER)).tolist():
        e = ends.endpoints[at]
        comm = ends.comms[ends.comm[at]]
        left = Left(comm, ends.ranks[at], e, ends.sides[at], int(calls[at]), int(messages[at]))
        found.ends.append(left)
    if keep and not ends.lossy:
        sure = (over < ends.through - _SURE) & parts.closed
        _remember(ends, *(_least(parts, ends, call, sure).tolist() for call in (True, False)))
    return found


def _least(parts: Parts, ends: Ends, call: bool, done: Bools) -> Ints:
    """Of each endpoint, the first call or message that is not done."""
    first = np.full(len(ends.endpoints), NEVER)
    left = ~done & (parts.call == call)
    np.minimum.at(first, parts.end[left], parts.place[left])
    return first


def _remember(ends: Ends, calls: list[int], messages: list[int]) -> None:
    """Note what need not be looked at again."""
    whole = [comm.complete_view for comm in ends.comms]
    for at in ends.calls_of:
        e = ends.endpoints[at]
        if whole[ends.comm[at]]:
            e.tail.over = min(calls[at], e.next_ord)
    for at in ends.messages_of:
        side = ends.sides[at]
        if side is None or not whole[ends.comm[at]]:
            continue
        side.over = min(messages[at], ends.pending[at], (side.last_idx or 0) + 1)


def _moved(order: Ints, end: Ints, ends: Ends, failed: Bools) -> Ints:
    """By how much slots that were left out move each call; marks calls that have no slot."""
    moved = np.zeros(len(order), np.int64)
    for at, e in ((n, ends.endpoints[n]) for n in ends.calls_of):
        if not e.tail.discarded and not e.tail.gaps:
            continue
        mine = end == at
        failed |= mine & np.isin(order, list(e.tail.discarded))
        for o, n in e.tail.gaps.items():
            moved[mine & (order < o)] += n
    return moved


def _calls(ends: Ends, table: SignatureTable) -> tuple[Parts, Bools]:
    rows, end = stacked(ends.calls, ends.calls_of, 7)
    of = ends.endpoints
    callers = [of[at] for at in ends.calls_of]
    facts = [(e.next_ord, e.entered - e.next_ord, e.done or 0) for e in callers]
    facts_of = np.zeros((3, len(of)), np.int64)
    facts_of[:, ends.calls_of] = np.array(facts, np.int64).reshape(-1, 3).T
    following, shift, over = facts_of
    order = np.lexsort((rows[:, c.ORD], end))  # stable: of a call seen twice the newer is last
    order = order[rows[order, c.ORD] < following[end[order]]]
    rows, end = rows[order], end[order]
    last = np.ones(len(rows), np.bool_)
    last[:-1] = (end[1:] != end[:-1]) | (rows[1:, c.ORD] != rows[:-1, c.ORD])
    rows, end = rows[last], end[last]
    rc = rows[:, c.RC]
    inside = rc == c.RC_INSIDE
    failed = ~np.isin(rc, (0, IN_PROGRESS, m.RC_NONE, c.RC_INSIDE))
    moved = _moved(rows[:, c.ORD], end, ends, failed)
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
    meeting, first = dense_ids(comm, slot)
    blocked = slot[first] >= np.array(ends.entered, np.int64)[comm[first]]
    if table.any_zero:
        zero = np.fromiter((table.is_zero(s) for s in rows[:, c.SIG].tolist()), bool, len(rows))
        zero &= np.array([x.discards_zero for x in ends.comms], np.bool_)[comm]
        blocked[meeting[zero]] = True
    barred = inside.copy()
    for at in np.flatnonzero(inside).tolist():
        barred[at] = of[int(end[at])].inside() is not None
    return Parts(
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
        closed=slot < np.array([x.closed for x in ends.comms], np.int64)[comm],
    ), blocked


def _messages(
    ends: Ends,
    comms: list[Communicator],
    sides: Mapping[At, Side],
    size: Callable[[m.Int64], m.Int64],
    faults: Mapping[Channel, tuple[int, Finding]],
) -> tuple[Parts, Bools]:
    rows, end = stacked(ends.messages, ends.messages_of, q.WIDTH)
    comm = np.array(ends.comm, np.int64)[end]
    keep = (rows[:, q.PEER] >= 0) & (
        rows[:, q.PEER] < np.array([x.key.nranks for x in comms], np.int64)[comm]
    )
    inside, stop = np.zeros(len(rows), np.bool_), 0
    for at, mine in zip(ends.messages_of, ends.messages, strict=True):
        start, stop = stop, stop + len(mine)
        side = ends.sides[at]
        assert side is not None
        left = side.unsettled
        # They are among the newest.
        for i in range(stop - 1, start - 1, -1) if left else ():
            op = q.Op(*rows[i].tolist())
            if side.is_pending(op):
                keep[i] = False
                ends.pending[at] = min(ends.pending[at], op.idx)
                left -= 1
            inside[i] = side.is_inside(op)
            left -= bool(inside[i])
            if not left:
                break
        if left:
            ends.pending[at] = -1  # older than what is looked at
    rows, end, comm, inside = rows[keep], end[keep], comm[keep], inside[keep]
    own = np.array(ends.ranks, np.int64)[end]
    send = rows[:, q.SEND] != 0
    peer = rows[:, q.PEER]
    src, dst = np.where(send, own, peer), np.where(send, peer, own)
    lane, first_of_lane = dense_ids(comm, src, dst)
    meeting, first = dense_ids(lane, rows[:, q.ORD])
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
    return Parts(
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
        closed=np.ones(len(rows), np.bool_),
    ), blocked


def _answered(other: Endpoint | None, sides: Mapping[At, Side], send: Any, rank: int) -> int:
    """How many of a lane the other side has made."""
    if other is None or is_unplaced(other):
        return NEVER
    theirs = sides.get((other.info.source, other.info.id))
    queue = None if theirs is None else theirs.queues.get((bool(send), rank))
    return 0 if queue is None else queue.end


def _run(p: Parts, ends: Ends, blocked: Bools) -> Ints:
    """When each part ended; NEVER."""
    n = len(p.end)
    grouped = np.flatnonzero(p.group)
    source = np.zeros(len(ends.endpoints), np.int64)
    for at in np.flatnonzero(np.bincount(p.end[grouped], minlength=len(source))).tolist():
        source[at] = ends.endpoints[at].info.source
    group, first = dense_ids(source[p.end[grouped]], p.group[grouped])
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
    _take_ends(p, ends, first, t, barred)
    limit = np.full(len(first), NEVER)
    if ends.deaths:
        own = [ends.deaths.get(e.process.who, NEVER) - SECOND for e in ends.endpoints]
        limits = np.minimum(np.array(ends.limit, np.int64)[ends.comm], own)[p.end]
        np.minimum.at(limit, node, limits)
    turn = np.empty(len(first), np.int64)
    turn[np.lexsort((first, idx, t))] = np.arange(len(first))
    stream, _ = dense_ids(np.array(ends.who, np.int64)[p.end], np.maximum(p.stream, 0))
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


def _take_ends(p: Parts, ends: Ends, first: Ints, t: Ints, barred: Bools) -> None:
    """A group begins when it ends, as far as that end is still known."""
    at = np.flatnonzero(p.group[first])
    owner = p.end[first[at]]
    groups = [ends.endpoints[n].process.groups for n in owner.tolist()]
    wanted = p.group[first[at]].tolist()
    known = [of.get(number) for of, number in zip(groups, wanted, strict=True)]
    for i, end in zip(at.tolist(), known, strict=True):
        if end is not None:
            t[i] = end.t
            if end.open:
                barred[i] = True
