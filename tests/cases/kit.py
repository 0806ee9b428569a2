"""What the made-up cases are built of: host states, verdicts, a registry.

A case is a job (``support.tracegen``) with what is true of it.  Host states are
those that a collector writes: a thread inside NCCL, in a system call, running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from support.tracegen import Comm, Job, Proc, S

AR, AG, RS, BC = "ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclBroadcast"
SEND, RECV = "ncclSend", "ncclRecv"
#: Elements of a message that NCCL buffers, and of one that it does not (float32).
SMALL, LARGE = 256, 64 << 20

#: Seconds after which the cases' waits count; the traces cover a little more.
FAST = {"missing_after": 6.0, "late_after": 4.0, "error_after": 12.0}
PAST = 15.0  # seconds from the hang to the end of the trace: past error_after


@dataclass(frozen=True)
class State:
    """What a main thread does while it is outside NCCL."""

    main: str
    syscall: str | None = None

    @property
    def busy(self) -> bool:
        """Whether it burns CPU time."""
        return self.main == "running"


#: Computes, or spins in a CUDA synchronisation: from outside they look alike.
RUNS = State("running")
#: A data loader's queue, a file, a socket of another library: not the device.
READS = State("syscall", "read")
SLEEPS = State("syscall", "clock_nanosleep")
SERVES = State("syscall", "epoll_wait")
JOINS = State("syscall", "wait4")
#: CUDA with blocking synchronisation, or anything else that polls.
POLLS = State("syscall", "poll")
#: The main thread while autograd's thread makes the calls.
LOCKED = State("syscall", "futex")
WRITES = State("uninterruptible", "write")
STOPPED = State("stopped")


def watch(p: Proc, end: float, *states: tuple[float, State], start: float = 0.5) -> None:
    """Coverage each second until ``end``; each state holds from its moment on.

    To be called when all calls are made: whether the main thread is inside
    NCCL, and the age of the last call, are read from them.
    """
    spans: list[tuple[int, int | None, int]] = []
    done = {(x["thread"], x["t"]) for _, _, x in p.lines if x["kind"] == "call"}
    for _, _, x in p.lines:
        if x["kind"] == "call":
            spans.append((x["t"], None if x["dur"] is None else x["t"] + x["dur"], x["thread"]))
        elif x["kind"] == "enter" and (x["thread"], x["t"]) not in done:
            spans.append((x["t"], None, x["thread"]))
    times = sorted(t for t0, t1, _ in spans for t in (t0, t1) if t is not None)
    held = sorted((t0, t1) for t0, t1, tid in spans if tid == p.pid and (t1 is None or t1 - t0 > S))
    order = sorted(states, key=lambda s: s[0]) or [(0.0, RUNS)]
    t, cpu, seen = start, 0, 0
    while True:
        at = p.host.at(t)
        state = next((s for since, s in reversed(order) if since <= t), order[0][1])
        inside = any(t0 <= at and (t1 is None or at < t1) for t0, t1 in held)
        while seen < len(times) and times[seen] <= at:
            seen += 1
        cpu += S if inside or state.busy else S // 1000
        line: dict[str, Any] = {"main": "nccl" if inside else state.main, "cpu": cpu}
        if not inside and state.syscall is not None:
            line["syscall"] = state.syscall
        p.coverage(t, last_call_age=at - times[seen - 1] if seen else None, **line)
        if t >= end:
            return
        t = min(t + 1.0, end)


def watch_all(procs: Iterable[Proc], end: float, *states: tuple[float, State]) -> None:
    """The same states for several processes."""
    for p in procs:
        watch(p, end, *states)


def make(c: Comm, api: str, t: float, inside: bool = False, **args: Any) -> None:
    """A call that returns at once, or one that is still inside."""
    if inside:
        args.pop("dur", None)
        c.proc.enter(c, api, t, **args)
    else:
        c.proc.call(c, api, t, **args)


def all_make(comms: Iterable[Comm], api: str, t: float, inside: bool = False, **args: Any) -> None:
    """The same call by all of them."""
    for c in comms:
        make(c, api, t, inside, **args)


def rounds(
    comms: Iterable[Comm], n: int, t: float, step: float = 0.1, api: str = AR, **args: Any
) -> float:
    """``n`` rounds of a healthy collective; returns the time after the last."""
    members = list(comms)
    for i in range(n):
        for r, c in enumerate(members):
            make(c, api, t + i * step + 1e-4 * r, **args)
    return t + n * step


def started(n: int, calls: int, **args: Any) -> tuple[Job, list[Comm], float]:
    """A job of ``n`` ranks that has made some rounds; its communicators, the time after them."""
    job = Job()
    comms = job.world(n)
    return job, comms, rounds(comms, calls, 1.0, **args)


@dataclass(frozen=True)
class Verdict:
    """What is true of a job.

    ``hang_type``: kinds that are right for the leading finding; none: nothing
    may be found.  ``blamed``: exactly these global ranks.  ``words``: parts of
    the sentence.  ``also``: further findings that must be there.
    """

    hang_type: tuple[str, ...] = ()
    blamed: tuple[int, ...] = ()
    severity: str = "error"
    role: tuple[str, ...] = ("root_cause",)
    words: tuple[str, ...] = ()
    reason: tuple[str, ...] = ()
    confidence: tuple[str, ...] = ()
    also: tuple[dict[str, Any], ...] = ()
    #: Parts of the whole report.
    report: tuple[str, ...] = ()
    #: What the report must not say.
    without: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A job, the truth about it and one line on why."""

    name: str
    why: str
    verdict: Verdict
    build: Callable[[], Job]


CASES: dict[str, Case] = {}


def case(why: str, **verdict: Any) -> Callable[[Callable[[], Job]], Callable[[], Job]]:
    """Register a builder under its own name."""

    def note(build: Callable[[], Job]) -> Callable[[], Job]:
        CASES[build.__name__] = Case(build.__name__, why, Verdict(**verdict), build)
        return build

    return note
