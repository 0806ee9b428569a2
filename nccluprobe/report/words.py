"""Words for what is known of a rank; text of the target made harmless."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nccluprobe.match.finding import REASONS, Finding
from nccluprobe.match.names import numbers
from nccluprobe.match.status import how_ended
from nccluprobe.plural import counted, plural, verb

#: What a source of traces cannot see.
_UNSEEN = {
    "graph_replay": "replays of CUDA graphs",
    "groups": "which calls are one group",
    "send_recv": "sends and receives",
}
#: How ranks that were attached late got the numbers of their calls.
_PLACED = {
    "aligned": "ranks attached late were placed by their calls",
    "ambiguous": "ranks attached late were placed by a guess",
    "unknown": "a rank that was attached late could not be placed",
}


#: Of a rank of which no process is known.
MAYBE_UNTRACED = "; it may not be traced"
#: Of a rank whose process nobody has looked at.
NOTHING_KNOWN = "it has not come to this call"


def escape(text: object) -> str:
    """A name from the target, harmless on a terminal."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)
    )


def ago(seconds: float) -> str:
    """A duration for people."""
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s"


def why(status: dict[str, Any]) -> str:
    """What is known of one rank that did not come."""
    reason = status["reason"]
    over = status.get("heartbeat") == "absent"
    until = f", until its process ended{how_ended(status)}" if over else ""
    if reason == "rank_exit_or_crash_suspected":
        if status.get("signal") is not None:
            return f"its process was ended by signal {status['signal']}"
        if status.get("process_end") == "signaled":
            return "its process was ended by a signal that is not known"
        if status.get("exit_code") is None:
            return "its process cannot be reached any more"
        return f"its process exited with code {status['exit_code']}"
    if reason == "rank_left_no_dump":
        return "it left no whole dump: it is stuck or gone, and nothing else explains the wait"
    if reason == "rank_device_not_begun":
        return "its host has queued the call, and its device has not begun it"
    if reason == "rank_exited":
        code = status.get("exit_code")
        if code is None:
            return "its process has ended; its exit code is not known"
        return f"its process exited with code {code}"
    if reason == "rank_waiting_elsewhere":
        seq = status.get("waits_in_comm_seq")
        what = "a send or receive" if seq is None else f"#{seq}"
        wait = "waited" if over else "waits"
        return f"it {wait} itself in {what} of communicator {status.get('waits_in_comm')}{until}"
    if reason == "rank_inside_other_call":
        for_long = ago(status.get("inside_s") or 0)
        return f"it {'was' if over else 'is'} inside {status.get('inside')} for {for_long}{until}"
    if reason == "rank_ended_communicator":
        since = f", and its process has ended since{how_ended(status)}" if over else ""
        return f"it ended the communicator ({status.get('comm_end')}){since}"
    if reason == "rank_not_observed":
        return "it is not observed (its collector is silent, or it is not traced)"
    if reason == "probe_event_loss_possible":
        lost = status.get("probe_dropped_events")
        if not lost:
            return "its call may be among the events that were lost"
        return f"its call may be among the {counted(lost, 'event')} that {verb(lost, 'was')} lost"
    if reason == "ranks_not_in_init":
        return f"not seen in the initialisation{MAYBE_UNTRACED}"
    if reason == "call_not_returned" and over:
        return f"its call did not return{until}, although nothing is known to have held it up"
    if reason != "rank_alive_but_not_entered":
        return REASONS.get(reason, escape(reason).replace("_", " "))
    if status.get("phase"):
        phase = escape(status["phase"])
        since = ago(status.get("phase_s") or 0)
        if over:
            return f"it was in the phase {phase}, by its own word, for {since}{until}"
        return f"it is alive, and has declared the phase {phase} {since} ago"
    be = "was" if over else "is"
    where = {
        "nccl": f"its main thread {be} inside NCCL",
        "syscall": f"its main thread {be} in the system call {status.get('syscall', '(unknown)')}",
        "running": f"its main thread {be} running outside NCCL",
        "stopped": "it was stopped" if over else "its process is stopped",
        "uninterruptible": f"its main thread {be} blocked in the kernel",
    }.get(str(status.get("main_thread")))
    if over:
        doing = f": {where}" if where else ""
        return f"it was alive and outside this call{doing}{until if where else until[1:]}"
    if where is None:  # of dumps, logs and reports nobody knows what became of a process
        return NOTHING_KNOWN
    return f"it is alive and outside this call: {where}"


def doubts(f: Finding) -> Iterable[str]:
    """What keeps a finding from being certain, or was not seen at all."""
    c = f.coverage
    if silent := c.get("collector_silent_comm_ranks"):
        yield f"not observed, collector silent: {numbers(silent)}"
    if text := c.get("unobserved_comm_ranks"):
        yield f"not traced: {plural(1 if str(text).isdigit() else 2, 'rank')} {text}"
    if c.get("lost_events"):
        yield f"{counted(c['lost_events'], 'event')} lost"
    if c.get("base") in _PLACED:
        yield _PLACED[c["base"]]
    if c.get("cannot_see"):
        yield "not seen: " + ", ".join(_UNSEEN.get(x, escape(x)) for x in c["cannot_see"])
