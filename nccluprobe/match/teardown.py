"""Members inside ncclCommDestroy or ncclCommFinalize: one is missing, or the call does not end.

ncclCommFinalize is collective over the communicator, ncclCommDestroy at least over
the ranks of a node.  That a call has returned to others shows that it does not need
those who have not come; one that does not block returns at once.  Nobody waits in
ncclCommAbort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nccluprobe.match import tense
from nccluprobe.match.absence import Context, strongest, waiting_until
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.details import lost_any, on_communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding, seconds
from nccluprobe.match.names import capital, everyone, named, unobserved_text
from nccluprobe.match.process import Inside
from nccluprobe.match.status import (
    absent_reason,
    coverage_of,
    end_reason,
    had_left,
    inside_end,
    is_silent,
    rank_status,
    ranks_text,
)
from nccluprobe.match.waits import Wait

_FINALIZE = "ncclCommFinalize"
_STUCK, _UNSEEN = "collective_all_ranks_stuck", "waiting_for_unobserved"
_DOING = {"running": "running", "stopped": "stopped", "uninterruptible": "blocked in the kernel"}


def waits_of(
    comms: Iterable[Communicator], known: list[Wait], context: Callable[[Communicator], Context]
) -> list[Wait]:
    """The waits in the end of a communicator: for members that have not come, or for nobody.

    ``known``: waits that are; who has waited there before it came to the end stays there.
    """
    told = {e.actor for w in known if w.finding is not None for e in w.entered}
    found = []
    for comm in comms:
        inside = [(e, c) for e in comm.members() if (c := inside_end(e)) is not None]
        if not inside or comm.ambiguous or any(e.actor in told for e, _ in inside):
            continue
        wait = _judge(comm, inside, context(comm))
        found += [] if wait is None else [wait]
    return found


def _judge(comm: Communicator, inside: list[tuple[Endpoint, Inside]], ctx: Context) -> Wait | None:
    first = min(c.t for _, c in inside)
    until = max(waiting_until(e, ctx) for e, _ in inside)
    if until - first < ctx.options.missing_after:
        return None
    absent = _absent(comm, inside, ctx)
    entered = tuple(e for e, _ in inside)
    api = min(inside, key=lambda x: x[1].t)[1].api
    if not absent:
        if len(inside) < len(comm.members()) or comm.key.nranks < 2:
            return None
        waited = until - max(c.t for _, c in inside)
        due = waited >= ctx.options.missing_after
        f = _all_inside(comm, inside, waited, ctx) if due else None
        seen = comm.complete_view
        return Wait(comm, api, first, entered, (), f if seen else None, cause=None if seen else f)
    return Wait(
        comm=comm,
        label=api,
        api=api,
        first=first,
        entered=entered,
        absent=tuple(absent),
        finding=_finding(comm, api, first, until, entered, absent, ctx),
    )


def _absent(
    comm: Communicator, inside: list[tuple[Endpoint, Inside]], ctx: Context
) -> list[Endpoint]:
    """Observed members that the call may wait for."""
    here = {id(e) for e, _ in inside}
    absent = [
        e
        for e in comm.members()
        if e.end is None
        and id(e) not in here
        and (e.process.ended or not is_silent(e.process, ctx.now, ctx.options.silent_after))
    ]
    back = [e for e in comm.members() if e.end is not None and id(e) not in here]
    if not back:
        return absent
    if any(c.api == _FINALIZE for _, c in inside):
        return []
    hosts = {e.process.boot_id for e, _ in inside}
    if hosts & {e.process.boot_id for e in back}:
        return []
    return [e for e in absent if e.process.boot_id in hosts]


def _all_inside(
    comm: Communicator, inside: list[tuple[Endpoint, Inside]], waited: int, ctx: Context
) -> Finding:
    """All observed members are inside the call that ends it, and that does not return."""
    entered = [e for e, _ in inside]
    ranks = sorted(e.comm_rank or 0 for e in entered)
    apis = sorted({c.api for _, c in inside})
    others, they = comm.unobserved(), tense.of(entered)
    kind, reason = (_STUCK, "all_inside") if comm.complete_view else (_UNSEEN, "rank_not_observed")
    why = (
        f"nobody {they.one.be} missing; work that was queued before, or {they.not_going_on}"
        if comm.complete_view
        else unobserved_text(len(others), comm.key.nranks)
    )
    error = waited >= ctx.options.error_after and comm.complete_view
    return Finding(
        key=("teardown", *comm.key, "all"),
        hang_type=kind,
        run_id=ctx.run_id,
        comm_uid_hash=comm.key.hash,
        comm_seq=None,
        detected_at=ctx.now,
        details={
            **on_communicator(
                comm,
                apis[0],
                ranks,
                reason,
                "inferred" if comm.complete_view else "reduced",
                waited_s=seconds(waited),
                lossy=lost_any(entered),
            ),
            "inside_comm_ranks": ranks,
            "first_entered_unix_ns": min(c.t for _, c in inside),
            "unobserved_comm_ranks": len(others),
            "not_observed_ranks": ranks_text(others),
            "summary": (
                f"{everyone(len(ranks), comm.label, comm.complete_view)} "
                f"{they.be} inside {' or '.join(apis)} for {seconds(waited):.1f} s{they.until}: "
                f"{why}."
            ),
        },
        severity="error" if error else "notice",
        role="unknown",
        job=ctx.job,
        coverage=coverage_of(comm, ctx.now, ctx.options.silent_after),
        since=max(c.t for _, c in inside),
        waiters=tuple(dict.fromkeys(e.process.who for e in entered)),
    )


def _finding(
    comm: Communicator,
    api: str,
    first: int,
    until: int,
    entered: tuple[Endpoint, ...],
    absent: list[Endpoint],
    ctx: Context,
) -> Finding:
    waited, limit = until - first, ctx.options.silent_after
    reasons = {e.comm_rank or 0: _reason(e, first, until, limit) for e in absent}
    lossy = "probe_event_loss_possible" in reasons.values()
    unobserved = comm.unobserved()
    ranks, missing = sorted(e.comm_rank or 0 for e in entered), sorted(reasons)
    details = on_communicator(
        comm,
        api,
        ranks,
        strongest(list(reasons.values())),
        "reduced" if lossy or unobserved else "inferred",
        waited_s=seconds(waited),
        lossy=lossy,
    )
    details |= {
        "missing_comm_ranks": missing,
        "missing_rank_status": [
            rank_status(comm, r, e, ctx.now, limit, reasons[r])
            for r, e in sorted((e.comm_rank or 0, e) for e in absent)
        ],
        "inside_comm_ranks": ranks,
        "first_entered_unix_ns": first,
        "unobserved_comm_ranks": len(unobserved),
        "summary": _summary(comm, api, entered, absent, waited),
    }
    return Finding(
        key=("teardown", *comm.key, tuple(missing)),
        hang_type="nccl_missing_exit",
        run_id=ctx.run_id,
        comm_uid_hash=comm.key.hash,
        comm_seq=None,
        detected_at=ctx.now,
        details=details,
        severity="error" if waited >= ctx.options.error_after and not lossy else "notice",
        job=ctx.job,
        coverage=coverage_of(comm, ctx.now, limit),
        since=first,
        culprits=tuple(dict.fromkeys(e.process.who for e in absent)),
        waiters=tuple(dict.fromkeys(e.process.who for e in entered)),
    )


def _reason(e: Endpoint, first: int, until: int, limit: int) -> str:
    p = e.process
    if p.lost_since(first):
        return "probe_event_loss_possible"
    if had_left(p, until, limit):
        return end_reason(p)
    return "rank_inside_other_call" if p.inside_now() is not None else absent_reason(p)


def _summary(
    comm: Communicator,
    api: str,
    entered: tuple[Endpoint, ...],
    absent: list[Endpoint],
    waited: int,
) -> str:
    they = tense.of(entered)
    text = (
        f"{capital(named(entered, f'communicator {comm.label}'))} "
        f"{they.wait} in {api} for {seconds(waited):.1f} s{they.until}; "
        f"{named(absent)} {tense.of(absent).have} not called it"
    )
    doing = _doing(absent[0]) if len(absent) == 1 else None
    return text + (f": it {doing}." if doing else ".")


def _doing(e: Endpoint) -> str | None:
    """What a rank does meanwhile, as far as is seen."""
    p, inside = e.process, e.process.inside_now()
    if p.ended:
        return "has ended"
    be = tense.of([e]).be
    if inside is not None:
        return f"{be} inside {inside.api}"
    if p.coverage is None:
        return None
    if p.coverage.main == "syscall" and p.coverage.syscall is not None:
        return f"{be} in the system call {p.coverage.syscall}"
    state = _DOING.get(p.coverage.main)
    return None if state is None else f"{be} {state}"
