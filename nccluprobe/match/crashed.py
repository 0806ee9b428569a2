"""Ranks that crashed in calls that all have made, or aborted the communicator then.

Hosts run ahead: who crashes has often made the same calls as the others, whose
hosts wait for their devices outside NCCL.  Nothing is open at the API then, but
the device run tells what cannot have ended, and nobody ends a job by a crash, or a
communicator that others go on to use by an abort.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from nccluprobe.match import tense
from nccluprobe.match.absence import Context, waiting_until
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.details import lost_any, on_communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.excuse import Stall
from nccluprobe.match.finding import Finding, seconds
from nccluprobe.match.names import capital, named
from nccluprobe.match.options import SECOND
from nccluprobe.match.status import coverage_of, end_reason, ended_abruptly, last_sign, rank_status
from nccluprobe.match.waits import Wait

#: Findings of calls that do not end on the devices, when they name nobody.
_STANDS = frozenset({"collective_all_ranks_stuck", "collective_missing_exit", "nccl_missing_exit"})
#: Who crashes later than this after the others stood may have given up, and others who
#: stand later than this after a crash have gone on without who crashed.
_AT_ONCE = 10 * SECOND


def broken_off_at(e: Endpoint) -> int | None:
    """When it aborted the communicator, or crashed while it still used it; None: it did not."""
    if e.end is not None and not e.end.orderly:
        return e.end.t
    end = e.process.end if e.process.ended else None
    return None if end is None or e.end is not None or not ended_abruptly(e.process) else end.t


def _ended_at(e: Endpoint) -> int | None:
    """When its process ended in a communicator that it had not ended; None where calls are lost.

    Of these nobody knows whether they were its last.
    """
    end = e.process.end if e.process.ended else None
    lost = e.end is not None or e.process.without_place()
    return None if end is None or lost else end.t


def under_crash(
    waits: Sequence[Wait],
    context: Callable[[Communicator], Context],
    missed: Collection[Hashable] = (),
) -> list[Finding]:
    """A finding for the first one that crashed in a call that others are still in, if any.

    For waits that only the devices' run knows of, where nothing else is a cause.  Who
    aborted, or ended in order, is told only when it is one of those that others wait for at
    last, ``missed``: some end a communicator so when it has done its work.
    """
    found: list[tuple[int, Wait, Endpoint, list[Endpoint]]] = []
    for w in waits:
        for e in w.held if w.device and w.cause is None else ():
            at = broken_off_at(e)
            if e.actor in missed:
                at = _ended_at(e) if at is None else at
            elif e.end is not None:
                continue
            if at is None:
                continue
            ctx = context(w.comm)
            stay = [
                x
                for x in w.entered
                if not x.process.ended
                and waiting_until(x, ctx) - max(at, last_sign(x)) >= ctx.options.missing_after
            ]
            if stay:
                found.append((at, w, e, stay))
    if not found:
        return []
    at, w, e, stay = min(found, key=lambda x: (x[0], x[1].order))
    return [_finding(w, e, stay, at, context(w.comm))]


def under_abort(stall: Stall, ctx: Context) -> Finding | None:
    """A finding for who aborted the communicator when its newest call may not have ended.

    ``stall``: members that have not called anything since, with others waiting for them.
    """
    comm = stall.comm
    ends = ((x.end, x) for x in comm.endpoints.values())
    found = [(end.t, x) for end, x in ends if end is not None and not end.orderly]
    at, e = min(found, key=lambda x: (x[0], x[1].info.id), default=(0, None))
    stay = [x for x in stall.members if x is not e and not x.process.ended]
    if e is None or not stay or at - stall.since > SECOND:
        return None
    api = "call" if comm.last_sig is None else ctx.table[comm.last_sig].api
    seq = comm.last_seq
    w = Wait(comm, f"{api} #{seq}", stall.since, stall.members, (), at=(comm.closed, 3), seq=seq)
    return _finding(w, e, stay, at, ctx)


def beside_stall(
    findings: Iterable[Finding],
    comms: Iterable[Communicator],
    context: Callable[[Communicator], Context],
) -> list[Finding]:
    """A finding for who crashed at once, where devices stand and nobody else is to blame.

    What does not end on them may lack it, though the devices' run cannot tell in what.
    """
    open_ = [f for f in findings if f.state == "open"]
    jobs = {f.job for f in open_ if _stands(f)}
    jobs -= {f.job for f in open_ if f.role == "root_cause" and not _stands(f)}
    found: dict[str | None, list[tuple[int, int, Communicator, Endpoint, list[Endpoint]]]] = {}
    for comm in comms if jobs else ():
        ctx = context(comm)
        if ctx.job not in jobs or comm.ambiguous:
            continue
        stands = [f for f in open_ if f.job == ctx.job and _stands(f)]
        for e in comm.endpoints.values():
            at = broken_off_at(e)
            if at is None or e.end is not None:
                continue
            if any(at - f.since > _AT_ONCE for f in stands):
                continue
            limit = ctx.options.missing_after
            waiting = {who for f in stands for who in f.waiters}
            stay = [
                x
                for x in comm.endpoints.values()
                if x.process.who in waiting
                and x.end is None
                and not x.process.ended
                and last_sign(x) - at <= _AT_ONCE  # who went on did so without it
                and waiting_until(x, ctx) - max(at, last_sign(x)) >= limit
            ]
            if stay:
                found.setdefault(ctx.job, []).append((at, -len(stay), comm, e, stay))
    made = []
    for job, several in sorted(found.items(), key=lambda x: x[0] or ""):
        at, _, comm, e, stay = min(several, key=lambda x: (*x[:2], x[2].key))
        made.append(_beside(comm, e, stay, at, context(comm)))
        for f in open_:
            if f.job == job and _stands(f):
                f.role, f.downstream_of = "downstream", made[-1].id
    return made


def _stands(f: Finding) -> bool:
    """Whether it says that devices do not go on, and names nobody."""
    return f.hang_type in _STANDS and not f.culprits and f.role != "downstream"


def _beside(
    comm: Communicator, e: Endpoint, stay: list[Endpoint], at: int, ctx: Context
) -> Finding:
    api = "call" if comm.last_sig is None else ctx.table[comm.last_sig].api
    label = f"{api} #{comm.last_seq}, or one before,"
    w = Wait(comm, label, at, tuple(stay), (), at=(comm.closed, 4), seq=comm.last_seq)
    return _finding(w, e, stay, at, ctx)


def _finding(w: Wait, e: Endpoint, stay: list[Endpoint], at: int, ctx: Context) -> Finding:
    comm = w.comm
    rank = -1 if e.comm_rank is None else e.comm_rank
    waited = max(waiting_until(x, ctx) - max(at, last_sign(x)) for x in stay)
    lossy = lost_any(comm.endpoints.values())
    aborted = e.end is not None
    how = "crashed or was killed" if ended_abruptly(e.process) else "ended"
    how = "aborted it" if aborted else how
    reason = "rank_ended_communicator" if aborted else end_reason(e.process)
    status = rank_status(comm, rank, e, ctx.now, ctx.options.silent_after, reason)
    ranks = sorted({x.comm_rank for x in stay if x.comm_rank is not None})
    they = replace(tense.of(stay), n=len(ranks))
    details: dict[str, Any] = {
        **on_communicator(
            comm,
            None,
            ranks,
            status["reason"],
            "reduced" if lossy else "inferred",
            waited_s=seconds(waited),
            lossy=lossy,
        ),
        "first_entered_unix_ns": w.first,
        "left_comm_ranks": [rank],
        "left_rank_status": [status],
        "unobserved_comm_ranks": len(comm.unobserved()),
        "summary": (
            f"{capital(named([e], f'communicator {comm.label}'))} "
            f"{how} when "
            f"{w.label} may not have ended; "
            + ("another member" if len(ranks) == 1 else f"{len(ranks)} other members")
            + f" {they.have} not called NCCL for {seconds(waited):.1f} s since{they.until}."
        ),
    }
    return Finding(
        key=("crashed", *comm.key, *w.at, rank),
        hang_type="comm_ended_under_waiters",
        run_id=ctx.run_id,
        comm_uid_hash=comm.key.hash,
        comm_seq=w.seq,
        detected_at=ctx.now,
        details=details,
        severity="error" if waited >= ctx.options.error_after else "notice",
        role="root_cause",
        job=ctx.job,
        coverage=coverage_of(comm, ctx.now, ctx.options.silent_after),
        since=at,
        culprits=(e.process.who,),
        waiters=tuple(x.process.who for x in stay),
    )


def is_beside_crash(w: Wait, named: list[Endpoint]) -> bool:
    """Whether another member crashed, or aborted, at about the time when who waits came.

    Those who are named may wait for that one on their devices.
    """
    ends = [at for x in w.comm.endpoints.values() if (at := broken_off_at(x)) is not None]
    alive = all(not e.process.ended and e.end is None for e in named)
    return alive and any(abs(at - w.first) <= _AT_ONCE for at in ends)
