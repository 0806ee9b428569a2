"""Cause or consequence: a wait-for rule over the open slots.

A rank that did not come to one communicator may wait itself on another: then
its absence is a consequence of that other absence.  Ranks that wait for each
other in a circle leave the role unknown.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from nccluprobe.match.absence import OpenSlot, strongest
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.finding import Finding
from nccluprobe.nccl.api import TRACED, Kind

#: Findings that explain why a rank does not come to a collective elsewhere.
_STOPS = frozenset(
    {
        "collective_mismatch",
        "skipped_or_extra_call",
        "comm_init_missing_enter",
        "comm_init_rank_conflict",
        "collective_all_ranks_stuck",
        "waiting_for_unobserved",
        "nccl_error_exit",
    }
)

#: Calls that block until others come.
_WAITS_INSIDE = frozenset(
    a.name
    for a in TRACED
    if a.kind in (Kind.P2P, Kind.ONE_SIDED) or a.name == "ncclGroupEnd" or a.makes_comm
)


@dataclass
class Wait:
    """An open slot and the finding made of it, if it is due."""

    comm: Communicator
    slot: OpenSlot
    finding: Finding | None

    @property
    def waiting(self) -> frozenset[Hashable]:
        """Processes that wait in it."""
        return frozenset(e.process.who for e in self.slot.entered)


def _blockers(wait: Wait, waits: list[Wait]) -> dict[Hashable, list[Wait]]:
    """Absent process -> open slots of other communicators in which it waits."""
    found: dict[Hashable, list[Wait]] = {}
    for e in wait.slot.absent:
        if e.process.ended or e.end is not None:
            continue
        who = e.process.who
        elsewhere = [w for w in waits if w is not wait and who in w.waiting]
        if elsewhere:
            found[who] = sorted(elsewhere, key=lambda w: (w.slot.first, w.comm.key))
    return found


def assign(waits: list[Wait], findings: list[Finding]) -> None:
    """Set role, downstream_of and reason of the absence findings."""
    blocked = {id(w): _blockers(w, waits) for w in waits}
    others = [f for f in findings if f.hang_type in _STOPS]
    for wait in waits:
        f = wait.finding
        if f is None:
            continue
        blockers = blocked[id(wait)]
        for status in f.details["missing_rank_status"]:
            _mark_waiting(status, wait, blockers)
        f.details["reason"] = strongest([s["reason"] for s in f.details["missing_rank_status"]])
        _assign_one(wait, f, blockers, blocked, others)
    _one_cause_per_culprit(waits)


def _mark_waiting(
    status: dict[str, object], wait: Wait, blockers: dict[Hashable, list[Wait]]
) -> None:
    rank = status["comm_rank"]
    e = next((e for e in wait.slot.absent if e.comm_rank == rank), None)
    if e is None or e.process.who not in blockers:
        return
    if status["reason"] in ("rank_alive_but_not_entered", "rank_inside_other_call"):
        other = blockers[e.process.who][0]
        status["reason"] = "rank_waiting_elsewhere"
        status["waits_in_comm"] = other.comm.key.hash
        status["waits_in_comm_seq"] = other.comm.seq(other.slot.slot)


def _cause_elsewhere(who: Hashable, wait: Wait, others: list[Finding]) -> str | None:
    """Another kind of finding that keeps this process from coming."""
    e = next(e for e in wait.slot.absent if e.process.who == who)
    if e.process.ended:
        others = [f for f in others if f.hang_type == "nccl_error_exit"]
    for f in others:
        if f.hang_type == "nccl_error_exit":
            # It failed after its last good call here, and did not come since.
            if who in f.culprits and f.role == "root_cause" and f.since >= e.last_t:
                return f.id
        elif who in f.waiters:
            return f.id
    return None


def _assign_one(
    wait: Wait,
    f: Finding,
    blockers: dict[Hashable, list[Wait]],
    blocked: dict[int, dict[Hashable, list[Wait]]],
    others: list[Finding],
) -> None:
    reasons = {s["reason"] for s in f.details["missing_rank_status"]}
    if not f.culprits or reasons <= {"rank_not_observed", "probe_event_loss_possible"}:
        f.role = "unknown"
        return
    free = [s for s in f.culprits if s not in blockers]
    causes = {s: _cause_elsewhere(s, wait, others) for s in free}
    if free and not all(causes.values()):
        # Inside a call that waits for others: a victim perhaps, so not blamed.
        may_wait = [s.get("inside") in _WAITS_INSIDE for s in f.details["missing_rank_status"]]
        f.role = "unknown" if all(may_wait) else "root_cause"
        return
    if free:
        f.role, f.downstream_of = "downstream", next(iter(causes.values()))
        return
    if _in_circle(wait, blocked):
        f.role = "unknown"
        return
    upstream = [w.finding.id for ws in blockers.values() for w in ws if w.finding is not None]
    upstream += [c for who in f.culprits if (c := _cause_elsewhere(who, wait, others))]
    if upstream:
        f.role, f.downstream_of = "downstream", upstream[0]


def _in_circle(start: Wait, blocked: dict[int, dict[Hashable, list[Wait]]]) -> bool:
    seen: set[int] = set()
    stack = [w for ws in blocked[id(start)].values() for w in ws]
    while stack:
        w = stack.pop()
        if w is start:
            return True
        if id(w) in seen:
            continue
        seen.add(id(w))
        stack += [x for xs in blocked[id(w)].values() for x in xs]
    return False


def _one_cause_per_culprit(waits: list[Wait]) -> None:
    """One rank that is missing on several communicators is one cause: the oldest wait."""
    first: dict[Hashable, Finding] = {}
    causes = sorted(
        (w for w in waits if w.finding is not None and w.finding.role == "root_cause"),
        key=lambda w: (w.slot.first, w.comm.key),
    )
    for w in causes:
        f = w.finding
        assert f is not None
        known = {id(first[s]): first[s] for s in f.culprits if s in first}
        if known and all(s in first for s in f.culprits):
            cause = next(iter(known.values()))
            f.role, f.downstream_of = "downstream", cause.id
        else:
            for s in f.culprits:
                first.setdefault(s, f)
