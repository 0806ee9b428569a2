"""Calls that do not return although nothing is known to hold them up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from nccluprobe.match import p2p_held, teardown, tense
from nccluprobe.match.absence import Context, waiting_until
from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.details import lost_any, on_communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding, required, seconds
from nccluprobe.match.full_queue import Queued
from nccluprobe.match.names import capital, in_job, named
from nccluprobe.match.process import Inside, Process
from nccluprobe.match.status import ENDING, coverage_of, process_facts
from nccluprobe.match.waits import Wait
from nccluprobe.nccl.api import BY_NAME, TRACED, Kind

if TYPE_CHECKING:
    from nccluprobe.match.state import State

Context_of = Callable[[int], Context]

#: Calls that wait for nobody.
LOCAL = frozenset(
    a.name
    for a in TRACED
    if a.kind is Kind.HELPER
    or a.name in ("ncclGroupStart", "ncclCommAbort", "ncclCommRevoke")
    or (a.kind is Kind.REGISTRATION and "Window" not in a.name and "DevComm" not in a.name)
)
#: Calls that all members of a communicator make, and that may wait for each other.
TOGETHER = ENDING | {"ncclCommWindowRegister"}


def judge(
    state: State, waits: list[Wait], contexts: Mapping[CommKey, Context], of: Context_of
) -> list[Finding]:
    """Calls that have been inside for too long, by process and by communicator.

    Adds to ``waits`` those for members that do not come to the end of theirs.
    """
    ends = teardown.waits_of(state.comms.values(), waits, lambda comm: contexts[comm.key])
    waits += ends
    found = [f for w in ends if (f := w.finding or w.cause) is not None]
    found += _calls(state, waits, of) + p2p_held.judge(state, waits, of)
    for key, comm in sorted(state.comms.items()):
        if (f := judge_level(comm, waits, contexts[key])) is not None:
            found.append(f)
            held = [e for e in comm.members() if e.process.who in f.culprits]
            _spare(f, held, comm.members(), state)
    return found


def _spare(f: Finding, held: list[Endpoint], members: list[Endpoint], state: State) -> None:
    """Blame nobody where a full queue of who is held explains it."""
    queued = Queued(state.of_source, state.p2p.sides)
    apart = {id(e) for e in held}
    others = [e for e in members if id(e) not in apart]
    full = [e for e in held if f.culprits and queued.may_be_full(e, others)]
    if full:  # of several that are held in one call, one explains the others
        f.culprits = ()
        queue, has = ("queue", "it has") if len(full) == 1 else ("queues", "they have")
        f.details["summary"] += (
            f" The {queue} of {named(full)} may be full, as {has} called most: then something "
            f"that all have queued does not end on the device."
        )


def _calls(state: State, waits: list[Wait], of: Context_of) -> list[Finding]:
    waiting = {e.process.who for w in waits for e in w.entered}
    found = []
    for p in state.processes.values():
        if p.ended or not p.inside or p.who in waiting:
            continue  # a process that waits for others is held up by them
        ctx = of(p.source)
        for call in p.inside.values():
            if call.api not in LOCAL and call.api not in TOGETHER:
                continue
            if min(ctx.now, p.through) - call.t < ctx.options.missing_after:
                continue
            at = None if call.comm is None else (p.source, call.comm)
            e = None if at is None else state.endpoints.get(at)
            comm = None if at is None else state.comm_of(at)
            found.append(_call(p, call, e, comm, ctx))
    return found


def _call(
    p: Process, call: Inside, e: Endpoint | None, comm: Communicator | None, ctx: Context
) -> Finding:
    waited = min(ctx.now, p.through) - call.t
    others = [] if comm is None else [x for x in comm.endpoints.values() if x is not e]
    # Who waits with the others in it, or for those that have not come, is not to blame.
    back = [x for x in others if x.end is not None and not _inside(x, call.api)]
    alone = call.api in LOCAL or (
        comm is not None
        and call.api != "ncclCommWindowRegister"
        and len(back) == comm.key.nranks - 1
    )
    where = f" of communicator {comm.label}" if comm is not None else ""
    why = (
        "; it waits for nobody"
        if call.api in LOCAL
        else "; all others have returned from it"
        if alone
        else "; it may wait for members that have not made the call"
    )
    api, it = BY_NAME[call.api], tense.of_processes([p])
    return Finding(
        key=("call", p.who, call.thread, call.t),
        hang_type="nccl_missing_exit",
        run_id=ctx.run_id,
        comm_uid_hash=None if e is None else e.info.hash,
        comm_seq=None,
        detected_at=ctx.now,
        details={
            **required(
                call.api,
                None if e is None else e.info.nranks,
                [] if e is None else [e.comm_rank],
                "call_not_returned",
                "inferred",
                waited_s=seconds(waited),
                lossy=bool(p.lost_since(call.t)),
            ),
            "inside_comm_ranks": [] if e is None else [e.comm_rank],
            "first_entered_unix_ns": call.t,
            **process_facts(p),
            "summary": (
                f"{call.api}{where} {it.have} not returned to {p.label()} for "
                f"{seconds(waited):.1f} s{it.until_that}{why}."
            ),
        },
        severity="error" if alone and waited >= ctx.options.error_after else "notice",
        role="root_cause" if alone else "unknown",
        job=ctx.job,
        since=call.t,
        culprits=(p.who,) if alone else (),
        waiters=(p.who,) if alone or api.ends_comm is None else (),
    )


def _inside(e: Endpoint, api: str) -> bool:
    calls = e.process.inside.values()
    return not e.process.ended and any(c.api == api and c.comm == e.info.id for c in calls)


def _inside_collective(e: Endpoint) -> Inside | None:
    if e.process.ended:
        return None
    calls = e.process.inside.values()
    mine = (c for c in calls if c.comm == e.info.id and c.is_collective and not c.group)
    return min(mine, key=lambda c: c.t, default=None)


def judge_level(comm: Communicator, waits: list[Wait], ctx: Context) -> Finding | None:
    """All have entered the newest slot; some are still inside, the others have returned."""
    if not any(e.process.inside for e in comm.endpoints.values()):
        return None
    members = comm.members()
    if comm.ambiguous or comm.disagreement is not None or not comm.complete_view:
        return None
    if len({e.entered for e in members}) != 1:
        return None
    inside = [(e, c) for e in members if (c := _inside_collective(e)) is not None]
    newest = max(e.last_t for e in members)
    if not inside or len(inside) == len(members):
        return None
    until = max(waiting_until(e, ctx) for e, _ in inside)
    if until - newest < ctx.options.missing_after:
        return None
    if any(e.process.ended or e.end is not None for e in members):
        return None
    held = {e.actor for w in waits for e in w.entered}
    if any(e.actor in held for e, _ in inside):
        return None
    return _level(comm, members, inside, until - newest, ctx)


def _level(
    comm: Communicator,
    members: list[Endpoint],
    inside: list[tuple[Endpoint, Inside]],
    waited: int,
    ctx: Context,
) -> Finding:
    ranks = [e.comm_rank for e, _ in inside if e.comm_rank is not None]
    back = [e.comm_rank for e in members if e.comm_rank not in ranks and e.comm_rank is not None]
    few = 2 * len(ranks) < len(members)
    held = tense.of(e for e, _ in inside)
    signature = ctx.table[comm.last_sig] if comm.last_sig is not None else None
    api = signature.api if signature else inside[0][1].api
    return Finding(
        key=("exit", *comm.key, comm.last_seq, tuple(ranks)),
        hang_type="collective_missing_exit",
        run_id=ctx.run_id,
        comm_uid_hash=comm.key.hash,
        comm_seq=comm.last_seq,
        detected_at=ctx.now,
        details={
            **on_communicator(
                comm,
                api,
                [e.comm_rank for e in members],
                "call_not_returned",
                "inferred",
                waited_s=seconds(waited),
                lossy=lost_any(members),
            ),
            "signature": signature.text() if signature else None,
            "inside_comm_ranks": ranks,
            "returned_comm_ranks": back,
            "summary": (
                f"All members of communicator {comm.label} entered {api} #{comm.last_seq}; it has "
                f"returned on {in_job(e for e in members if e.comm_rank in back)}, and not on "
                f"{in_job(e for e, _ in inside)} for {seconds(waited):.1f} s{held.until}."
            ),
        },
        severity="error" if waited >= ctx.options.error_after else "notice",
        role="root_cause" if few else "unknown",
        job=ctx.job,
        coverage=coverage_of(comm, ctx.now, ctx.options.silent_after),
        since=max(e.last_t for e in members),
        culprits=tuple(e.process.who for e, _ in inside) if few else (),
        waiters=tuple(e.process.who for e in members),
    )


def relabel(state: State, waits: list[Wait], contexts: Mapping[CommKey, Context]) -> None:
    """Absent ranks that are inside the call before: it is that call that does not return.

    After roles are set: a rank that waits for somebody elsewhere is left as it is.
    """
    behind = {a for w in waits if w.device for a in w.heads or ()}
    for w in waits:
        f = w.finding
        if f is None or f.hang_type != "collective_missing_enter" or f.role == "downstream":
            continue
        if not w.absent or "hypotheses" in f.details or not f.culprits:
            continue
        if f.role == "root_cause" and all(e.actor in behind for e in w.absent):
            continue  # its stream stands before something else: it is not the call that holds it
        calls = [_inside_collective(e) for e in w.absent]
        ctx = contexts[w.comm.key]
        now = ctx.now
        if any(c is None or now - c.t < ctx.options.missing_after for c in calls):
            continue
        f.hang_type = "nccl_missing_exit"
        f.role = "root_cause"
        f.details["reason"] = "call_not_returned"
        f.details["confidence"] = min(f.details["confidence"], "inferred", key=_CONFIDENCE.index)
        for status in f.details["missing_rank_status"]:
            status["reason"] = "call_not_returned"
        call = calls[0]
        assert call is not None
        held, they = tense.of(w.absent), replace(tense.of(w.entered), n=2)
        f.details["summary"] = (
            f"{capital(named(w.absent, f'communicator {w.comm.label}'))} "
            f"{held.be} inside {call.api} for {seconds(now - call.t):.1f} s{held.until}, although "
            f"all {they.have} entered it and the others {they.have} returned; they {they.wait} in "
            f"{w.label}."
        )
        _spare(f, list(w.absent), w.comm.members(), state)


_CONFIDENCE = ("none", "reduced", "inferred", "observed")
