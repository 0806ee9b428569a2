"""What ranks wait in on their devices, as waits of the graph.

The device run (``device``) tells which operations stand at the heads of streams
and cannot end.  Those that lack somebody's call are waits already; their edges
become exact here.  Those that all have called, and that stand behind something
else in the stream of one of them, are added.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nccluprobe.match import p2p_orders as make
from nccluprobe.match.absence import Context, waiting_until
from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.device import Device
from nccluprobe.match.device_lack import Lack, Stall
from nccluprobe.match.device_ops import Part
from nccluprobe.match.endpoint import TRANSFERS, Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.hosts import Host, host_of
from nccluprobe.match.p2p_faults import Faults
from nccluprobe.match.p2p_habit import odd_one
from nccluprobe.match.p2p_pair import At, Pairs
from nccluprobe.match.p2p_queue import Side
from nccluprobe.match.process import Actor
from nccluprobe.match.signature import SignatureTable
from nccluprobe.match.status import last_sign
from nccluprobe.match.waits import Wait
from nccluprobe.match.zeros import zero_before


@dataclass
class Stalls:
    """What stands at the heads of the streams; empty when nobody waits."""

    device: Device | None = None
    stalls: list[Stall] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    #: id of a node -> the finding of a cycle of streams that it is in
    causes: dict[int, Finding] = field(default_factory=dict)
    #: Side -> call_idx of sends and receives at the head of a stream; None: not known.
    heads: dict[At, frozenset[int]] | None = None
    #: Actor -> processes that left before what stands at the head of its stream could run.
    gone: dict[Actor, set[Hashable]] = field(default_factory=dict)
    _held: set[Actor] = field(default_factory=set)
    _seen: set[tuple[int, int]] = field(default_factory=set)
    _lacks: list[Lack] = field(default_factory=list)

    def note(self) -> None:
        """Index what the run left."""
        assert self.device is not None
        self.heads = {}
        for s in self.stalls:
            at = (s.endpoint.info.source, s.endpoint.info.id)
            mine = frozenset(p.idx for p in s.parts if p.message is not None)
            self.heads[at] = self.heads.get(at, frozenset()) | mine
            self._held.add(s.endpoint.actor)
            if s.lack.gone:
                left = self.gone.setdefault(s.endpoint.actor, set())
                left |= {e.process.who for e in s.lack.gone}

    def holds(self, e: Endpoint) -> bool:
        """Whether something that cannot end stands at the head of a stream of a rank."""
        return e.actor in self._held

    def only_behind(self, e: Endpoint, own: Endpoint, calls: Collection[int]) -> bool:
        """Whether a rank's streams stand behind calls of another, at last, and behind no more."""
        if self.device is None:
            return False
        of_node: dict[int, list[Stall]] = {}
        for s in self.stalls:
            of_node.setdefault(id(s.node), []).append(s)
        edge = [s for s in self.stalls if s.endpoint.actor == e.actor]
        seen = {id(s.node) for s in edge}
        reached = False
        while edge:
            s = edge.pop()
            if s.endpoint is own and any(p.message and p.idx in calls for p in s.parts):
                reached = True
                continue
            if s.lack.missing or s.lack.gone or s.lack.held or s.lack.fault:
                return False
            ahead = [h for node in s.lack.behind for h in self.device.heads_before(node)]
            for head in ahead:
                if id(head) not in seen:
                    seen.add(id(head))
                    edge += of_node.get(id(head), [])
        return reached

    # -- the graph -----------------------------------------------------------

    def attach(
        self, waits: Sequence[Wait], context: Callable[[Communicator], Context]
    ) -> list[Wait]:
        """Make the edges of ``waits`` exact; returns the waits that nobody knew of."""
        if self.device is None:
            return []
        slots = {(w.comm.key, w.at[0]): w for w in waits if w.seq is not None and len(w.at) == 1}
        messages: dict[int, list[Wait]] = {}
        for w in waits:
            if w.calls:
                messages.setdefault(id(w.entered[0]), []).append(w)
            elif w.seq is not None and len(w.at) == 1 and self.device.ran(w.comm):
                w.heads = set()
        added: list[Wait] = []
        of_node: dict[int, list[Wait]] = {}
        mine: list[tuple[Stall, Wait, list[Part]]] = []
        for s in self.stalls:
            quiet = _quiet_for(s.endpoint, context(s.parts[0].comm))
            still = quiet >= context(s.parts[0].comm).options.silent_after
            for part in s.parts:
                if part.message is not None:
                    continue
                at = (part.comm.key, part.slot)
                if at not in slots:
                    slots[at] = _of_call(part, s)
                    added.append(slots[at])
                w = slots[at]
                if w.device and all(e is not part.endpoint for e in w.entered):
                    w.entered = (*w.entered, part.endpoint)
                w.heads = (w.heads or set()) | {part.endpoint.actor}
                mine.append((s, w, [part]))
            sent = [p for p in s.parts if p.message is not None]
            if not sent:
                continue
            calls = {p.idx for p in sent}
            of_judge = messages.get(id(s.endpoint), ())
            known = next((x for x in of_judge if x.calls & calls), None)
            if known is None and not still:
                continue
            if known is None:
                known = _of_messages(s, sent)
                added.append(known)
            mine.append((s, known, sent))
        for s, w, _ in mine:
            of_node.setdefault(id(s.node), []).append(w)
        for s, w, parts in mine:
            self._edges(s, w, parts, of_node)
        return added

    def _edges(
        self, s: Stall, w: Wait, parts: list[Part], of_node: Mapping[int, list[Wait]]
    ) -> None:
        assert self.device is not None
        w.cause = w.cause or s.lack.fault or self.causes.get(id(s.node))
        known = {id(e) for e in (*w.absent, *w.held)}
        for part in parts:
            lack = self.device.lacks(part)
            if (id(w), id(lack)) in self._seen:
                continue
            self._seen.add((id(w), id(lack)))
            w.missing |= bool(lack.missing)
            self._lacks.append(lack)  # an id stands for it as long as it lives
            for e in (*lack.missing, *lack.gone, *lack.held):
                if id(e) not in known:
                    known.add(id(e))
                    w.held.append(e)
            for node in lack.behind:
                w.doubtful |= any(map(_is_filled, node.parts))
                for head in self.device.heads_before(node):
                    ahead = of_node.get(id(head), [])
                    w.behind += [
                        x for x in ahead if x is not w and all(x is not y for y in w.behind)
                    ]
                    if not ahead:
                        ends = [p.endpoint for p in head.parts]
                        w.held += [e for e in ends if id(e) not in known]
                        known |= {id(e) for e in ends}


def _of_call(part: Part, s: Stall) -> Wait:
    comm = part.comm
    return Wait(
        comm=comm,
        label=f"call #{comm.seq(part.slot)}",
        first=s.node.t,
        entered=(part.endpoint,),
        absent=(),
        at=(part.slot, 2),
        seq=comm.seq(part.slot),
        heads=set(),
        device=True,
    )


def _of_messages(s: Stall, parts: list[Part]) -> Wait:
    e = s.endpoint
    return Wait(
        comm=parts[0].comm,
        label=make.stalled(s),
        api=None if s.parts[0].message is None else TRANSFERS[0 if s.parts[0].send else 1],
        first=s.node.t,
        entered=(e,),
        absent=(),
        at=(-2, e.comm_rank or 0, s.node.idx),
        calls=frozenset(p.idx for p in parts),
        heads={e.actor},
        device=True,
        doubtful=any(map(_is_filled, parts)),
    )


def _quiet_for(e: Endpoint, ctx: Context) -> int:
    """How long an endpoint's process has not called NCCL, ns."""
    return waiting_until(e, ctx) - last_sign(e)


def stalls_of(
    comms: Iterable[Communicator],
    context: Callable[[Communicator], Context],
    pairs: Pairs,
    sides: Mapping[At, Side],
    faults: Faults,
    table: SignatureTable,
    disputed: frozenset[CommKey],
    orders: Sequence[Finding],
) -> Stalls:
    """Run the streams, and find orders that exclude each other."""
    # A send or receive that lacks its partner explains more than a call that may have ended.
    device = Device(comms, sides, pairs.wires.size, faults.at, table, disputed, not pairs.open)
    found = Stalls(device, device.stalls())
    found.note()
    for members in device.deadlocks(found.stalls):
        f = _deadlock(members, context, pairs, sides, orders)
        if f is None:
            continue
        if all(f is not x for x in orders):
            found.findings.append(f)
        found.causes |= {id(s.node): f for s in members}
    return found


def _deadlock(
    members: list[Stall],
    context: Callable[[Communicator], Context],
    pairs: Pairs,
    sides: Mapping[At, Side],
    orders: Sequence[Finding],
) -> Finding | None:
    if any(uneven(p) for s in members for p in s.parts if p.message is None):
        return None  # one has made a call less: all that follows is shifted
    if not any(p.message for s in members for p in s.parts):
        hashes = {p.comm.key.hash for s in members for p in s.parts}
        return next(
            (f for f in orders if {f.comm_uid_hash, f.details["other_comm_uid_hash"]} <= hashes),
            None,
        )
    parts = [p for s in members for p in s.parts]
    parts += [p for s in members for node in s.lack.behind for p in node.parts]
    if len({p.comm.key for p in parts}) > 1 and any(map(_is_filled, parts)):
        return None  # a lost record's place is known among those of its own communicator only
    ends = [s.endpoint for s in members]
    if any(_left(e) or host_of(e) is Host.AWAY for e in ends):
        return None
    first = next(s for s in members if any(p.message for p in s.parts))
    comm = first.parts[0].comm
    ctx = context(comm)
    quiet = min(_quiet_for(s.endpoint, context(s.parts[0].comm)) for s in members)
    if quiet < ctx.options.missing_after:
        return None
    odd = None
    if len(members) == 2:
        a, b = (sides.get((e.info.source, e.info.id)) for e in ends)
        odd = odd_one(a, b, pairs.wires.size)
    return make.deadlock(comm, ctx, members, odd.endpoint if odd else None, quiet)


def _left(e: Endpoint) -> bool:
    """Whether it went by itself: what stood until it was aborted stood."""
    return e.process.ended if e.end is None else e.end.orderly


def _is_filled(part: Part) -> bool:
    """Whether no record of it is seen, but of what its peer made."""
    e = part.endpoint
    return part.idx in e.process.losses.filled.get(e.info.id, ())


def uneven(part: Part) -> bool:
    """Whether some members have made more calls than others, or one of count 0 before."""
    members = part.comm.members()
    if len({e.entered for e in members}) > 1:
        return True
    return any(zero_before(part.comm, e, part.slot) is not None for e in members)
