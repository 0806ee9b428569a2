"""What endpoints have made of late, as columns: what ``device_ran`` runs at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from nccluprobe.match import p2p_queue as q
from nccluprobe.match import tail as c
from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.device_ops import death_of
from nccluprobe.match.device_rounds import NEVER, Bools, Ints
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.options import SECOND
from nccluprobe.match.p2p_pair import At
from nccluprobe.match.p2p_queue import Side
from nccluprobe.match.process import Who

#: About so many operations are looked at.
_MOST = 1 << 20


@dataclass
class Ends:
    """What is gathered of endpoints that have made anything since; the columns of the parts."""

    endpoints: list[Endpoint] = field(default_factory=list)
    sides: list[Side | None] = field(default_factory=list)
    comm: list[int] = field(default_factory=list)
    who: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    calls: list[Ints] = field(default_factory=list)
    calls_of: list[int] = field(default_factory=list)
    messages: list[Ints] = field(default_factory=list)
    messages_of: list[int] = field(default_factory=list)
    comms: list[Communicator] = field(default_factory=list)
    #: Of communicators: slots that all have entered, oldest end less a margin.
    entered: list[int] = field(default_factory=list)
    limit: list[int] = field(default_factory=list)
    #: When work of a process was taken away first.
    deaths: dict[Who, int] = field(default_factory=dict)
    #: All calls before this are known, of every process that has not ended.
    through: int = NEVER
    #: Events were lost: what is supposed of them may be taken back.
    lossy: bool = False
    #: Of endpoints: the least call_idx of what has not taken effect.
    pending: list[int] = field(default_factory=list)


@dataclass
class Parts:
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
    closed: Bools  # all have made it, and agreed


def gather(
    comms: list[Communicator], sides: Mapping[At, Side], disputed: frozenset[CommKey]
) -> Ends:
    """The newest rows of all endpoints of which anything may not have ended.

    ``disputed``: communicators whose calls differ somewhere: their calls are left out.
    """
    ends = Ends(comms=comms)
    who: dict[Who, int] = {}
    seen: set[int] = set()
    most = max(16, _MOST // max(1, sum(len(comm.endpoints) for comm in comms)))
    for number, comm in enumerate(comms):
        entered, limit = NEVER, NEVER
        agreed = comm.key not in disputed
        for rank, e in comm.endpoints.items():
            p, tail, any_left = e.process, e.tail, False
            if p.source not in seen:
                seen.add(p.source)
                ends.lossy |= p.lost > 0
                if p.end is None:
                    ends.through = min(ends.through, p.through)
            if e.end is not None or p.end is not None:
                death = death_of(e)
                if death is not None:
                    limit = min(limit, death - SECOND)
                    ends.deaths[p.who] = min(ends.deaths.get(p.who, death), death)
            side = side_of(e, sides)
            if side is not None and (side.over <= (side.last_idx or 0) or side.unsettled):
                rows = side.recent()[-most:]
                ends.messages.append(rows[rows[:, q.IDX] >= side.over] if side.over else rows)
                ends.messages_of.append(len(ends.endpoints))
                any_left = True
            if e.slotted and rank not in comm.unwatched:
                entered = min(entered, e.entered)
                if agreed and tail.over < e.next_ord and len(rows := tail.rows()[-most:]):
                    ends.calls.append(rows[rows[:, c.ORD] >= tail.over] if tail.over else rows)
                    ends.calls_of.append(len(ends.endpoints))
                    any_left = True
            if any_left:
                ends.endpoints.append(e)
                ends.sides.append(side)
                ends.comm.append(number)
                ends.who.append(who.setdefault(p.who, len(who)))
                ends.ranks.append(rank)
        ends.entered.append(entered)
        ends.limit.append(limit)
    ends.pending = [NEVER] * len(ends.endpoints)
    return ends


def side_of(e: Endpoint, sides: Mapping[At, Side]) -> Side | None:
    side = sides.get((e.info.source, e.info.id))
    return None if side is None or not side.placed else side


def stacked(tables: list[Ints], of: list[int], width: int) -> tuple[Ints, Ints]:
    """All rows in one table, and whose each is."""
    if not tables:
        return np.empty((0, width), np.int64), np.empty(0, np.int64)
    return np.concatenate(tables), np.repeat(np.array(of, np.int64), [len(x) for x in tables])


def dense_ids(*columns: Ints) -> tuple[Ints, Ints]:
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
    if size > 4 * len(key):
        _, first, number = np.unique(key, return_index=True, return_inverse=True)
        return number, first
    first_of = np.full(size, -1)
    first_of[key[::-1]] = np.arange(len(key))[::-1]  # of a place set twice the last one stays
    found = first_of >= 0
    return (np.cumsum(found) - 1)[key], first_of[found]
