"""Findings of disagreements: provisional at once, then decided."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nccluprobe.match import model as m
from nccluprobe.match.absence import Context, OpenSlot
from nccluprobe.match.communicator import Communicator, Disagreement
from nccluprobe.match.details import on_communicator
from nccluprobe.match.disagree import MAX_SHIFT, Decision, Verdict, decide
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding, seconds
from nccluprobe.match.names import capital, in_job, named, numbers
from nccluprobe.match.options import SECOND
from nccluprobe.match.signature import Signature, SignatureTable, difference
from nccluprobe.match.status import coverage_of, rank_status
from nccluprobe.match.zeros import note_zeros
from nccluprobe.nccl.enums import DATATYPE_BYTES

#: NCCL lets a host run ahead by about a thousand calls: so many slots after a
#: disagreement, waiting is a consequence of it.
CONSEQUENCES = 1100
_KEPT = 1000

#: Faults of one rank on two communicators within this time are one.
_TOGETHER = 60 * SECOND


@dataclass
class Fault:
    """A decided disagreement: a fact that stays."""

    comm: Communicator
    slot: int
    finding: Finding
    members: frozenset[Hashable]  # processes
    own_t: int  # entry of the ranks that differ
    repeated: int = 0


class Mismatches:
    """All disagreements of an analysis."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self._known: dict[tuple[Any, ...], Fault] = {}

    def judge(self, comm: Communicator, ctx: Context, final: bool) -> list[Finding]:
        """Decide the communicator's disagreement if it is time; else a provisional finding."""
        d = comm.disagreement
        if d is None:
            return []
        streams = _streams(comm, d.slot, ctx.options.decide_calls + MAX_SHIFT + 1)
        decision = self._decide(comm, streams, ctx)
        due = (
            final
            or ctx.now - d.since >= ctx.options.decide_after
            or min(e.entered for e in comm.members()) > d.slot + ctx.options.decide_calls
        )
        findings = [
            _finding(comm, d, ctx, decision, v, n, provisional=not due)
            for n, v in enumerate(decision.verdicts)
            if not v.legal
        ]
        if not due:
            return findings[:1]
        faults = (v for v in decision.verdicts if not v.legal)
        for v, f in zip(faults, findings, strict=True):
            self._remember(comm, d.slot, v, f)
        note_zeros(comm, d.slot, decision)
        comm.realign(decision)
        return []

    @staticmethod
    def _decide(comm: Communicator, streams: dict[int, list[int]], ctx: Context) -> Decision:
        history = comm.history.tolist()
        discards = ctx.table.any_zero and comm.discards_zero
        return decide(streams, ctx.table, ctx.options.decide_calls, history, discards)

    def among_entered(self, comm: Communicator, o: OpenSlot, ctx: Context) -> list[Finding]:
        """Those who came to an open slot differ already: that is not hidden by who is absent."""
        if comm.disagreement is not None:
            return []
        streams = _streams(comm, o.slot, ctx.options.decide_calls + MAX_SHIFT + 1)
        sigs = {stream[0] for stream in streams.values()} - {m.SIG_LOST}
        if all(ctx.table.compatible(a, b) for a, b in pairwise(sorted(sigs))):
            return []
        decision = self._decide(comm, streams, ctx)
        since = max(t for e in o.entered if (t := e.t_at(o.slot)) is not None)
        d = Disagreement(o.slot, comm.seq(o.slot), since)
        due = ctx.now - since >= ctx.options.decide_after
        return [
            _finding(comm, d, ctx, decision, v, n, provisional=not due)
            for n, v in enumerate(decision.verdicts)
            if not v.legal
        ]

    def _remember(self, comm: Communicator, slot: int, v: Verdict, f: Finding) -> None:
        key = (comm.key, v.ranks, v.shift, f.hang_type)
        known = self._known.get(key)
        if known is not None:
            known.repeated += 1
            known.slot = slot
            known.finding.details["repeated"] = known.repeated
            return
        members = frozenset(e.process.who for e in comm.endpoints.values())
        own_t = min(t for r in v.ranks if (t := comm.endpoints[r].t_at(slot)) is not None)
        fault = self._known[key] = Fault(comm, slot, f, members, own_t)
        if len(self.faults) < _KEPT:
            self._link(fault)
            self.faults.append(fault)

    def _link(self, fault: Fault) -> None:
        """Faults of one rank on several communicators at one time are one fault.

        A side that nothing singles out on one communicator may be on another.
        """
        for other in self.faults:
            a, b = sorted((other, fault), key=lambda x: not x.finding.culprits)
            if a.comm is b.comm or abs(a.own_t - b.own_t) > _TOGETHER:
                continue
            who = set(a.finding.culprits)
            if a.finding.role != "root_cause" or b.finding.role == "downstream" or not who:
                continue
            if not b.finding.culprits and who <= b.members:
                b.finding.details["singled_out_by"] = a.finding.id
            elif who != set(b.finding.culprits):
                continue
            elif _is_other_side(a, b):
                # The call that it made on one belongs on the other.
                a, b = (a, b) if a.finding.details["reason"] == "call_skipped" else (b, a)
                for one, two in ((a, b), (b, a)):
                    one.finding.details["other_communicator"] = two.comm.key.hash
                a.finding.details["summary"] += f" It made it on communicator {b.comm.label}."
            b.finding.role, b.finding.downstream_of = "downstream", a.finding.id

    def findings(self) -> list[Finding]:
        """Decided disagreements."""
        return [fault.finding for fault in self.faults]

    def explains(self, comm: Communicator, slot: int) -> Finding | None:
        """The disagreement before it that waiting in this slot follows from."""
        near = (
            f for f in self.faults if f.comm is comm and f.slot <= slot <= f.slot + CONSEQUENCES
        )
        return next((f.finding for f in near), None)


def _is_other_side(a: Fault, b: Fault) -> bool:
    """Whether a call was left out on one communicator and made on another."""
    x, y = a.finding.details, b.finding.details
    return {x["reason"], y["reason"]} == {"call_skipped", "call_extra"} and x["call"] == y["call"]


def _streams(comm: Communicator, slot: int, n: int) -> dict[int, list[int]]:
    streams = {}
    for e in comm.members():
        at = slot - e.dropped
        if e.comm_rank is not None and 0 <= at < len(e.rows):
            streams[e.comm_rank] = e.rows.sig[at : at + n].tolist()
    return streams


def _finding(
    comm: Communicator,
    d: Disagreement,
    ctx: Context,
    decision: Decision,
    verdict: Verdict,
    number: int,
    provisional: bool,
) -> Finding:
    limit = ctx.options.silent_after
    by_rank = {e.comm_rank: e for e in comm.members()}
    present = [r for ranks in decision.groups.values() for r in ranks]
    entries = [t for r in present if (t := by_rank[r].t_at(d.slot)) is not None]
    model = ctx.table[next(iter(decision.groups))]
    own = ctx.table[by_rank[verdict.ranks[0]].sig_at(d.slot) or m.SIG_LOST]
    exact = all(e.base == "exact" and not e.lost for e in comm.members())
    shift = verdict.shift
    named = decision.named
    parts = difference(model, own)
    reason = "calls_swapped" if verdict.swapped else "arguments_differ"
    if shift is not None:
        reason = "call_skipped" if shift.skip else "call_extra"
    details: dict[str, Any] = {
        **on_communicator(
            comm,
            model.api,
            sorted(present),
            reason,
            _confidence(exact, decision),
            waited_s=seconds(max(0, ctx.now - min(entries))),
            lossy=any(e.lost for e in comm.members()),
        ),
        "provisional": provisional,
        "differs_in": parts,
        "majority_comm_ranks": sorted(decision.reference) if named else [],
        "minority_comm_ranks": list(verdict.ranks) if named else [],
        "minority_rank_status": [
            rank_status(comm, r, by_rank[r], ctx.now, limit, reason)
            for r in (verdict.ranks if named else ())
        ],
        "calls": [
            {
                "signature": ctx.table[sig].text(),
                "comm_ranks": sorted(ranks),
                "call_idx": {str(r): by_rank[r].idx_at(d.slot) for r in ranks},
                **_sites([by_rank[r].site_at(d.slot) for r in ranks], ctx.table),
            }
            for sig, ranks in decision.groups.items()
        ],
        "first_entered_unix_ns": min(entries),
        "several_shifts_fit": verdict.several_fit,
    }
    if shift is not None:
        wrong = model if shift.skip else own
        details["call"] = wrong.text()
        details["shifted_by"] = shift.by if not shift.skip else -shift.by
    if verdict.swapped:
        details["swapped_by"] = verdict.swapped
    if (note := _explanation(model, own)) is not None:
        details["explanation"] = note
    details["summary"] = _summary(comm, d, details, model, own, verdict, decision)
    guess = any(by_rank[r].guessed for r in present)
    blamed = tuple(by_rank[r].process.who for r in verdict.ranks) if named and not guess else ()
    return Finding(
        key=("disagreement", *comm.key, d.slot, number),
        hang_type="collective_mismatch" if shift is None else "skipped_or_extra_call",
        run_id=ctx.run_id,
        comm_uid_hash=comm.key.hash,
        comm_seq=d.seq,
        detected_at=ctx.now,
        details=details,
        severity="error" if exact and not provisional else "notice",
        role="unknown" if provisional or guess else "root_cause",
        job=ctx.job,
        coverage=coverage_of(comm, ctx.now, limit),
        since=min(entries),
        culprits=blamed,
        # Who has not come to it is not kept by it.
        waiters=tuple(_processes([e for e in comm.members() if e.entered > d.slot])),
    )


def _sites(sites: list[int], table: SignatureTable) -> dict[str, list[str]]:
    """Where the calls came from, if the trace tells."""
    known = sorted({table.sites[s] for s in sites if s})
    return {"sites": known} if known else {}


def _confidence(exact: bool, decision: Decision) -> str:
    if not exact:
        return "reduced"
    return "inferred" if decision.inferred else "observed"


def _processes(endpoints: list[Endpoint]) -> list[Hashable]:
    return [e.process.who for e in endpoints]


def _explanation(model: Signature, own: Signature) -> str | None:
    if 0 in (model.count, own.count) and model.count != own.count:
        return "one side passed count 0: NCCL discards such a call, so it takes no part"
    if model.api == own.api and model.datatype != own.datatype:
        sizes = [(s.count or 0) * DATATYPE_BYTES.get(s.datatype or "", 0) for s in (model, own)]
        if sizes[0] == sizes[1] != 0:
            return "same bytes, other type"
    return None


def _summary(
    comm: Communicator,
    d: Disagreement,
    details: dict[str, Any],
    model: Signature,
    own: Signature,
    verdict: Verdict,
    decision: Decision,
) -> str:
    where = f"#{d.seq} of communicator {comm.label}"
    members = [e for e in comm.members() if e.comm_rank in verdict.ranks]
    rank = capital(named(members))
    others = in_job(e for e in comm.members() if e.comm_rank in decision.reference)
    shift = verdict.shift
    if shift is not None and decision.named:
        did = "left out" if shift.skip else "made an extra"
        more = f" ({shift.by} calls)" if shift.by > 1 else ""
        return f"{rank} {did} {details['call']}{more} at {where}; {others} did not."
    if decision.named and verdict.swapped:
        return (
            f"{rank} called {own.text()} and {model.text()} in the other order than {others}, "
            f"at {where}."
        )
    if decision.named:
        return f"{rank} called {own.text()} where {others} called {model.text()}, at {where}."
    sides = " and ".join(
        f"{numbers(call['comm_ranks'])} called {call['signature']}" for call in details["calls"]
    )
    return f"At {where}, {sides}; nothing tells which side is wrong."
