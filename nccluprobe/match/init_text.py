"""The findings made of initialisations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nccluprobe.match import tense
from nccluprobe.match.absence import Context
from nccluprobe.match.finding import Finding, required, seconds
from nccluprobe.match.names import numbers
from nccluprobe.match.process import Process
from nccluprobe.match.status import process_facts
from nccluprobe.plural import counted

if TYPE_CHECKING:
    from nccluprobe.match.inits import Claim

#: So many ranks, and so many candidates, are told one by one.
_KEPT = 64


def _finding(
    hang_type: str,
    uid_hash: str | None,
    claims: list[Claim],
    nranks: int,
    reason: str,
    ctx: Context,
    since: int,
    key: tuple[Any, ...],
    details: dict[str, Any],
    confidence: str = "inferred",
) -> Finding:
    waited = max(0, ctx.now - since)
    limit = ctx.options.error_after
    return Finding(
        key=key,
        hang_type=hang_type,
        run_id=ctx.run_id,
        comm_uid_hash=uid_hash,
        comm_seq=None,
        detected_at=ctx.now,
        details={
            **required(
                claims[0].api,
                nranks,
                sorted({c.rank for c in claims}),
                reason,
                confidence,
                waited_s=seconds(waited),
                lossy=any(c.process.lost for c in claims),
            ),
            "first_entered_unix_ns": min(c.t for c in claims),
            **details,
        },
        severity="error" if waited >= limit else "notice",
        role="root_cause",
        job=ctx.job,
        since=since,
        waiters=tuple(c.process.who for c in claims if c.waits(ctx)),
    )


def missing(
    uid_hash: str,
    nranks: int,
    waiting: list[Claim],
    came: list[int],
    elsewhere: list[Process],
    ctx: Context,
) -> Finding:
    """Ranks that did not come; ``elsewhere``: processes that may be they."""
    absent = [r for r in range(nranks) if r not in set(came)]
    first = min(c.t for c in waiting)
    candidates = elsewhere[:_KEPT]
    named = ""
    where = "have entered it, without blocking" if waiting[0].pending else "inside"
    they = tense.of_processes(c.process for c in waiting)
    it = they.one
    until = they.until and f", until {numbers(c.rank for c in waiting)} {they.fate}"
    if candidates and len(candidates) <= 8:
        named = " Not in it: " + "; ".join(p.label() for p in candidates) + "."
    f = _finding(
        "comm_init_missing_enter",
        uid_hash,
        waiting,
        nranks,
        "ranks_not_in_init",
        ctx,
        first,
        ("init", uid_hash, tuple(absent[:_KEPT]), len(absent)),
        {
            "entered_comm_ranks": came,
            "missing_comm_ranks": absent,
            "missing_rank_status": [
                {
                    "comm_rank": r,
                    "global_rank": None,
                    "heartbeat": "unavailable",
                    "heartbeat_age_s": None,
                    "probe_dropped_events": None,
                    "reason": "ranks_not_in_init",
                }
                for r in absent[:_KEPT]
            ],
            "candidates": [{"rank": p.rank, **process_facts(p)} for p in candidates],
            "summary": (
                f"{waiting[0].api} of communicator {uid_hash} ({nranks} ranks) {it.wait} for "
                f"{seconds(ctx.now - first):.1f} s{until}: {numbers(absent)} not "
                f"seen in it, {numbers(came)} {where}.{named}"
            ),
        },
    )
    f.candidates = tuple(p.who for p in elsewhere)
    return f


def stuck(uid_hash: str | None, claims: list[Claim], ctx: Context, since: int) -> Finding:
    """All ranks are in it, and none has returned."""
    nranks = claims[0].nranks
    ranks = list(range(nranks)) if uid_hash is None else sorted({c.rank for c in claims})
    they = tense.of_processes(c.process for c in claims)
    of = f" of communicator {uid_hash}" if uid_hash else f" of {claims[0].process.label()}"
    return _finding(
        "comm_init_stuck",
        uid_hash,
        claims,
        nranks,
        "all_inside",
        ctx,
        since,
        ("init_stuck", uid_hash or claims[0].process.who, claims[0].t if not uid_hash else 0),
        {
            "entered_comm_ranks": ranks,
            "summary": (
                f"All {nranks} ranks {they.be} inside {claims[0].api}{of}, the last for "
                f"{seconds(ctx.now - since):.1f} s{they.until}, and it {they.one.does} not end: "
                f"nobody {they.one.be} missing; the network between them or its set-up is the "
                f"place to look."
            ),
        },
    )


def not_returned(
    uid_hash: str, waiting: list[Claim], back: list[Claim], ctx: Context, since: int
) -> Finding:
    """The init has returned on some ranks, and not on others."""
    ranks = sorted({c.rank for c in waiting})
    they = tense.of_processes(c.process for c in waiting)
    f = _finding(
        "nccl_missing_exit",
        uid_hash,
        [*waiting, *back],
        waiting[0].nranks,
        "call_not_returned",
        ctx,
        since,
        ("init_exit", uid_hash, tuple(ranks[:_KEPT])),
        {
            "inside_comm_ranks": ranks,
            "summary": (
                f"{waiting[0].api} of communicator {uid_hash} has returned on "
                f"{counted(len(back), 'rank')}, and not on {numbers(ranks)} "
                f"for {seconds(ctx.now - since):.1f} s{they.until}."
            ),
        },
    )
    f.culprits = tuple(c.process.who for c in waiting)
    return f


def sizes(
    uid_hash: str,
    claims: list[Claim],
    found: list[tuple[int, int]],
    named: bool,
    ctx: Context,
) -> Finding:
    """Ranks that passed different sizes."""
    by_size = {n: sorted({c.rank for c in claims if c.nranks == n}) for n, _ in found}
    wrong = [c for c in claims if c.nranks != found[0][0]] if named else []
    said = " and ".join(f"{numbers(ranks)} passed nranks {n}" for n, ranks in by_size.items())
    tail = "" if named else "; no side is in the majority"
    f = _finding(
        "collective_mismatch",
        uid_hash,
        claims,
        found[0][0],
        "arguments_differ",
        ctx,
        max(c.t for c in claims),
        ("init_sizes", uid_hash),
        {
            "provisional": False,
            "differs_in": ["nranks"],
            "majority_comm_ranks": by_size[found[0][0]] if named else [],
            "minority_comm_ranks": sorted({c.rank for c in wrong}),
            "calls": [
                {"signature": f"{claims[0].api}(nranks {n})", "comm_ranks": ranks}
                for n, ranks in by_size.items()
            ],
            "summary": f"At {claims[0].api} of communicator {uid_hash}, {said}{tail}.",
        },
        confidence="observed",
    )
    f.severity = "error"
    f.culprits = tuple(c.process.who for c in wrong)
    return f


def conflict(
    uid_hash: str,
    nranks: int,
    claims: list[Claim],
    pair: tuple[Claim, Claim],
    wrong: Claim | None,
    ctx: Context,
) -> Finding:
    """Two claims of one rank at one time; ``wrong``: the one that is not its own, if known."""
    rank = pair[0].rank
    who = " and ".join(c.process.label() for c in pair)
    tail = ""
    if wrong is not None:
        right = pair[0] if wrong is pair[1] else pair[1]
        tail = f" In the job it is the rank of {right.process.place()}: the other is wrong."
    f = _finding(
        "comm_init_rank_conflict",
        uid_hash,
        claims,
        nranks,
        "rank_claimed_twice",
        ctx,
        pair[1].t,
        ("conflict", uid_hash, rank),
        {
            "comm_rank": rank,
            "claimed_by": [process_facts(c.process) for c in pair],
            "summary": (
                f"Two processes claim rank {rank} of communicator {uid_hash} at the same "
                f"time: {who}.{tail}"
            ),
        },
        confidence="observed" if wrong is None else "inferred",
    )
    f.severity = "error"
    if wrong is not None:
        f.culprits = (wrong.process.who,)
    return f
