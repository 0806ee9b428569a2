"""The finding made of counters: who is behind, by how much, in which function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nccluprobe.match.absence import Context, strongest
from nccluprobe.match.finding import Finding, required, seconds
from nccluprobe.match.names import capital, numbers
from nccluprobe.match.status import end_reason, process_facts, ranks_text
from nccluprobe.plural import counted, verb

if TYPE_CHECKING:
    from nccluprobe.match.standing import Group, Stand

_ONE_LOOK = (
    "one look at the counters: a job that goes on shows small differences, too; "
    "look again after a while (--missing-after)"
)

_TOO_SOON = (
    "the looks are too near to each other to name a cause: look again after a while "
    "(--missing-after)"
)


def describe(group: Group, lags: dict[int, dict[str, int]], ctx: Context) -> Finding:
    """A finding for ranks that stand behind others."""
    ahead = [s for r, s in sorted(group.stands.items()) if r not in lags]
    missing = group.least(lags)
    behind = [group.stands[r] for r in missing]
    between = [group.stands[r] for r in lags if r not in set(missing)]
    # Ranks that are each behind the other in something: nobody is in front.
    front = ahead or [max((*behind, *between), key=lambda s: s.calls)]
    waited = max(s.still for s in front)
    settled = min(waited, *(s.still for s in (*behind, *between))) >= ctx.options.missing_after
    now = max(ctx.now, *(s.until for s in group.stands.values()))
    statuses = [_status(s, lags[s.rank], now) for s in behind]
    reason = strongest([s["reason"] for s in statuses])
    entered = sorted((*ahead, *between), key=lambda s: s.rank)
    apis = sorted({api for r in missing for api in lags[r]})
    unobserved = [r for r in range(group.nranks) if r not in group.stands]
    details: dict[str, Any] = {
        **required(
            apis[0] if len(apis) == 1 else None,
            group.nranks,
            [s.rank for s in entered],
            reason,
            "inferred",
            waited_s=seconds(waited),
            lossy=False,
        ),
        "missing_comm_ranks": missing,
        "missing_rank_status": statuses,
        "evidence": "inspect",
        "behind_in": apis,
        "positions": {
            str(r): {"counters": list(s.seqs), "source": s.source, "unix_ns": s.until}
            for r, s in sorted(group.stands.items())[:64]
        },
        "comm_name": group.name,
        "instance": None,
        "unobserved_comm_ranks": len(unobserved),
        "summary": _summary(group, front, behind, between, lags, waited),
    }
    if not settled:
        details["note"] = _TOO_SOON if waited else _ONE_LOOK
    alone = bool(ahead) and reason not in ("rank_inside_other_call", "rank_waiting_elsewhere")
    return Finding(
        key=("standing", group.hash, group.nranks, tuple(missing)),
        hang_type="collective_missing_enter",
        run_id=ctx.run_id,
        comm_uid_hash=group.hash,
        comm_seq=min(s.calls for s in behind),
        detected_at=now,
        details=details,
        severity="error" if settled and waited >= ctx.options.error_after else "notice",
        role="root_cause" if settled and alone else "unknown",
        job=ctx.job,
        coverage={
            "observed_ranks": len(group.stands),
            "expected_nranks": group.nranks,
            "unobserved_comm_ranks": ranks_text(unobserved),
            "base": "exact",
            "numbers": "NCCL's",
            "cannot_see": ["calls without a counter", "graph_replay"],
            "notes": ["by NCCL's own counters in the processes' memory, not by calls seen"],
        },
        since=min(s.since for s in front),
        culprits=tuple(s.who for s in behind),
        waiters=tuple(s.who for s in entered),
    )


def describe_gone(group: Group, ctx: Context) -> Finding:
    """A finding for ranks whose process is gone while others still use the communicator."""
    gone = dict(sorted(group.gone.items()))
    now = max(ctx.now, *(look.t for look in gone.values()))
    statuses = []
    for rank, look in gone.items():
        status: dict[str, Any] = {
            "comm_rank": rank,
            "global_rank": look.rank,
            "heartbeat": "absent",
            "heartbeat_age_s": seconds(max(0, now - look.t)),
            "probe_dropped_events": None,
            "reason": "rank_exit_or_crash_suspected",
        }
        if look.key.pid:
            status |= {"host": look.host, "pid": look.key.pid}
        statuses.append(status)
    missing, stay = list(gone), sorted(group.stands)
    label = group.hash + (f" ({group.name})" if group.name else "")
    several = len(missing) > 1
    details: dict[str, Any] = {
        **required(
            None,
            group.nranks,
            stay,
            "rank_exit_or_crash_suspected",
            "inferred",
            waited_s=0.0,
            lossy=False,
        ),
        "missing_comm_ranks": missing,
        "missing_rank_status": statuses,
        "comm_name": group.name,
        "instance": None,
        "summary": (
            f"{capital(numbers(missing))} of communicator {label} "
            f"{'are' if several else 'is'} gone: the process{'es' if several else ''} "
            f"cannot be reached any more, while {counted(len(stay), 'other')} still "
            f"{verb(len(stay), 'uses')} it."
        ),
    }
    return Finding(
        key=("gone", group.hash, group.nranks, tuple(missing)),
        hang_type="comm_ended_under_waiters",
        run_id=ctx.run_id,
        comm_uid_hash=group.hash,
        comm_seq=None,
        detected_at=now,
        details=details,
        severity="error",
        role="root_cause",
        job=ctx.job,
        coverage={"observed_ranks": len(stay), "expected_nranks": group.nranks},
        since=min(look.t for look in gone.values()),
        culprits=tuple(look.key for look in gone.values()),
        waiters=tuple(s.who for _, s in sorted(group.stands.items())),
    )


def _status(s: Stand, lag: dict[str, int], now: int) -> dict[str, Any]:
    look, p = s.look, s.process
    alive = look.alive if look is not None else p is not None and not p.ended
    inside = s.inside
    reason = "rank_alive_but_not_entered"
    if p is not None and p.ended:
        reason = end_reason(p)
    elif not alive:
        reason = "rank_exited"
    elif inside:
        reason = "rank_inside_other_call"
    status: dict[str, Any] = {
        "comm_rank": s.rank,
        "global_rank": p.rank if p is not None and p.rank is not None else look and look.rank,
        "heartbeat": "alive" if alive else "absent",
        "heartbeat_age_s": seconds(max(0, now - s.until)),
        "probe_dropped_events": None,
        "reason": reason,
        "behind": lag,
        "counters": list(s.seqs),
        "source": s.source,
        "still_s": seconds(s.still),
    }
    if look is not None:
        status["main_thread"] = look.main
        if look.key.pid:
            status |= {"host": look.host, "pid": look.key.pid}
        if look.syscall is not None:
            status["syscall"] = look.syscall
    if p is not None:
        status |= process_facts(p)
    if inside:
        status["inside"] = inside[0]
    return status


def _summary(
    group: Group,
    front: list[Stand],
    behind: list[Stand],
    between: list[Stand],
    lags: dict[int, dict[str, int]],
    waited: int,
) -> str:
    label = group.hash + (f" ({group.name})" if group.name else "")
    parts = []
    for s in behind[:4]:
        place = f" (pid {s.who.pid}" + ("" if s.look is None else f" on {s.look.host}") + ")"
        place = place if s.who.pid else ""
        lag = " and ".join(f"{n} {api}" for api, n in sorted(lags[s.rank].items()))
        parts.append(f"rank {s.rank}{place} is {lag} behind")
    if len(behind) > 4:
        parts.append(f"{counted(len(behind) - 4, 'more rank', 'is')} behind")
    text = ", ".join(parts)
    have = "have" if len(front) > 1 else "has"
    known = f", and {have} not moved for {seconds(waited):.1f} s" if waited else ""
    if between:
        many = len(between) > 1
        known += (
            f"; {numbers(s.rank for s in between)} {'are' if many else 'is'} behind, too, but "
            f"{'have' if many else 'has'} made calls that {numbers(s.rank for s in behind)} "
            f"{'have' if len(behind) > 1 else 'has'} not come to"
        )
    return (
        f"{text[0].upper()}{text[1:]} on communicator {label}, by NCCL's own counters: "
        f"{numbers(s.rank for s in front)} went furthest{known}."
    )
