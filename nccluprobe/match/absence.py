"""Who did not come: the first open slot of a communicator, judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nccluprobe.match import model as m
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.details import on_communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding, seconds
from nccluprobe.match.lessons import wait_for_root
from nccluprobe.match.options import Options
from nccluprobe.match.signature import Signature, SignatureTable
from nccluprobe.match.status import (
    absent_reason,
    coverage_of,
    crashed_alone,
    end_reason,
    ended_abruptly,
    inside_end,
    is_silent,
    left_at,
    rank_status,
    unseen,
)
from nccluprobe.match.waits import Wait


@dataclass(frozen=True)
class Context:
    """What every rule needs besides the communicator: passed in, never looked up."""

    options: Options
    table: SignatureTable
    now: int
    run_id: str
    job: str | None


@dataclass(frozen=True)
class OpenSlot:
    """The first slot that some observed members entered and others did not."""

    slot: int
    entered: tuple[Endpoint, ...]
    absent: tuple[Endpoint, ...]
    first: int  # entry of the first member
    until: int  # how long somebody is known to have waited
    signature: Signature | None
    queued_behind: int  # later slots that somebody entered
    #: Of the absent: events of theirs were lost since, and others are surely absent.
    perhaps: tuple[Endpoint, ...] = ()

    @property
    def waited(self) -> int:
        """How long the first member has waited."""
        return self.until - self.first


def waiting_until(e: Endpoint, ctx: Context) -> int:
    """Until when this member is known to have waited: now, or its end.

    Who has begun to end the communicator and is inside that call still waits.
    """
    ends = [ctx.now]
    if e.end is not None and inside_end(e) is None:
        ends.append(e.end.t)
    if e.process.end is not None:
        ends.append(e.process.end.t)
    elif is_silent(e.process, ctx.now, ctx.options.silent_after):
        ends.append(e.process.through)
    return min(ends)


def open_slot(comm: Communicator, ctx: Context) -> OpenSlot | None:
    """The communicator's first open slot, None when all are level."""
    if comm.ambiguous:
        return None
    members = comm.members()
    sure = [e for e in members if not e.guessed]
    # What is certain is judged before what is a guess.
    if len({e.entered for e in sure}) > 1:
        members = sure
    if len(members) < 2:
        return None
    slot = min(e.entered for e in members)
    entered = tuple(e for e in members if e.entered > slot)
    at = dict.fromkeys(entered, slot)
    if ctx.table.any_zero and comm.discards_zero:
        # Who has only calls of count 0 there takes no part, and waits for nobody.
        at = {e: n for e in entered if (n := _real_call(e, slot, ctx.table)) is not None}
        entered = tuple(at)
    times = [t for e, n in at.items() if (t := e.t_at(n)) is not None]
    if entered and not times:
        # They entered it before they were traced, or it is forgotten already.
        times = [int(e.rows.t[0]) if len(e.rows) else e.last_t for e in entered]
    if not times:
        return None
    sigs = [s for e, n in at.items() if (s := e.sig_at(n)) not in (None, m.SIG_LOST)]
    absent = tuple(e for e in members if e not in at)
    return OpenSlot(
        slot=slot,
        entered=entered,
        absent=absent,
        perhaps=_perhaps(absent),
        first=min(times),
        until=max(waiting_until(e, ctx) for e in entered),
        signature=ctx.table[max(set(sigs), key=sigs.count)] if sigs else None,
        queued_behind=max(e.entered for e in entered) - slot - 1,
    )


def _perhaps(absent: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
    """Who may have come unseen, beside others that have not: one fault explains enough."""
    found = tuple(e for e in absent if unseen(e) and not _crashed(e))
    return found if len(found) < len(absent) else ()


def _crashed(e: Endpoint) -> bool:
    return e.process.ended and ended_abruptly(e.process)


def _may_have_come(e: Endpoint, o: OpenSlot) -> bool:
    """Whether its call may be among events that were lost."""
    if e.queued and not e.queued_in_group:
        return True
    lost = unseen(e)
    # The only one that is absent waits for nobody in the slots that all others have entered.
    return lost >= (min(x.entered for x in o.entered) - o.slot if len(o.absent) == 1 else 1)


def _real_call(e: Endpoint, slot: int, table: SignatureTable) -> int | None:
    """Its first slot from this one on that is no call of count 0."""
    start = max(0, slot - e.dropped)
    if start >= len(e.rows):
        return slot
    held = e.rows.sig[start:].tolist()
    return next((slot + n for n, sig in enumerate(held) if not table.is_zero(sig)), None)


def wait_of(comm: Communicator, o: OpenSlot, finding: Finding | None) -> Wait:
    """The open slot as a node of the wait-for graph."""
    seq = comm.seq(o.slot)
    name = o.signature.api if o.signature else "call"
    return Wait(
        comm=comm,
        label=f"{name} #{seq}",
        api=o.signature.api if o.signature else None,
        first=o.first,
        entered=o.entered,
        absent=(absent := tuple(e for e in o.absent if e not in o.perhaps)),
        weak=bool(absent) and all(_may_have_come(e, o) for e in absent),
        finding=finding,
        at=(o.slot,),
        seq=seq,
    )


@dataclass(frozen=True)
class _Verdict:
    hang_type: str
    reasons: dict[int, str]  # comm rank -> reason
    missing: tuple[Endpoint, ...]
    not_observed: tuple[Endpoint, ...]
    proof: bool
    loss: bool


def judge(comm: Communicator, o: OpenSlot, ctx: Context) -> Finding | None:
    """A finding for an open slot, if it has been open long enough or there is proof."""
    if comm.disagreement is not None:
        return None
    verdict = _verdict(o, ctx)
    if verdict is None:
        return None
    return _finding(comm, o, verdict, ctx)


def _verdict(o: OpenSlot, ctx: Context) -> _Verdict | None:
    opt = ctx.options
    silent: list[Endpoint] = []
    watched: list[Endpoint] = []
    for e in o.absent:
        not_seen = not e.process.ended and is_silent(e.process, ctx.now, opt.silent_after)
        (silent if not_seen and e.end is None else watched).append(e)
    if not watched:
        return _not_observed(o, silent, ctx)
    reasons: dict[int, str] = {}
    proof = ended_comm = False
    asserted = True
    lossy = 0
    for e in watched:
        rank = e.comm_rank if e.comm_rank is not None else -1
        ended_at = left_at(e)
        left = ended_at is not None and _left_waiters(e, ended_at, o, ctx)
        if _may_have_come(e, o) and not (_crashed(e) and e.end is None):
            lossy += 1
            reasons[rank] = "probe_event_loss_possible"
            if left:
                continue
        elif left:
            proof = True
            comm_ended_first = e.end is not None and (
                not e.process.ended or e.end.t <= (e.process.end.t if e.process.end else ctx.now)
            )
            ended_comm |= comm_ended_first
            reasons[rank] = "rank_ended_communicator" if comm_ended_first else end_reason(e.process)
            continue
        else:
            inside = e.process.inside_now() is not None
            reasons[rank] = "rank_inside_other_call" if inside else absent_reason(e.process)
        if e in o.perhaps:
            continue
        # Who was held by others when these came is missing since it was set free.
        since = max(o.first, e.last_t, e.process.held_until(o.first))
        known = e.process.heard_until(ctx.now) if ended_at is None else ended_at
        if o.until - since < opt.missing_after or known - since < opt.missing_after:
            asserted = False
    if not (proof or asserted):
        return None
    hang_type = "comm_ended_under_waiters" if ended_comm else "collective_missing_enter"
    loss = 0 < lossy == len(watched)
    return _Verdict(hang_type, reasons, tuple(watched), tuple(silent), proof, loss)


def _not_observed(o: OpenSlot, silent: list[Endpoint], ctx: Context) -> _Verdict | None:
    """Only unobserved ranks are behind: said, when the others have stopped."""
    newest = max(e.last_t for e in o.entered)
    if o.until - max(newest, o.first) < ctx.options.missing_after:
        return None
    reasons = {e.comm_rank: "rank_not_observed" for e in silent if e.comm_rank is not None}
    return _Verdict("collective_missing_enter", reasons, tuple(silent), (), proof=False, loss=False)


def _left_waiters(e: Endpoint, ended_at: int, o: OpenSlot, ctx: Context) -> bool:
    """Whether others waited on after it had ended: a whole job going down is no hang."""
    grace = min(ctx.options.silent_after, ctx.options.missing_after)
    if e.end is None and crashed_alone(e.process, (x.process for x in o.entered)):
        grace = 0
    if e.end is not None and not e.end.orderly and _broke_down(o, ended_at):
        grace = 0  # an abort is no orderly end: they went down because of it
    return o.until - max(ended_at, o.first) > grace


def _broke_down(o: OpenSlot, since: int) -> bool:
    ends = [e.process.end for e in o.entered if ended_abruptly(e.process)]
    return any(end is not None and end.t >= since for end in ends)


def is_guess(o: OpenSlot) -> bool:
    """Whether it rests on a place that is one of several: then nobody is named as sure."""
    return any(e.guessed for e in o.absent) or all(e.guessed for e in o.entered)


def _confidence(v: _Verdict, o: OpenSlot) -> str:
    if not any(r != "rank_not_observed" for r in v.reasons.values()):
        return "none"
    exact = all(e.base == "exact" and not e.lost for e in (*o.entered, *o.absent))
    if v.loss or v.not_observed or not exact or "rank_left_no_dump" in v.reasons.values():
        return "reduced"
    return "observed"


#: The reason of a finding is the strongest of its ranks'.
_STRENGTH = (
    "rank_exit_or_crash_suspected",
    "rank_ended_communicator",
    "rank_exited",
    "call_skipped",
    "partner_gone_past",
    "rank_alive_but_not_entered",
    "rank_left_no_dump",
    "rank_device_not_begun",
    "rank_inside_other_call",
    "rank_waiting_elsewhere",
    "probe_event_loss_possible",
    "rank_not_observed",
)


def strongest(reasons: list[str]) -> str:
    """The reason that stands for several ranks."""
    return min(reasons, key=_STRENGTH.index)


def _finding(comm: Communicator, o: OpenSlot, v: _Verdict, ctx: Context) -> Finding:
    opt = ctx.options
    limit = opt.silent_after
    blamed = any(r != "rank_not_observed" for r in v.reasons.values())
    guess = is_guess(o)
    is_error = v.proof or (o.waited >= opt.error_after and blamed and not v.loss)
    missing = [e.comm_rank for e in v.missing if e.comm_rank is not None]
    details: dict[str, Any] = {
        **on_communicator(
            comm,
            o.signature.api if o.signature else None,
            [e.comm_rank for e in o.entered],
            strongest(list(v.reasons.values())),
            _confidence(v, o),
            waited_s=seconds(o.waited),
            lossy=v.loss or any(e.lost for e in (*o.entered, *o.absent)),
        ),
        "missing_comm_ranks": missing,
        "missing_rank_status": [
            rank_status(comm, e.comm_rank, e, ctx.now, limit, v.reasons[e.comm_rank])
            for e in v.missing
            if e.comm_rank is not None
        ],
        "signature": o.signature.text() if o.signature else None,
        "first_entered_unix_ns": o.first,
        "queued_behind": o.queued_behind,
        "entered_call_idx": {str(e.comm_rank): e.idx_at(o.slot) for e in o.entered},
        "not_observed_comm_ranks": [e.comm_rank for e in v.not_observed],
        "unobserved_comm_ranks": len(comm.unobserved()),
    }
    if guess:
        is_error, blamed = False, False
        details["note"] = (
            "attached late, and the calls fit in several ways: which rank is behind is a guess"
        )
    return Finding(
        key=("absence", *comm.key, o.slot, tuple(missing)),
        hang_type=v.hang_type,
        run_id=ctx.run_id,
        comm_uid_hash=comm.key.hash,
        comm_seq=comm.seq(o.slot),
        detected_at=ctx.now,
        details=details,
        severity="error" if is_error else "notice",
        job=ctx.job,
        coverage=coverage_of(comm, ctx.now, limit),
        since=o.first,
        culprits=tuple(e.process.who for e in v.missing) if blamed else (),
        waiters=tuple(e.process.who for e in o.entered),
        for_root=wait_for_root(o) if blamed else None,
    )
