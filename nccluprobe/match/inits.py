"""Communicators in the making: ranks that wait for others, ranks claimed twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nccluprobe.match import model as m
from nccluprobe.match.absence import Context
from nccluprobe.match.finding import Finding, seconds
from nccluprobe.match.process import Process
from nccluprobe.match.status import is_silent, process_facts, ranks_text

_KEPT = 10_000


@dataclass
class _Claim:
    """A rank that a process initialises."""

    process: Process
    rank: int
    t: int
    api: str
    thread: int
    t_exit: int | None = None  # None: still inside
    group: int = 0

    def inside(self) -> bool:
        """Whether it still waits for the others, as far as the trace tells."""
        if self.t_exit is None:
            return not self.process.ended
        end = self.process.groups.get(self.group) if self.group else None
        return end is not None and end.open and not self.process.ended

    def until(self, now: int, limit: int) -> int:
        """Until when it is known to have been inside."""
        if self.process.ended and self.process.end is not None:
            return min(now, self.process.end.t)
        return self.process.through if is_silent(self.process, now, limit) else now


@dataclass
class _Init:
    uid_hash: str
    nranks: int
    claims: list[_Claim] = field(default_factory=list)
    done: bool = False


@dataclass
class Inits:
    """All initialisations by unique id."""

    inits: OrderedDict[str, _Init] = field(default_factory=OrderedDict)

    def note(self, call: m.Enter | m.Call, process: Process) -> None:
        """Take an init call, entered or finished."""
        if call.uid_hash is None or call.rank is None or call.nranks is None:
            return
        if not 0 < call.nranks <= m.MAX_NRANKS:
            return
        init = self.inits.get(call.uid_hash)
        if init is None:
            init = self.inits[call.uid_hash] = _Init(call.uid_hash, call.nranks)
            if len(self.inits) > _KEPT:
                self.inits.popitem(last=False)
        claim = next(
            (
                c
                for c in init.claims
                if c.process.who == process.who and c.thread == call.thread and c.t == call.t
            ),
            None,
        )
        if claim is None:
            if len(init.claims) >= 4 * init.nranks + 16:
                return
            claim = _Claim(process, call.rank, call.t, call.api, call.thread, group=call.group)
            init.claims.append(claim)
        if isinstance(call, m.Call):
            claim.t_exit = max(call.t, call.t_exit)
            if m.not_run(call.rc):
                init.claims.remove(claim)
            elif call.rc == 0 and not call.group and not call.nonblocking:
                init.done = True  # a blocking init returns when all have come

    def findings(self, context: Callable[[int], Context]) -> list[Finding]:
        """What is wrong with initialisations now."""
        found: list[Finding] = []
        for init in self.inits.values():
            if not init.claims:
                continue
            ctx = context(init.claims[0].process.source)
            found += _conflicts(init, ctx)
            missing = None if init.done else _missing(init, ctx)
            if missing is not None:
                found.append(missing)
        return found


def _missing(init: _Init, ctx: Context) -> Finding | None:
    limit = ctx.options.silent_after
    waiting = [c for c in init.claims if c.inside()]
    came = sorted({c.rank for c in init.claims})
    if not waiting or len(came) >= init.nranks:
        return None
    first = min(c.t for c in waiting)
    waited = max(c.until(ctx.now, limit) for c in waiting) - first
    if waited < ctx.options.missing_after:
        return None
    missing = [r for r in range(init.nranks) if r not in set(came)]
    details: dict[str, Any] = {
        "api": waiting[0].api,
        "expected_nranks": init.nranks,
        "entered_comm_ranks": came,
        "missing_comm_ranks": missing,
        "missing_rank_status": [
            {
                "comm_rank": r,
                "global_rank": None,
                "heartbeat": "unavailable",
                "heartbeat_age_s": None,
                "probe_dropped_events": None,
                "reason": "ranks_not_in_init",
            }
            for r in missing[:64]
        ],
        "waited_s": seconds(waited),
        "reason": "ranks_not_in_init",
        "confidence": "inferred",
        "trace_event_loss_possible": any(c.process.lost for c in init.claims),
        "first_entered_unix_ns": first,
        "summary": (
            f"{waiting[0].api} of communicator {init.uid_hash} ({init.nranks} ranks) waits for "
            f"{seconds(waited):.1f} s: rank{'s' if len(missing) > 1 else ''} "
            f"{ranks_text(missing)} not seen in it, "
            f"rank{'s' if len(came) > 1 else ''} {ranks_text(came)} inside."
        ),
    }
    return Finding(
        key=("init", init.uid_hash, tuple(missing[:64]), len(missing)),
        hang_type="comm_init_missing_enter",
        run_id=ctx.run_id,
        comm_uid_hash=init.uid_hash,
        comm_seq=None,
        detected_at=ctx.now,
        details=details,
        severity="error" if waited >= ctx.options.error_after else "notice",
        role="root_cause",
        job=ctx.job,
        since=first,
        waiters=tuple(c.process.who for c in waiting),
    )


def _conflicts(init: _Init, ctx: Context) -> list[Finding]:
    by_rank: dict[int, list[_Claim]] = {}
    for c in init.claims:
        by_rank.setdefault(c.rank, []).append(c)
    found = []
    for rank, claims in sorted(by_rank.items()):
        if len(claims) < 2:
            continue
        claims.sort(key=lambda c: c.t)
        pair = next(
            (
                (a, b)
                for i, a in enumerate(claims)
                for b in claims[i + 1 :]
                if a.process.who != b.process.who and b.t <= _ends(a)
            ),
            None,
        )
        if pair is not None:
            found.append(_conflict(init, rank, pair, ctx))
    return found


def _ends(c: _Claim) -> int:
    if c.t_exit is not None:
        return c.t_exit
    end = c.process.end
    return end.t if end is not None else 2**63 - 1


def _conflict(init: _Init, rank: int, pair: tuple[_Claim, _Claim], ctx: Context) -> Finding:
    came = sorted({c.rank for c in init.claims})
    who = " and ".join(c.process.label() for c in pair)
    return Finding(
        key=("conflict", init.uid_hash, rank),
        hang_type="comm_init_rank_conflict",
        run_id=ctx.run_id,
        comm_uid_hash=init.uid_hash,
        comm_seq=None,
        detected_at=ctx.now,
        details={
            "api": pair[0].api,
            "expected_nranks": init.nranks,
            "entered_comm_ranks": came,
            "missing_comm_ranks": [],
            "missing_rank_status": [],
            "waited_s": seconds(max(0, ctx.now - pair[0].t)),
            "reason": "rank_claimed_twice",
            "confidence": "observed",
            "trace_event_loss_possible": False,
            "comm_rank": rank,
            "claimed_by": [process_facts(c.process) for c in pair],
            "summary": (
                f"Two processes claim rank {rank} of communicator {init.uid_hash} at the same "
                f"time: {who}."
            ),
        },
        severity="error",
        role="root_cause",
        job=ctx.job,
        since=pair[1].t,
        culprits=tuple(c.process.who for c in pair),
    )
