"""Whether what a unit waits for could still come, if all ranks went on as they are.

A peer's next operation stands behind all that is in its stream.  When something
there needs a rank whose next call, in turn, would stand behind the waiting unit
itself, the operation cannot come any more: it was left out, or the orders differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.device_lack import Stall
from nccluprobe.match.device_ops import Part, Stream
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.hosts import Host, host_of
from nccluprobe.match.p2p_pair import At
from nccluprobe.match.p2p_queue import IDX as P2P_IDX
from nccluprobe.match.p2p_queue import ORD as P2P_ORD
from nccluprobe.match.p2p_queue import PEER, SEND, STREAM, WIDTH, Side
from nccluprobe.match.p2p_units import Unit
from nccluprobe.match.process import Actor
from nccluprobe.match.tail import IDX, ORD
from nccluprobe.match.waits import Wait
from nccluprobe.match.zeros import zero_before


class _Others(NamedTuple):
    """What those make who have come to a call: sends and receives around it."""

    #: Whether any does so between the call before it and this one; and before the next one.
    before: bool
    after: bool
    #: How many have come, of whose calls between the two none was lost.
    n: int


#: So many others show where in the program a step stands.
_SEVERAL = 3


@dataclass
class Heads:
    """What stands at the heads of streams, and where next calls would stand."""

    stalls: Iterable[Stall]
    sides: Mapping[At, Side]
    comms: Collection[Communicator] = ()
    #: Ids of units that are out of place: nobody has gone past these.
    strays: set[int] = field(default_factory=set)
    _at: dict[Stream, list[Stall]] = field(default_factory=dict)
    _inside: dict[int, list[Stall]] = field(default_factory=dict)
    _of: dict[Actor, list[Stall]] = field(default_factory=dict)
    _lacking: dict[int, tuple[dict[Actor, list[Endpoint]], list[Endpoint]]] = field(
        default_factory=dict
    )
    _others: dict[tuple[CommKey, int], _Others] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for s in self.stalls:
            self._of.setdefault(s.endpoint.actor, []).append(s)
            for stream in s.node.streams:
                self._at.setdefault(stream, []).append(s)
            if s.node.inside:
                self._inside.setdefault(id(s.endpoint), []).append(s)

    def past(self, unit: Unit, peer: Endpoint) -> bool:
        """Whether the peer's operation for a unit cannot come in time any more."""
        inside = peer.process.inside_now() is not None
        if inside and unit.hard is not None:
            return False
        return self.shut(unit, peer) or (inside and self.met_since(unit, peer))

    def shut(self, unit: Unit, peer: Endpoint) -> bool:
        """Whether the peer's next operation for a unit can only come after the unit."""
        if id(unit) in self.strays:
            return False
        calls = {o.op.idx for o in unit.ops}
        mine = {
            id(s.node)
            for s in self._of.get(unit.endpoint.actor, ())
            if s.endpoint is unit.endpoint and any(p.idx in calls for p in s.parts)
        }
        if not mine:
            return False
        edge = [(s, True) for s in self._before_next(peer)]
        #: id of a stall -> whether all that is behind it has to end, too, as known so far
        seen = {id(s): True for s, _ in edge}
        while edge:
            s, whole = edge.pop()
            if id(s.node) in mine:
                return True
            for ahead, rest in self._needs(s, unit.endpoint, whole):
                if id(ahead) not in seen or (rest and not seen[id(ahead)]):
                    seen[id(ahead)] = rest
                    edge.append((ahead, rest))
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

    def met_since(self, unit: Unit, peer: Endpoint) -> bool:
        """Whether the two have made a communicator together since a unit, without its half.

        All hosts meet there, so that what the one called before and the other has not
        called after it is most likely left out, if the other is held in a circle with the
        one: else its half may still come.  Not if who waits may have gone away.
        """
        if host_of(unit.endpoint) is Host.AWAY:
            return False
        mine, theirs = (self._made_at.get(e.actor, {}) for e in (unit.endpoint, peer))
        met = any(t > unit.t and key in theirs for key, t in mine.items())
        return met and self._hangs_on(peer.actor, unit.endpoint.actor)

    def _hangs_on(self, who: Actor, other: Actor) -> bool:
        """Whether one is held inside a call for want of the other, or of who waits for that."""
        edge = [s.lack for s in self._of.get(who, ()) if s.node.inside]
        seen, asked = {id(x) for x in edge}, {who}
        while edge:
            lack = edge.pop()
            needed = {e.actor for e in (*lack.missing, *lack.held)}
            needed |= {p.endpoint.actor for n in lack.behind for p in n.parts}
            if other in needed:
                return True
            for actor in needed - asked:
                asked.add(actor)
                for s in self._of.get(actor, ()):
                    if id(s.lack) not in seen:
                        seen.add(id(s.lack))
                        edge.append(s.lack)
        return False

    @cached_property
    def _made_at(self) -> dict[Actor, dict[CommKey, int]]:
        """When who got which communicator that was seen from its making on."""
        found: dict[Actor, dict[CommKey, int]] = {}
        for comm in self.comms:
            for e in comm.endpoints.values():
                if e.info.from_start:
                    found.setdefault(e.actor, {})[comm.key] = e.info.t
        return found

    def _needs(self, s: Stall, own: Endpoint, whole: bool) -> list[tuple[Stall, bool]]:
        """What has to end before an operation at the head of its stream can.

        Of calls that were not made, those of the waiting rank only: any other may be
        the one that was left out.  Nor those that it has left out, or made with count 0.
        ``whole``, also of what is found: all that is behind it has to end, too, and so
        any rank has to come that lacks several calls: it has not left out all of them.
        """
        found: list[tuple[Stall, bool]] = []
        missing, several = self._missing_of(s)
        come = [e for e in several if whole and e.actor != own.actor]
        come += [e for e in missing.get(own.actor, ()) if not self._leave_out(s, e)]
        for e in come:
            found += [(x, True) for x in self._before_next(e)]
        for e in s.lack.held:
            found += [(x, False) for x in self._inside.get(id(e), [])]
        for node in s.lack.behind:
            for stream in node.streams:
                found += [(x, False) for x in self._at.get(stream, [])]
        return found

    def _missing_of(self, s: Stall) -> tuple[dict[Actor, list[Endpoint]], list[Endpoint]]:
        """Who has not made what stands at the head of a stream; and who lacks more than that."""
        known = self._lacking.get(id(s))
        if known is None:
            by_actor: dict[Actor, list[Endpoint]] = {}
            for e in s.lack.missing:
                by_actor.setdefault(e.actor, []).append(e)
            several = [e for e in s.lack.missing if self._lacks_several(s, e)]
            known = self._lacking[id(s)] = (by_actor, several)
        return known

    def _lacks_several(self, s: Stall, e: Endpoint) -> bool:
        """Whether a rank has not come to a collective, nor to a send or receive after it.

        Of what the rank at whose stream's head the collective stands has made with it.
        """
        own = s.endpoint
        mine, theirs = (self.sides.get((x.info.source, x.info.id)) for x in (own, e))
        if mine is None or own.info.hash != e.info.hash or e.entered >= own.entered:
            return False
        calls = [p.idx for p in s.parts if p.message is None]
        if not calls:
            return False
        rows = mine.recent()
        rows = rows[(rows[:, PEER] == e.comm_rank) & (rows[:, P2P_IDX] > max(calls))]
        rows = rows[np.isin(np.maximum(rows[:, STREAM], 0), [n for _, n in s.node.streams])]
        made = np.empty((0, WIDTH), np.int64) if theirs is None else theirs.recent()
        made = made[made[:, PEER] == own.comm_rank]
        for send in (0, 1):
            there = made[made[:, SEND] != send][:, P2P_ORD].max(initial=-1)
            if bool((rows[rows[:, SEND] == send][:, P2P_ORD] > there).any()):
                return True
        return False

    def _leave_out(self, s: Stall, e: Endpoint) -> bool:
        """Whether an endpoint has gone past its part of a collective at the head of a stream."""
        return any(self._has_passed(p, e) for p in s.parts if p.message is None)

    def _has_passed(self, p: Part, e: Endpoint) -> bool:
        if zero_before(p.comm, e, p.slot) is not None:
            return True
        return p.slot == e.entered and self._is_after(e) and self.left_out(p.comm, e)

    def left_out(self, comm: Communicator, own: Endpoint) -> bool:
        """Whether a rank in a send or receive has left out the call before, not its peer its half.

        It passed count 0 there; or the others, who run the same code with other peers, make
        their sends and receives of this step only after that call, and none before: they have,
        or they all stand in that call, several of them, and it made none before in any step.
        """
        if zero_before(comm, own, own.entered):
            return True
        at = (comm.key, own.entered)
        if at not in self._others:
            self._others[at] = _others_at(comm, own.entered, self.sides)
        others = self._others[at]
        # One of the others is its peer.
        stand = others.n == comm.key.nranks - 1 > _SEVERAL and not self._makes_some(own)
        return (others.after or stand) and not others.before

    def _makes_some(self, e: Endpoint) -> bool:
        """Whether an endpoint made sends or receives before its last collective."""
        side = self.sides.get((e.info.source, e.info.id))
        if side is None or e.last_idx is None:
            return False
        return bool((side.recent()[:, P2P_IDX] < e.last_idx).any())

    def _is_after(self, e: Endpoint) -> bool:
        """Whether an endpoint has made a send or receive since its last collective there."""
        side, last = self.sides.get((e.info.source, e.info.id)), e.last_idx
        if side is None:
            return False
        return bool((side.recent()[:, P2P_IDX] > (-1 if last is None else last)).any())

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


def note_skipped(known: Iterable[Wait], waits: Iterable[Wait], heads: Heads) -> None:
    """Tell of collectives who has left them out, and sits in a send or receive after them."""
    sits = {(w.comm.key, e.actor): w for w in waits for e in w.entered}
    for call in known:
        skipped = []
        for e in call.absent if call.seq is not None else ():
            w = sits.get((call.comm.key, e.actor))
            last = -1 if e.last_idx is None else e.last_idx
            if w is None or call.at != (e.entered,) or min(w.calls, default=-1) <= last:
                continue
            if heads.left_out(call.comm, e):
                skipped.append(e)
        if skipped and not _outvoted(call, heads.sides):
            call.skipped += skipped


def note_crossed(known: Iterable[Wait], waits: Iterable[Wait]) -> None:
    """Tell of collectives to which peers went past a send or receive that lacks its half.

    Who stands in that one has not come to the collective: one of them has left out a call,
    or made one too many, and where nobody knows who, that explains both.
    """
    of: dict[int, list[Wait]] = {}
    for w in waits:
        f = w.cause
        if f is not None and not f.culprits and f.details.get("reason") == "partner_gone_past":
            of.setdefault(id(w.entered[0]), []).append(w)
    for call in known if of else ():
        if call.seq is None or call.cause is not None:
            continue
        made = {id(x) for x in call.entered}
        for e in call.absent:
            if call.at != (e.entered,):
                continue
            crossing = (w for w in of.get(id(e), ()) if made & {id(x) for x in w.absent})
            call.cause = next((w.cause for w in crossing), call.cause)


def _outvoted(call: Wait, sides: Mapping[At, Side]) -> bool:
    """Whether more ranks have come to later sends and receives than have made a call."""
    without = 0
    for e in call.absent:
        side = sides.get((e.info.source, e.info.id))
        last = -1 if e.last_idx is None else e.last_idx
        if side is not None and call.at == (e.entered,):
            without += bool((side.recent()[:, P2P_IDX] > last).any())
    return without > len(call.entered)


def _others_at(comm: Communicator, slot: int, sides: Mapping[At, Side]) -> _Others:
    """What those make who have come to a slot of a communicator."""
    before = after = False
    came = 0
    for e in comm.members():
        if e.entered <= slot:
            continue
        order = slot - (e.entered - e.next_ord)
        idx = {n: i for n, i in e.tail.rows()[:, [ORD, IDX]].tolist() if abs(n - order) <= 1}
        if order not in idx or (order and order - 1 not in idx):
            continue
        came += e.process.losses.between(e.info.id, idx.get(order - 1, -1), idx[order]) == 0
        if (side := sides.get((e.info.source, e.info.id))) is None:
            continue
        made = side.recent()[:, P2P_IDX]
        made = made[made > idx.get(order - 1, -1)]
        before |= bool((made < idx[order]).any())
        made = made[made > idx[order]]
        after |= bool((made < idx.get(order + 1, made.max(initial=0) + 1)).any())
    return _Others(before, after, came)
