"""Communicators whose observed members are level and do not go on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from nccluprobe.match import tense
from nccluprobe.match.absence import Context, waiting_until
from nccluprobe.match.children import inside_child
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.details import lost_any, on_communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.excuse import Stall
from nccluprobe.match.finding import Finding, seconds
from nccluprobe.match.names import capital, everyone, named, unobserved_text
from nccluprobe.match.status import coverage_of, inside_end, last_sign, ranks_text
from nccluprobe.match.waits import Wait
from nccluprobe.plural import counted


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
    inside = {e: t for e in members if (t := e.inside(other=False)) is not None}
    if not inside or any(inside_child(e) or inside_end(e) for e in inside):
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
    they = tense.of(members)
    if unobserved:
        hang_type, reason = "waiting_for_unobserved", "rank_not_observed"
        summary = (
            f"{everyone(len(ranks), comm.label, complete=False)} "
            f"{they.wait} in {api} #{seq} for "
            f"{seconds(waited):.1f} s{they.until}; {unobserved_text(len(others), comm.key.nranks)}."
        )
    else:
        hang_type, reason = "collective_all_ranks_stuck", "all_inside"
        summary = (
            f"All {len(ranks)} members of communicator {comm.label} {they.be} inside {api} #{seq} "
            f"for {seconds(waited):.1f} s{they.until}: nobody {they.one.be} missing; "
            f"{they.not_going_on}."
        )
    details: dict[str, Any] = {
        **on_communicator(
            comm,
            api,
            ranks,
            reason,
            "reduced" if unobserved else "inferred",
            waited_s=seconds(waited),
            lossy=lost_any(members),
        ),
        "signature": signature.text() if signature else None,
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
    ranks = [e.comm_rank for e in members if e.comm_rank is not None]
    waited = max(0, ctx.now - stall.since)
    elsewhere = len({e.actor for w in behind for e in w.entered})
    key = ("stall", *comm.key, comm.last_seq)
    f = _of_the_device(key, comm, members, [w.finding for w in behind], stall.since, ctx)
    f.details["entered_comm_ranks"] = ranks
    f.details["summary"] = _stall_text(
        stall, _newest_call(comm, ctx) or "its calls", waited, elsewhere
    )
    return f


def hung_finding(
    comm: Communicator, kept: Sequence[Endpoint], behind: Sequence[Finding], ctx: Context
) -> Finding:
    """Members are held up, and no rank that does not come explains all of them: the device.

    ``kept``: these members; ``behind``: findings of ranks that wait because of it.
    """
    since = max(map(last_sign, kept))
    f = _of_the_device(("hung", *comm.key), comm, kept, behind, since, ctx)
    if f.details["trace_event_loss_possible"]:
        f.details["confidence"] = "reduced"
    f.details["unobserved_comm_ranks"] = len(comm.unobserved())
    newest = _newest_call(comm, ctx)
    call = f"a call that all entered, {newest} or one before," if newest else "what they called"
    they = tense.of(kept)
    f.details["summary"] = (
        f"{capital(named(kept, f'communicator {comm.label}'))} {they.stand} still for "
        f"{f.details['waited_s']:.1f} s{they.until}, and no rank that {they.one.does} not come "
        f"explains all of them: {call} {they.one.does} not end on the device; no single rank "
        f"stands out."
    )
    return f


def _of_the_device(
    key: tuple[Hashable, ...],
    comm: Communicator,
    kept: Sequence[Endpoint],
    behind: Sequence[Finding | None],
    since: int,
    ctx: Context,
) -> Finding:
    """``kept`` stand still in what all have entered: a cause with nobody to blame."""
    signature = ctx.table[comm.last_sig] if comm.last_sig is not None else None
    severe = any(f is not None and f.severity == "error" for f in behind)
    return Finding(
        key=key,
        hang_type="collective_all_ranks_stuck",
        run_id=ctx.run_id,
        comm_uid_hash=comm.key.hash,
        comm_seq=comm.last_seq,
        detected_at=ctx.now,
        details={
            **on_communicator(
                comm,
                signature.api if signature else None,
                [e.comm_rank for e in comm.members()],
                "all_silent_after",
                "inferred",
                waited_s=seconds(max(0, ctx.now - since)),
                lossy=lost_any(comm.members()),
            ),
            "signature": signature.text() if signature else None,
            "unobserved_comm_ranks": 0,
        },
        severity="error" if severe else "notice",
        role="root_cause",
        job=ctx.job,
        coverage=coverage_of(comm, ctx.now, ctx.options.silent_after),
        since=since,
        waiters=tuple(e.process.who for e in kept),
    )


def _newest_call(comm: Communicator, ctx: Context) -> str | None:
    """The newest collective; None: it was used for sends and receives only."""
    if comm.last_sig is None:
        return None
    return f"{ctx.table[comm.last_sig].api} #{comm.last_seq}"


def _stall_text(stall: Stall, call: str, waited: int, elsewhere: int) -> str:
    comm, members = stall.comm, stall.members
    they = tense.of(members)
    others = f"{counted(elsewhere, 'other rank')} {replace(they, n=elsewhere).wait} for them"
    for_long = f"for {seconds(waited):.1f} s{they.until}"
    if len(members) == comm.key.nranks:
        who = (
            f"All {len(members)} members of communicator {comm.label} entered {call} and none of "
            f"them {they.one.have} called NCCL {for_long}"
        )
    else:
        who = (
            f"All {comm.key.nranks} members of communicator {comm.label} entered {call}, after "
            f"which {named(members)} {they.have} not called NCCL {for_long}"
        )
    return (
        f"{who}, while {others}: either this call {they.one.does} not end on the device, or all "
        f"of them left together; no single rank stands out."
    )
