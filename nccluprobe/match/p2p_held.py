"""Hosts inside sends, receives and groups for which all have come.

Such a call makes its connections and is queued, and returns then.  Where nobody is missing
in it, nor in anything else that its process has called, the network does not connect them,
or a queue is full behind something that does not end on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from nccluprobe.match import tense
from nccluprobe.match.absence import Context
from nccluprobe.match.align import EXACT
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding, required, seconds
from nccluprobe.match.names import capital, numbers
from nccluprobe.match.p2p_open import GROUP
from nccluprobe.match.process import Inside, Process
from nccluprobe.match.status import is_silent
from nccluprobe.match.tail import GROUP as CALL_GROUP
from nccluprobe.match.waits import Wait

if TYPE_CHECKING:
    from nccluprobe.match.p2p_pair import At
    from nccluprobe.match.p2p_queue import Side
    from nccluprobe.match.state import State

_APIS = ("ncclSend", "ncclRecv", "ncclGroupEnd")
_KEY = "held transfers"


def judge(state: State, waits: Sequence[Wait], of: Callable[[int], Context]) -> list[Finding]:
    """One finding per job; ``settle`` keeps it where nothing else is wrong there."""
    waiting = {e.process.who for w in waits for e in w.entered}
    jobs: dict[str | None, list[tuple[Process, Inside]]] = {}
    where: dict[str | None, set[str]] = {}
    for p in state.processes.values():
        call = None if p.ended or p.in_phase or p.who in waiting else p.inside_now()
        if call is None or call.api not in _APIS:
            continue
        ctx = of(p.source)
        silent = is_silent(p, ctx.now, ctx.options.silent_after)
        if silent or min(ctx.now, p.through) - call.t < ctx.options.missing_after:
            continue
        ends = list(_ends(call, state.of_source.get(p.source, ()), state.p2p.sides))
        comms = [state.comm_of((e.info.source, e.info.id)) for e in ends]
        if comms and all(
            e.base == EXACT and c is not None and c.complete_view and c.disagreement is None
            for e, c in zip(ends, comms, strict=True)
        ):
            jobs.setdefault(ctx.job, []).append((p, call))
            where.setdefault(ctx.job, set()).update(c.key.hash for c in comms if c is not None)
    return [_finding(calls, where[job], of(calls[0][0].source)) for job, calls in jobs.items()]


def _ends(call: Inside, mine: Sequence[Endpoint], sides: Mapping[At, Side]) -> Iterator[Endpoint]:
    """The endpoints on which a call has something in flight."""
    for e in mine:
        side = sides.get((e.info.source, e.info.id))
        grouped = bool((e.tail.rows()[:, CALL_GROUP] == call.group).any())
        grouped |= side is not None and bool((side.recent()[:, GROUP] == call.group).any())
        if call.comm == e.info.id or (call.group and grouped):
            yield e


def _finding(calls: list[tuple[Process, Inside]], where: set[str], ctx: Context) -> Finding:
    first = min(c.t for _, c in calls)
    newest = max(c.t for _, c in calls)
    waited = ctx.now - newest
    ranks = sorted(p.rank for p, _ in calls if p.rank is not None)
    apis = " or ".join(sorted({c.api for _, c in calls}))
    lossy = any(p.lost for p, _ in calls)
    if len(ranks) == len(calls):
        who = f"{numbers(ranks)} of the job"
    else:  # not all have a known rank
        who = ", ".join(p.label() for p, _ in calls[:4])
        who += f" and {len(calls) - 4} more" if len(calls) > 4 else ""
    they = tense.of_processes(p for p, _ in calls)
    return Finding(
        key=(_KEY, ctx.job),
        hang_type="nccl_missing_exit",
        run_id=ctx.run_id,
        comm_uid_hash=next(iter(where)) if len(where) == 1 else None,
        comm_seq=None,
        detected_at=ctx.now,
        details={
            **required(
                calls[0][1].api,
                None,
                [],
                "call_not_returned",
                "reduced" if lossy else "inferred",
                waited_s=seconds(waited),
                lossy=lossy,
            ),
            "first_entered_unix_ns": first,
            "summary": (
                f"{capital(who)} {they.be} inside {apis} for {seconds(waited):.1f} s{they.until}, "
                f"although the other side of each send and receive {they.one.have} come: the "
                f"network {they.one.does} not connect them, or something that was queued before "
                f"{they.one.does} not end on the device."
            ),
        },
        severity="error" if waited >= ctx.options.error_after else "notice",
        role="unknown",
        job=ctx.job,
        since=newest,
        waiters=tuple(p.who for p, _ in calls),
    )


def settle(findings: list[Finding]) -> None:
    """A cause, where nothing else is wrong in its job; else what is wrong explains it."""
    for f in [f for f in findings if f.key[0] == _KEY]:
        others = (g for g in findings if g is not f and g.job == f.job)
        if any(g.state == "open" and g.hang_type != "delayed_collective_enter" for g in others):
            findings[:] = [g for g in findings if g is not f]
        else:
            f.role = "root_cause"
