"""What the devices can have done of the operations that the hosts queued.

Hosts run ahead: all members may have made a call while it stands in some stream
behind an operation that cannot end.  The newest operations are run here as
streams do: in order, a group as one, a small send without its receive.  Whatever
may have ended, has; what is left at the head of a stream cannot end, and says
what it lacks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from nccluprobe.match import model as m
from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.components import components
from nccluprobe.match.device_lack import Lack, Stall
from nccluprobe.match.device_ops import (
    Meeting,
    Node,
    Part,
    Stream,
    death_of,
    in_flight,
    margin,
    meeting_of,
    parts_of_calls,
    parts_of_messages,
)
from nccluprobe.match.device_ran import ran
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.p2p_pair import SMALL, At, Channel, is_unplaced
from nccluprobe.match.p2p_queue import Side
from nccluprobe.match.signature import SignatureTable

#: About so many operations are run in a scan, and at least so many of each endpoint.
_BUDGET = 1 << 15
_LEAST = 6
#: Up to so many are all run, when the others are known to have ended.
_MOST_LEFT = 1 << 16


class Device:
    """Streams of all processes of the given communicators."""

    def __init__(
        self,
        comms: Iterable[Communicator],
        sides: Mapping[At, Side],
        size: Callable[[m.Int64], m.Int64],
        faults: Mapping[Channel, tuple[int, Finding]],
        table: SignatureTable,
        disputed: frozenset[CommKey] = frozenset(),
        crashes: bool = True,
    ) -> None:
        """``crashes``: who crashed may have done so in a call that all had begun."""
        self._comms = {c.key: c for c in comms}
        self._sides, self._size, self._faults = sides, size, faults
        self._disputed, self._crashes = disputed, crashes
        #: (channel, is a send, ordinal) -> where it stands
        self._message: dict[tuple[Channel, bool, int], Node] = {}
        self._meeting: dict[tuple[CommKey, int], Meeting] = {}
        self._death: dict[int, int] = {}
        self._known: dict[tuple[int, int | None, frozenset[tuple[CommKey, int]]], Lack] = {}
        ends = sum(len(c.endpoints) for c in self._comms.values())
        past = ran(self._comms.values(), sides, size, faults, table, disputed)
        all_left = past.left is not None and past.left <= _MOST_LEFT
        most = _MOST_LEFT if all_left else max(_LEAST, _BUDGET // max(1, ends))
        nodes: dict[tuple[int, ...], Node] = {}
        nothing: dict[tuple[CommKey, int], list[Endpoint]] = {}
        for comm in self._comms.values():
            for e in comm.endpoints.values():
                if (e.end or e.process.end) and (at := death_of(e)) is not None:
                    self._death[id(e)] = at
        for left in past.ends:
            comm, e = left.comm, left.endpoint
            parts_of_messages(left, size, nodes, most)
            if e.slotted and comm.key not in disputed and left.rank not in comm.unwatched:
                parts_of_calls(left, table, nodes, nothing, most)
        self.nodes = list(nodes.values())
        self._streams: dict[Stream, deque[Node]] = {}
        for node in sorted(self.nodes, key=lambda n: (n.t, n.idx)):
            for stream in node.streams:
                queue = self._streams.get(stream) or self._streams.setdefault(stream, deque())
                queue.append(node)
            for part in node.parts:
                self._register(part, node, table)
        for at_slot, idle in nothing.items():
            if at_slot in self._meeting:
                self._meeting[at_slot].absent += idle
        for node in nodes.values():
            node.launched = not node.inside or all(self._posted(p) for p in node.parts)
        self._run()

    def _register(self, part: Part, node: Node, table: SignatureTable) -> None:
        if part.message is not None:
            self._message[part.message] = node
            return
        key = (part.comm.key, part.slot)
        meeting = self._meeting.get(key)
        if meeting is None:
            meeting = self._meeting[key] = meeting_of(part, table)
        meeting.nodes[part.rank] = node

    def _posted(self, part: Part) -> bool:
        """Whether all others have made their part, so that nobody is held inside it."""
        if part.message is None:
            return not self._meeting[part.comm.key, part.slot].absent
        channel, send, order = part.message
        if (channel, not send, order) in self._message:
            return True
        other = part.comm.endpoints.get(part.peer)
        return other is None or is_unplaced(other) or self._old(part, other)

    def _old(self, part: Part, other: Endpoint) -> bool:
        """Whether the other side made it, so long ago that it is not remembered."""
        assert part.message is not None
        _, send, order = part.message
        theirs = self._sides.get((other.info.source, other.info.id))
        queue = None if theirs is None else theirs.queues.get((not send, part.rank))
        return queue is not None and queue.end > order

    # -- running -------------------------------------------------------------

    def _run(self) -> None:
        for meeting in self._meeting.values():
            meeting.open()
        self._ask: deque[Node] = deque()
        for queue in list(self._streams.values()):
            self._head(queue[0], 0)
        while self._ask or self._aborted():
            node = self._ask.popleft()
            if not node.done and node.begun and all(map(self._ready, node.parts)):
                self._finish(node)

    def _aborted(self) -> bool:
        """Take what an abort ended off the heads of streams: what stood behind it runs.

        Whether there is more to ask.
        """
        while self._death and not self._ask:
            heads = {id(q[0]): q[0] for q in self._streams.values() if q}
            over = [(n, t) for n in heads.values() if (t := self._end_of(n)) is not None]
            if not over:
                break
            for node, t in over:
                node.dead = node.done = True
                self._next(node, t)
        return bool(self._ask)

    def _end_of(self, node: Node) -> int | None:
        """When aborts ended what stands at the heads of its streams; None: a part of it stands."""
        ends = [self._death.get(id(p.endpoint)) for p in node.parts]
        known = [t for t in ends if t is not None]
        ended = any(p.endpoint.process.ended for p in node.parts)
        return max(known) if node.at_head and not ended and len(known) == len(ends) else None

    def _head(self, node: Node, t: int) -> None:
        """It has come to the head of one of its streams."""
        node.heads += 1
        node.begin = max(node.begin, t, node.t)
        if node.heads < len(node.streams):
            return
        ends = [self._death.get(id(p.endpoint)) for p in node.parts]
        if any(d is not None and d < node.begin for d in ends):
            node.dead = True
            if all(not p.endpoint.process.ended for p in node.parts):
                node.done = True
                self._next(node, node.begin)  # its communicator was aborted: it is taken off
            return
        if node.launched:
            self._begin(node)

    def _begin(self, node: Node) -> None:
        node.begun = True
        self._ask.append(node)
        for part in node.parts:
            if part.message is not None:
                channel, send, order = part.message
                other = self._message.get((channel, not send, order))
                if other is not None and other.begun:
                    self._ask.append(other)
                continue
            meeting = self._meeting[part.comm.key, part.slot]
            if meeting.came(part.rank, node.begin):
                self._close(meeting)

    def _close(self, meeting: Meeting) -> None:
        """All have come: whoever ended before that did not take part."""
        members = {r: meeting.comm.endpoints[r] for r in meeting.nodes}
        newest = max(members.values(), key=lambda e: e.process.last_activity)
        for rank, e in members.items():
            d = self._death.get(id(e))
            if d is None or meeting.spared(rank):
                continue
            late = meeting.t - d + self._crashes * in_flight(e, newest)
            if late > margin(e, meeting.comm.endpoints.values()):
                meeting.gone.append(e)
        self._ask += [n for n in meeting.nodes.values() if n.begun]

    def _finish(self, node: Node) -> None:
        node.done = True
        t = node.begin
        for part in node.parts:
            if part.message is not None:
                channel, send, order = part.message
                other = self._message.get((channel, not send, order))
                if other is not None and other.begun and not self._is_small(part):
                    t = max(t, other.begin)
            else:
                meeting = self._meeting[part.comm.key, part.slot]
                t = t if meeting.spared(part.rank) else max(t, meeting.t)
        self._next(node, t)

    def _next(self, node: Node, t: int) -> None:
        for stream in node.streams:
            queue = self._streams[stream]
            queue.popleft()
            if queue:
                self._head(queue[0], t)

    def _is_small(self, part: Part) -> bool:
        return part.send and 0 <= part.size <= SMALL

    def _ready(self, part: Part) -> bool:
        if part.message is None:
            return self._meeting[part.comm.key, part.slot].over_for(part.rank)
        return not self._lacks_of_message(part)

    # -- what is left ----------------------------------------------------------

    def ran(self, comm: Communicator) -> bool:
        """Whether the calls on a communicator were run."""
        return comm.key in self._comms and comm.key not in self._disputed

    def lacks(self, part: Part) -> Lack:
        if part.message is not None:
            return self._lacks_of_message(part)
        meeting = self._meeting[part.comm.key, part.slot]
        if meeting.over_for(part.rank):
            return Lack()
        needed = meeting.needed
        mine = meeting.nodes[part.rank]
        alike = frozenset((p.comm.key, p.slot) for p in mine.parts if p.message is None)
        known = self._known.get((id(meeting), needed, alike))
        if known is not None:
            return known
        found = self._known[id(meeting), needed, alike] = Lack(gone=list(meeting.gone))
        found.missing = [e for e in meeting.absent if needed is None or e.comm_rank == needed]
        for rank, node in meeting.nodes.items():
            if needed not in (None, rank) or node.begun or (node.done and not node.dead):
                continue
            if not self._held_alike(node, alike):
                self._add_part(found, meeting.comm.endpoints[rank], node)
        return found

    def _held_alike(self, node: Node, own: frozenset[tuple[CommKey, int]]) -> bool:
        """Whether a thread is inside a call for lack of those only whom this one lacks, too."""
        if node.launched or not node.at_head or node.dead:
            return False
        return all((p.comm.key, p.slot) in own or self._posted(p) for p in node.parts)

    @staticmethod
    def _add_part(found: Lack, e: Endpoint, node: Node) -> None:
        if node.dead or e.process.ended:
            found.gone.append(e)
        elif node.at_head:
            found.held.append(e)
        else:
            found.behind.append(node)

    def _lacks_of_message(self, part: Part) -> Lack:
        assert part.message is not None
        channel, send, order = part.message
        found = Lack()
        fault = self._faults.get(channel)
        if fault is not None and order >= fault[0]:
            found.fault = fault[1]
            return found
        other = part.comm.endpoints.get(part.peer)
        if other is None or is_unplaced(other):
            return found
        side = self._sides[part.endpoint.info.source, part.endpoint.info.id]
        if order < side.queue(send, part.peer).complete:
            return found
        small = self._is_small(part)
        node = self._message.get((channel, not send, order))
        if node is None:
            if not small and not self._old(part, other):
                found.missing.append(other)
            return found
        mine = self._message[part.message]
        if small or (node.done and not node.dead) or node is mine:
            return found
        if not node.begun:
            self._add_part(found, other, node)
            return found
        d = self._death.get(id(other))
        sent = not send and any(
            p.message == (channel, True, order) and self._is_small(p) for p in node.parts
        )
        t = node.begin if sent else max(mine.begin, node.begin)
        limit = margin(other, (part.endpoint,)) - in_flight(other, part.endpoint)
        if d is not None and t - d > limit:
            found.gone.append(other)
        return found

    def heads_before(self, node: Node) -> list[Node]:
        """Operations at the heads of their streams behind which one stands, at last."""
        found: dict[int, Node] = {}
        seen = {id(node)}
        edge = [node]
        while edge:
            at = edge.pop()
            for stream in at.streams:
                queue = self._streams[stream]
                head = queue[0] if queue else at
                if head is at or id(head) in seen:
                    continue
                seen.add(id(head))
                if head.at_head:
                    found[id(head)] = head
                else:
                    edge.append(head)
        return list(found.values())

    def stalls(self) -> list[Stall]:
        """What stands at the heads of streams, by endpoint, oldest first."""
        found: list[Stall] = []
        heads = {id(q[0]): q[0] for q in self._streams.values() if q}
        for node in heads.values():
            if not node.at_head or node.dead:
                continue
            of: dict[int, Stall] = {}
            for part in node.parts:
                lack = self.lacks(part)
                if not lack:
                    continue
                stall = of.get(id(part.endpoint))
                if stall is None:
                    of[id(part.endpoint)] = Stall(part.endpoint, node, [part], lack)
                    continue
                if len(stall.parts) == 1:
                    first, stall.lack = stall.lack, Lack()
                    stall.lack.add(first)
                stall.parts.append(part)
                stall.lack.add(lack)
            found += of.values()
        return sorted(found, key=lambda s: (s.node.t, s.node.idx))

    def deadlocks(self, stalls: list[Stall]) -> list[list[Stall]]:
        """Stalls that hold up each other and have no other reason: orders that exclude."""
        nodes = list({id(s.node): s.node for s in stalls}.values())
        number = {id(n): i for i, n in enumerate(nodes)}
        edges: list[list[int]] = [[] for _ in nodes]
        explained: set[int] = set()
        for s in stalls:
            at = number[id(s.node)]
            if s.lack.missing or s.lack.fault or s.lack.gone or s.lack.held:
                explained.add(at)
            for part in s.lack.behind:
                edges[at] += [number[id(h)] for h in self.heads_before(part) if id(h) in number]
        found: list[list[Stall]] = []
        free = set(explained)
        for component in components(edges):
            inside = set(component)
            outside = {to for n in component for to in edges[n]} - inside
            if inside & explained or outside & free:
                free |= inside
            elif len(component) > 1 and not outside:
                found.append([s for s in stalls if number[id(s.node)] in inside])
        return found
