"""Jobs that were killed as a whole: judged as of the moment before.

A launcher, a batch system or a watchdog ends a job that hangs, rank by rank within
seconds, some only when the grace after SIGTERM is over.  Those ends are no evidence
of who is the cause: the job is judged as it stood before the first of them.  Who
crashed before that, or ended in order, keeps its end: it may be why the others were
killed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from nccluprobe.match import model as m
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.hosts import BLOCKING
from nccluprobe.match.options import SECOND, Options
from nccluprobe.match.process import TOGETHER, Process

if TYPE_CHECKING:
    from nccluprobe.match.state import State

SIGHUP, SIGINT, SIGABRT, SIGKILL, SIGTERM = 1, 2, 6, 9, 15
#: Who is killed so long after its last call stood there before, ns.
_STOOD = 10 * SECOND
#: Launchers and batch systems kill so long after SIGTERM, at most, ns.
_GRACE = 40 * SECOND


class How(Enum):
    """What a process's end says of who caused it."""

    ORDER = "in order"
    TOLD = "told to end"  # a signal that asks, from outside
    KILLED = "killed"  # from outside, be it by the system for its memory
    GAVE_UP = "gave up"  # it aborted, as watchdogs do
    FAILED = "failed"  # it exited with an error
    CRASHED = "crashed"  # a signal that nobody sends


def how_ended(end: m.ProcessEnd) -> How:
    """Shells and launchers report a signal as an exit code of 128 more.

    Who was found gone, with its collector, was killed: more is not known.
    """
    if end.how == "gone":
        return How.KILLED
    code = end.code or 0
    signal = end.signal or (code - 128 if 128 < code < 128 + 64 else 0)
    if signal in (SIGHUP, SIGINT, SIGTERM):
        return How.TOLD
    if signal == SIGKILL:
        return How.KILLED
    if signal == SIGABRT:
        return How.GAVE_UP
    if not signal and code:
        return How.FAILED
    return How.CRASHED if signal or end.how == "signaled" else How.ORDER


@dataclass(frozen=True)
class _End:
    t: int
    how: How
    process: Process


@dataclass
class Closing:
    """What is set aside while a scan judges."""

    jobs: set[Hashable] = field(default_factory=set)
    #: Of these, the jobs of which only ranks that waited gave up, by themselves.
    given_up: set[Hashable] = field(default_factory=set)
    _processes: list[Process] = field(default_factory=list)
    _ends: list[tuple[Endpoint, m.CommEnd]] = field(default_factory=list)

    def set_aside(self, t: int, process: Process, endpoints: Iterable[Endpoint]) -> None:
        """Judge a process, and its communicators, as of this moment."""
        process.judge_as_of(t)
        self._processes.append(process)
        for e in endpoints:
            if e.end is not None and e.end.t >= t:
                self._ends.append((e, e.end))
                e.end = None

    def undo(self) -> None:
        """All is as it is again."""
        for p in self._processes:
            p.restore()
        for e, end in self._ends:
            e.end = end
        self.jobs.clear()
        self.given_up.clear()
        self._processes.clear()
        self._ends.clear()


def closing(state: State, nows: dict[Hashable, int]) -> Closing:
    """Set aside the ends of all jobs that were killed as a whole, until ``undo``.

    ``nows``: the moment that each job is judged by, unix ns; that of such a job changes.
    """
    jobs: dict[Hashable, list[Process]] = {}
    for source, p in state.processes.items():
        jobs.setdefault(state.jobs.same(source), []).append(p)
    found = Closing()
    for job, members in jobs.items():
        ends = _wave(members, state)
        t, those = _given_up(members, state, nows.get(job, 0))
        if those and not (ends and ends[0].t <= t):
            told = ends and ends[0].how is How.TOLD and ends[0].t - t <= TOGETHER
            if not told and not any(p.gave_up >= t and _is_away(p, state) for p in those):
                found.given_up.add(job)  # who waits for nobody aborts as it is told to
        else:
            t, those = ends[0].t if ends else 0, [e.process for e in ends]
            if _failed_alike(ends, max(map(_last_call, members)), state.options):
                found.given_up.add(job)
        for p in those:
            found.set_aside(t, p, state.of_source.get(p.source, ()))
        if those:
            nows[job] = t
            found.jobs.add(job)
    return found


def _given_up(members: list[Process], state: State, now: int) -> tuple[int, list[Process]]:
    """When members of a job that stood began to abort, and whom to judge as of then.

    Whose watchdog aborts, or ends it, had waited; those that are missed are judged as of then,
    too.  None are, when anything was called since, or when as many go on waiting as gave up.
    """
    aborts = [p.gave_up for p in members if p.gave_up]
    if not aborts:
        return 0, []
    moved = max(map(_last_call, members))
    t = min((a for a in aborts if a > moved), default=0)
    if not t or t - moved < state.options.missing_after:
        return 0, []
    those = [p for p in members if not p.ended or p.end is None or p.end.t >= t]
    gave_up = sum(p.gave_up >= t for p in those)
    waiting = sum(_is_ahead(p, state) for p in those if not p.ended and p.gave_up < t)
    if now - t > TOGETHER and waiting >= gave_up:
        return 0, []
    return t, those


def _wave(members: list[Process], state: State) -> list[_End]:
    """The ends that belong to the killing of the job, oldest first."""
    ends = [_End(p.end.t, how_ended(p.end), p) for p in members if p.ended and p.end is not None]
    if not ends:
        return []
    ends.sort(key=lambda e: (e.t, e.process.source))
    if any(not p.ended and p.through > ends[-1].t + TOGETHER for p in members):
        return []  # somebody is there still
    moved = max(map(_last_call, members))
    first = len(ends) - 1
    while first and _joins(ends[first - 1], ends[first], moved, state.options):
        first -= 1
    while first < len(ends) and not _begins(ends[first:], moved, state):
        first += 1
    return ends[first:]


def _last_call(p: Process) -> int:
    held = (c.t for c in (*p.inside.values(), *p.cut.values()) if c.api in BLOCKING)
    return max((p.last_call, *held))


def _joins(a: _End, b: _End, moved: int, options: Options) -> bool:
    """Whether the earlier one of two ends may be of one killing with the other."""
    if moved - a.t > TOGETHER:
        return False  # others went on without it
    if b.t - a.t <= TOGETHER:
        return True
    if b.t - a.t > _GRACE or How.ORDER in (a.how, b.how):
        return False
    return (a.how, b.how) == (How.TOLD, How.KILLED) or a.t - moved >= options.missing_after


def _begins(ends: list[_End], moved: int, state: State) -> bool:
    """Whether the first of these ends is that of one that was there till it was killed."""
    first = ends[0]
    if first.how in (How.ORDER, How.CRASHED):
        return False
    if first.how is How.TOLD:
        return True
    alike = [first]
    if _failed_alike(ends, moved, state.options):
        return True
    if first.how is not How.FAILED:  # an error of one makes errors of the others
        alike = [e for e in ends if e.how is first.how and e.t - first.t <= TOGETHER]
        if len(alike) == len(ends) > 1:
            return True
    return first.t - moved >= _STOOD and not all(_is_away(e.process, state) for e in alike)


def _failed_alike(ends: list[_End], moved: int, options: Options) -> bool:
    """Whether all exited with one error after a long wait, as those do who give up waiting.

    An exception of one rank on its own may look alike: so the first is no cause, nor cleared.
    """
    codes = {e.process.end.code for e in ends if e.process.end is not None}
    if len(ends) < 2 or len(codes) > 1 or any(e.how is not How.FAILED for e in ends):
        return False
    return ends[0].t - moved >= max(_STOOD, options.missing_after)


def _is_away(p: Process, state: State) -> bool:
    """Whether others wait for a process, and it for nobody, as far as its calls tell."""
    if any(c.api in BLOCKING for c in (*p.inside.values(), *p.cut.values())):
        return False
    return _standing(p, state) == (False, True)


def _is_ahead(p: Process, state: State) -> bool:
    """Whether a process has made calls that others lack."""
    return _standing(p, state)[0]


def _standing(p: Process, state: State) -> tuple[bool, bool]:
    """Whether others lack calls that a process made, and, if not, whether it lacks some."""
    missed = False
    for e in state.of_source.get(p.source, ()):
        at = (e.info.source, e.info.id)
        comm, side = state.comm_of(at), state.p2p.sides.get(at)
        if comm is None or comm.ambiguous:
            continue
        if side is not None and any(q.n for q in side.queues.values()):
            return True, False
        others = [x.entered for x in comm.members() if x is not e]
        if any(n < e.entered for n in others):
            return True, False
        missed |= any(n > e.entered for n in others) or bool(state.p2p.awaited(comm, e))
    return False, missed
