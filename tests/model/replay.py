"""Runs programs so that they can be compared call by call with a run that was traced.

A trace says when each call was entered.  What a rank does between its calls is
its own, so another program can always come later: ``Replay`` holds each of its
calls back until the traced run entered its own.  What is left to differ is
what the trace really shows, and ``difference`` names the first of it.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any

from model.emit import INSIDE
from model.engine import Engine
from model.ops import Call, End, Group, Init, Instruction, Leave, Program, Split
from model.process import Gen, Process, Record, Thread

#: How much earlier or later a call may be entered, or return, and a host state begin, in seconds:
#: the library takes up to 0.15 s to make a communicator.
TOLERANCE = 0.25
#: Rank -> indices of the records that a tracer lost.
Lost = dict[int, set[int]]
#: How often a tracer looks at the main thread.
LOOK_S = 1.0


class Counting(Engine):
    """Knows at which instruction each thread is, and when it began each of them."""

    def __init__(self, program: Program, seed: int) -> None:
        super().__init__(program, seed)
        #: (rank, thread) -> when each instruction began.
        self.began: dict[tuple[int, int], list[float]] = {}
        #: Of each record of a rank: its thread, and when the instruction that made it began.
        self.source: dict[int, list[tuple[int, float]]] = {}

    def _thread(self, thread: Thread, code: list[Instruction]) -> Gen:
        return super()._thread(thread, self._counted(thread, code))  # type: ignore[arg-type]

    def _counted(self, thread: Thread, code: list[Instruction]) -> Iterator[Instruction]:
        began = self.began.setdefault((thread.proc.rank, thread.index), [])
        for what in code:
            began.append(self.now)
            yield what

    def _enter(self, thread: Thread, api: str, fields: dict[str, Any]) -> Record:
        rank = thread.proc.rank
        source = (thread.index, self.began[rank, thread.index][-1])
        self.source.setdefault(rank, []).append(source)
        return super()._enter(thread, api, fields)


class _Least(random.Random):
    """Takes the shortest of all delays, so that a call can wait for its time."""

    def random(self) -> float:
        return 0.0


class Diverged(Exception):
    """A call is not the one that was traced: says which."""


class Replay(Engine):
    """Enters the n-th call of each thread when ``like`` did, or later if it must.

    Raises Diverged at the first call that ``like`` did not enter so.
    """

    def __init__(self, program: Program, like: Engine, lost: Lost | None = None) -> None:
        super().__init__(program, 0)
        self.rng = _Least()
        self.like = like
        self.gone = gone(like, lost)
        self.traced: dict[tuple[int, int], list[Record]] = {}
        for proc in like.procs:
            for record in proc.records:
                self.traced.setdefault((proc.rank, record.thread), []).append(record)
        self.made: dict[tuple[int, int], int] = {}

    def _enter(self, thread: Thread, api: str, fields: dict[str, Any]) -> Record:
        key = (thread.proc.rank, thread.index)
        n = self.made.get(key, 0)
        self.made[key] = n + 1
        traced = self.traced.get(key, [])
        if n < len(traced) and id(traced[n]) in self.gone:
            return super()._enter(thread, api, fields)
        known = {k: v for k, v in fields.items() if k != "new_comm"}
        if n >= len(traced):
            raise Diverged(f"rank {key[0]} makes one more call: {api} {known}")
        like = {k: v for k, v in traced[n].fields.items() if k != "new_comm"}
        if traced[n].api != api or like != known:
            raise Diverged(f"rank {key[0]} makes {api} {known}, not {traced[n].api} {like}")
        if self.now > traced[n].t + TOLERANCE:
            raise Diverged(f"rank {key[0]} makes {api} too late, {self.now - traced[n].t:.1f} s")
        return super()._enter(thread, api, fields)

    def _until(self, thread: Thread, t: float | None = None) -> Gen:
        """Busy outside NCCL, looking as the traced rank did, until this time or the next call's."""
        key = (thread.proc.rank, thread.index)
        traced, n = self.traced.get(key, []), self.made.get(key, 0)
        if t is None:
            t = traced[n].t if n < len(traced) else self.now
        if t > self.now:
            main, syscall = state(self.like.procs[thread.proc.rank], (t + self.now) / 2)
            if main != "nccl":
                self._state(thread, main, syscall)
            yield t - self.now
            self._state(thread, "running")

    def _call(self, thread: Thread, what: Call) -> Gen:
        yield from self._until(thread)
        yield from super()._call(thread, what)

    def _group(self, thread: Thread, what: Group) -> Gen:
        yield from self._until(thread)
        yield from super()._group(thread, what)

    def _init(self, thread: Thread, what: Init) -> Gen:
        yield from self._until(thread)
        yield from super()._init(thread, what)

    def _split(self, thread: Thread, what: Split) -> Gen:
        yield from self._until(thread)
        yield from super()._split(thread, what)

    def _end(self, thread: Thread, what: End) -> Gen:
        yield from self._until(thread)
        yield from super()._end(thread, what)

    def _leave(self, thread: Thread, what: Leave) -> Gen:
        ended = self.like.procs[thread.proc.rank].ended
        yield from self._until(thread, None if ended is None else ended[0])
        yield from super()._leave(thread, what)


def state(proc: Process, t: float) -> tuple[str, str | None]:
    """What the main thread is seen to do."""
    if not proc.states:
        return ("unknown", None)
    i = max(0, bisect_right(proc.states, t, key=lambda s: s[0]) - 1)
    _, main, syscall = proc.states[i]
    if main != "nccl" and any(a <= t and (b is None or b > t) for a, b in proc.stops):
        return ("stopped", None)
    return (main, syscall)


def gone(run: Engine, lost: Lost | None) -> set[int]:
    """The records (by id) of which nothing is left but that there was one."""
    return {
        id(record)
        for proc in run.procs
        for i, record in enumerate(proc.records)
        if i in (lost or {}).get(proc.rank, ())
        and record.end is not None
        and record.end - record.t <= INSIDE
    }


def difference(a: Engine, b: Engine, horizon: float, lost: Lost | None = None) -> str | None:
    """The first thing in which the traces of two runs differ up to this time; None: nothing.

    ``lost``: rank -> indices of records of the first that a tracer lost.  Of
    these it tells how many there were, and the time.
    """
    left_out = gone(a, lost)
    for p, q in zip(a.procs, b.procs, strict=True):
        said = _calls(p, q, horizon, left_out)
        if said is not None:
            return f"rank {p.rank}: {said}"
    for p, q in zip(a.procs, b.procs, strict=True):
        said = _host(p, q, horizon, a.program.host_state)
        if said is not None:
            return f"rank {p.rank}: {said}"
    return None


def _calls(p: Process, q: Process, horizon: float, left_out: set[int]) -> str | None:
    mine = [r for r in p.records if r.t <= horizon]
    other = [r for r in q.records if r.t <= horizon]
    threads = {r.thread for r in mine} | {r.thread for r in other}
    for thread in sorted(threads):
        one = [r for r in mine if r.thread == thread]
        two = [r for r in other if r.thread == thread]
        for i, (x, y) in enumerate(zip(one, two, strict=False)):
            if (said := _differs(x, y, horizon, id(x) in left_out)) is not None:
                return f"call {i} of thread {thread}: {said}"
        if len(one) != len(two):
            return f"thread {thread} makes {len(one)} calls, not {len(two)}"
    if (p.ended is None) != (q.ended is None):
        return "ends" if q.ended is None else "does not end"
    if p.ended is not None and q.ended is not None:
        if p.ended[1:] != q.ended[1:]:
            return f"ends with {p.ended[1:]}, not {q.ended[1:]}"
        if abs(p.ended[0] - q.ended[0]) > TOLERANCE:
            return f"ends at {p.ended[0]:.3f}, not {q.ended[0]:.3f}"
    return None


def _differs(x: Record, y: Record, horizon: float, lost: bool) -> str | None:
    """What two records do not have in common; if one was lost, but their times."""
    if lost:
        if y.end is None or y.end - y.t > INSIDE:
            return f"a call of which nothing is left does not return ({y.api})"
    elif x.api != y.api or x.fields != y.fields or x.comm_line != y.comm_line:
        return f"{x.api} {x.fields}, not {y.api} {y.fields}"
    inside = [r.end is None or r.end > horizon for r in (x, y)]
    if inside[0] != inside[1]:
        return f"{x.api} " + ("returns" if inside[1] else "does not return")
    times = [(x.t, y.t)]
    if x.end is not None and y.end is not None and not inside[0]:
        times.append((x.end, y.end))
    for s, t in times:
        if abs(s - t) > TOLERANCE:
            return f"{x.api} at {s:.3f}, not {t:.3f}"
    return None


def _host(p: Process, q: Process, horizon: float, seen: bool) -> str | None:
    """Whether a look at the main thread shows another state, other than at a change of it."""
    if not p.records:
        return None
    end = horizon if p.ended is None else min(horizon, p.ended[0])
    first = p.records[0].t + 0.5
    looks = [first + i * LOOK_S for i in range(int((end - first) / LOOK_S) + 1)]
    for t, x, y in zip(looks, _seen(p, looks), _seen(q, looks), strict=True):
        if x == y:
            continue
        for now, other in ((x, q), (y, p)):
            if _known(now, seen) not in {_known(s, seen) for s in _around(other, t)}:
                return f"is seen {x} at {t:.1f}, not {y}"
    return None


def _seen(proc: Process, looks: list[float]) -> list[tuple[str, str | None]]:
    """The state at each of these times."""
    found = []
    i = -1
    for t in looks:
        while i + 1 < len(proc.states) and proc.states[i + 1][0] <= t:
            i += 1
        plain = proc.states and not proc.stops
        found.append(proc.states[max(i, 0)][1:] if plain else state(proc, t))
    return found


def _known(what: tuple[str, str | None], seen: bool) -> tuple[str, str | None]:
    return what if seen or what[0] in ("nccl", "stopped") else ("unknown", None)


def _around(proc: Process, t: float) -> list[tuple[str, str | None]]:
    first = bisect_left(proc.states, t - TOLERANCE, key=lambda s: s[0])
    last = bisect_right(proc.states, t + TOLERANCE, key=lambda s: s[0])
    times = [t - TOLERANCE, t, t + TOLERANCE, *(s[0] for s in proc.states[first:last])]
    return [state(proc, when) for when in times]
