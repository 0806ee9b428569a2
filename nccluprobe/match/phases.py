"""Phases that a job declares: while one lasts, below its limit, nobody is missed.

The claim is the job's own word, so it is believed for so long only: up to the
limit of the phase, up to the process's end, and, where the job promised to
write again, up to when it fell silent.  What is proven needs no limit: an end,
a difference, a deadlock are found in any phase.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nccluprobe.match.finding import Finding
from nccluprobe.match.options import SECOND, Options

if TYPE_CHECKING:
    from nccluprobe.match.absence import Context
    from nccluprobe.match.communicator import CommKey
    from nccluprobe.match.process import Process
    from nccluprobe.match.waits import Wait

_KEPT = 64
#: A promise to write again is broken after so many of its intervals, or so long.
_MISSED, _LEAST = 3, 10 * SECOND
#: Reasons that a phase explains: nothing shows that the rank cannot come any more.
_EXCUSABLE = frozenset(
    {
        "rank_alive_but_not_entered",
        "rank_inside_other_call",
        "rank_waiting_elsewhere",
        "rank_not_observed",
        "probe_event_loss_possible",
    }
)

#: Findings that rest on nothing but how long a call has lasted.
_BY_TIME = frozenset(
    {
        "collective_all_ranks_stuck",
        "comm_init_missing_enter",
        "comm_init_stuck",
        "nccl_missing_exit",
        "waiting_for_unobserved",
    }
)


@dataclass(frozen=True)
class Phase:
    """What a process says of itself in its heartbeat; ``name`` None: in no phase since ``since``.

    ``beat``: when it said so; ``every``, ``limit``: ns, by its own word.
    """

    source: int
    t: int
    name: str | None
    since: int
    beat: int
    every: int | None = None
    limit: int | None = None
    step: int | None = None


@dataclass
class Declared:
    """One phase of a process; times in unix ns.  ``ended`` None: it lasts."""

    name: str
    since: int
    beat: int
    every: int | None = None
    limit: int | None = None
    step: int | None = None
    ended: int | None = None

    def until(self, now: int) -> int:
        """Until when it is believed, as far as the limit does not matter."""
        end = now if self.ended is None else min(now, self.ended)
        if self.every is not None:
            end = min(end, self.beat + max(_MISSED * self.every, _LEAST))
        return end


@dataclass
class Phases:
    """What one process declared, oldest first."""

    declared: deque[Declared] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def note(self, p: Phase) -> None:
        """Take what the process says of itself now."""
        last = self.declared[-1] if self.declared else None
        if last is not None and last.ended is None:
            if last.name == p.name:
                last.beat = max(last.beat, p.beat)
                last.every, last.limit, last.step = p.every, p.limit, p.step
                return
            last.ended = max(last.since, p.since)
        if p.name is not None:
            self.declared.append(Declared(p.name, p.since, p.beat, p.every, p.limit, p.step))

    def now(self, now: int) -> Declared | None:
        """The phase that it is in, by its own word."""
        last = self.declared[-1] if self.declared else None
        return last if last is not None and last.until(now) >= now >= last.since else None

    def excused_until(self, since: int, now: int, options: Options) -> int:
        """The last moment in [since, now] at which a phase within its limit held; 0: none."""
        for d in reversed(self.declared):
            until = d.until(now)
            if until < since:
                continue
            if d.since <= until and until - d.since <= options.phase_limit(d.name, d.limit):
                return until
        return 0


def of_process(p: Process, since: int, now: int, options: Options) -> int:
    """As ``Phases.excused_until``; a process that has ended is in no phase."""
    if not p.phases.declared:
        return 0
    end = p.end.t if p.ended and p.end is not None else now
    return p.phases.excused_until(since, min(now, end), options)


def apply(
    waits: list[Wait],
    current: list[Finding],
    contexts: Mapping[CommKey, Context],
    processes: Iterable[Process],
    context_of: Callable[[int], Context],
) -> list[Finding]:
    """Drop findings of waits that a phase explains; returns what remains.

    The clock of such a wait starts again when the phase is over.  A rank in a
    phase is not named beside others.  ``context_of`` takes a process's source.
    """
    declared = {p.who: p for p in processes if p.phases.declared}
    if not declared:
        return current
    for p in declared.values():
        ctx = context_of(p.source)
        since = ctx.now - ctx.options.missing_after
        p.in_phase = bool(of_process(p, since, ctx.now, ctx.options))
    excused = _solve(waits, contexts)
    dropped: set[int] = set()
    for w in waits:
        f = w.finding
        if f is None or not _excusable(f):
            continue
        ctx = contexts[w.comm.key]
        until = excused[id(w)]
        if until:
            left = _until(w, ctx) - max(until, w.first)
            if left < ctx.options.missing_after:
                dropped.add(id(f))
                w.finding = None
            elif left < ctx.options.error_after:
                f.severity = "notice"
        else:
            _spare(w, f, ctx)
    mine = {id(w.finding) for w in waits if w.finding is not None}
    for f in current:
        if f.hang_type in _BY_TIME and id(f) not in mine and f.state == "open":
            alone = [declared[who] for who in (*f.candidates, *f.waiters) if who in declared]
            if any(_held_back(p, f, context_of(p.source)) for p in alone):
                dropped.add(id(f))
    return [f for f in current if id(f) not in dropped]


def _held_back(p: Process, f: Finding, ctx: Context) -> bool:
    """Whether one of those inside, or that may be missing, is in a phase."""
    until = of_process(p, f.since, ctx.now, ctx.options)
    return bool(until) and ctx.now - max(until, f.since) < ctx.options.missing_after


def _excusable(f: Finding) -> bool:
    return all(s["reason"] in _EXCUSABLE for s in f.details["missing_rank_status"])


def _until(w: Wait, ctx: Context) -> int:
    """Until when somebody is known to have waited."""
    from nccluprobe.match.absence import waiting_until

    return max((waiting_until(e, ctx) for e in w.entered), default=ctx.now)


def _solve(waits: Iterable[Wait], contexts: Mapping[CommKey, Context]) -> dict[int, int]:
    """Wait -> the moment up to which phases explain it, through others' waits too; 0: not."""
    waits = list(waits)
    sits: dict[Hashable, list[Wait]] = {}
    for w in waits:
        for e in w.entered:
            sits.setdefault(e.actor, []).append(w)
    found = {id(w): 0 for w in waits}
    own = {
        (id(w), e.actor): of_process(e.process, w.first, ctx.now, ctx.options)
        for w in waits
        for ctx in (contexts[w.comm.key],)
        for e in (*w.absent, *w.held)
    }
    changed = True
    while changed:
        changed = False
        for w in waits:
            ends = [
                max(
                    own[id(w), e.actor],
                    max((found[id(x)] for x in sits.get(e.actor, ()) if x is not w), default=0),
                )
                for e in (*w.absent, *w.held)
            ] + [found[id(x)] for x in w.behind if id(x) in found]
            until = min(ends, default=0)
            if until > found[id(w)]:
                found[id(w)] = until
                changed = True
    return found


def _spare(w: Wait, f: Finding, ctx: Context) -> None:
    """Of several that did not come, those in a phase are not named."""
    spared = set()
    for e in w.absent:
        until = of_process(e.process, w.first, ctx.now, ctx.options)
        if until and ctx.now - max(until, w.first) < ctx.options.missing_after:
            spared.add(e.process.who)
    if spared:
        f.culprits = tuple(who for who in f.culprits if who not in spared)
