"""Calls of count 0 that one rank made and the others did not: NCCL discards them.

All that such a rank calls afterwards on this communicator takes the place of the
call before it, so that it lacks one in the end, while it has gone on by itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from nccluprobe.match import tense
from nccluprobe.match.absence import Context
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.details import lost_any, on_communicator
from nccluprobe.match.disagree import Decision, ZeroCall
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding, seconds
from nccluprobe.match.names import capital, named
from nccluprobe.match.signature import SignatureTable
from nccluprobe.match.status import coverage_of, rank_status
from nccluprobe.match.waits import Wait

#: A call of count 0 explains an absence so many slots later: hosts run ahead that far.
_RECENT = 1100


def note_zeros(comm: Communicator, slot: int, decision: Decision) -> None:
    """Remember who passed count 0 where the others made no such call."""
    for v in decision.verdicts:
        if not v.legal or v.shift is None or v.shared:
            continue  # what both make explains no call that one lacks
        made = v.ranks
        if v.shift.skip:  # of two equal sides the first counts as right
            made = decision.reference if len(decision.reference) <= len(v.ranks) else ()
        for rank in made:
            e = comm.endpoints[rank]
            sig = e.sig_at(slot)
            if sig is not None:
                comm.zero_calls[rank] = ZeroCall(slot, sig, e.idx_at(slot))


def zero_before(comm: Communicator, e: Endpoint, slot: int) -> ZeroCall | None:
    """An absent member's call of count 0 that explains why it lacks a call at ``slot``."""
    zero = comm.zero_calls.get(-1 if e.comm_rank is None else e.comm_rank)
    return None if zero is None or not 0 <= slot - zero.slot <= _RECENT else zero


def shifted_by_zero(w: Wait) -> list[Endpoint]:
    """Of those who are absent from a collective, those who made a call of count 0 before."""
    if w.seq is None or not w.at or not w.comm.zero_calls:
        return []
    return [e for e in w.absent if zero_before(w.comm, e, w.at[0]) is not None]


def ahead_by_zero(w: Wait) -> list[Endpoint]:
    """Members that are not in a call that all have made, as one of count 0 put them ahead of it.

    What it lacks of them stands where the others made the call after it.
    """
    if w.seq is None or not w.device or not w.comm.zero_calls:
        return []
    here = {id(e) for e in w.entered}
    members = [e for e in w.comm.members() if id(e) not in here]
    return [e for e in members if zero_before(w.comm, e, w.at[0]) is not None]


def zero_finding(w: Wait, e: Endpoint, ctx: Context) -> Finding | None:
    """A call of count 0 where it alone explains that streams hold up each other."""
    zero = zero_before(w.comm, e, w.at[0])
    waited = ctx.now - max(w.first, e.last_t)
    if zero is None or e.comm_rank is None or waited < ctx.options.missing_after:
        return None
    comm, rank, call = w.comm, e.comm_rank, ctx.table[zero.sig]
    lossy = lost_any(comm.endpoints.values())
    limit = ctx.options.silent_after
    hold = "hold" if tense.of(w.entered).fate is None else "held"
    return Finding(
        key=("zero", *comm.key, rank, zero.slot),
        hang_type="collective_mismatch",
        run_id=ctx.run_id,
        comm_uid_hash=comm.key.hash,
        comm_seq=comm.seq(zero.slot),
        detected_at=ctx.now,
        details={
            **on_communicator(
                comm,
                call.api,
                [x.comm_rank for x in comm.members()],
                "arguments_differ",
                "reduced" if lossy else "inferred",
                waited_s=seconds(waited),
                lossy=lossy,
            ),
            "differs_in": ["count"],
            "majority_comm_ranks": [x.comm_rank for x in comm.members() if x is not e],
            "minority_comm_ranks": [rank],
            "minority_rank_status": [
                rank_status(comm, rank, e, ctx.now, limit, "arguments_differ")
            ],
            "first_entered_unix_ns": w.first,
            "explanation": _text(e, zero, ctx.table),
            "summary": (
                f"{capital(named([e]))} called {call.text()} (call_idx {zero.idx}) on communicator "
                f"{comm.label}, which NCCL discards: it is one call ahead of the others since, and "
                f"the streams {hold} up each other at {w.label}."
            ),
        },
        severity="error" if waited >= ctx.options.error_after else "notice",
        role="root_cause",
        job=ctx.job,
        coverage=coverage_of(comm, ctx.now, limit),
        since=w.first,
        culprits=(e.process.who,),
        waiters=tuple(x.process.who for x in w.entered),
    )


def _text(e: Endpoint, zero: ZeroCall, table: SignatureTable) -> str:
    return (
        f"{named([e])} called {table[zero.sig].text()} (call_idx {zero.idx}): NCCL "
        f"discards a call of count 0, so it takes no part in what the others wait in"
    )


def explain_zeros(waits: Iterable[Wait], table: SignatureTable) -> None:
    """Tell of absent ranks that passed count 0 before: that may be why they do not come."""
    for w in waits:
        f = w.finding
        for e in () if f is None else shifted_by_zero(w):
            zero = zero_before(w.comm, e, w.at[0])
            if f is not None and zero is not None:
                f.details["explanation"] = _text(e, zero, table)
