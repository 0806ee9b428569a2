"""Split, shrink and grow: collective over the parent, entered by a part of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nccluprobe.match import names, tense
from nccluprobe.match.absence import Context, strongest, waiting_until
from nccluprobe.match.children import Children, Made, inside_child
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.details import on_communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding, seconds
from nccluprobe.match.inits import GROW, Inits
from nccluprobe.match.process import Inside
from nccluprobe.match.status import (
    coverage_of,
    end_reason,
    had_left,
    is_silent,
    process_facts,
    rank_status,
)
from nccluprobe.match.waits import Wait

SHRINK = "ncclCommShrink"


@dataclass
class _Came:
    """Who came to a child of a communicator, and who did not."""

    comm: Communicator
    ctx: Context
    child: int
    call: Made
    waiting: list[tuple[Endpoint, Inside]]
    came: list[Endpoint]
    absent: list[Endpoint]
    #: Of ``absent``, so many may stay away (a shrink), nobody knows which.
    may_stay: int = 0
    #: Ranks of the new communicator that a grow lacks.
    new_ranks: list[int] = field(default_factory=list)

    @property
    def first(self) -> int:
        """Since when the first one waits."""
        return min(c.t for _, c in self.waiting)

    @property
    def until(self) -> int:
        """Until when somebody is known to wait."""
        return max(waiting_until(e, self.ctx) for e, _ in self.waiting)


def judge_child(
    comm: Communicator, children: Children, inits: Inits, ctx: Context
) -> tuple[Wait | None, Finding | None]:
    """The wait for members that did not come to a split, shrink or grow; what is wrong with it.

    Callers without a colour take part in a split: they have entered like all
    others.  Ranks that a shrink leaves out do not call it.
    """
    if comm.ambiguous:
        return None, None
    members = comm.members()
    inside = [(e, c) for e in members if (c := inside_child(e)) is not None]
    back = [] if inside else inits.waiting_members(comm, ctx)
    inside += back  # these poll, which is not seen: it may have ended
    if not inside:
        return None, None
    child = min(c.ord or 0 for _, c in inside)
    waiting = [(e, c) for e, c in inside if c.ord == child]
    call = children.made(waiting[0][0], child)
    if call is None:
        return None, None
    came = [e for e in members if children.made(e, child) is not None]
    x = _Came(comm, ctx, child, call, waiting, came, [e for e in members if e not in came])
    if call.api == SHRINK:
        _leave_out(x, call.nranks or 0)
    elif call.api == GROW and not x.absent and call.nranks is not None:
        here = inits.new_ranks(call.uid_hash, call.nranks, comm.key.nranks)
        x.new_ranks = [r for r in range(comm.key.nranks, call.nranks) if r not in here]
    if not x.absent and not x.new_ranks:
        return None, None if back else _stuck(x)
    due = x.until - x.first >= ctx.options.missing_after
    finding = _finding(x) if due else None
    if finding is not None and back and finding.details["confidence"] == "observed":
        finding.details["confidence"] = "inferred"  # that they wait is not seen
    wait = Wait(
        comm=comm,
        label=f"{call.api} {child}",
        api=call.api,
        first=x.first,
        entered=tuple(e for e, _ in waiting),
        absent=tuple(x.absent),
        finding=finding,
    )
    return (wait if x.absent else None), finding


def _leave_out(x: _Came, n: int) -> None:
    """``n`` ranks are left out of a shrink: those that are gone before all others."""
    gone = [e for e in x.absent if e.process.ended or e.end is not None]
    n = max(0, n - len(x.comm.unobserved()))
    left_out = gone[:n]
    x.absent = [e for e in x.absent if e not in left_out]
    x.may_stay = min(n - len(left_out), len(x.absent))
    if x.may_stay == len(x.absent):
        x.absent = []


def _stuck(x: _Came) -> Finding | None:
    """All have come and nobody gets out."""
    newest = max(c.t for _, c in x.waiting)
    if not x.comm.complete_view and x.call.api != SHRINK:
        return None
    if len(x.waiting) < len(x.came) or x.until - newest < x.ctx.options.missing_after:
        return None
    waited = x.until - newest
    they = tense.of(e for e, _ in x.waiting)
    ranks = sorted(e.comm_rank or 0 for e in x.came)
    return Finding(
        key=("child_stuck", *x.comm.key, x.child),
        hang_type="comm_init_stuck",
        run_id=x.ctx.run_id,
        comm_uid_hash=x.comm.key.hash,
        comm_seq=None,
        detected_at=x.ctx.now,
        details={
            **_details(x, waited, "all_inside"),
            "summary": (
                f"All {len(ranks)} callers {they.be} inside {x.call.api} {x.child} of communicator "
                f"{x.comm.label}, the last for {seconds(waited):.1f} s{they.until}, and it "
                f"{they.one.does} not end: nobody {they.one.be} missing."
            ),
        },
        severity="error" if waited >= x.ctx.options.error_after else "notice",
        role="root_cause",
        job=x.ctx.job,
        coverage=coverage_of(x.comm, x.ctx.now, x.ctx.options.silent_after),
        since=newest,
        waiters=tuple(e.process.who for e, _ in x.waiting),
    )


def _details(x: _Came, waited: int, reason: str) -> dict[str, Any]:
    return {
        **on_communicator(
            x.comm,
            x.call.api,
            sorted(e.comm_rank or 0 for e in x.came),
            reason,
            "inferred",
            waited_s=seconds(waited),
            lossy=any(e.process.lost_since(x.first) for e in x.absent),
        ),
        "child": x.child,
        "first_entered_unix_ns": x.first,
    }


def _finding(x: _Came) -> Finding:
    ctx, limit = x.ctx, x.ctx.options.silent_after
    waited = x.until - x.first
    watched = [e for e in x.absent if e.process.ended or not is_silent(e.process, ctx.now, limit)]
    named = watched or x.absent
    reasons = {e.comm_rank or 0: _reason(e, x, bool(watched)) for e in named}
    unsure = ("rank_not_observed", "probe_event_loss_possible")
    blamed = any(r not in unsure for r in reasons.values()) and not x.may_stay
    missing = sorted(reasons)
    details = _details(x, waited, strongest(list(reasons.values())) if named else _NEW)
    details |= {
        "missing_comm_ranks": missing,
        "missing_rank_status": [
            rank_status(x.comm, e.comm_rank or 0, e, ctx.now, limit, reasons[e.comm_rank or 0])
            for e in named
        ],
        "confidence": "observed" if blamed else "none",
        "summary": _summary(x, named, waited),
    }
    if x.may_stay:
        details["left_out"] = x.may_stay
        details["candidates"] = [
            {"rank": e.process.rank, **process_facts(e.process)} for e in named
        ]
    if x.new_ranks:
        details |= {"missing_new_ranks": x.new_ranks, "confidence": "inferred"}
    ended = any(had_left(e.process, x.until, limit) for e in watched)
    error = (blamed and ended) or (
        waited >= ctx.options.error_after and (blamed or bool(x.new_ranks or x.may_stay))
    )
    return Finding(
        key=("child", *x.comm.key, x.child, tuple(missing), tuple(x.new_ranks[:64])),
        hang_type="comm_init_missing_enter",
        run_id=ctx.run_id,
        comm_uid_hash=x.comm.key.hash,
        comm_seq=None,
        detected_at=ctx.now,
        details=details,
        severity="error" if error else "notice",
        # Whose absence it is, the wait-for graph tells.
        role="root_cause" if x.new_ranks else "unknown",
        job=ctx.job,
        coverage=coverage_of(x.comm, ctx.now, limit),
        since=x.first,
        culprits=tuple(e.process.who for e in named) if blamed else (),
        waiters=tuple(e.process.who for e, _ in x.waiting),
    )


_NEW = "ranks_not_in_init"


def _reason(e: Endpoint, x: _Came, watched: bool) -> str:
    if not watched:
        return "rank_not_observed"
    if had_left(e.process, x.until, x.ctx.options.silent_after):
        return end_reason(e.process)
    if e.end is not None:
        return "rank_ended_communicator"
    if e.process.lost_since(x.first):
        return "probe_event_loss_possible"
    return "rank_alive_but_not_entered"


def _summary(x: _Came, missing: list[Endpoint], waited: int) -> str:
    what = x.call.api.removeprefix("ncclComm").lower()
    where = f"{what} {x.child} of communicator {x.comm.label}"
    they = tense.of(e for e, _ in x.waiting)
    tail = (
        f"{len(x.came)} of {x.comm.key.nranks} ranks came, the first {they.one.wait} for "
        f"{seconds(waited):.1f} s{they.until}."
    )
    if x.new_ranks:
        return f"New {names.numbers(x.new_ranks)} did not come to {where}: {tail}"
    if x.may_stay:
        n = len(x.absent) - x.may_stay
        return (
            f"{n} of {names.named(missing)} did not enter {where}, which leaves out "
            f"{x.may_stay} of them: {tail}"
        )
    return f"{names.capital(names.named(missing))} did not enter {where}: {tail}"
