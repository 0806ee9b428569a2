"""Findings: their names, values and JSON, defined once.

``docs/findings.md`` and ``finding.schema.json`` are generated from this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

HANG_TYPES: dict[str, str] = {
    "collective_missing_enter": "members wait in a collective that others have not entered",
    "delayed_collective_enter": "a rank came to collectives later than all others",
    "collective_mismatch": "members came to one slot with different calls or arguments",
    "skipped_or_extra_call": "a rank's calls are shifted: it left out a call, or made one more",
    "collective_all_ranks_stuck": "all members are inside the same collective and it does not end",
    "nccl_missing_exit": "a call does not return: it could, or members do not come to the end",
    "nccl_error_exit": "an NCCL function returned an error",
    "comm_init_missing_enter": "ranks wait in a communicator's initialisation for others",
    "comm_init_rank_conflict": "two processes claim one rank of a new communicator",
    "comm_init_stuck": "all ranks are in a communicator's initialisation and it does not end",
    "comm_ended_under_waiters": "a member ended the communicator while others wait on it",
    "waiting_for_unobserved": "all observed members wait; the rest is not traced",
    "p2p_mismatch": "a send and its receive differ",
    "p2p_unmatched": "a send or receive without partner: its peer left it out, or does not come",
    "p2p_order_inversion": "two peers send and receive in orders that exclude each other",
    "collective_missing_exit": "a collective that all entered does not end on some members",
    "cross_comm_order_inversion": "members use two communicators in orders that exclude each other",
}
#: Names that later releases will use; part of the contract already.
RESERVED_HANG_TYPES: dict[str, str] = {}

REASONS: dict[str, str] = {
    "rank_alive_but_not_entered": "its process lives and is observed, and has not made the call",
    "rank_left_no_dump": "it left no whole dump, and nothing else explains what others wait for",
    "rank_device_not_begun": "its host has queued the call, and its device has not begun it",
    "rank_exit_or_crash_suspected": "its process ended by a signal or with a code other than 0",
    "rank_exited": "its process ended; with code 0, or the code is not known",
    "rank_waiting_elsewhere": "it waits itself, in a collective of another communicator",
    "rank_inside_other_call": "it is inside another NCCL call",
    "rank_not_observed": "no trace speaks for it, or its collector is silent",
    "probe_event_loss_possible": "events of this rank were lost: the call may be among them",
    "rank_ended_communicator": "it ended the communicator itself",
    "arguments_differ": "its call differs from that of the others",
    "calls_swapped": "it made two calls in the other order than the others",
    "call_skipped": "it left out a call that the others made",
    "call_extra": "it made a call that the others did not make",
    "partner_gone_past": "it has gone past the send or receive, to later calls",
    "wrong_peer": "its send or receive has another peer than the one that waits for it",
    "wrong_communicator": "two ranks use different communicators for one send and receive",
    "rank_late": "it came later than all others",
    "call_returned_error": "the function returned an error",
    "ranks_not_in_init": "fewer ranks came than the communicator has",
    "rank_claimed_twice": "two processes initialise one rank at the same time",
    "call_not_returned": "its call does not return, although nothing is known to hold it up",
    "all_inside": "all members are inside the call",
    "not_complete_here": "calls that its peers have completed do not complete on it",
    "all_silent_after": "all members made the call, and none has called NCCL since",
    "orders_exclude": "each side waits in a call that the other has not made",
}

BASE_MEANINGS: dict[str, str] = {
    "exact": "seen from its init, or NCCL's own counters agree with those of another rank",
    "aligned": "placed in the one way that fits: by few counters, or by the calls alone",
    "ambiguous": "several places fit, as the calls repeat; one of them is taken as a guess",
    "unknown": "no place is known: the rank is not judged",
}

STATES = ("open", "resolved")
SEVERITIES = ("notice", "error")
ROLES = ("root_cause", "downstream", "unknown")
HEARTBEATS = ("alive", "stale", "absent", "unavailable")
CONFIDENCES = ("observed", "inferred", "reduced", "none")


@dataclass
class Finding:
    """One finding.  ``key`` identifies it while it lasts."""

    key: tuple[Any, ...]
    hang_type: str
    run_id: str
    comm_uid_hash: str | None
    comm_seq: int | None
    detected_at: int
    details: dict[str, Any]
    severity: str
    role: str = "unknown"
    downstream_of: str | None = None
    state: str = "open"
    job: str | None = None
    coverage: dict[str, Any] = field(default_factory=dict)
    #: The processes it points at, for readers: host, pid and rank of each.
    named: list[dict[str, Any]] = field(default_factory=list)
    #: The limits that it was found by.
    limits: dict[str, float] = field(default_factory=dict)
    #: For the wait-for rule and the report, not written.
    since: int = 0
    #: When all who waited had given it up, unix ns; None: somebody waits still.
    until: int | None = None
    culprits: tuple[Hashable, ...] = ()  # processes it points at
    waiters: tuple[Hashable, ...] = ()  # processes that wait
    #: Culprits that nothing keeps from coming: they wait for nothing, or their peers came all
    #: the same from what these wait in.
    free: frozenset[Hashable] = frozenset()
    #: It blames who waits for nobody only if others have come, whose events were lost.
    supposes: bool = False
    #: Only the root with its data is absent: what such waits taught before (lessons.Lesson).
    for_root: tuple[str, int | None, int] | None = None
    #: Rank in the communicator -> rank in the job, for the report; empty: they are the same.
    job_ranks: dict[int, int] = field(default_factory=dict)
    #: Rank in the communicator -> what became of it since (``tense.fate``), for the report.
    past: dict[int, str] = field(default_factory=dict)
    #: Of those that are named the processes that have ended: host and pid.
    gone: frozenset[tuple[str, int]] = frozenset()
    #: The summary with who waits first, for where that one turns out to be wrong.
    waiter_first: str | None = None
    #: Members (endpoints) that entered and have left: they are to be named.
    left: tuple[Any, ...] = ()
    #: Processes to which an error was returned that is a consequence -> when, unix ns.
    failed: dict[Hashable, int] = field(default_factory=dict)
    #: Processes that may be those that did not come, of whom only ranks are known.
    candidates: tuple[Hashable, ...] = ()

    @property
    def id(self) -> str:
        """Stable: the same fault in the same traces has the same id."""
        text = "\0".join(str(part) for part in self.key)
        return "f" + hashlib.blake2s(text.encode("utf-8", "replace"), digest_size=5).hexdigest()

    def resolved(self, now: int) -> Finding:
        """The same finding, ended."""
        return replace(self, state="resolved", details={**self.details, "resolved_at_unix_ns": now})

    def to_json(self) -> dict[str, Any]:
        """The published shape and our additions."""
        return {
            "hang_type": self.hang_type,
            "run_id": self.run_id,
            "comm_uid_hash": self.comm_uid_hash,
            "comm_seq": self.comm_seq,
            "detected_at_unix_ns": self.detected_at,
            "details": self.details,
            "id": self.id,
            "state": self.state,
            "severity": self.severity,
            "role": self.role,
            "downstream_of": self.downstream_of,
            "culprits": self.named,
            "job": self.job,
            "coverage": self.coverage,
            "limits": self.limits,
        }


def seconds(ns: int) -> float:
    """Nanoseconds as seconds with millisecond resolution."""
    return round(ns / 1e9, 3)


def required(
    api: str | None,
    nranks: int | None,
    entered: Sequence[int | None],
    reason: str,
    confidence: str,
    *,
    waited_s: float,
    lossy: bool,
) -> dict[str, Any]:
    """The details that every finding has; no rank is missing, unless the caller adds some.

    ``entered``: communicator ranks; ``lossy``: whether lost events may be behind it.
    """
    return {
        "api": api,
        "expected_nranks": nranks,
        "entered_comm_ranks": list(entered),
        "missing_comm_ranks": [],
        "missing_rank_status": [],
        "waited_s": waited_s,
        "reason": reason,
        "confidence": confidence,
        "trace_event_loss_possible": lossy,
    }
