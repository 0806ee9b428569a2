"""What is said of a rank in a finding, and how sure it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nccluprobe.match.align import AMBIGUOUS, BASES, UNKNOWN
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import seconds
from nccluprobe.match.options import SECOND
from nccluprobe.match.process import TOGETHER, Inside, Process

#: Clocks of two hosts that say nothing of their error may differ by this much.
UNKNOWN_CLOCK = 1 * SECOND

#: State of the main thread of a rank that left no dump, and that others wait for.
NO_DUMP = "no_dump"
#: State of the main thread of a rank that has queued its calls, and whose device begins none.
NOT_BEGUN = "not_begun"

_BY_STATE = {NO_DUMP: "rank_left_no_dump", NOT_BEGUN: "rank_device_not_begun"}

#: So many ranks' alignments are told in a finding.
_KEPT = 64

SIGINT, SIGTERM = 2, 15
#: Calls that end a communicator and may wait for its other members.
ENDING = frozenset({"ncclCommDestroy", "ncclCommFinalize"})
#: Shells and launchers report these signals as exit codes.
_POLITE_CODES = (0, 128 + SIGINT, 128 + SIGTERM)


def unseen(e: Endpoint) -> int:
    """How many more collectives a member may have entered than are seen, their records lost.

    With the end of a group all that is queued in it may have been entered.
    """
    idx = -1 if e.last_idx is None else e.last_idx
    lost = e.process.unseen_after(e.info.id, idx, e.last_t)
    return lost + e.in_group if lost and e.queued_in_group else lost


def is_silent(p: Process, now: int, limit: int) -> bool:
    """Whether its collector is too far behind for anything to be said of now."""
    bound = UNKNOWN_CLOCK if p.bound is None else p.bound
    return p.silent_for(now) > limit + bound


def inside_end(e: Endpoint) -> Inside | None:
    """The call that ends this communicator, together with others, and that it is inside of."""
    found = (c for c in e.process.all_inside() if c.api in ENDING and c.comm == e.info.id)
    return next(found, None)


def heartbeat(p: Process | None, now: int, limit: int) -> tuple[str, float | None]:
    """Heartbeat value and the age of what it rests on."""
    if p is None or (p.coverage is None and p.end is None):
        return "unavailable", None
    if p.coverage is not None and p.coverage.main == NO_DUMP:
        return "unavailable", None
    if (over := p.over) is not None:
        return "absent", seconds(max(0, now - over.t))
    if p.coverage is None:
        return "unavailable", None
    age = seconds(max(0, now - p.coverage.t))
    if p.coverage.alive is False:
        return "absent", age
    return ("stale" if is_silent(p, now, limit) else "alive"), age


def absent_reason(p: Process) -> str:
    """Why a rank that has not ended did not come, as far as can be told at once."""
    main = None if p.coverage is None else p.coverage.main
    return _BY_STATE.get(main or "", "rank_alive_but_not_entered")


def end_reason(p: Process) -> str:
    """Why an ended process did not come."""
    end = p.end
    if end is not None and (end.how == "signaled" or end.signal or (end.code or 0) != 0):
        return "rank_exit_or_crash_suspected"
    return "rank_exited"


def had_left(p: Process, until: int, limit: int) -> bool:
    """Whether a process ended while others waited on until then: not in one shutdown."""
    return p.ended and p.end is not None and until - p.end.t > limit


def ended_abruptly(p: Process) -> bool:
    """Whether it ended in a way that no orderly shutdown explains."""
    end = p.end
    if end is None:
        return False
    if end.how == "signaled" or end.signal:
        return end.signal not in (SIGINT, SIGTERM, None)
    return end.code is not None and end.code not in _POLITE_CODES


def crashed_alone(p: Process, others: Iterable[Process]) -> bool:
    """Whether a process ended abruptly, and none of the others in the same way at that time.

    Who kills a job as a whole reaches one rank first, be it by milliseconds, and of those that
    give up together, as PyTorch's watchdogs do, one is the first.
    """
    end = p.end
    if end is None or not ended_abruptly(p):
        return False
    ends = [x.end for x in others if x is not p and x.end is not None]
    alike = any(x.signal == end.signal and abs(x.t - end.t) <= TOGETHER for x in ends)
    return not (end.signal and alike)


def rank_status(
    comm: Communicator | None,
    comm_rank: int,
    e: Endpoint | None,
    now: int,
    limit: int,
    reason: str,
) -> dict[str, Any]:
    """One entry of ``missing_rank_status``."""
    p = e.process if e is not None else None
    beat, age = heartbeat(p, now, limit)
    status: dict[str, Any] = {
        "comm_rank": comm_rank,
        "global_rank": p.rank if p is not None else None,
        "heartbeat": beat,
        "heartbeat_age_s": age,
        "probe_dropped_events": None,
        "reason": reason,
    }
    if e is None or p is None:
        return status
    if beat in ("alive", "absent"):
        status["probe_dropped_events"] = p.lost_since(e.last_t)
    status["call_idx"] = e.last_idx
    if comm is not None:
        status["last_comm_seq"] = comm.seq(e.entered - 1) if e.entered else None
    status |= process_facts(p)
    if e.last_t:
        status["last_entered_unix_ns"] = e.last_t
    if (phase := p.phases.now(now)) is not None:
        status |= {"phase": phase.name, "phase_s": seconds(now - phase.since)}
    if e.queued_in_group:
        status["queued_in_open_group"] = True
    if e.end is not None:
        status["comm_end"] = e.end.how
    if (inside := p.inside_now()) is not None:
        status["inside"] = inside.api
        status["inside_s"] = seconds(max(0, now - inside.t))
    return status


def process_facts(p: Process) -> dict[str, Any]:
    """Where a process is and what is known of its state."""
    facts: dict[str, Any] = {}
    if p.info is not None and p.info.pid:  # 0: a source that does not tell
        facts |= {"host": p.info.host, "pid": p.info.pid}
    if (end := p.end or p.set_aside) is not None:
        facts["process_end"] = end.how
        facts["exit_code"] = end.code
        facts["signal"] = end.signal
        facts["ended_unix_ns"] = end.t
    if p.end is None and p.coverage is not None:
        facts["main_thread"] = p.coverage.main
        if p.coverage.syscall is not None:
            facts["syscall"] = p.coverage.syscall
    return facts


def how_ended(facts: dict[str, Any]) -> str:
    """How a process ended, in brackets, or that it is not known; empty: no end was seen.

    ``facts``: ``process_end``, ``exit_code`` and ``signal``, as in the status of a rank.
    """
    if facts.get("process_end") is None:
        return ""
    if facts.get("signal") is not None:
        return f" (signal {facts['signal']})"
    if facts["process_end"] == "signaled":
        return " (signal not known)"
    code = facts.get("exit_code")
    return " (exit code not known)" if code is None else f" (exit code {code})"


def coverage_of(comm: Communicator, now: int, limit: int) -> dict[str, Any]:
    """The coverage that a finding on this communicator rests on."""
    known = [e for _, e in sorted(comm.endpoints.items())]
    silent = [
        e.comm_rank for e in known if not e.process.ended and is_silent(e.process, now, limit)
    ]
    members = comm.members()
    cannot_see = sorted(
        {what for e in known if e.process.info for what in e.process.info.cannot_see}
    )
    bases = {e.base for e in known}
    notes = []
    if silent:
        notes.append("collector silent: these ranks are not observed")
    if AMBIGUOUS in bases:
        notes.append("attached late, and the calls fit in several ways: a verdict is a guess")
    if comm.unwatched:
        notes.append("no longer waited for: " + ranks_text(sorted(comm.unwatched)))
    lost = sum(e.process.lost for e in known)
    return {
        "observed_ranks": len(members),
        "expected_nranks": comm.key.nranks,
        "unobserved_comm_ranks": ranks_text(comm.unobserved()),
        "collector_silent_comm_ranks": silent,
        "through_unix_ns": min((e.process.through for e in members), default=None),
        "lost_events": lost,
        # The weakest of all members.
        "base": next((b for b in BASES if b in bases), UNKNOWN),
        "alignment": alignment_of(known),
        "numbers": "from the first call seen" if comm.relative else "NCCL's",
        "cannot_see": cannot_see,
        "notes": notes,
    }


def alignment_of(endpoints: list[Endpoint]) -> list[dict[str, Any]]:
    """How each member that was attached late was placed among the others."""
    return [
        {
            "comm_rank": e.comm_rank,
            "base": e.base,
            "shift": e.first_slot,
            "why": "not compared so far" if e.placement is None else e.placement.why,
            "other_shifts": 0 if e.placement is None else e.placement.others,
        }
        for e in endpoints
        if e.late
    ][:_KEPT]


def ranks_text(ranks: list[int]) -> str:
    """``0-2,5`` for [0, 1, 2, 5]."""
    parts: list[str] = []
    at = 0
    while at < len(ranks):
        end = at
        while end + 1 < len(ranks) and ranks[end + 1] == ranks[end] + 1:
            end += 1
        parts.append(str(ranks[at]) if end == at else f"{ranks[at]}-{ranks[end]}")
        at = end + 1
    return ",".join(parts)


def left_at(e: Endpoint) -> int | None:
    """When a member ended, or ended the communicator; None: it is there."""
    ends = (e.end, e.process.end if e.process.ended else None)
    return min((x.t for x in ends if x is not None), default=None)


def last_sign(e: Endpoint) -> int:
    """When its process called NCCL last, as far as is seen."""
    return max(e.process.last_activity, e.last_t)
