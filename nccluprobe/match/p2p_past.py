"""Whether what a unit waits for could still come, if all ranks went on as they are.

A peer's next operation stands behind all that is in its stream.  When something
there needs a rank whose next call, in turn, would stand behind the waiting unit
itself, the operation cannot come any more: it was left out, or the orders differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nccluprobe.match.device import Stall
from nccluprobe.match.device_ops import Part, Stream
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.p2p_pair import At
from nccluprobe.match.p2p_queue import STREAM, Side
from nccluprobe.match.p2p_units import Unit
from nccluprobe.match.zeros import zero_before


@dataclass
class Heads:
    """What stands at the heads of streams, and where next calls would stand."""

    stalls: Iterable[Stall]
    sides: Mapping[At, Side]
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
        the one that was left out.  Nor those that it has made with count 0.
        """
        found: list[Stall] = []
        for e in s.lack.missing:
            if e.actor == own.actor and not any(_made_with_zero(p, e) for p in s.parts):
                found += self._before_next(e)
        for e in s.lack.held:
            found += self._inside.get(id(e), [])
        for node in s.lack.behind:
            for stream in node.streams:
                found += self._at.get(stream, [])
        return found

    def _before_next(self, e: Endpoint) -> list[Stall]:
        """What the next call of an endpoint would stand behind."""
        stream = self._stream(e)
        return [] if stream is None else list(self._at.get((e.process.who, stream), ()))

    def _stream(self, e: Endpoint) -> int | None:
        """The stream of all remembered calls of an endpoint; None: several, or not known."""
        used = set(e.tail.stream.tolist())
        side = self.sides.get((e.info.source, e.info.id))
        if side is not None:
            used |= set(side.recent()[:, STREAM].tolist())
        return max(used.pop(), 0) if len(used) == 1 else None


def _made_with_zero(p: Part, e: Endpoint) -> bool:
    """Whether an endpoint has gone past its part of a call, by one of count 0."""
    return p.message is None and zero_before(p.comm, e, p.slot) is not None
