"""Who made a call at another place of its program than all others did.

Ranks run the same code, each on its own communicators: those that one split of one
parent made stand for each other.  So what a rank called just before a call, and how
much between two, is what the others called there, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match import p2p_queue, tail
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.p2p_pair import At
from nccluprobe.match.p2p_queue import Side
from nccluprobe.match.p2p_units import Unit
from nccluprobe.match.process import Actor
from nccluprobe.match.waits import Wait, entry_of

#: So many others show what the program does.
_OTHERS = 3
#: Of more calls in a circle than this, the others are not compared.
_MOST = 8
#: Splits of splits of splits: a broken trace may name a circle.
_DEEP = 16


class _Place(NamedTuple):
    """A call, as all ranks make it: where, and which one of a communicator that they share."""

    family: Hashable
    message: bool
    slot: int


class Programs:
    """The newest calls of the ranks, on all their communicators."""

    def __init__(
        self, comms: Collection[Communicator], sides: Mapping[At, Side] | None = None
    ) -> None:
        self._comms = comms
        self._sides = {} if sides is None else sides

    @cached_property
    def _at(self) -> dict[At, Endpoint]:
        """All endpoints: seldom wanted."""
        ends = (e for comm in self._comms for e in comm.endpoints.values())
        return {(e.info.source, e.info.id): e for e in ends}

    @cached_property
    def _of(self) -> dict[Actor, list[Endpoint]]:
        found: dict[Actor, list[Endpoint]] = {}
        for e in self._at.values():
            found.setdefault(e.actor, []).append(e)
        return found

    def family(self, e: Endpoint) -> Hashable:
        """The communicator, or the split that made it and those of other ranks."""
        below: list[int] = []
        while e.info.parent is not None and e.info.child is not None and len(below) < _DEEP:
            parent = self._at.get((e.info.source, e.info.parent))
            if parent is None:
                break
            below.append(e.info.child)
            e = parent
        return (e.info.hash, *below)

    def before(self, actor: Actor, t: int, but: Hashable = None) -> _Place | None:
        """The last call of an actor before a time, no send or receive on the family ``but``."""
        found: tuple[int, _Place] | None = None
        for e in self._of.get(actor, ()):
            family = self.family(e)
            rows = e.tail.rows()
            made = [(rows[:, tail.T], False)]
            side = self._sides.get((e.info.source, e.info.id))
            if side is not None and family != but:
                made.append((side.recent()[:, p2p_queue.T], True))
            for times, message in made:
                at = np.flatnonzero(times < t)
                if len(at) and (found is None or int(times[at].max()) > found[0]):
                    n = int(at[times[at].argmax()])
                    slot = -1 if message else _slots(e)[n]
                    found = (int(times[n]), _Place(family, message, int(slot)))
        return None if found is None else found[1]

    def count(self, actor: Actor, family: Hashable, stream: int, span: tuple[int, int]) -> int:
        """How many collectives an actor made on a family and a stream between two times.

        -1: none at all, it has no communicator of that family.
        """
        found = -1
        for e in self._of.get(actor, ()):
            if self.family(e) == family:
                rows = e.tail.rows()
                t = rows[:, tail.T]
                inside = (t > span[0]) & (t < span[1]) & (rows[:, tail.STREAM] == stream)
                found = max(found, 0) + int(inside.sum())
        return found


def _slots(e: Endpoint) -> m.Int64:
    return e.tail.ord + (e.entered - e.next_ord)


def _row(e: Endpoint, slot: int) -> m.Int64 | None:
    at = np.flatnonzero(_slots(e) == slot)
    return e.tail.rows()[at[-1]] if len(at) else None


def out_of_place(known: Iterable[Wait], units: Sequence[Unit], programs: Programs) -> set[int]:
    """Ids of units that one rank stands in where all others made a collective that it lacks.

    All others came to that call straight from where it came to what it stands in, and made
    nothing like that between: it has left the call out, its peers no part of theirs.
    """
    found: set[int] = set()
    waits = list(known)
    for call in waits:
        if len(call.absent) != 1 or call.seq is None or call.at != (call.absent[0].entered,):
            continue
        (own,) = call.absent
        mine = [u for u in units if u.endpoint.actor == own.actor and u.endpoint is not own]
        mine = [u for u in mine if _is_of_all(u, units)]
        strays = [u for u in mine if _took_its_place(call, u.endpoint, u.t, programs)]
        found |= {id(u) for u in strays}
        others = [(w, e) for w in waits for e in w.entered if w.seq is not None]
        calls = [(w, e) for w, e in others if e.actor == own.actor and w.comm is not call.comm]
        if strays or any(_took_its_place(call, e, entry_of(w, e), programs) for w, e in calls):
            call.strays.append(own)
    return found


def _is_of_all(unit: Unit, units: Sequence[Unit]) -> bool:
    """Whether more than one send or receive of a pair is open: it may be the only one there."""
    peers = [o.peer for o in unit.ops]
    others = (u.endpoint for u in units if u.endpoint.info.hash == unit.endpoint.info.hash)
    return len(unit.ops) > 1 or any(e is not unit.endpoint and e not in peers for e in others)


def _took_its_place(call: Wait, e: Endpoint, t: int, programs: Programs) -> bool:
    """``e``, ``t``: where the rank stands, and since when."""
    family = programs.family(e)
    mine = programs.before(e.actor, t, family)
    if mine is None or e.process.lost:
        return False
    others = [e for e in call.entered if programs.count(e.actor, family, 0, (0, 0)) >= 0]
    if len(others) < _OTHERS or any(e.process.lost for e in others):
        return False
    for e in others:
        row = _row(e, call.at[0])
        if row is None or programs.before(e.actor, int(row[tail.T])) != mine:
            return False
    return True


def odd_between(
    waits: Sequence[Wait], actors: Collection[Actor], programs: Programs
) -> tuple[Actor, ...]:
    """Of what waits in a circle: who made more, or less, between two calls than all others."""
    calls = [w for w in waits if w.seq is not None and w.at[0] > 0][:_MOST]
    found: set[Actor] = set()
    for x, y in permutations(calls, 2):
        if x.comm is not y.comm and y.entered:
            found |= _odd(x, programs.family(y.entered[0]), programs)
    return tuple(found) if len(found) == 1 and found <= set(actors) else ()


def _odd(x: Wait, family: Hashable, programs: Programs) -> set[Actor]:
    made: dict[Actor, int] = {}
    for e in x.comm.members():
        rows = [_row(e, slot) for slot in (x.at[0] - 1, x.at[0])]
        last, row = rows
        if last is None or row is None:
            continue
        span = (int(last[tail.T]), int(row[tail.T]))
        n = programs.count(e.actor, family, int(row[tail.STREAM]), span)
        if n < 0:
            continue
        if e.process.lost or e.base != "exact":
            return set()
        made[e.actor] = n
    times = Counter(made.values())
    if len(made) < _OTHERS or len(times) != 2 or min(times.values()) != 1:
        return set()
    return {a for a, n in made.items() if times[n] == 1}
