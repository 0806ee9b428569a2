"""Cause or consequence: what the wait-for graph says of the findings.

Every finding about ranks that did not come gets its role here: root cause for
those that wait for nobody, downstream of another finding, or unknown where the
trace does not decide.  Cycles and stalls of the device become findings of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from math import inf
from typing import Any

from nccluprobe.match.absence import Context, strongest
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.completion import not_complete, transfers_not_complete
from nccluprobe.match.crashed import is_beside_crash, under_abort, under_crash
from nccluprobe.match.cycles import cycle_finding, hypotheses
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.excuse import Excuses, Stall
from nccluprobe.match.explained import explained
from nccluprobe.match.finding import Finding
from nccluprobe.match.graph import Cause, Graph
from nccluprobe.match.hosts import Host, host_of
from nccluprobe.match.launch_depth import at_launch_depth
from nccluprobe.match.peers import is_alone
from nccluprobe.match.process import Actor
from nccluprobe.match.program import Programs
from nccluprobe.match.stuck import stall_finding
from nccluprobe.match.suppose import least_behind
from nccluprobe.match.waits import Wait
from nccluprobe.match.zeros import zero_finding

#: A rank with these reasons may have come, or is not seen: it is not blamed.
_UNSURE = frozenset({"rank_not_observed", "probe_event_loss_possible"})
_LOST = "probe_event_loss_possible"
#: Reasons that a wait elsewhere explains.
_EXPLAINED = frozenset({"rank_alive_but_not_entered", "rank_inside_other_call"})


def assign(
    waits: list[Wait],
    findings: list[Finding],
    comms: Collection[Communicator],
    now: Mapping[int, int],
    context: Callable[[Communicator], Context],
    silent_after: int,
    unreceived: Iterable[Wait] = (),
) -> list[Finding]:
    """Set role, downstream_of, culprits and reasons; returns findings of cycles and stalls.

    ``unreceived``: sends that ranks which crashed have not received.
    """
    broken = frozenset(
        who for f in findings if f.hang_type == "collective_missing_exit" for who in f.culprits
    )
    for w in waits:
        if w.finding is not None:
            w.finding.until = w.until
        if w.seq is None and w.finding is not None and (said := _reasons(w.finding)):
            w.weak = said == {_LOST}
    orders = [f for f in findings if f.hang_type == "cross_comm_order_inversion"]
    known = explained(waits, findings, comms)
    programs, full = Programs(comms), at_launch_depth(comms)
    failed = frozenset(who for f in findings for who in f.failed if known.get(who) == f.id)
    graph = Graph(waits, now, silent_after, known, failed, broken, orders, programs, full)
    excuses = Excuses(graph, comms)
    roles = _Roles(graph, excuses, context, comms)
    made = roles.run()
    roots = [f for f in (*findings, *made) if f.role == "root_cause"]
    made += [] if roots else transfers_not_complete(waits, context)
    # Who does not come to an init is known by number only: that says nothing against a crash.
    if all(f.hang_type == "comm_init_missing_enter" and not f.culprits for f in roots):
        ends = (graph.causes[id(w)] for w in waits if w.finding is not None)
        missed = {c.key for found in ends for c in found if c.kind == "rank"}
        made += (crash := under_crash([*waits, *unreceived], context, missed))
        if crash:
            roles.follow(crash)
        if not (crash or roots):
            roles.name_unsure()
    return made


def _reasons(f: Finding) -> set[str]:
    return {s["reason"] for s in f.details.get("missing_rank_status") or ()}


def _not_all_made(waits: list[tuple[Wait, Endpoint]]) -> bool:
    """Whether an endpoint has lost fewer events than calls that it is waited for in."""
    p = waits[0][1].process
    if all(any(e is x for x in w.posted) for w, e in waits):
        return False  # all of them lack the end of a group only, which is one event
    lacking = sum(least_behind(w.comm, e) if w.seq is not None else 1 for w, e in waits)
    last = {e: -1 if e.last_idx is None else e.last_idx for _, e in waits}
    places = sum(p.losses.after(e.info.id, idx) for e, idx in last.items())
    places += sum(e.in_group for e in last if e.queued_in_group)  # made, if its end was lost
    return lacking > p.unplaced() + places


def _is_held(waits: list[tuple[Wait, Endpoint]]) -> bool:
    """Whether hosts are inside the first call of a communicator, which returns when all come."""
    return any(
        w.at == (0,) and any(x.inside(other=w.seq is None) for x in w.entered) for w, _ in waits
    )


class _Roles:
    def __init__(
        self,
        graph: Graph,
        excuses: Excuses,
        context: Callable[[Communicator], Context],
        comms: Collection[Communicator],
    ) -> None:
        self.graph = graph
        self.comms = comms
        self.excuses = excuses
        self.context = context
        everything = {c for w in graph.waits if not w.gone_on for c in graph.causes[id(w)]}
        self.stalls = excuses.stalls(sorted(everything, key=repr))
        self._stall_of: dict[Hashable, Stall] = {a: s for s in self.stalls for a in s.candidates}
        self._of_cause: dict[Cause, Finding] = {}
        #: actor -> the findings that name it, one after the other
        self._faults: dict[Hashable, list[Finding]] = {}

    def run(self) -> list[Finding]:
        """All roles; the findings that the graph adds."""
        made = self._make()
        waits = sorted(
            (w for w in self.graph.waits if w.finding is not None), key=lambda w: w.order
        )
        for w in waits:
            self._tell(w)
            self._direct(w)
        for w in waits:
            self._follow(w)
        return made

    def _make(self) -> list[Finding]:
        made = []
        for cycle in self.graph.cycles:
            if (f := cycle_finding(cycle, self.context)) is not None:
                self._of_cause[Cause("cycle", cycle.number)] = f
                made.append(f)
        for n, (w, e) in enumerate(self.graph.zeros):
            if (f := zero_finding(w, e, self.context(w.comm))) is not None:
                self._of_cause[Cause("zero", n)] = f
                made.append(f)
        for stall in self.stalls:
            behind = [
                w
                for w in self.graph.waits
                if w.finding is not None
                and any(c.key in stall.candidates for c in self.graph.causes[id(w)])
            ]
            if behind:
                ctx = self.context(stall.comm)
                f = under_abort(stall, ctx) or stall_finding(stall, behind, ctx)
                for a in stall.candidates:
                    self._of_cause[Cause("rank", a)] = f
                made.append(f)
        return made + self._stuck()

    def _stuck(self) -> list[Finding]:
        """Calls that lack nobody and are not complete, with others waiting behind them."""
        made = []
        for node in self.graph.waits:
            if node.absent:
                continue
            cause = Cause("stuck", node.comm.key)
            behind = [
                w
                for w in self.graph.waits
                if w.finding is not None and cause in self.graph.causes[id(w)]
            ]
            if node.finding is not None:
                node.finding.role = "root_cause"
                self._of_cause[cause] = node.finding
            elif behind and cause not in self._of_cause:
                stall = Stall(node.comm, node.entered, ())
                posted = transfers_not_complete([node], self.context)
                found = posted or [stall_finding(stall, behind, self.context(node.comm))]
                self._of_cause[cause] = found[0]
                made += found
            elif (alone := not_complete(node, self.context(node.comm))) is not None:
                made.append(alone)
        return made

    def _tell(self, w: Wait) -> None:
        """Say of absent ranks that wait themselves where they do."""
        assert w.finding is not None
        statuses: list[dict[str, Any]] = w.finding.details["missing_rank_status"]
        by_rank = {e.comm_rank: e for e in w.absent}
        for status in statuses:
            e = by_rank.get(status["comm_rank"])
            if e is None or status["reason"] not in _EXPLAINED:
                continue
            elsewhere = [x for x in self.graph.holding(w, e) if x is not w]
            if not elsewhere or Cause("rank", e.actor) in self._ends(e.actor):
                continue
            status["reason"] = "rank_waiting_elsewhere"
            status["waits_in_comm"] = elsewhere[0].comm.key.hash
            status["waits_in_comm_seq"] = elsewhere[0].seq
            status["waits_in"] = elsewhere[0].label
        if statuses:
            w.finding.details["reason"] = strongest([s["reason"] for s in statuses])

    def _ends(self, actor: Actor) -> frozenset[Cause]:
        """What an absent actor's absence comes from."""
        found: set[Cause] = set()
        for w in self.graph.waits_of(actor):
            found |= self.graph.causes[id(w)]
        return frozenset(found) or frozenset({Cause("rank", actor)})

    def _direct(self, w: Wait) -> None:
        """Name the absent ranks that are causes themselves."""
        f = w.finding
        assert f is not None
        causes = self.graph.causes[id(w)]
        reasons = {s["comm_rank"]: s["reason"] for s in f.details["missing_rank_status"]}
        named = []
        for e in w.absent:
            cause = Cause("rank", e.actor)
            if cause not in causes or (cause in self._of_cause and not w.gone_on):
                continue
            if reasons.get(e.comm_rank) in _UNSURE or e.guessed:
                continue
            passed = self.graph.passed(w, e)
            if passed or self._has_nothing_open(e, reasons.get(e.comm_rank)):
                f.free |= {e.process.who}
            free = passed or self.graph.left(w, e) or not self.graph.holding(w, e)
            if free or cause in self._own_end(e.actor):
                named.append(e)
        if not named or not f.culprits:
            return
        if is_alone(w, self.comms) or self._is_against_all(w, named, reasons):
            f.details["note"] = (
                "no other rank of this program made this call: it may be one too many"
            )
            return
        wanted = {e.process.who for e in named} & set(f.culprits)
        if not wanted:
            return
        for e in named:
            before = self._faults.setdefault(e.actor, [])
            came = min(w.first, max(e.last_t, e.info.t))
            if all(self._over(g) <= came for g in before):
                f.role = "root_cause"  # it has come to other calls since those were over
                before.append(f)
        if f.role == "root_cause":
            f.culprits = tuple(who for who in f.culprits if who in wanted)
            chosen = any(self._chosen(w, e) for e in named) or is_beside_crash(w, named)
            if chosen and f.details["confidence"] == "observed":
                f.details["confidence"] = "inferred"
            if any(self.graph.supposed(e.actor) for e in named):
                f.details["confidence"] = "reduced"
                f.supposes = True
        else:
            f.role = "downstream"
            f.downstream_of = self._faults[named[0].actor][-1].id

    def _named(self, actor: Hashable, t: int) -> Finding | None:
        """The finding that names a rank: of several the first that was not over at that time."""
        found = self._faults.get(actor, [])
        return next((g for g in found if self._over(g) > t), found[-1] if found else None)

    def _over(self, f: Finding) -> float:
        """When all who waited had given up what a finding is about; infinite while one waits."""
        ends = (w.until for w in self.graph.waits if w.finding is f)
        return next((t for t in ends if t is not None), inf)

    def _has_nothing_open(self, e: Endpoint, reason: str | None) -> bool:
        """Whether completion is seen, and a rank that has not come waits for no device."""
        seen = e.completed is not None and reason == "rank_alive_but_not_entered"
        return seen and not self.graph.waits_of(e.actor)

    def _is_against_all(
        self, w: Wait, named: list[Endpoint], reasons: Mapping[int | None, str]
    ) -> bool:
        """Whether one rank waits for all others, who wait for nothing, and nobody else for them."""
        all_others = len(named) == w.comm.key.nranks - 1
        if len(w.entered) != 1 or not all_others or len(named) < 3:
            return False
        who, alone = {e.actor for e in named}, {w.entered[0].actor}
        lacking = (x for x in self.graph.waits if any(e.actor in who for e in x.absent))
        return all({e.actor for e in x.entered} == alone for x in lacking) and all(
            self._has_nothing_open(e, reasons.get(e.comm_rank)) for e in named
        )

    def _chosen(self, w: Wait, e: Endpoint) -> bool:
        """Whether a cause waits itself for those who wait for it, as far as can be seen."""
        if self.graph.left(w, e) or self.graph.passed(w, e) or host_of(e) is Host.AWAY:
            return False
        return bool(self.graph.waits_of(e.actor))

    def name_unsure(self) -> None:
        """Of ranks that may have come, as events of theirs were lost: the only one that has not.

        One that has lost fewer events than calls that it is waited for in has not made all
        of them, and one that is away comes to none.  Else the loss explains what is seen, and
        what nobody sees keeps the others.
        """
        found: dict[Actor, list[tuple[Wait, Endpoint]]] = {}
        for w in self.graph.waits:
            if w.finding is None or w.finding.role != "unknown" or not w.finding.culprits:
                continue
            statuses = w.finding.details["missing_rank_status"]
            lossy = {s["comm_rank"] for s in statuses if s["reason"] == _LOST}
            for e in w.absent:
                cause = Cause("rank", e.actor)
                if cause not in self._own_end(e.actor) or e.guessed:
                    continue
                if e.comm_rank not in lossy:
                    return  # another one that waits for nobody
                found.setdefault(e.actor, []).append((w, e))
        found = {
            a: ws
            for a, ws in found.items()
            if _not_all_made(ws) or _is_held(ws) or host_of(ws[0][1]) is Host.AWAY
        }
        if len(found) != 1:
            return
        (waits,) = found.values()
        if len(waits) == 1 and waits[0][0].seq is None:
            return  # a single send or receive may as well be one too many
        if host_of(waits[0][1]) is Host.INSIDE:
            return  # it waits there itself, in what was lost
        for w, e in waits:
            assert w.finding is not None
            w.finding.role = "root_cause"
            w.finding.culprits = (e.process.who,)

    def follow(self, found: Iterable[Finding]) -> None:
        """Link what waits for those whom these findings name."""
        for f in found:
            for who in f.culprits:
                self._of_cause.setdefault(Cause("rank", (who, 0)), f)
        for w in self.graph.waits:
            if w.finding is not None:
                self._follow(w)

    def _own_end(self, actor: Actor) -> frozenset[Cause]:
        """The causes of an actor's own absence: itself, when it waits for nobody."""
        waits = self.graph.waits_of(actor)
        if not waits:
            return frozenset({Cause("rank", actor)})
        found: set[Cause] = set()
        for w in waits:
            found |= self.graph.causes[id(w)]
        return frozenset(found)

    def _follow(self, w: Wait) -> None:
        """Link a finding that names nobody to the finding that explains it."""
        f = w.finding
        assert f is not None
        if f.role != "unknown":
            return
        cited: list[str] = []
        for c in sorted(self.graph.causes[id(w)], key=repr):
            if c.kind == "finding":
                cited.append(str(c.key))
                continue
            g = self._named(c.key, w.first) or self._of_cause.get(c)
            if g is not None and g is not f:
                cited.append(g.id)
            if c.kind == "cycle" and g is None:
                f.details["hypotheses"] = hypotheses(self.graph.cycles[int(str(c.key))])
        if cited:
            f.role, f.downstream_of = "downstream", cited[0]
