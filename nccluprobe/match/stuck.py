"""Communicators whose observed members are level and do not go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nccluprobe.match.absence import Context, waiting_until
from nccluprobe.match.children import inside_child
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.excuse import Stall
from nccluprobe.match.finding import Finding, seconds
from nccluprobe.match.status import coverage_of, ranks_text
from nccluprobe.match.waits import Wait


def judge_level(comm: Communicator, ctx: Context) -> Finding | None:
    """A finding when members have been inside the same slot for long, and none is behind.

    A collective that all have entered, and whose calls have returned, may be
    complete or not: the API does not tell, and nothing is said.
    """
    members = comm.members()
    if comm.ambiguous or not members or comm.disagreement is not None:
        return None
    level = {e.entered for e in members}
    if len(level) != 1 or 0 in level:
        return None
    inside = {e: t for e in members if (t := e.inside()) is not None}
    if not inside or any(inside_child(e) for e in inside):
        return None
    waited = {e: waiting_until(e, ctx) - t for e, t in inside.items()}
    newest = max(e.last_t for e in members)
    if ctx.now - newest < ctx.options.missing_after:
        return None
    if comm.complete_view:
        if len(inside) < len(members) or min(waited.values()) < ctx.options.missing_after:
            return None
        return _finding(comm, ctx, members, max(waited.values()), unobserved=False)
    if max(waited.values()) < ctx.options.missing_after:
        return None
    return _finding(comm, ctx, members, max(waited.values()), unobserved=True)


def _finding(
    comm: Communicator, ctx: Context, members: list[Endpoint], waited: int, unobserved: bool
) -> Finding:
    slot = members[0].entered - 1
    seq = comm.last_seq
    signature = ctx.table[comm.last_sig] if comm.last_sig is not None else None
    ranks = [e.comm_rank for e in members if e.comm_rank is not None]
    others = comm.unobserved()
    api = signature.api if signature else None
    if unobserved:
        hang_type, reason = "waiting_for_unobserved", "rank_not_observed"
        summary = (
            f"All {len(ranks)} observed members of communicator {comm.label} wait in {api} "
            f"#{seq} for {seconds(waited):.1f} s; {len(others)} of {comm.key.nranks} ranks "
            f"are not observed."
        )
    else:
        hang_type, reason = "collective_all_ranks_stuck", "all_inside"
        summary = (
            f"All {len(ranks)} members of communicator {comm.label} are inside {api} #{seq} "
            f"for {seconds(waited):.1f} s: nobody is missing; the device or the network is not "
            f"going on."
        )
    details: dict[str, Any] = {
        "api": api,
        "expected_nranks": comm.key.nranks,
        "entered_comm_ranks": ranks,
        "missing_comm_ranks": [],
        "missing_rank_status": [],
        "waited_s": seconds(waited),
        "reason": reason,
        "confidence": "reduced" if unobserved else "inferred",
        "trace_event_loss_possible": any(e.lost or e.process.lost for e in members),
        "signature": signature.text() if signature else None,
        "comm_name": comm.name,
        "instance": comm.key.instance,
        "unobserved_comm_ranks": len(others),
        "not_observed_ranks": ranks_text(others),
        "summary": summary,
    }
    return Finding(
        key=("level", *comm.key, slot, unobserved),
        hang_type=hang_type,
        run_id=ctx.run_id,
        comm_uid_hash=comm.key.hash,
        comm_seq=seq,
        detected_at=ctx.now,
        details=details,
        severity="error" if waited >= ctx.options.error_after and not unobserved else "notice",
        role="unknown",
        job=ctx.job,
        coverage=coverage_of(comm, ctx.now, ctx.options.silent_after),
        since=max(e.last_t for e in members),
        waiters=tuple(e.process.who for e in members),
    )


def stall_finding(stall: Stall, behind: Sequence[Wait], ctx: Context) -> Finding:
    """All members' newest call is one slot, and others wait for them elsewhere: the device."""
    comm, members = stall.comm, list(stall.members)
    seq = comm.last_seq
    signature = ctx.table[comm.last_sig] if comm.last_sig is not None else None
    api = signature.api if signature else None
    ranks = [e.comm_rank for e in members if e.comm_rank is not None]
    waited = max(0, ctx.now - stall.since)
    elsewhere = len({e.actor for w in behind for e in w.entered})
    details: dict[str, Any] = {
        "api": api,
        "expected_nranks": comm.key.nranks,
        "entered_comm_ranks": ranks,
        "missing_comm_ranks": [],
        "missing_rank_status": [],
        "waited_s": seconds(waited),
        "reason": "all_silent_after",
        "confidence": "inferred",
        "trace_event_loss_possible": any(e.lost or e.process.lost for e in members),
        "signature": signature.text() if signature else None,
        "comm_name": comm.name,
        "instance": comm.key.instance,
        "unobserved_comm_ranks": 0,
        "summary": _stall_text(stall, f"{api} #{seq}", ranks, waited, elsewhere),
    }
    severe = any(w.finding is not None and w.finding.severity == "error" for w in behind)
    return Finding(
        key=("stall", *comm.key, seq),
        hang_type="collective_all_ranks_stuck",
        run_id=ctx.run_id,
        comm_uid_hash=comm.key.hash,
        comm_seq=seq,
        detected_at=ctx.now,
        details=details,
        severity="error" if severe else "notice",
        role="root_cause",
        job=ctx.job,
        coverage=coverage_of(comm, ctx.now, ctx.options.silent_after),
        since=stall.since,
        waiters=tuple(e.process.who for e in members),
    )


def hung_finding(
    comm: Communicator, kept: Sequence[Endpoint], behind: Sequence[Finding], ctx: Context
) -> Finding:
    """Members are held up, and no rank that does not come explains all of them: the device.

    ``kept``: these members; ``behind``: findings of ranks that wait because of it.
    """
    signature = ctx.table[comm.last_sig] if comm.last_sig is not None else None
    api = signature.api if signature else None
    ranks = [e.comm_rank for e in kept if e.comm_rank is not None]
    since = max(max(e.process.last_activity, e.last_t) for e in kept)
    waited = max(0, ctx.now - since)
    lossy = any(e.lost or e.process.lost for e in comm.members())
    return Finding(
        key=("hung", *comm.key),
        hang_type="collective_all_ranks_stuck",
        run_id=ctx.run_id,
        comm_uid_hash=comm.key.hash,
        comm_seq=comm.last_seq,
        detected_at=ctx.now,
        details={
            "api": api,
            "expected_nranks": comm.key.nranks,
            "entered_comm_ranks": [e.comm_rank for e in comm.members()],
            "missing_comm_ranks": [],
            "missing_rank_status": [],
            "waited_s": seconds(waited),
            "reason": "all_silent_after",
            "confidence": "reduced" if lossy else "inferred",
            "trace_event_loss_possible": lossy,
            "signature": signature.text() if signature else None,
            "comm_name": comm.name,
            "instance": comm.key.instance,
            "unobserved_comm_ranks": len(comm.unobserved()),
            "summary": (
                f"Ranks {ranks_text(ranks)} of communicator {comm.label} stand still for "
                f"{seconds(waited):.1f} s, and no rank that does not come explains all of them: "
                f"a call that all entered, {api} #{comm.last_seq} or one before, does not end on "
                f"the device; no single rank stands out."
            ),
        },
        severity="error" if any(f.severity == "error" for f in behind) else "notice",
        role="root_cause",
        job=ctx.job,
        coverage=coverage_of(comm, ctx.now, ctx.options.silent_after),
        since=since,
        waiters=tuple(e.process.who for e in kept),
    )


def _stall_text(stall: Stall, call: str, ranks: list[int], waited: int, elsewhere: int) -> str:
    comm = stall.comm
    others = f"{elsewhere} other rank{'s wait' if elsewhere > 1 else ' waits'} for them"
    for_long = f"for {seconds(waited):.1f} s"
    if len(ranks) == comm.key.nranks:
        who = (
            f"All {len(ranks)} members of communicator {comm.label} entered {call} and none of "
            f"them has called NCCL {for_long}"
        )
    else:
        who = (
            f"All {comm.key.nranks} members of communicator {comm.label} entered {call}, after "
            f"which ranks {ranks_text(ranks)} have not called NCCL {for_long}"
        )
    return (
        f"{who}, while {others}: either this call does not end on the device, or all of them "
        f"left together; no single rank stands out."
    )
