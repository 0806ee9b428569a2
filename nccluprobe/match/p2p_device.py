"""What the devices can have done of the sends and receives that the hosts queued.

Hosts run ahead: both sides of a pair may be queued while one of them stands in
its stream behind an operation that cannot end.  The newest operations are run
here as streams do: in order, a group as one, a small send without its receive.
What is left at the head of a stream is what its rank waits in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from nccluprobe.match import model as m
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.graph import components
from nccluprobe.match.p2p_pair import At, Channel, is_unplaced
from nccluprobe.match.p2p_queue import Op, Side
from nccluprobe.match.process import Who

#: A send of so many bytes is surely buffered, unless too many are before it.
SMALL = 64 << 10
Stream = tuple[Who, int]
_OpKey = tuple[Channel, bool, int]


@dataclass(eq=False)
class Node:
    """An operation or a group in its streams."""

    t: int
    idx: int
    ops: list[tuple[Side, Op, _OpKey]] = field(default_factory=list)
    streams: set[Stream] = field(default_factory=set)
    heads: int = 0  # streams at whose head it stands
    done: bool = False

    @property
    def at_head(self) -> bool:
        """Whether it has begun."""
        return self.heads == len(self.streams)


@dataclass
class Stall:
    """What keeps an endpoint's operations at the head of a stream."""

    side: Side
    node: Node
    #: Endpoints whose part is queued behind something else, and is not made at all.
    behind: list[Endpoint] = field(default_factory=list)
    missing: list[Endpoint] = field(default_factory=list)
    fault: Finding | None = None


class Device:
    """Streams of all processes of the given communicators."""

    def __init__(
        self,
        comms: Iterable[Communicator],
        sides: Mapping[At, Side],
        size: Callable[[m.Int64], m.Int64],
        faults: Mapping[Channel, tuple[int, Finding]],
    ) -> None:
        self._comms = {c.key: c for c in comms}
        self._sides, self._size, self._faults = sides, size, faults
        self._node: dict[_OpKey, Node] = {}
        self._small: set[_OpKey] = set()
        nodes: dict[tuple[int, ...], Node] = {}
        for comm in self._comms.values():
            for rank, e in comm.endpoints.items():
                side = sides.get((e.info.source, e.info.id))
                if side is not None and side.placed:
                    self._add(comm, rank, side, nodes)
        self._streams: dict[Stream, deque[Node]] = {}
        for node in sorted(nodes.values(), key=lambda n: (n.t, n.idx)):
            for stream in node.streams:
                self._streams.setdefault(stream, deque()).append(node)
        self._run()

    def _add(
        self, comm: Communicator, rank: int, side: Side, nodes: dict[tuple[int, ...], Node]
    ) -> None:
        rows = side.recent()
        info, process = side.endpoint.info, side.endpoint.process
        sizes = self._size(rows[:, 1]).tolist()
        for row, size in zip(rows.tolist(), sizes, strict=True):
            op = Op(*row)
            if side.is_pending(op) or not 0 <= op.peer < comm.key.nranks:
                continue
            key = (info.source, op.group) if op.group else (info.source, info.id, op.idx)
            end = process.groups.get(op.group) if op.group else None
            node = nodes.get(key)
            if node is None:
                node = nodes[key] = Node(op.t if end is None else end.t, op.idx)
            pair = (rank, op.peer) if op.send else (op.peer, rank)
            which = (Channel(comm.key, *pair), bool(op.send), op.ord)
            node.ops.append((side, op, which))
            node.streams.add((process.who, op.stream))
            self._node[which] = node
            if op.send and 0 <= size <= SMALL:
                self._small.add(which)

    # -- running -------------------------------------------------------------

    def _run(self) -> None:
        ask = deque(queue[0] for queue in self._streams.values())
        for node in ask:
            node.heads += 1
        while ask:
            node = ask.popleft()
            if node.done or not node.at_head or not all(map(self._ready, node.ops)):
                continue
            node.done = True
            for stream in node.streams:
                queue = self._streams[stream]
                queue.popleft()
                if queue:
                    queue[0].heads += 1
                    ask.append(queue[0])
                    ask += self._partners(queue[0])
            ask += self._partners(node)

    def _partners(self, node: Node) -> list[Node]:
        found = (self._node.get((c, not send, n)) for _, _, (c, send, n) in node.ops)
        return [n for n in found if n is not None and not n.done]

    def _ready(self, one: tuple[Side, Op, _OpKey]) -> bool:
        return self._lacks(one) is None

    def _lacks(self, one: tuple[Side, Op, _OpKey]) -> str | None:
        """``missing``, ``behind`` or ``fault``; None: it can end."""
        side, op, which = one
        channel, send, order = which
        fault = self._faults.get(channel)
        if fault is not None and order >= fault[0]:
            return "fault"
        comm = self._comms[channel.comm]
        other = comm.endpoints.get(op.peer)
        if other is None or is_unplaced(other):
            return None
        if order < side.queue(send, op.peer).complete:
            return None
        node = self._node.get((channel, not send, order))
        if node is not None:
            if node.done or node.at_head or which in self._small:
                return None
            return "behind"
        theirs = self._sides.get((other.info.source, other.info.id))
        rank = channel.src if send else channel.dst
        queue = None if theirs is None else theirs.queues.get((not send, rank))
        if queue is not None and queue.end > order:
            return None  # older than what is remembered
        return None if which in self._small else "missing"

    def _held_by(self, node: Node) -> list[Node]:
        """Nodes at heads of streams behind which the other parts of this one stand."""
        found: list[Node] = []
        for one in node.ops:
            channel, send, order = one[2]
            if self._lacks(one) != "behind":
                continue
            part = self._node[channel, not send, order]
            found += [h for s in part.streams if (h := self._streams[s][0]) is not part]
        return found

    def deadlocks(self) -> list[list[Stall]]:
        """Stalls that hold up each other and have no other reason: orders that exclude."""
        stalls = self.stalls()
        nodes = list({id(s.node): s.node for s in stalls}.values())
        number = {id(n): i for i, n in enumerate(nodes)}
        edges = [[number[id(h)] for h in self._held_by(n) if id(h) in number] for n in nodes]
        explained = {number[id(s.node)] for s in stalls if s.missing or s.fault}
        found: list[list[Stall]] = []
        free: set[int] = set(explained)
        for component in components(edges):
            inside = set(component)
            outside = {to for n in component for to in edges[n]} - inside
            if inside & explained or outside & free:
                free |= inside
            elif len(component) > 1 and not outside:
                found.append([s for s in stalls if number[id(s.node)] in inside])
        return found

    # -- what is left ----------------------------------------------------------

    def stalls(self) -> list[Stall]:
        """What stands at the heads of streams, by endpoint, oldest first."""
        found: dict[tuple[int, int], Stall] = {}
        heads = {id(s[0]): s[0] for s in self._streams.values() if s}
        for node in heads.values():
            if not node.at_head:
                continue
            for one in node.ops:
                side, op, which = one
                lacks = self._lacks(one)
                if lacks is None:
                    continue
                stall = found.setdefault((id(node), id(side)), Stall(side, node))
                other = self._comms[which[0].comm].endpoints.get(op.peer)
                if lacks == "fault":
                    stall.fault = self._faults[which[0]][1]
                elif other is not None:
                    ends = stall.behind if lacks == "behind" else stall.missing
                    if other not in ends:
                        ends.append(other)
        return sorted(found.values(), key=lambda s: (s.node.t, s.node.idx))
