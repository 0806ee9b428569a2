"""Splits that a part of the parent's members have entered."""

from __future__ import annotations

from typing import Any

from nccluprobe.match.absence import Context, strongest, waiting_until
from nccluprobe.match.children import Children
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding, seconds
from nccluprobe.match.process import Inside
from nccluprobe.match.status import coverage_of, end_reason, is_silent, rank_status, ranks_text

SPLIT = "ncclCommSplit"


def judge_split(comm: Communicator, children: Children, ctx: Context) -> Finding | None:
    """A finding when members wait in a split that other observed members have not entered.

    Callers without a colour take part: they have entered like all others.
    """
    if comm.ambiguous:
        return None
    members = comm.members()
    inside = [(e, c) for e in members if (c := _inside_split(e)) is not None]
    if not inside:
        return None
    child = min(c.ord or 0 for _, c in inside)
    waiting = [(e, c) for e, c in inside if c.ord == child]
    absent = [e for e in members if not children.entered(e, child)]
    first = min(c.t for _, c in waiting)
    waited = max(waiting_until(e, ctx) for e, _ in waiting) - first
    if not absent or waited < ctx.options.missing_after:
        return None
    watched = [
        e
        for e in absent
        if e.process.ended or not is_silent(e.process, ctx.now, ctx.options.silent_after)
    ]
    return _finding(comm, ctx, child, absent, watched, first, waited)


def _inside_split(e: Endpoint) -> Inside | None:
    if e.process.ended:
        return None
    found = (c for c in e.process.inside.values() if c.api == SPLIT and c.comm == e.info.id)
    return next((c for c in found if c.ord is not None), None)


def _finding(
    comm: Communicator,
    ctx: Context,
    child: int,
    absent: list[Endpoint],
    watched: list[Endpoint],
    first: int,
    waited: int,
) -> Finding:
    limit = ctx.options.silent_after
    came = [e for e in comm.members() if e not in absent]
    named = watched or absent
    reasons: dict[int, str] = {}
    for e in named:
        if not watched:
            reason = "rank_not_observed"
        elif e.process.ended:
            reason = end_reason(e.process)
        elif e.process.lost_since(first):
            reason = "probe_event_loss_possible"
        else:
            reason = "rank_alive_but_not_entered"
        reasons[e.comm_rank or 0] = reason
    blamed = any(
        r not in ("rank_not_observed", "probe_event_loss_possible") for r in reasons.values()
    )
    ended = any(e.process.ended for e in watched)
    missing = sorted(reasons)
    details: dict[str, Any] = {
        "api": SPLIT,
        "expected_nranks": comm.key.nranks,
        "entered_comm_ranks": [e.comm_rank for e in came],
        "missing_comm_ranks": missing,
        "missing_rank_status": [
            rank_status(comm, e.comm_rank or 0, e, ctx.now, limit, reasons[e.comm_rank or 0])
            for e in named
        ],
        "waited_s": seconds(waited),
        "reason": strongest(list(reasons.values())),
        "confidence": "observed" if blamed else "none",
        "trace_event_loss_possible": any(e.process.lost_since(first) for e in absent),
        "child": child,
        "comm_name": comm.name,
        "instance": comm.key.instance,
        "first_entered_unix_ns": first,
        "summary": (
            f"Rank{'s' if len(missing) > 1 else ''} {ranks_text(missing)} did not enter split "
            f"{child} of communicator {comm.label}: {len(came)} of {comm.key.nranks} ranks came, "
            f"the first waits for {seconds(waited):.1f} s."
        ),
    }
    error = blamed and (ended or waited >= ctx.options.error_after)
    return Finding(
        key=("split", *comm.key, child, tuple(missing)),
        hang_type="comm_init_missing_enter",
        run_id=ctx.run_id,
        comm_uid_hash=comm.key.hash,
        comm_seq=None,
        detected_at=ctx.now,
        details=details,
        severity="error" if error else "notice",
        role="root_cause" if blamed else "unknown",
        job=ctx.job,
        coverage=coverage_of(comm, ctx.now, limit),
        since=first,
        culprits=tuple(e.process.who for e in named) if blamed else (),
        waiters=tuple(e.process.who for e in came),
    )
