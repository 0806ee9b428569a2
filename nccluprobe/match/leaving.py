"""Ranks that left: the job, or a communicator, while others wait on.

A job that goes down rank by rank is no hang: who leaves has left somebody only
when others wait on for longer than a shutdown takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from nccluprobe.match import tense
from nccluprobe.match.absence import Context, waiting_until
from nccluprobe.match.finding import Finding
from nccluprobe.match.names import capital, named
from nccluprobe.match.status import crashed_alone, end_reason, ended_abruptly, left_at, rank_status
from nccluprobe.match.waits import seen_in

if TYPE_CHECKING:
    from nccluprobe.match.communicator import CommKey
    from nccluprobe.match.endpoint import Endpoint
    from nccluprobe.match.process import Process
    from nccluprobe.match.waits import Wait

_WAITS = "rank_waiting_elsewhere"


def gone_under(w: Wait, ctx: Context) -> list[Endpoint]:
    """Members that have left while others waited on."""
    gone = []
    for e in w.comm.endpoints.values():
        at = left_at(e)
        if at is None:
            continue
        abrupt = e.end is None and crashed_alone(e.process, (x.process for x in w.entered))
        grace = 0 if abrupt else min(ctx.options.silent_after, ctx.options.missing_after)
        until = max((waiting_until(x, ctx) for x in w.entered if x is not e), default=0)
        if until - max(at, w.first) > grace:
            gone.append(e)
    return gone


def note_left(w: Wait, gone: list[Endpoint]) -> None:
    """The absent one may be free to come, but who entered and left cannot take part any more.

    Before roles are set: the absent one is not named; ``settle`` names who left.
    """
    f = w.finding
    assert f is not None
    f.culprits = ()
    f.left = tuple(gone)


def settle(
    waits: list[Wait], contexts: dict[CommKey, Context], processes: Iterable[Process]
) -> None:
    """Name who left under the others, or who made a call after all others had; after roles."""
    over = [p for p in processes if _ended_in_order(p)]
    for w in waits:
        f = w.finding
        if f is None:
            continue
        if f.left:
            _left(w, f, contexts[w.comm.key])
        elif f.role == "root_cause" and _is_extra(w, f, waits):
            _extra(w, f)
        elif f.role == "root_cause" and _is_tie(w, f):
            f.details["confidence"] = "inferred"
            f.details["note"] = (
                "they left too early, or else the others made a call too much: as many say one "
                "thing as the other"
            )
            if _is_end_of_job(w, f, over, contexts[w.comm.key]):
                f.culprits = ()


def _left(w: Wait, f: Finding, ctx: Context) -> None:
    gone: list[Endpoint] = list(f.left)
    ranks = [e.comm_rank for e in gone if e.comm_rank is not None]
    status = [
        rank_status(w.comm, r, e, ctx.now, ctx.options.silent_after, _why(e))
        for r, e in zip(ranks, gone, strict=False)
    ]
    f.hang_type, f.severity, f.role = "comm_ended_under_waiters", "error", "root_cause"
    f.downstream_of = None
    f.culprits = tuple(e.process.who for e in gone)
    if w.calls and f.details["confidence"] == "observed":
        # Who has queued a receive and left may have been done, but for a sender that hangs.
        f.details["confidence"] = "inferred"
    they = replace(tense.of(e for e in w.entered if e not in gone), n=2)
    f.details |= {
        "reason": status[0]["reason"],
        "left_comm_ranks": ranks,
        "left_rank_status": status,
        "summary": (
            f"{capital(named(gone, f'communicator {w.comm.label}'))} entered {w.label} and left "
            f"before it could end; the others {they.wait} on{they.until}."
        ),
    }


def _why(e: Endpoint) -> str:
    end = e.process.end if e.process.ended else None
    if e.end is not None and (end is None or e.end.t <= end.t):
        return "rank_ended_communicator"
    return end_reason(e.process)


def _orderly(e: Endpoint) -> bool:
    """Whether it left as one does at the end of a job, and was not told to in mid-call."""
    if left_at(e) is None or ended_abruptly(e.process):
        return False
    return e.end.orderly if e.end is not None else _ended_in_order(e.process)


def _ended_in_order(p: Process) -> bool:
    end = p.end
    if end is None or not p.ended or ended_abruptly(p):
        return False
    return not end.signal and not end.in_flight and not p.cut


def _lacking(w: Wait, f: Finding) -> list[Endpoint]:
    """Who did not come, with those that may have, as events of theirs were lost.

    Who is only supposed to have come, and left in order, did not wait there.
    """
    known, seen = w.comm.endpoints, seen_in(w)
    missing = [known[r] for r in f.details.get("missing_comm_ranks") or () if r in known]
    return missing + [e for e in w.entered if e not in seen and _orderly(e)]


def _judged(w: Wait, f: Finding) -> bool:
    if f.hang_type not in ("collective_missing_enter", "comm_ended_under_waiters"):
        return False
    return w.seq is not None and w.comm.complete_view and any(_orderly(e) for e in w.absent)


def _is_extra(w: Wait, f: Finding, waits: list[Wait]) -> bool:
    """Whether the greater part had an orderly end after the same call, or waits for somebody.

    Not if it is one of those that ended whom the others wait for: they would have come, too.
    """
    if not _judged(w, f) or 2 * len(lacking := _lacking(w, f)) <= w.comm.key.nranks:
        return False
    reasons = {s["comm_rank"]: s["reason"] for s in f.details["missing_rank_status"]}
    ended = {e.process.who for e in lacking if _orderly(e)}
    alive = {e.process.who for e in lacking} - ended
    if any(
        x.process.who in ended
        for other in waits
        if other is not w and any(e.process.who in alive for e in other.entered)
        for x in (*other.absent, *other.held)
    ):
        return False
    # Several do not all end too early; where events were lost, what the others wait in is not seen.
    several = len(ended) > 1 and len(seen_in(w)) == 1
    return all(
        _orderly(e) or (left_at(e) is None and (several or reasons.get(e.comm_rank) == _WAITS))
        for e in lacking
    )


def _is_tie(w: Wait, f: Finding) -> bool:
    """Whether one half had an orderly end and the other made a call more: who is wrong?"""
    return (
        _judged(w, f)
        and 2 * len(w.absent) == w.comm.key.nranks
        and all(_orderly(e) for e in w.absent)
    )


def _is_end_of_job(w: Wait, f: Finding, over: list[Process], ctx: Context) -> bool:
    """Whether others came to their end with those that left, and it is about a single call.

    Then the program was over for them, and the call may be one too many.
    """
    members = {id(e.process) for e in w.comm.endpoints.values()}
    limit = ctx.options.silent_after
    return f.details["queued_behind"] == 0 and all(
        e.end is None and any(id(p) not in members and _together(p, e.process, limit) for p in over)
        for e in w.absent
    )


def _together(a: Process, b: Process, limit: int) -> bool:
    return a.end is not None and b.end is not None and abs(a.end.t - b.end.t) <= limit


def _extra(w: Wait, f: Finding) -> None:
    made = seen_in(w)
    ranks = [e.comm_rank for e in made if e.comm_rank is not None]
    f.hang_type = "skipped_or_extra_call"
    f.culprits = tuple(e.process.who for e in made)
    f.details |= {
        "reason": "call_extra",
        "confidence": "inferred",
        "call": f.details.get("signature"),
        "minority_comm_ranks": ranks,
        "summary": (
            f"{capital(named(made, f'communicator {w.comm.label}'))} called {w.label} after "
            f"{named(_lacking(w, f))}, the greater part, had made their last call and come to an "
            f"orderly end."
        ),
    }
