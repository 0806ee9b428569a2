"""Whom open sends and receives wait for, and whether that is a finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nccluprobe.match import model as m
from nccluprobe.match import p2p_finding as make
from nccluprobe.match.absence import Context, strongest, waiting_until
from nccluprobe.match.children import in_child_without
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.hosts import Host, host_of, is_stopped
from nccluprobe.match.lessons import wait_for_sender
from nccluprobe.match.p2p_blame import odd_of, of_step
from nccluprobe.match.p2p_fill import Filled
from nccluprobe.match.p2p_habit import odd_one
from nccluprobe.match.p2p_loss import awaits_end, guessed, halves, may_have
from nccluprobe.match.p2p_orders import inversion
from nccluprobe.match.p2p_pair import At, Channel, Pairs
from nccluprobe.match.p2p_past import Heads
from nccluprobe.match.p2p_queue import Side
from nccluprobe.match.p2p_shape import SKIPPED, shape_says
from nccluprobe.match.p2p_steps import Steps
from nccluprobe.match.p2p_units import Peer, Unit, buffered, units_of
from nccluprobe.match.stalls import Stalls
from nccluprobe.match.status import (
    absent_reason,
    crashed_alone,
    end_reason,
    ended_abruptly,
    is_silent,
    last_sign,
    left_at,
)
from nccluprobe.match.waits import Wait
from nccluprobe.match.zeros import zero_before


class Judge:
    """The open operations of one communicator at one moment."""

    def __init__(
        self,
        comm: Communicator,
        ctx: Context,
        channels: Sequence[Channel],
        pairs: Pairs,
        sides: Mapping[At, Side],
        faults: Mapping[Channel, Finding],
        stalls: Stalls,
        heads: Heads,
        filled: Filled,
    ) -> None:
        self.comm, self.ctx, self.open = comm, ctx, channels
        self.pairs, self.sides, self.faults = pairs, sides, faults
        self.units = units_of(comm, channels, pairs, sides, stalls.heads, stalls.gone)
        self._of: dict[int, list[Unit]] = {}
        for u in self.units:
            self._of.setdefault(id(u.endpoint), []).append(u)
        self._steps = Steps(comm, sides, pairs.wires.size)
        self.heads, self.stalls, self.filled = heads, stalls, filled
        self.findings, self.waits = list[Finding](), list[Wait]()

    def run(self, explained: Mapping[int, Finding]) -> None:
        """Fill ``waits`` and ``findings``; ``explained``: id of a unit -> why it waits."""
        known = {**self._inversions(explained), **explained}
        for unit in self.units:
            self._judge(unit, known.get(id(unit)))

    def side(self, e: Endpoint) -> Side | None:
        """Sends and receives of an endpoint."""
        return self.sides.get((e.info.source, e.info.id))

    # -- two that wait for each other ----------------------------------------

    def _inversions(self, explained: Mapping[int, Finding]) -> dict[int, Finding]:
        found: dict[int, Finding] = {}
        for u in self.units:
            for peer in {id(o.peer): o.peer for o in u.ops if o.peer is not None}.values():
                for v in self._of.get(id(peer), ()):
                    if u is v or not v.needs(u.endpoint):
                        continue
                    if any(id(x) in k for x in (u, v) for k in (found, explained)):
                        continue
                    f = self._inversion(u, v)
                    if f is not None:
                        found[id(u)] = found[id(v)] = f
                        self.findings.append(f)
        return found

    def _inversion(self, u: Unit, v: Unit) -> Finding | None:
        ctx = self.ctx
        if any(not o.counted for x in (u, v) for o in x.ops):
            return None
        ends = (u.endpoint, v.endpoint)
        # Of those that were held till they ended, what was so by then stands.
        held = None not in (u.held, v.held)
        if any(e.end is not None or (e.process.ended and not held) for e in ends):
            return None
        if self._left_out(u, v) or self._left_out(v, u):
            return None
        loss = self.loss(u) or self.loss(v)
        size = self.pairs.wires.size
        odd = odd_one(u.side, v.side, size, (u.idx, v.idx)) or odd_one(u.side, v.side, size)
        limit = ctx.options.missing_after
        if held:
            since = max(u.held or 0, v.held or 0)
            # A send may only be slow to leave; two receives cannot help each other.
            if u.receives and v.receives:
                limit = min(limit, ctx.options.decide_after)
        elif odd is None or any(host_of(e) is Host.AWAY for e in ends):
            return None
        else:
            since = max(last_sign(e) for e in ends)
        if min(waiting_until(e, ctx) for e in ends) - since < limit:
            return None
        return inversion(self.comm, ctx, u, v, odd.endpoint if odd else None, loss)

    # -- one unit ------------------------------------------------------------

    def _judge(self, unit: Unit, inverted: Finding | None) -> None:
        until = waiting_until(unit.endpoint, self.ctx)
        peers = self._peers(unit, until)
        blocked = self._blocked(unit, until)
        cause = inverted or self._fault(unit)
        due = cause is None and peers and blocked and not self._idle(unit, peers)
        finding = self._due(unit, peers, until) if due else None
        if finding is not None and finding.role == "root_cause":
            self.findings.append(finding)
            cause, finding = finding, None
        elif finding is not None and peers[0].reason == "rank_alive_but_not_entered":
            there = [(p.endpoint, self.side(p.endpoint)) for p in peers]
            finding.for_root = wait_for_sender(unit, there, self.open, self.pairs.wires.size)
        held = 0 if unit.hard is None else until - unit.hard
        if cause is None and not peers and held >= max(1, self.ctx.options.missing_after):
            self.findings.append(self._unobserved(unit, until))
        if not blocked or not peers:
            return
        self.waits.append(
            Wait(
                comm=self.comm,
                label=unit.label,
                api=unit.api,
                first=unit.t,
                entered=(unit.endpoint,),
                absent=tuple(p.endpoint for p in peers),
                finding=finding,
                at=(-1, unit.endpoint.comm_rank or 0, unit.ops[0].op.peer, unit.ops[0].position),
                cause=cause,
                hard=unit.hard is not None,
                calls=frozenset(o.op.idx for o in unit.ops),
                doubtful=any(p.loss or p.maybe for p in peers),
                posted=tuple(p.endpoint for p in peers if awaits_end(self.side(p.endpoint), unit)),
            )
        )

    def _idle(self, unit: Unit, peers: list[Peer]) -> bool:
        """Whether receives wait for work, as was declared or as history teaches.

        Only for peers that are free to come: alive, not stopped, outside NCCL.
        """
        if any(o.op.send for o in unit.ops):
            return False
        if any(p.reason != "rank_alive_but_not_entered" or is_stopped(p.endpoint) for p in peers):
            return False
        if self.ctx.options.idle_declared(self.comm.name, self.comm.key.hash):
            return True
        rank = unit.endpoint.comm_rank or 0
        return all(
            self.pairs.lessons.get(Channel(self.comm.key, o.op.peer, rank), 0)
            >= self.ctx.options.idle_lessons
            for o in unit.ops
        )

    def _fault(self, unit: Unit) -> Finding | None:
        """A difference before on the same channel, which explains that it does not go on."""
        rank = unit.endpoint.comm_rank or 0
        for o in unit.ops:
            ranks = (rank, o.op.peer) if o.op.send else (o.op.peer, rank)
            found = self.faults.get(Channel(self.comm.key, *ranks))
            if found is not None:
                return found
        return None

    def _blocked(self, unit: Unit, until: int) -> bool:
        """Whether the thread is held: a small send is buffered, and its sender goes on."""
        if unit.receives:
            return True
        limit = self.ctx.options.missing_after
        if unit.hard is not None:
            return until - unit.hard >= limit
        if all(buffered(unit, o, self.pairs.wires.size) for o in unit.ops):
            return False
        return until - last_sign(unit.endpoint) >= limit

    def may_have(self, e: Endpoint, unit: Unit) -> bool:
        """Whether an endpoint may have made, unseen, what a unit waits for."""
        side, known = self.side(e), self.filled.lacking
        return awaits_end(side, unit) or may_have(self.comm, side, unit, e, known)

    def loss(self, unit: Unit) -> bool:
        """Whether operations that a unit waits for may be among lost events."""
        return any(self.may_have(o.peer, unit) for o in unit.ops if o.peer is not None)

    def _peers(self, unit: Unit, until: int) -> list[Peer]:
        found: dict[int, Peer] = {}
        for o in unit.ops:
            if o.peer is not None and id(o.peer) not in found:
                if not o.counted and unit.hard is None:
                    continue
                found[id(o.peer)] = self._peer(unit, o.peer, until, o.counted)
        return list(found.values())

    def _peer(self, unit: Unit, e: Endpoint, until: int, counted: bool) -> Peer:
        opt, p = self.ctx.options, e.process
        side = self.side(e)
        last = max(e.last_t, side.last_t if side else 0)
        since = max(unit.t, last)
        ended = left_at(e)
        if ended is not None:
            abrupt = e.end is None and crashed_alone(p, (unit.endpoint.process,))
            grace = 0 if abrupt else min(opt.silent_after, opt.missing_after)
            first = e.end is not None and ended == e.end.t
            reason = "rank_ended_communicator" if first else end_reason(p)
            if self._lost_before_end(e, unit):
                return Peer(e, "probe_event_loss_possible", until - since, loss=True)
            if until - max(ended, unit.t) > grace:
                return Peer(e, reason, until - max(ended, unit.t), proof=True)
            until = min(until, ended)  # it went down with who waits for it, and was there till then
        if is_silent(p, self.ctx.now, opt.silent_after) or (p.end is not None and not p.ended):
            return Peer(e, "rank_not_observed", until - since, silent=True)
        quiet = min(until, p.heard_until(self.ctx.now)) - since
        if not counted:
            return Peer(e, "rank_not_observed", quiet, silent=True)
        if self.may_have(e, unit):
            return Peer(e, "probe_event_loss_possible", quiet, loss=True)
        inside = p.inside_now() is not None
        reason = "rank_inside_other_call" if inside else absent_reason(p)
        maybe = may_have(self.comm, side, unit, e, ())
        short = not maybe or any(half in self.filled.short for half in halves(self.comm, unit, e))
        if short and self._steps.left_out(unit, e):
            return Peer(e, "call_skipped", quiet, gone=True, maybe=maybe)
        if short and self._gone_past(unit, e, until):
            reason, crossed = "partner_gone_past", self.heads.crosses(unit, e)
            return Peer(e, reason, quiet, gone=True, crossed=crossed, maybe=maybe)
        if not maybe and self.heads.past(unit, e):
            return Peer(e, "partner_gone_past", quiet, gone=True, crossed=True)
        return Peer(e, reason, quiet, maybe=maybe)

    def _lost_before_end(self, e: Endpoint, unit: Unit) -> bool:
        """Whether a peer that came to an orderly end may have made it all the same."""
        if ended_abruptly(e.process) or (e.end is not None and not e.end.orderly):
            return False
        if (side := self.side(e)) is not None and side.queued:
            return bool(e.process.lost)
        return self.may_have(e, unit)

    def _left_out(self, unit: Unit, other: Unit) -> bool:
        """The peer's unit is of a later step, and the waiting one is not."""
        return self._steps.left(unit, other.endpoint) and not self._steps.left(other, unit.endpoint)

    def _gone_past(self, unit: Unit, e: Endpoint, until: int) -> bool:
        """It waits for the waiting rank itself, in what that comes to only afterwards."""
        own = unit.endpoint
        units = self._of.get(id(e), ())
        if in_child_without(e, own) or any(x.needs(own) and self._left_out(unit, x) for x in units):
            return True
        if self._stands_behind(unit, e):
            # What it queued stands behind this unit in that rank's stream, if in order.
            return zero_before(self.comm, own, own.entered) is None
        if self.comm.disagreement is not None or not (own.slotted and e.slotted):
            return False
        if own.queued or (own.last_idx is not None and own.last_idx > unit.idx):
            return False
        if e.entered <= own.entered or self.heads.left_out(self.comm, own):
            return False
        if e.sig_at(e.entered - 1) == m.SIG_LOST:
            return False  # that it went on is only supposed
        return e.inside() is not None or until - last_sign(e) >= self.ctx.options.missing_after

    def _mutual(self, unit: Unit, peer: Peer) -> bool:
        """Whether a peer stands in a send or receive of the two: each needs the other first."""
        rank = unit.endpoint.comm_rank
        heads = (s for s in self.stalls.stalls if s.endpoint is peer.endpoint)
        mine = any(p.message is not None and p.peer == rank for s in heads for p in s.parts)
        return (
            mine and peer.reason == "partner_gone_past" and self._stands_behind(unit, peer.endpoint)
        )

    def _stands_behind(self, unit: Unit, e: Endpoint) -> bool:
        """Whether all that a peer waits for is behind a unit."""
        calls = {o.op.idx for o in unit.ops}
        return unit.hard is None and self.stalls.only_behind(e, unit.endpoint, calls)

    def _due(self, unit: Unit, peers: list[Peer], until: int) -> Finding | None:
        opt = self.ctx.options
        watched = [p for p in peers if not p.silent]
        if not watched:
            stopped = until - max(unit.t, last_sign(unit.endpoint))
            if max(stopped, 0 if unit.hard is None else until - unit.hard) < opt.missing_after:
                return None
            return self._finding(unit, peers, until, error=False, loss=False)
        proof = any(p.proof for p in watched)
        asserted = all(p.quiet >= opt.missing_after for p in watched if not p.proof)
        if not (proof or asserted):
            # It serves others, and has kept this one waiting far beyond the limit.
            held = unit.hard is not None or until - last_sign(unit.endpoint) >= opt.missing_after
            if not held or until - unit.t < opt.error_after:
                return None
            return self._finding(unit, peers, until, error=False, loss=False)
        gone = [p for p in watched if p.gone]
        loss = any(p.loss for p in watched)
        quiet = min(p.quiet for p in watched)
        error = proof or bool(gone) or (quiet >= opt.error_after and not loss)
        blamed = self._blamed(unit, watched) if not gone or asserted else None
        if blamed is not None:
            return self._finding(
                unit, peers, until, error=error, loss=loss, culprits=blamed, role="root_cause"
            )
        return self._finding(unit, peers, until, error=error, loss=loss)

    def _blamed(self, unit: Unit, watched: list[Peer]) -> tuple[Endpoint, ...] | None:
        """Who is wrong when peers have gone past; None: nobody has, the wait-for graph decides."""
        gone, op = tuple(p.endpoint for p in watched if p.gone), unit.ops[0].op
        if any(p.crossed for p in watched):
            args = (self.comm, self.sides, unit.side, watched[0].endpoint, op)
            return gone if len(unit.ops) == 1 and shape_says(*args) == SKIPPED else ()
        if len(unit.ops) != 1 or len(watched) != 1:
            return of_step(self.comm, unit.endpoint, gone) if len(watched) == 1 else gone or None
        peer = watched[0]
        if not gone and peer.endpoint.end is None and peer.reason != "rank_exited":
            return None
        odd = odd_of(self.comm, self.sides, self.pairs, unit.side, peer.endpoint, op)
        if odd is None:
            # One of two is wrong: with more ranks, the one that all others wait for.
            if not gone:
                return None
            return gone if self.comm.key.nranks > 2 and not self._mutual(unit, peer) else ()
        return (odd,) if gone or odd is unit.endpoint else None

    def _finding(
        self,
        unit: Unit,
        peers: list[Peer],
        until: int,
        *,
        error: bool,
        loss: bool,
        culprits: tuple[Endpoint, ...] | None = None,
        role: str = "unknown",
    ) -> Finding:
        watched = [p for p in peers if not p.silent]
        shown = watched or peers
        reasons = {
            p.endpoint.comm_rank: (p.endpoint, p.reason)
            for p in shown
            if p.endpoint.comm_rank is not None
        }
        sure = not (loss or any(p.maybe for p in peers) or guessed(unit))
        sure = sure and len(watched) == len(peers)
        return make.unmatched(
            self.comm,
            self.ctx,
            unit,
            reasons,
            strongest([p.reason for p in shown]),
            until,
            error=error,
            loss=loss,
            confidence=("observed" if role == "unknown" else "inferred")
            if sure
            else "reduced"
            if watched
            else "none",
            culprits=tuple(p.endpoint for p in watched) if culprits is None else culprits,
            role=role,
            not_observed=tuple(
                r for p in peers if p.silent and (r := p.endpoint.comm_rank) is not None
            ),
        )

    def _unobserved(self, unit: Unit, until: int) -> Finding:
        ranks = tuple(sorted({o.op.peer for o in unit.ops}))
        return make.unmatched(
            self.comm,
            self.ctx,
            unit,
            {},
            "rank_not_observed",
            until,
            error=False,
            loss=False,
            confidence="none",
            culprits=(),
            not_observed=ranks,
        )
