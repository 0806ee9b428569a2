"""The wait-for graph: actors that wait in operations, operations that lack actors.

Nodes are actors (who makes calls) and waits.  An actor points at the waits that
it sits in; a wait points at the actors that have not come to it, all of whom it
needs.  What an actor's absence comes from is found at the ends of its paths.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.hosts import Host, host_of, is_stopped
from nccluprobe.match.options import SECOND
from nccluprobe.match.process import Actor
from nccluprobe.match.status import is_silent
from nccluprobe.match.waits import Wait, entry_of

#: Who ended a communicator after waiting so long in another gave up: a consequence.
_GAVE_UP = 10 * SECOND
#: So many peers must have gone past a wait to show that it holds nobody's host.
_PEERS = 2


class Cause(NamedTuple):
    """Where a path ends.

    ``rank``: an actor that waits for nobody.  ``finding``: something else that is
    wrong with it (key: the finding's id).  ``inside``: an actor in a call that
    may wait for others.  ``silent``: an actor that is not observed.  ``phase``: an
    actor that has declared why it does not come.  ``cycle``:
    actors that wait for each other (key: number of the cycle).  ``stuck``: a call
    that lacks nobody and is not complete (key: its communicator).
    """

    kind: str
    key: Hashable


@dataclass
class Cycle:
    """Actors that wait for each other, and for nobody else."""

    number: int
    waits: tuple[Wait, ...]
    actors: tuple[Actor, ...]
    #: All hosts are inside the calls: nobody can go on.
    proven: bool
    #: The fewer ones, when the cycle has two sides of different size.
    minority: tuple[Actor, ...] = ()


@dataclass
class Graph:
    """All waits of a scan, and what they come from."""

    waits: Sequence[Wait]
    now: Mapping[int, int]  # source -> the moment of judging
    silent_after: int
    #: process -> id of a finding that explains why it does not come
    explained: Mapping[Hashable, str]
    #: Of these, processes that cannot go on by themselves, whatever they wait for.
    broken: frozenset[Hashable] = frozenset()
    cycles: list[Cycle] = field(default_factory=list)
    causes: dict[int, frozenset[Cause]] = field(default_factory=dict)  # by id(wait)
    #: actor -> waits that it sits in, oldest first
    blockers: dict[Actor, list[Wait]] = field(default_factory=dict)
    #: actor -> those of them that it is inside of: it is that call that holds the thread
    _hard: dict[Actor, list[Wait]] = field(default_factory=dict)
    endpoint_of: dict[Actor, Endpoint] = field(default_factory=dict)
    #: Ids of waits to which the absent ones have come, unseen.
    _came: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        for w in sorted(self.waits, key=lambda w: w.order):
            for e in w.entered:
                self.blockers.setdefault(e.actor, []).append(w)
                if w.hard or e.inside() is not None:
                    self._hard.setdefault(e.actor, []).append(w)
                self.endpoint_of.setdefault(e.actor, e)
            for e in (*w.absent, *w.held):
                self.endpoint_of.setdefault(e.actor, e)
        self._solve()

    # -- edges -------------------------------------------------------------

    def waits_of(self, actor: Actor) -> list[Wait]:
        """The waits that keep an actor from coming elsewhere."""
        e = self.endpoint_of[actor]
        waits = [w for w in self.blockers.get(actor, ()) if id(w) not in self._came]
        if not waits or is_stopped(e) or actor[0] in self.broken:
            return []
        if any(w.weak for w in waits) and host_of(e) is Host.AWAY:
            waits = [w for w in waits if not w.weak]  # it does something else
        hard = [w for w in self._hard.get(actor, ()) if id(w) not in self._came]
        if hard:
            return hard
        # What stands behind something else in its stream does not hold it.
        heads = [w for w in waits if w.heads is None or actor in w.heads]
        return heads or waits

    def left(self, w: Wait, e: Endpoint) -> bool:
        """Whether an absent member ended by itself: it will not come, and waits for nobody."""
        times = [x.t for x in (e.end, e.process.end if e.process.ended else None) if x is not None]
        if not times:
            return False
        gone = min(times)
        return not any(
            x is not w and x.first + _GAVE_UP <= gone for x in self.blockers.get(e.actor, ())
        )

    def passed(self, w: Wait, e: Endpoint) -> bool:
        """Whether others came to this wait from the very waits that an absent member sits in.

        Then these do not keep it from coming.  Asked only where completion is
        seen: else a rank may have to wait for the device where its peers need not.
        """
        waits = self.waits_of(e.actor)
        if e.completed is None or not waits or any(x.seq is None for x in waits):
            return False
        peers = [p for p in w.entered if all(self._before(x, w, p) for x in waits)]
        return len(peers) >= _PEERS

    def _before(self, x: Wait, w: Wait, peer: Endpoint) -> bool:
        """Whether a peer sat in one wait already when it came to the other."""
        sat = next((p for p in x.entered if p.actor == peer.actor), None)
        return sat is not None and x is not w and entry_of(x, sat) <= entry_of(w, peer)

    def _end_of(self, actor: Actor) -> Cause:
        """The cause that an actor without waits is."""
        e = self.endpoint_of[actor]
        who = actor[0]
        if who in self.explained:
            return Cause("finding", self.explained[who])
        p = e.process
        if not p.ended and is_silent(p, self.now.get(p.source, 0), self.silent_after):
            return Cause("silent", actor)
        if host_of(e) is Host.INSIDE:
            return Cause("inside", actor)
        return Cause("phase" if p.in_phase and not p.ended else "rank", actor)

    # -- solving -----------------------------------------------------------

    def _solve(self) -> None:
        actors = list(self.endpoint_of)
        own: dict[int, set[Cause]] = {}
        edges = self._edges(actors, own)
        while self._release(actors, edges):
            own.clear()
            edges = self._edges(actors, own)
        found: list[frozenset[Cause]] = [frozenset()] * len(edges)
        for component in components(edges):
            inside = set(component)
            ends: set[Cause] = set()
            for n in component:
                ends |= own.get(n, set())
                for to in edges[n]:
                    if to not in inside:
                        ends |= found[to]
            if len(component) == 1 and not edges[component[0]]:
                n = component[0]
                if n < len(actors):
                    ends.add(self._end_of(actors[n]))
            elif len(component) > 1:
                ends = self._break(
                    tuple(actors[n] for n in component if n < len(actors)),
                    tuple(self.waits[n - len(actors)] for n in component if n >= len(actors)),
                    ends,
                )
            for n in component:
                found[n] = frozenset(ends)
        for i, w in enumerate(self.waits):
            self.causes[id(w)] = found[len(actors) + i]

    def _edges(self, actors: list[Actor], own: dict[int, set[Cause]]) -> list[list[int]]:
        """Nodes that each node points at: actors first, then waits.  ``own``: causes of waits."""
        node_of: dict[Hashable, int] = {a: i for i, a in enumerate(actors)}
        for i, w in enumerate(self.waits):
            node_of[id(w)] = len(actors) + i
        edges: list[list[int]] = [[node_of[id(w)] for w in self.waits_of(a)] for a in actors]
        for i, w in enumerate(self.waits):
            out = []
            if w.cause is not None:
                own.setdefault(len(actors) + i, set()).add(Cause("finding", w.cause.id))
                edges.append([])
                continue
            if not (w.absent or w.held or w.behind):
                own.setdefault(len(actors) + i, set()).add(Cause("stuck", w.comm.key))
            for e in (*w.absent, *w.held):
                if self.left(w, e) or self.passed(w, e):
                    own.setdefault(len(actors) + i, set()).add(Cause("rank", e.actor))
                else:
                    out.append(node_of[e.actor])
            out += [node_of[id(x)] for x in w.behind if id(x) not in self._came]
            edges.append(out)
        return edges

    def _release(self, actors: list[Actor], edges: list[list[int]]) -> bool:
        """Whether waits of a cycle lack only ranks that may have come: these have come.

        They wait themselves for who waits there: else, besides the loss, several ranks
        would have made calls in orders that exclude each other.
        """
        weak = {len(actors) + i for i, w in enumerate(self.waits) if w.weak}
        found = {
            id(self.waits[n - len(actors)])
            for component in (components(edges) if weak else ())
            for n in weak.intersection(component if len(component) > 1 else ())
        } - self._came
        self._came |= found
        return bool(found)

    def _break(
        self, actors: tuple[Actor, ...], waits: tuple[Wait, ...], outside: set[Cause]
    ) -> set[Cause]:
        """The cause of a cycle."""
        if all(w.device for w in waits):
            # Streams that hold up each other: they do so as well when one has made a call
            # less than others, and all that follows is shifted.
            waits = (*waits, *self._uneven(waits))
        heads = {e.actor for w in waits for e in w.entered if e.actor in (w.heads or ())}
        everyone = frozenset(actors) | heads
        actors = actors or tuple(sorted(heads, key=repr))
        hosts = {a: host_of(self.endpoint_of[a]) for a in actors}
        here = {id(w) for w in waits}
        hard = {a for a in actors if any(id(w) in here for w in self._hard.get(a, ()))}
        mutual = any(e.actor in actors for w in waits for e in w.held)
        if outside and (len(hard) < len(actors) or mutual):
            return outside
        away = [a for a in actors if hosts[a] is Host.AWAY]
        if away:
            return {Cause("rank", a) for a in away}
        # A host that is free has queued its work and gone away, when all others are held.
        free = {a for a in actors if hosts[a] is Host.OUTSIDE}
        few = _minority(waits, everyone)
        if few and _on_one_communicator(waits):
            return {Cause("rank", a) for a in few}  # whose calls have one order
        odd = odd_call(waits)
        if odd is not None and few and {e.actor for e in odd.absent} == set(few):
            return {Cause("rank", a) for a in few}  # what all others made, it left out
        if not few and hard and free and len(hard) + len(free) == len(actors):
            return {Cause("rank", a) for a in free}
        cycle = Cycle(
            len(self.cycles),
            tuple(sorted(waits, key=lambda w: w.order)),
            tuple(sorted(actors, key=repr)),
            proven=len(hard) == len(actors),
            minority=few,
        )
        self.cycles.append(cycle)
        return {Cause("cycle", cycle.number)}

    def _uneven(self, waits: tuple[Wait, ...]) -> list[Wait]:
        """Open calls on the communicators of a cycle of streams."""
        comms = {w.comm.key for w in waits if w.seq is not None}
        return [w for w in self.waits if w.seq is not None and not w.device and w.comm.key in comms]


def _on_one_communicator(waits: Sequence[Wait]) -> bool:
    """Whether a cycle is one of collectives, splits and the like of one communicator."""
    if any(w.device or w.label.startswith(("ncclSend", "ncclRecv")) for w in waits):
        return False
    return len({w.comm.key for w in waits}) == 1


def odd_call(waits: Sequence[Wait]) -> Wait | None:
    """The one collective of a cycle that some have not made, when all else has been made."""
    open_ = [w for w in waits if not w.device]
    return open_[0] if len(open_) == 1 and open_[0].seq is not None else None


def _minority(waits: Sequence[Wait], actors: frozenset[Actor]) -> tuple[Actor, ...]:
    """Of two sides of different size, the smaller one.

    Only those count that had to come to both: others had no choice of an order.
    """
    odd = odd_call(waits)
    if odd is not None:
        sides = [{e.actor for e in x} for x in (odd.entered, odd.absent)]
        few, many = sorted(sides, key=len)
        return tuple(sorted(few, key=repr)) if len(few) < len(many) and few <= actors else ()
    # What only the streams tell is between these, unless there is nothing else.
    pair = [w for w in waits if not w.device] or list(waits)
    if len(pair) != 2:
        return ()
    both = set.intersection(*({e.actor for e in (*w.entered, *w.absent)} for w in pair))
    sat = ({e.actor for e in w.entered if not w.device or e.actor in (w.heads or ())} for w in pair)
    few, many = sorted((s & both for s in sat), key=len)
    if not few or len(few) == len(many) or few & many:
        return ()
    return tuple(sorted(few, key=repr))


def components(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Strongly connected components, each after those that it points at (Tarjan)."""
    index = [-1] * len(edges)
    low = [0] * len(edges)
    on_stack = [False] * len(edges)
    stack: list[int] = []
    found: list[list[int]] = []
    count = 0
    for root in range(len(edges)):
        if index[root] >= 0:
            continue
        work = [(root, 0)]
        while work:
            n, at = work.pop()
            if at == 0:
                index[n] = low[n] = count
                count += 1
                stack.append(n)
                on_stack[n] = True
            for i in range(at, len(edges[n])):
                to = edges[n][i]
                if index[to] < 0:
                    work.append((n, i + 1))
                    work.append((to, 0))
                    break
                if on_stack[to]:
                    low[n] = min(low[n], index[to])
            else:
                if low[n] == index[n]:
                    component = []
                    while True:
                        x = stack.pop()
                        on_stack[x] = False
                        component.append(x)
                        if x == n:
                            break
                    found.append(component)
                if work:
                    up = work[-1][0]
                    low[up] = min(low[up], low[n])
    return found
