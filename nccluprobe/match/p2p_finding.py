"""Findings of sends and receives: their details and sentences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nccluprobe.match import tense
from nccluprobe.match.absence import Context
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.details import on_communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding, seconds
from nccluprobe.match.names import capital, named, numbers
from nccluprobe.match.p2p_pair import Pair, size_of
from nccluprobe.match.p2p_queue import Op
from nccluprobe.match.p2p_units import Open, Unit
from nccluprobe.match.signature import SignatureTable
from nccluprobe.match.status import coverage_of, rank_status

WORD = {True: ("ncclSend", "to"), False: ("ncclRecv", "from")}


def _call(op: Op, table: SignatureTable) -> str:
    name, word = WORD[bool(op.send)]
    s = table[op.sig]
    if s.count is None:
        return f"{name} {word} rank {op.peer}"
    return f"{name}(count {s.count}, {s.datatype}) {word} rank {op.peer}"


def _op(op: Op, rank: int, table: SignatureTable) -> dict[str, Any]:
    s = table[op.sig]
    return {
        "api": WORD[bool(op.send)][0],
        "comm_rank": rank,
        "peer": op.peer,
        "ord": op.ord,
        "call_idx": None if op.idx < 0 else op.idx,
        "count": s.count,
        "datatype": s.datatype,
        "bytes": size_of(s),
        "entered_unix_ns": op.t,
    }


def base(comm: Communicator, first: int, until: int, loss: bool, **more: Any) -> dict[str, Any]:
    """Details that all findings have."""
    details: dict[str, Any] = {
        **on_communicator(
            comm,
            None,
            [],
            "rank_alive_but_not_entered",
            "observed",
            waited_s=seconds(max(0, until - first)),
            lossy=loss,
        ),
        "first_entered_unix_ns": first,
    }
    return details | more


def made(
    comm: Communicator,
    ctx: Context,
    hang_type: str,
    key: tuple[Any, ...],
    details: dict[str, Any],
    error: bool,
    role: str,
    culprits: Iterable[Endpoint],
    waiters: Iterable[Endpoint],
) -> Finding:
    """A finding with these details."""
    return Finding(
        key=("p2p", hang_type, *comm.key, *key),
        hang_type=hang_type,
        run_id=ctx.run_id,
        comm_uid_hash=comm.key.hash,
        comm_seq=None,
        detected_at=ctx.now,
        details=details,
        severity="error" if error else "notice",
        role=role,
        job=ctx.job,
        coverage=coverage_of(comm, ctx.now, ctx.options.silent_after),
        since=details["first_entered_unix_ns"],
        culprits=tuple(dict.fromkeys(e.process.who for e in culprits)),
        waiters=tuple(dict.fromkeys(e.process.who for e in waiters)),
    )


def differing(
    comm: Communicator, pair: Pair, ctx: Context, odd: Endpoint | None, loss: bool
) -> Finding:
    """A send and its receive of another size (or, as a notice, of another type)."""
    c, table = pair.channel, ctx.table
    sizes = [size_of(table[op.sig]) for op in (pair.send, pair.recv)]
    same_bytes = sizes[0] is not None and sizes[0] == sizes[1]
    src, dst = comm.endpoints[c.src], comm.endpoints[c.dst]
    details = base(
        comm,
        pair.first,
        ctx.now,
        loss,
        api="ncclSend",
        entered_comm_ranks=[c.src, c.dst],
        reason="calls_swapped" if pair.swapped else "arguments_differ",
        confidence="reduced" if loss else "observed",
        provisional=pair.provisional,
        differs_in=["datatype"] if same_bytes else ["bytes"],
        pair=[_op(pair.send, c.src, table), _op(pair.recv, c.dst, table)],
        position=pair.position,
        several_shifts_fit=pair.several_fit,
    )
    text = (
        f"{capital(named([src]))} called {_call(pair.send, table)} where {named([dst])} called "
        f"{_call(pair.recv, table)}, pair #{pair.position} of communicator {comm.label}"
    )
    if same_bytes:
        details["explanation"] = "same bytes, other type"
        text += ": same bytes, other type."
    else:
        if 0 in sizes:
            details["explanation"] = "one side passed count 0"
        text += f": {sizes[0]} bytes sent, {sizes[1]} awaited"
        if pair.swapped:
            text += ", and the other way round in the next pair: the order differs"
        text += (
            "; neither side is the odd one."
            if odd is None
            else (f"; {named([odd])} differs from what it and its peers do otherwise.")
        )
    details["summary"] = text
    return made(
        comm,
        ctx,
        "p2p_mismatch",
        (c.src, c.dst, pair.position, same_bytes),
        details,
        error=not (same_bytes or pair.provisional or loss),
        role="unknown" if pair.provisional or same_bytes else "root_cause",
        culprits=() if odd is None or pair.provisional else (odd,),
        waiters=() if same_bytes else (src, dst),
    )


def left_over(
    comm: Communicator,
    ctx: Context,
    has: Endpoint,
    lacks: Endpoint,
    ops: tuple[Op, ...],
    culprit: Endpoint | None,
    *,
    loss: bool,
    shifted: bool = False,
    provisional: bool = False,
    several_fit: bool = False,
    position: int = 0,
) -> Finding:
    """Operations that one side made and the other did not: both have gone on, or ended."""
    op, table = ops[0], ctx.table
    extra = culprit is has
    details = base(
        comm,
        op.t,
        ctx.now,
        loss,
        api=WORD[bool(op.send)][0],
        entered_comm_ranks=[has.comm_rank],
        missing_comm_ranks=[lacks.comm_rank],
        reason="call_extra" if extra else "call_skipped",
        confidence="reduced" if loss else "inferred",
        provisional=provisional,
        unmatched=[_op(o, has.comm_rank or 0, table) for o in ops[:8]],
        position=position,
        several_shifts_fit=several_fit,
    )
    details["missing_rank_status"] = [_status(comm, lacks, ctx, details["reason"])]
    calls = f"{_call(op, table)}" + (f" ({len(ops)} calls)" if len(ops) > 1 else "")
    other = "receive" if op.send else "send"
    if extra:
        text = f"{capital(named([has]))} made an extra {calls}"
        text += f": {named([lacks])} has no {other} for it"
    else:
        text = f"{capital(named([lacks]))} left out a {other}: {named([has])} called {calls}"
        if culprit is None:
            text = (
                f"{capital(named([has]))} called {calls} and {named([lacks])} has no {other} "
                "for it: one made a call too many, or the other one too few"
            )
    after = "what follows on both sides is shifted by it" if shifted else "both have ended"
    details["summary"] = f"{text}, #{position} of communicator {comm.label}; {after}."
    return made(
        comm,
        ctx,
        "p2p_unmatched",
        (has.comm_rank, op.send, op.peer, position, "left"),
        details,
        error=shifted and not (provisional or loss),
        role="unknown" if provisional else "root_cause",
        culprits=() if provisional or culprit is None else (culprit,),
        waiters=(has, lacks) if shifted and not provisional else (),
    )


def misplaced(
    comm: Communicator,
    ctx: Context,
    unit: Unit,
    o: Open,
    wanted: tuple[Communicator, Unit, Open],
    culprit: Endpoint | None,
    loss: bool,
) -> Finding:
    """An operation with the wrong peer or on the wrong communicator."""
    there, waiting, other = wanted
    same = o.peer is not None and o.peer.process.who == waiting.endpoint.process.who
    rank, peer = unit.endpoint.comm_rank, waiting.endpoint.comm_rank
    it = tense.of([waiting.endpoint])
    details = base(
        comm,
        min(unit.t, waiting.t),
        ctx.now,
        loss,
        api=WORD[bool(o.op.send)][0],
        entered_comm_ranks=[rank],
        missing_comm_ranks=[o.op.peer],
        reason="wrong_communicator" if same else "wrong_peer",
        confidence="reduced" if loss else "inferred",
        unmatched=[_op(o.op, rank or 0, ctx.table), _op(other.op, peer or 0, ctx.table)],
        awaited_on_comm=there.key.hash,
    )
    details["summary"] = (
        f"{capital(named([unit.endpoint]))} called {_call(o.op, ctx.table)} on communicator "
        f"{comm.label}, which nobody {it.have} answered, and {named([waiting.endpoint])} "
        f"{it.wait} in "
        f"{_call(other.op, ctx.table)}"
        + (f" on communicator {there.label}: " if there is not comm else ": ")
        + ("the two used different communicators." if same else "the call has the wrong peer.")
    )
    return made(
        comm,
        ctx,
        "p2p_unmatched",
        (rank, o.op.send, o.op.peer, o.position, "misplaced"),
        details,
        error=not loss,
        role="root_cause",
        culprits=() if culprit is None else (culprit,),
        waiters=(unit.endpoint, waiting.endpoint),
    )


def _status(comm: Communicator, e: Endpoint, ctx: Context, reason: str) -> dict[str, Any]:
    limit = ctx.options.silent_after
    return rank_status(comm, -1 if e.comm_rank is None else e.comm_rank, e, ctx.now, limit, reason)


def unmatched(
    comm: Communicator,
    ctx: Context,
    unit: Unit,
    reasons: dict[int, tuple[Endpoint, str]],
    reason: str,
    until: int,
    *,
    error: bool,
    loss: bool,
    confidence: str,
    culprits: tuple[Endpoint, ...],
    role: str = "unknown",
    not_observed: tuple[int, ...] = (),
) -> Finding:
    """Operations that wait for peers, judged like an open collective."""
    e = unit.endpoint
    unseen = not reasons
    details = base(
        comm,
        unit.t,
        until,
        loss,
        api=unit.ops[0].text.split()[0],
        entered_comm_ranks=[e.comm_rank],
        missing_comm_ranks=sorted(reasons),
        missing_rank_status=[_status(comm, x, ctx, why) for _, (x, why) in sorted(reasons.items())],
        reason=reason,
        confidence=confidence,
        unmatched=[_op(o.op, e.comm_rank or 0, ctx.table) for o in unit.ops[:64]],
        position=unit.ops[0].position,
        inside=unit.hard is not None,
        not_observed_comm_ranks=list(not_observed),
        unobserved_comm_ranks=len(comm.unobserved()),
    )
    waits = _waits_text(comm, details, unit)
    turned = f"{capital(waits)}: {_missing_text(unit, reasons, culprits)}"
    lead = {r: x for r, x in reasons.items() if x[0] in culprits}
    details["summary"] = _blames_text(unit, waits, reasons, lead) if lead else turned
    f = made(
        comm,
        ctx,
        "waiting_for_unobserved" if unseen else "p2p_unmatched",
        (e.comm_rank, unit.ops[0].op.send, unit.ops[0].op.peer, unit.ops[0].position, "open"),
        details,
        error=error,
        role=role,
        culprits=culprits,
        waiters=(e,),
    )
    f.waiter_first = turned
    return f


#: ``{}``: the send or receive; ``{be}``: is or was.
_WHY = {
    "rank_alive_but_not_entered": "has not made {}",
    "rank_left_no_dump": "has left no whole dump",
    "rank_device_not_begun": "has queued {}, and its device has not begun it",
    "rank_inside_other_call": "{be} inside another NCCL call",
    "rank_exit_or_crash_suspected": "crashed or was killed",
    "rank_exited": "has exited",
    "rank_ended_communicator": "has ended the communicator",
    "probe_event_loss_possible": "may have made {}: events of it were lost",
    "partner_gone_past": "has gone past {}, to later calls",
    "call_skipped": "has ended its group of this step without {}",
    "rank_not_observed": "is not observed",
}


def _waits_text(comm: Communicator, details: dict[str, Any], unit: Unit) -> str:
    it = tense.of([unit.endpoint])
    held = f"{it.be} inside" if unit.hard is not None else f"{it.wait} in"
    return (
        f"{named([unit.endpoint])} {held} {unit.label} of communicator {comm.label} "
        f"for {details['waited_s']:.1f} s{it.until}"
    )


def _told(reasons: dict[int, tuple[Endpoint, str]], what: str) -> str:
    """What each of some ranks has done instead of ``what``."""
    told = [
        f"{named([x]) if x.comm_rank == r else f'rank {r} of the communicator'} "
        f"{_WHY.get(why, why.replace('_', ' ')).format(what, be=tense.of([x]).be)}"
        for r, (x, why) in sorted(reasons.items())[:6]
    ]
    return ", ".join(told)


def _other(unit: Unit) -> str:
    return "receive" if unit.ops[0].op.send else "send"


def _missing_text(
    unit: Unit, reasons: dict[int, tuple[Endpoint, str]], culprits: tuple[Endpoint, ...]
) -> str:
    """What lacks, of who waits."""
    if not reasons:
        return "its peer is not observed."
    if unit.endpoint in culprits:
        have = "has" if len(reasons) == 1 else "have"
        return f"an extra call, {numbers(reasons)} {have} done all that they did before."
    return f"the {_other(unit)} is missing; {_told(reasons, 'it')}."


def _blames_text(
    unit: Unit,
    waits: str,
    reasons: dict[int, tuple[Endpoint, str]],
    lead: dict[int, tuple[Endpoint, str]],
) -> str:
    """Who did not come, and then who waits for it."""
    rest = {r: x for r, x in reasons.items() if r not in lead}
    also = f"; {_told(rest, 'it')}" if rest else ""
    return f"{capital(_told(lead, f'a {_other(unit)}'))}: {waits}{also}."
