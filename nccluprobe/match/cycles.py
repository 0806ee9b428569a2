"""Actors that wait for each other: a deadlock when it is proven, else two hypotheses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nccluprobe.match import tense
from nccluprobe.match.absence import Context
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.details import lost_any, on_communicator
from nccluprobe.match.finding import Finding, seconds
from nccluprobe.match.graph import Cycle
from nccluprobe.match.minority import odd_call
from nccluprobe.match.names import capital, named
from nccluprobe.match.status import coverage_of
from nccluprobe.match.waits import Wait

_PLACED = (
    "made more, or less, between two of these calls than all others, who made as much as each "
    "other: a call left out, or made once too often, or in another order."
)
_BEHIND = (
    "All have been made, and each stands behind another one in a stream: their orders differ, "
    "or somebody has made a call more or less than the others before."
)
_LOCKED = (
    "What each side lacks would stand behind these in a stream: their orders differ, or somebody "
    "has made a call more or less than the others."
)


def _side(w: Wait) -> str:
    return f"{named(w.entered, f'communicator {w.comm.label}')} in {w.label}"


def hypotheses(cycle: Cycle) -> list[str]:
    """What each side would have to have done, when the trace does not decide."""
    return [
        f"{_side(w)} queued it and went away: then it is the cause"
        if len(w.entered) == 1
        else f"{_side(w)} queued it and went away: then they are the cause"
        for w in cycle.waits[:4]
    ] + ["all of them wait in the calls: then the orders of the calls exclude each other"]


def _odd_text(w: Wait | None) -> str:
    return "" if w is None else f"{_side(w)}, which the others have not called. "


def _waiting(cycle: Cycle) -> str:
    """How many wait: known where it is rank by rank, not of streams that hold up each other."""
    return f"{len(cycle.actors)} ranks" if len(cycle.actors) > 1 else "These"


def _all_made_there(odd: Wait, p2p: Sequence[Wait]) -> bool:
    """Whether these sends and receives lack no half, and are on the communicator of a call."""
    return all(w.comm is odd.comm and not w.absent and not w.missing for w in p2p)


def _confidence(cycle: Cycle) -> str:
    if not cycle.proven:
        return "inferred"
    return "reduced" if any(w.doubtful for w in cycle.waits) else "observed"


def cycle_finding(cycle: Cycle, context: Callable[[Communicator], Context]) -> Finding | None:
    """A finding for calls whose orders exclude each other; None while they are not due.

    When hosts are not shown inside the calls and no side is the smaller one, it
    stays with the absences, whose role is unknown.
    """
    first = cycle.extra or cycle.waits[0]
    ctx = context(first.comm)
    due = [w for w in cycle.waits if w.finding is not None]
    odd = cycle.extra or (None if cycle.placed else odd_call(cycle.waits))
    if not due or not (cycle.proven or cycle.minority or odd or cycle.streams):
        return None
    waited = ctx.now - max(w.first for w in cycle.waits)
    if waited < ctx.options.missing_after:
        return None
    p2p = [w for w in cycle.waits if w.p2p]
    hang_type = "p2p_order_inversion" if p2p else "cross_comm_order_inversion"
    # One half that was left out explains more than several ranks with a call too many.
    few = () if p2p and len(cycle.minority) > 1 else cycle.minority
    if odd is not None and (few or (p2p and _all_made_there(odd, p2p))):
        hang_type = "skipped_or_extra_call"
    made = [w for w in cycle.waits if w.device] if cycle.streams else []
    told = made if len(made) > 1 else cycle.waits
    sides = "; ".join(_side(w) for w in told[:4])
    more = "" if len(told) <= 4 else f"; and {len(told) - 4} more"
    there = [e for w in cycle.waits for e in w.entered]
    they = replace(tense.of(there), n=2)
    blamed = [e for e in there if e.actor in few and len(few) < len(cycle.actors)]
    details: dict[str, Any] = {
        **on_communicator(
            first.comm,
            first.finding.details.get("api") if first.finding else None,
            [e.comm_rank for e in first.entered],
            "orders_exclude" if odd is None or not few else "call_extra",
            _confidence(cycle),
            waited_s=seconds(waited),
            lossy=lost_any(e for w in cycle.waits for e in w.entered),
        ),
        "first_entered_unix_ns": min(w.first for w in cycle.waits),
        "cycle": [
            {
                "comm_uid_hash": w.comm.key.hash,
                "instance": w.comm.key.instance,
                "comm_seq": w.seq,
                "call": w.label,
                "entered_comm_ranks": [e.comm_rank for e in w.entered],
                "missing_comm_ranks": [e.comm_rank for e in w.absent],
            }
            for w in cycle.waits[:16]
        ],
        "minority_comm_ranks": sorted({e.comm_rank for e in blamed if e.comm_rank is not None}),
        "summary": (
            _odd_text(odd)
            + (f"{capital(named(blamed[:1]))} {_PLACED} " if cycle.placed and blamed else "")
            + f"{_waiting(cycle)} {they.wait} for each other{they.until}: {sides}{more}. "
            + (
                f"Each side {they.one.be} inside a call that the other {they.one.have} not made."
                if cycle.proven
                else (_BEHIND if len(made) > 1 else _LOCKED)
                if cycle.streams
                else f"Each side {they.one.have} made a call that the other {they.one.have} not."
            )
        ),
    }
    error = cycle.proven or waited >= ctx.options.error_after
    return Finding(
        key=("cycle", *(x for w in cycle.waits[:4] for x in (*w.comm.key, *w.at))),
        hang_type=hang_type,
        run_id=ctx.run_id,
        comm_uid_hash=first.comm.key.hash,
        comm_seq=first.seq,
        detected_at=ctx.now,
        details=details,
        severity="error" if error else "notice",
        role="root_cause",
        job=ctx.job,
        coverage=coverage_of(first.comm, ctx.now, ctx.options.silent_after),
        since=max(w.first for w in cycle.waits),
        culprits=tuple(dict.fromkeys(e.process.who for e in blamed)),
        waiters=tuple(dict.fromkeys(e.process.who for w in cycle.waits for e in w.entered)),
    )
