"""Whether what a unit waits for could still come, if all ranks went on as they are.

A peer's next operation stands behind all that is in its stream.  When something
there needs a rank whose next call, in turn, would stand behind the waiting unit
itself, the operation cannot come any more: it was left out, or the orders differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nccluprobe.match.communicator import Communicator
from nccluprobe.match.device_lack import Stall
from nccluprobe.match.device_ops import Part, Stream
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.p2p_pair import At
from nccluprobe.match.p2p_queue import IDX as P2P_IDX
from nccluprobe.match.p2p_queue import STREAM, Side
from nccluprobe.match.p2p_units import Unit
from nccluprobe.match.tail import IDX, ORD
from nccluprobe.match.waits import Wait
from nccluprobe.match.zeros import zero_before


@dataclass
class Heads:
    """What stands at the heads of streams, and where next calls would stand."""

    stalls: Iterable[Stall]
    sides: Mapping[At, Side]
    #: Ids of units that are out of place: nobody has gone past these.
    strays: set[int] = field(default_factory=set)
    _at: dict[Stream, list[Stall]] = field(default_factory=dict)
    _inside: dict[int, list[Stall]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for s in self.stalls:
            for stream in s.node.streams:
                self._at.setdefault(stream, []).append(s)
            if s.node.inside:
                self._inside.setdefault(id(s.endpoint), []).append(s)

    def shut(self, unit: Unit, peer: Endpoint) -> bool:
        """Whether the peer's next operation for a unit can only come after the unit."""
        if id(unit) in self.strays:
            return False
        calls = {o.op.idx for o in unit.ops}
        mine = {
            id(s.node)
            for streams in self._at.values()
            for s in streams
            if s.endpoint is unit.endpoint and any(p.idx in calls for p in s.parts)
        }
        if not mine:
            return False
        edge = self._before_next(peer)
        seen = {id(s.node) for s in edge}
        while edge:
            s = edge.pop()
            if id(s.node) in mine:
                return True
            for ahead in self._needs(s, unit.endpoint):
                if id(ahead.node) not in seen:
                    seen.add(id(ahead.node))
                    edge.append(ahead)
        return False

    def crosses(self, unit: Unit, peer: Endpoint) -> bool:
        """Whether only calls on other communicators hold the peer up, behind the unit.

        Then its half may be due after them: left out, or in another order.
        """
        own = unit.endpoint.info.hash
        before = self._before_next(peer)
        return all(p.comm.key.hash != own for s in before for p in s.parts) and self.shut(
            unit, peer
        )

    def _needs(self, s: Stall, own: Endpoint) -> list[Stall]:
        """What has to end before an operation at the head of its stream can.

        Of calls that were not made, those of the waiting rank only: any other may be
        the one that was left out.  Nor those that it has left out, or made with count 0.
        """
        found: list[Stall] = []
        for e in s.lack.missing:
            if e.actor == own.actor and not any(self._left_out(p, e) for p in s.parts):
                found += self._before_next(e)
        for e in s.lack.held:
            found += self._inside.get(id(e), [])
        for node in s.lack.behind:
            for stream in node.streams:
                found += self._at.get(stream, [])
        return found

    def _left_out(self, p: Part, e: Endpoint) -> bool:
        """Whether an endpoint has gone past its part of a call."""
        if p.message is not None:
            return False
        if zero_before(p.comm, e, p.slot) is not None:
            return True
        return p.slot == e.entered and left_out_call(p.comm, e, self.sides)

    def _before_next(self, e: Endpoint) -> list[Stall]:
        """What the next call of an endpoint would stand behind."""
        stream = stream_of(e, self.sides.get((e.info.source, e.info.id)))
        return [] if stream is None else list(self._at.get((e.process.who, stream), ()))


def stream_of(e: Endpoint, side: Side | None) -> int | None:
    """The stream of all remembered calls of an endpoint; None: several, or not known."""
    used = set(e.tail.stream.tolist())
    if side is not None:
        used |= set(side.recent()[:, STREAM].tolist())
    return max(used.pop(), 0) if len(used) == 1 else None


def note_skipped(known: Iterable[Wait], waits: Iterable[Wait], sides: Mapping[At, Side]) -> None:
    """Tell of collectives who has left them out, and sits in a send or receive after them."""
    sits = {(w.comm.key, e.actor): w for w in waits for e in w.entered}
    for call in known:
        skipped = []
        for e in call.absent if call.seq is not None else ():
            w = sits.get((call.comm.key, e.actor))
            last = -1 if e.last_idx is None else e.last_idx
            if w is None or call.at != (e.entered,) or min(w.calls, default=-1) <= last:
                continue
            if left_out_call(call.comm, e, sides):
                skipped.append(e)
        if skipped and not _outvoted(call, sides):
            call.skipped += skipped


def _outvoted(call: Wait, sides: Mapping[At, Side]) -> bool:
    """Whether more ranks have come to later sends and receives than have made a call."""
    without = 0
    for e in call.absent:
        side = sides.get((e.info.source, e.info.id))
        last = -1 if e.last_idx is None else e.last_idx
        if side is not None and call.at == (e.entered,):
            without += bool((side.recent()[:, P2P_IDX] > last).any())
    return without > len(call.entered)


def left_out_call(comm: Communicator, own: Endpoint, sides: Mapping[At, Side]) -> bool:
    """Whether a rank in a send or receive has left out the call before, not its peer its half.

    It passed count 0 there; or the others, who run the same code with other peers, make
    their sends and receives of this step only after that call, and none before.
    """
    if zero_before(comm, own, own.entered):
        return True
    before = after = False
    for e in comm.members():
        side = sides.get((e.info.source, e.info.id))
        if e is own or side is None or e.entered <= own.entered:
            continue
        order = own.entered - (e.entered - e.next_ord)
        idx = {n: i for n, i in e.tail.rows()[:, [ORD, IDX]].tolist() if abs(n - order) <= 1}
        if order not in idx or (order and order - 1 not in idx):
            continue
        made = side.recent()[:, P2P_IDX]
        made = made[made > idx.get(order - 1, -1)]
        before |= bool((made < idx[order]).any())
        made = made[made > idx[order]]
        after |= bool((made < idx.get(order + 1, made.max(initial=0) + 1)).any())
    return after and not before
