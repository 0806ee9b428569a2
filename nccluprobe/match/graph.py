"""The wait-for graph: actors that wait in operations, operations that lack actors.

Nodes are actors (who makes calls) and waits.  An actor points at the waits that
it sits in; a wait points at the actors that have not come to it, all of whom it
needs.  What an actor's absence comes from is found at the ends of its paths.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nccluprobe.match.alone import at_odds, left_out
from nccluprobe.match.components import components, lasting_part, proven_part
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.extra import Cause as Cause
from nccluprobe.match.extra import extra_call, out_of_order
from nccluprobe.match.finding import Finding
from nccluprobe.match.hosts import Host, host_of, is_stopped
from nccluprobe.match.minority import minority, odd_call, on_one_communicator
from nccluprobe.match.options import SECOND
from nccluprobe.match.order import exclude, excludes, locked
from nccluprobe.match.peers import passed
from nccluprobe.match.process import Actor
from nccluprobe.match.program import Programs, odd_between
from nccluprobe.match.status import crashed_alone, is_silent, left_at
from nccluprobe.match.waits import Wait, came_to, seen_in
from nccluprobe.match.zeros import ahead_by_zero, shifted_by_zero

#: Who ended a communicator after waiting so long in another gave up: a consequence.
_GAVE_UP = 10 * SECOND


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
    #: Made by a minority, and gone past by others: a call too many.
    extra: Wait | None = None
    #: All its calls were made, and each stands behind another one in some stream.
    streams: bool = False
    #: The minority made more, or less, between two of these calls than all others.
    placed: bool = False


@dataclass
class Graph:
    """All waits of a scan, and what they come from."""

    waits: Sequence[Wait]
    now: Mapping[int, int]  # source -> the moment of judging
    silent_after: int
    #: process -> id of a finding that explains why it does not come
    explained: Mapping[Hashable, str]
    #: Of these, processes to which an error was returned because of another rank.
    failed: frozenset[Hashable] = frozenset()
    #: Of these, processes that cannot go on by themselves, whatever they wait for.
    broken: frozenset[Hashable] = frozenset()
    #: Findings of calls on two communicators in orders that exclude each other.
    orders: Sequence[Finding] = ()
    programs: Programs | None = None
    #: Processes that may not queue more, as far as completion shows.
    full: frozenset[Hashable] = frozenset()
    cycles: list[Cycle] = field(default_factory=list)
    #: Calls that streams hold up each other at, and who made one of count 0 before.
    zeros: list[tuple[Wait, Endpoint]] = field(default_factory=list)
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
                self.endpoint_of.setdefault(e.actor, e)
                if any(e is x for x in w.absent):
                    continue  # its part stands behind something older, which is what holds it
                self.blockers.setdefault(e.actor, []).append(w)
                # Inside a send or receive a host is held by that one's peer, not by a collective.
                if w.hard or e.inside(other=w.seq is None) is not None:
                    self._hard.setdefault(e.actor, []).append(w)
            for e in (*w.absent, *w.held):
                self.endpoint_of.setdefault(e.actor, e)
        self._solve()
        for w in self.waits:
            w.over = self._over(w)

    # -- edges -------------------------------------------------------------

    def waits_of(self, actor: Actor) -> list[Wait]:
        """The waits that keep an actor from coming elsewhere."""
        e = self.endpoint_of[actor]
        waits = [w for w in self.blockers.get(actor, ()) if not self._over(w)]
        if not waits or is_stopped(e) or actor[0] in self.broken:
            return []
        # When the first one came will do: what it gave up before it came itself stands in no
        # stream any more, so that the rule of the heads below sets that aside.
        newest = max(w.first for w in waits)
        waits = [w for w in waits if w.aborted.get(actor, newest) >= newest]
        if any(w.weak for w in waits) and host_of(e) is Host.AWAY:
            waits = [w for w in waits if not w.weak]  # it does something else
        hard = [w for w in self._hard.get(actor, ()) if not self._over(w)]
        if hard:
            return hard
        # What stands behind something else in its stream does not hold it.
        heads = [w for w in waits if w.heads is None or actor in w.heads]
        return heads or waits

    def holding(self, w: Wait, e: Endpoint) -> list[Wait]:
        """The waits that keep an absent member from coming to ``w``.

        Not those that it gave up, by aborting their communicator, and called on after that,
        before anybody came to ``w``; nor any since all who came to ``w`` gave that up.
        """
        went_on, until = min(w.first, max(e.last_t, e.info.t)), w.until
        return [
            x
            for x in self.waits_of(e.actor)
            if x.aborted.get(e.actor, went_on) >= went_on
            and (until is None or came_to(x, e.actor) < until)
        ]

    def supposed(self, actor: Actor) -> bool:
        """Whether that it waits for nobody rests on calls that others may have made unseen."""
        return any(id(w) in self._came for w in self.blockers.get(actor, ()))

    def left(self, w: Wait, e: Endpoint) -> bool:
        """Whether an absent member ended by itself: it will not come, and waits for nobody.

        Who waited elsewhere itself and ended together with those who wait for it, as in
        a job that is killed as a whole, did not leave them.
        """
        gone = left_at(e)
        if gone is None or e.process.who in self.failed:
            return False
        others = [x for x in self.blockers.get(e.actor, ()) if x is not w and x.first <= gone]
        if any(x.first + _GAVE_UP <= gone for x in others):
            return False
        return self._stayed(w, e, gone)

    def _stayed(self, w: Wait, e: Endpoint, gone: int) -> bool:
        """Whether somebody who waits in it was still there long after one had gone."""
        abrupt = e.end is None and crashed_alone(e.process, (x.process for x in w.entered))
        grace = min(SECOND, self.silent_after) if abrupt else self.silent_after
        ends = (left_at(x) for x in w.entered if x is not e)
        nows = (self.now.get(x.process.source, 0) for x in w.entered if x is not e)
        until = max((n if t is None else t for t, n in zip(ends, nows, strict=True)), default=0)
        return until - gone > grace

    def passed(self, w: Wait, e: Endpoint) -> bool:
        """Whether what an absent member sits in does not keep its peers from coming."""
        if e.completed is None or e.process.who in self.full:
            return False
        waits = self.waits_of(e.actor)
        return bool(waits) and passed(w, e, waits, self.blockers)

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
            for e in (*(w.absent if id(w) not in self._came else ()), *w.held):
                if self.left(w, e) or self.passed(w, e):
                    own.setdefault(len(actors) + i, set()).add(Cause("rank", e.actor))
                elif self.waits_of(e.actor) and not self.holding(w, e):
                    own.setdefault(len(actors) + i, set()).add(self._end_of(e.actor))
                else:
                    out.append(node_of[e.actor])
            out += [node_of[id(x)] for x in w.behind if not self._over(x)]
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
        done = not found
        while found:
            self._came |= found
            # What only stood behind them goes on.
            found = {id(w) for w in self.waits if self._goes_on(w)} - self._came
        return not done

    def _goes_on(self, w: Wait) -> bool:
        if w.absent or w.held or w.cause is not None:
            return False
        return bool(w.behind) and all(self._over(x) for x in w.behind)

    def _over(self, w: Wait) -> bool:
        """Whether the absent ones have come to a wait, and nobody is held inside it."""
        return id(w) in self._came and not w.held

    def _break(
        self, actors: tuple[Actor, ...], waits: tuple[Wait, ...], outside: set[Cause]
    ) -> set[Cause]:
        """The cause of a cycle."""
        if (inversion := excludes(waits, self.orders)) is not None:
            return {Cause("finding", inversion.id)}
        # The place of what was lost among the calls of other communicators is not known.
        streams = all(w.device for w in waits)
        vague = streams and any(w.doubtful for w in waits)
        if streams:
            # Streams that hold up each other: they do so as well when one has made a call
            # less than others, and all that follows is shifted.
            waits = (*waits, *self._uneven(waits))
        heads = {e.actor for w in waits for e in w.entered if e.actor in (w.heads or ())}
        everyone = frozenset(actors) | heads
        shifted = {e.actor for w in waits for e in (*shifted_by_zero(w), *w.skipped)} & everyone
        if shifted:  # it has gone past what it lacks
            return {Cause("rank", a) for a in shifted}
        if ahead := [(w, e) for w in waits for e in ahead_by_zero(w) if e.actor in everyone]:
            self.zeros.append(ahead[0])
            return {Cause("zero", len(self.zeros) - 1)}
        if vague:
            return outside
        actors = actors or tuple(sorted(heads, key=repr))
        hosts = {a: host_of(self.endpoint_of[a]) for a in actors}
        here = {id(w) for w in waits}
        hard = {a for a in actors if any(id(w) in here for w in self._hard.get(a, ()))}
        if len(hard) < len(actors) and (part := proven_part(actors, waits, self._hard)):
            return self._break(*part, set())
        mutual = any(e.actor in actors for w in waits for e in w.held)
        free = {a for a in actors if hosts[a] is Host.OUTSIDE}
        causes = outside or {Cause("rank", a) for a in free}
        core = lasting_part(actors, waits, self.waits_of) if len(causes) == 1 else ()
        if (extra := extra_call(waits, self.waits, causes, core)) is not None:
            few = tuple(e.actor for e in seen_in(extra[0]))
            if gone := [a for a in few if host_of(self.endpoint_of[a]) is Host.AWAY]:
                return {Cause("rank", a) for a in gone}
            others = {*few, *(e.actor for e in extra[0].absent)}
            # Of collectives of two communicators it may be their order as well.
            if all(w.seq is not None and w.comm is not extra[0].comm for w in extra[1:]):
                return self._cycle(sorted(extra, key=lambda w: w.order), others, few)
            return self._cycle(extra, others, few, extra=extra[0])
        if outside and (len(hard) < len(actors) or mutual):
            return outside
        away = [a for a in actors if hosts[a] is Host.AWAY]
        if away:
            return {Cause("rank", a) for a in away}
        if odd_ones := out_of_order(waits) & everyone:
            return {Cause("rank", a) for a in odd_ones}
        proven = len(hard) == len(actors)
        waits = tuple(sorted(waits, key=lambda w: w.order))
        few = minority(waits, everyone)
        apart = odd_between(waits, everyone, self.programs) if self.programs else ()
        if apart and not {*apart} & {*few}:
            return self._cycle(waits, everyone, apart, proven, streams=streams, placed=True)
        if few and on_one_communicator(waits):
            return {Cause("rank", a) for a in few}  # whose calls have one order
        odd = odd_call(waits)
        if odd is not None and few and {e.actor for e in odd.absent} == set(few):
            return {Cause("rank", a) for a in few}  # what all others made, it left out
        strays = set() if few else {e.actor for w in waits for e in w.strays} & everyone
        if alone := strays or left_out(waits, everyone):
            return {Cause("rank", a) for a in alone}
        if (odd_one := at_odds(waits, self.waits)) is not None:
            one, own = odd_one
            mine = {id(w): w for w in (*waits, *own) if not w.device}.values()
            return self._cycle([*mine], actors, (one,)) if own else {Cause("rank", one)}
        left = free if not few and hard and len(hard) + len(free) == len(actors) else set()
        streams |= bool(left) and exclude(waits, self.blockers)
        if not streams and any(
            w.seq is not None for a in left for w in self.blockers[a] if id(w) in here
        ):
            return {Cause("rank", a) for a in left}
        return self._cycle(waits, actors, few, proven, streams=streams or locked(waits))

    def _cycle(
        self,
        waits: Sequence[Wait],
        actors: Iterable[Actor],
        minority: Iterable[Actor],
        proven: bool = False,
        extra: Wait | None = None,
        streams: bool = False,
        placed: bool = False,
    ) -> set[Cause]:
        cycle = Cycle(
            len(self.cycles),
            tuple(waits),
            tuple(sorted(set(actors), key=repr)),
            proven=proven,
            minority=tuple(sorted(minority, key=repr)),
            extra=extra,
            streams=streams,
            placed=placed,
        )
        self.cycles.append(cycle)
        return {Cause("cycle", cycle.number)}

    def _uneven(self, waits: tuple[Wait, ...]) -> list[Wait]:
        """Open calls on the communicators of a cycle of streams."""
        comms = {w.comm.key for w in waits if w.seq is not None}
        return [w for w in self.waits if w.seq is not None and not w.device and w.comm.key in comms]
