"""Operations as the streams of a device hold them: what ``device`` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from nccluprobe.match import model as m
from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.device_rounds import NEVER
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.options import SECOND
from nccluprobe.match.p2p_pair import SMALL, Channel, size_of
from nccluprobe.match.p2p_queue import IDX as P2P_IDX
from nccluprobe.match.p2p_queue import Op, Side
from nccluprobe.match.process import Who
from nccluprobe.match.signature import SignatureTable
from nccluprobe.match.status import UNKNOWN_CLOCK, ended_abruptly
from nccluprobe.match.tail import GROUP, IDX, ORD, RC, RC_INSIDE, SIG, STREAM, T

#: A stream of a process.
Stream = tuple[Who, int]
#: Rooted collectives in which the data goes out from the root, and comes in to it.
_OUTWARD = frozenset({"ncclBroadcast", "ncclScatter"})
_INWARD = frozenset({"ncclReduce", "ncclGather"})


class Part(NamedTuple):
    """One operation of one endpoint: a call of all members, or a send or receive."""

    comm: Communicator
    endpoint: Endpoint
    rank: int
    idx: int
    sig: int
    #: Of a collective.
    slot: int = -1
    #: Of a send or receive: channel, whether it is a send, ordinal.
    message: tuple[Channel, bool, int] | None = None
    peer: int = -1
    size: int = -1

    @property
    def send(self) -> bool:
        """Whether it is a send."""
        return self.message is not None and self.message[1]


@dataclass(eq=False, slots=True)
class Node:
    """An operation or a group in its streams."""

    t: int
    idx: int
    parts: list[Part] = field(default_factory=list)
    streams: set[Stream] = field(default_factory=set)
    heads: int = 0  # streams at whose head it stands
    #: Its call has not returned.
    inside: bool = False
    #: The call has given it to the device.
    launched: bool = True
    begun: bool = False
    done: bool = False
    #: Its process or communicator had ended before it could begin.
    dead: bool = False
    #: It did not begin earlier than this.
    begin: int = 0

    @property
    def at_head(self) -> bool:
        """Whether nothing is before it."""
        return self.heads == len(self.streams)


class Left(NamedTuple):
    """An endpoint of which operations are left."""

    comm: Communicator
    rank: int
    endpoint: Endpoint
    #: Its sends and receives, if these have their places.
    side: Side | None
    #: Calls with an ``ord``, messages with a ``call_idx`` below this have ended.
    calls: int = 0
    messages: int = 0


class Ran(NamedTuple):
    """What has not ended, by endpoint."""

    ends: list[Left]
    #: How many operations; None: not looked at.
    left: int | None = None


@dataclass(eq=False)
class Meeting:
    """One collective: who has come to it on the device."""

    comm: Communicator
    slot: int
    #: The rank whose data all wait for, or that waits for all: small and rooted.
    root: int | None = None
    inward: bool = False
    nodes: dict[int, Node] = field(default_factory=dict)
    absent: list[Endpoint] = field(default_factory=list)
    gone: list[Endpoint] = field(default_factory=list)
    t: int = 0
    left: int = 0
    root_here: bool = False

    def open(self) -> None:
        """All parts are known."""
        self.left = len(self.nodes)
        self.root_here = (
            self.root is not None
            and self.root not in self.nodes
            and all(e.comm_rank != self.root for e in self.absent)
        )

    def came(self, rank: int, t: int) -> bool:
        """One has begun its part; returns whether it may be over for others now."""
        self.left -= 1
        self.t = max(self.t, t)
        self.root_here |= rank == self.root
        return self.left == 0 or rank == self.root

    def spared(self, rank: int) -> bool:
        """Whether a member needs nobody else."""
        return self.root is not None and (rank == self.root) != self.inward

    @property
    def needed(self) -> int | None:
        """The one rank that members need; None: all of them."""
        return self.root if self.root is not None and not self.inward else None

    def over_for(self, rank: int) -> bool:
        """Whether a member that has begun can have ended."""
        if self.spared(rank):
            return True
        if self.root is not None and not self.inward and self.root_here:
            return True
        return not self.left and not self.absent and not self.gone


def meeting_of(part: Part, table: SignatureTable) -> Meeting:
    """The collective that a part belongs to."""
    s = table[part.sig]
    size = size_of(s)
    rooted = s.api in _OUTWARD or s.api in _INWARD
    small = rooted and s.root is not None and size is not None and size <= SMALL
    comm, slot = part.comm, part.slot
    absent = [
        e
        for rank, e in comm.endpoints.items()
        if e.slotted and rank not in comm.unwatched and e.entered <= slot
    ]
    return Meeting(comm, slot, s.root if small else None, s.api in _INWARD, absent=absent)


def death_of(e: Endpoint) -> int | None:
    """When the device's work for an endpoint was taken away."""
    times = [e.process.end.t] if e.process.ended and e.process.end is not None else []
    if e.end is not None and not e.end.orderly:
        times.append(e.end.t)
    return min(times, default=None)


def margin(e: Endpoint, others: Iterable[Endpoint]) -> int:
    """How far the clocks of an endpoint's host and of others may differ, ns."""
    boot = e.process.boot_id
    bounds = [x.process.bound for x in (e, *others) if x.process.boot_id != boot or not boot]
    if not bounds:
        return 0
    own = UNKNOWN_CLOCK if e.process.bound is None else e.process.bound
    return own + max(UNKNOWN_CLOCK if b is None else b for b in bounds)


def in_flight(dead: Endpoint, other: Endpoint) -> int:
    """How long before a crash an operation may have begun and not been over, ns.

    0: its peer has gone on since, or it had aborted the communicator before.
    """
    end = dead.process.end
    if end is None or not ended_abruptly(dead.process) or other.process.last_activity > end.t:
        return 0
    if dead.end is not None and not dead.end.orderly and dead.end.t < end.t:
        return 0
    return SECOND


def _node(
    nodes: dict[tuple[int, ...], Node], e: Endpoint, group: int, kind: int, order: tuple[int, int]
) -> Node:
    """The node of a call or of its group."""
    t, idx = order
    source = e.info.source
    key = (source, group) if group else (source, e.info.id, kind, idx)
    node = nodes.get(key)
    if node is None:
        end = e.process.groups.get(group) if group else None
        node = nodes[key] = Node(t if end is None else end.t, idx)
        node.inside = end is not None and end.open
    return node


def _put(node: Node, part: Part, stream: int) -> None:
    e = part.endpoint
    node.parts.append(part)
    node.streams.add((e.process.who, max(stream, 0)))


def parts_of_messages(
    left: Left,
    size: Callable[[m.Int64], m.Int64],
    nodes: dict[tuple[int, ...], Node],
    most: int,
) -> None:
    """Add the newest sends and receives of an endpoint that are left, ``most`` of them."""
    comm, rank, side, since = left.comm, left.rank, left.side, left.messages
    if side is None or since == NEVER:
        return
    rows = side.recent()[-most:]
    rows = rows[rows[:, P2P_IDX] >= since]
    sizes = size(rows[:, 1]).tolist()
    e = side.endpoint
    for row, n in zip(rows.tolist(), sizes, strict=True):
        op = Op(*row)
        if side.is_pending(op) or not 0 <= op.peer < comm.key.nranks:
            continue
        send = bool(op.send)
        node = _node(nodes, e, op.group, 0, (op.t, op.idx))
        node.inside |= side.is_inside(op)
        pair = (rank, op.peer) if send else (op.peer, rank)
        message = (Channel(comm.key, *pair), send, op.ord)
        part = Part(comm, e, rank, op.idx, op.sig, -1, message, op.peer, n)
        _put(node, part, op.stream)


def parts_of_calls(
    left: Left,
    table: SignatureTable,
    nodes: dict[tuple[int, ...], Node],
    nothing: dict[tuple[CommKey, int], list[Endpoint]],
    most: int,
) -> None:
    """Add the newest collectives of an endpoint that are left, ``most`` of them.

    ``nothing``: slots that it passed with count 0.
    """
    comm, rank, e, since = left.comm, left.rank, left.endpoint, left.calls
    if since == NEVER:
        return
    tail = e.tail.rows()
    rows = tail[(tail[:, ORD] < e.next_ord) & (tail[:, ORD] >= since)][::-1].tolist()
    if not rows:
        return
    rows.sort(key=itemgetter(ORD), reverse=True)  # of what came twice the later first
    done, shift, last = e.done or 0, e.entered - e.next_ord, -1
    held = e.inside() is not None
    zeros, gaps = table.any_zero and comm.discards_zero, e.tail.gaps
    for row in rows[:most]:
        if row[ORD] == last:
            continue  # seen before, while it was inside
        if gaps:
            shift -= sum(n for o, n in gaps.items() if row[ORD] < o and (o <= last or last < 0))
        last = row[ORD]
        inside = row[RC] == RC_INSIDE
        if (not inside and m.not_run(row[RC])) or last in e.tail.discarded:
            shift += 1
            continue
        slot = last + shift
        if slot < done or row[SIG] == m.SIG_LOST:
            continue
        if zeros and table.is_zero(row[SIG]):
            nothing.setdefault((comm.key, slot), []).append(e)
            continue
        node = _node(nodes, e, row[GROUP], 1, (row[T], row[IDX]))
        node.inside |= inside and held
        _put(node, Part(comm, e, rank, row[IDX], row[SIG], slot), row[STREAM])
