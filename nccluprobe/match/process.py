"""What is known of one traced process: coverage, losses, silence, what it is inside."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match.held_up import HeldUp
from nccluprobe.match.losses import Losses
from nccluprobe.match.phases import Phases
from nccluprobe.nccl.api import BY_NAME, Kind

_KEPT_GAPS = 4096
_KEPT_LOSSES = 1024
#: States of a main thread before it may give up or be killed: of thousands of processes.
_KEPT_STATES = 32
_KEPT_GROUPS = 64
_KEPT_QUEUED = 4096
_KEPT_WAITS = 512
#: Times of long waits that are in one such interval count as one, ns.
_ALIKE = 100_000_000
#: Collectors tell once a second how far they have seen, ns.
_TOLD = 1_500_000_000
#: Processes of one job that end within this time may have been killed as one, ns.
TOGETHER = 5_000_000_000


#: A process: its key, or the number of a source that has not said whose it is.
Who = m.ProcessKey | int
#: Who makes calls: a process, or one of its threads (else 0) when it drives several ranks.
Actor = tuple[Who, int]


@dataclass(frozen=True)
class Inside:
    """A call that a process is inside of."""

    api: str
    t: int
    thread: int
    comm: int | None
    group: int
    ord: int | None = None

    @property
    def is_collective(self) -> bool:
        """Whether all members of the communicator have to make it, one after another."""
        known = BY_NAME.get(self.api)
        return known is not None and known.kind is Kind.COLLECTIVE


@dataclass(frozen=True)
class GroupEnd:
    """The end of a group; ``rc`` RC_NONE when not known; ``open``: in flight."""

    t: int
    rc: int
    open: bool = False


@dataclass
class Process:
    """State of one source.  A source is one process as seen by one tracer."""

    source: int
    name: str
    info: m.ProcessInfo | None = None
    #: The process itself: two tracers of one process give the same.
    who: Who = field(init=False)
    bound: int | None = None
    coverage: m.Coverage | None = None
    #: Since when its main thread is in the state that coverage tells.
    main_since: int = 0
    held_up: HeldUp = field(default_factory=HeldUp)
    end: m.ProcessEnd | None = None
    #: Last sign of life that its trace shows.
    alive_until: int = 0
    #: When it was found gone, where nobody saw it end; 0: its end is known.
    found_gone: int = 0
    #: Its end while a scan judges it as of a moment before that.
    set_aside: m.ProcessEnd | None = None
    #: Newest time in the trace, whatever the line.
    newest: int = 0
    #: Newest entry or exit of a call.
    last_activity: int = 0
    inside: dict[tuple[int, int], Inside] = field(default_factory=dict)
    #: Calls that never returned, as their thread or the process ended.
    cut: dict[tuple[int, int], Inside] = field(default_factory=dict)
    gaps: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_KEPT_GAPS))
    groups: OrderedDict[int, GroupEnd] = field(default_factory=OrderedDict)
    caught_up: bool = False
    #: It drives several ranks of one communicator, one thread each.
    several_ranks: bool = False
    #: Newest entry of a collective, send or receive.
    last_call: int = 0
    #: The source is no trace: ``inspect`` looked once.
    snapshot: bool = False
    #: Time of the first coverage line: watched since then.
    first_coverage: int = 0
    read_through: int = 0
    #: Where its lost records are missing.
    losses: Losses = field(default_factory=Losses)
    #: Of those without a place, so many are supposed to be calls, while a scan judges.
    supposed: int = 0
    #: What it declared of itself.
    phases: Phases = field(default_factory=Phases)
    #: Such a phase excuses it, by the last scan.
    in_phase: bool = False
    #: Long waits that it took part in: its own entry, and that of the last one.  Those that
    #: are alike, as when hosts had run ahead, are one.
    waits: OrderedDict[tuple[int, int], tuple[int | None, int]] = field(default_factory=OrderedDict)
    #: When it began to abort what it had called last, unix ns; 0: it did not.
    gave_up: int = 0
    #: What its main thread did, while alive: since when, the state, the system call.
    _mains: deque[tuple[int, str, str | None]] = field(
        default_factory=lambda: deque(maxlen=_KEPT_STATES)
    )
    #: Calls that failed after they had waited, and when.
    _broken_off: deque[tuple[Inside, int]] = field(default_factory=lambda: deque(maxlen=_KEPT_GAPS))
    _as_of: int = 0
    _later: tuple[m.Coverage | None, int, int, dict[tuple[int, int], Inside], int] | None = None
    _loss_t: list[int] = field(default_factory=list)
    _loss_n: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.who = self.source if self.info is None else self.info.key

    def tell(self, info: m.ProcessInfo) -> None:
        """It is known which process it is."""
        self.info = info
        self.who = info.key

    @property
    def through(self) -> int:
        """Every call that entered before this is known, or counted as lost."""
        seen = self.coverage.through if self.coverage else 0
        if (end := self.end or self.set_aside) is not None:
            seen = max(seen, end.t)
        return min(seen, self._as_of) if self._as_of else seen

    @property
    def rank(self) -> int | None:
        """Rank in the job, if known."""
        return self.info.rank if self.info else None

    @property
    def sees_completion(self) -> bool:
        """Whether its source tells what has completed: neither a probe nor NCCL's log."""
        return self.info is not None and self.info.front not in ("ebpf", "preload", "nccl log")

    def outlived(self, other: Process) -> bool:
        """Whether it was there when another one had ended: not both as a job was killed."""
        if other.end is None or not other.ended:
            return False
        return self.end is None or not self.ended or self.end.t - other.end.t > TOGETHER

    @property
    def boot_id(self) -> str:
        """Boot of its host: times of one boot compare exactly."""
        return self.info.key.boot_id if self.info else ""

    @property
    def ended(self) -> bool:
        """Whether the process is known to have ended (not only its tracing)."""
        return self.end is not None and self.end.how != "detached"

    @property
    def has_given_up(self) -> bool:
        """Whether a scan judges it as of the moment when it gave up."""
        return 0 < self._as_of <= self.gave_up

    @property
    def over(self) -> m.ProcessEnd | None:
        """Its end, also while that is set aside; None: it is there, as far as is known."""
        end = self.end or self.set_aside
        return None if end is None or end.how == "detached" else end

    @property
    def lost(self) -> int:
        """Events lost so far."""
        return self._loss_n[-1] if self._loss_n else 0

    def place(self) -> str:
        """For people: pid and host."""
        if self.info is None or not self.info.pid:
            return self.name
        return f"pid {self.info.pid} on {self.info.host}"

    def label(self) -> str:
        """For people: rank, pid and host."""
        rank = "" if self.rank is None else f"rank {self.rank}, "
        return rank + self.place()

    def silent_for(self, now: int) -> int:
        """How far its collector is behind ``now``; 0 after the process's end."""
        return 0 if self.ended else max(0, now - self.through)

    def heard_until(self, now: int) -> int:
        """Until when it is known what it has called, unix ns.

        Now, where its collector was heard just before: what that last told is a second old
        at most, and a limit that is over is not kept waiting for it.
        """
        return now if 0 <= now - self.through <= _TOLD else self.through

    def note_coverage(self, c: m.Coverage) -> None:
        """Take a coverage line."""
        if self.coverage is None or self.coverage.main != c.main:
            self.main_since = c.t
        self.held_up.note(c.main, c.t)
        self.coverage = c
        # What it does after it gave up is not what it did before.
        before = c.alive is not False and not self.last_call < self.gave_up < c.t
        if before and (not self._mains or self._mains[-1][1:] != (c.main, c.syscall)):
            self._mains.append((c.t, c.main, c.syscall))
        self.first_coverage = self.first_coverage or c.t
        if c.alive is not False:
            self.alive_until = max(self.alive_until, c.t)
            self.newest = max(self.newest, c.t, c.through)
        self.losses.covered(c)
        if not self._loss_n or c.lost != self._loss_n[-1]:
            self._loss_t.append(c.t)
            self._loss_n.append(c.lost)
            if len(self._loss_t) > _KEPT_LOSSES:
                # Forgetting the oldest makes a window's count an upper bound.
                del self._loss_t[0], self._loss_n[0]

    def lost_since(self, t: int) -> int | None:
        """Events lost after ``t``; None when there is no coverage at all."""
        if not self._loss_n:
            return None
        # The count at t itself is between two lines: the earlier one is safe.
        at = bisect_right(self._loss_t, t) - 1
        return self._loss_n[-1] - (self._loss_n[at] if at >= 0 else 0)

    def without_place(self) -> int:
        """How many lost events are not known to be missing at some place."""
        return self.losses.without_place(self.lost, self.through)

    def unplaced(self) -> int:
        """How many of them may be anything, while a scan supposes that others were calls."""
        return max(0, self.without_place() - self.supposed)

    def unseen_after(self, comm: int, idx: int, t: int) -> int:
        """How many collectives on a communicator may follow an ordinal seen at ``t``, unseen.

        0: none was lost, or all lost ones are missing at other places.
        """
        most = self.lost_since(t)
        if not most:
            return 0
        here = self.losses.calls_after(comm, idx)
        return min(most, here + self.unplaced())

    def note_end(self, end: m.ProcessEnd) -> None:
        """It ended, or its tracing did."""
        self.end = end
        if end.how == "gone" and end.t - self.alive_until > TOGETHER:
            self.found_gone = end.t
        else:
            self.newest = max(self.newest, end.t)

    def note_activity(self, a: m.Activity, shortest: int) -> None:
        """Note silences longer than ``shortest`` between calls."""
        if len(a.t_enter) == 0:
            return
        exits = np.maximum(a.t_exit, a.t_enter)
        busy = np.maximum.accumulate(exits)
        if self.last_activity:
            busy = np.maximum(busy, self.last_activity)
        before = np.empty_like(busy)
        before[0] = self.last_activity or a.t_enter[0]
        before[1:] = busy[:-1]
        if int((a.t_enter - before).max()) > shortest:
            for i in np.flatnonzero(a.t_enter - before > shortest):
                self.gaps.append((int(before[i]), int(a.t_enter[i])))
        if int((exits - a.t_enter).max()) > shortest:
            for i in np.flatnonzero(exits - a.t_enter > shortest):
                self.note_wait(int(a.t_enter[i]), int(exits[i]))
        self.last_activity = max(self.last_activity, int(busy[-1]))
        self.alive_until = max(self.alive_until, self.last_activity)
        self.newest = max(self.newest, self.last_activity)

    def silence_before(self, t: int, since: int) -> tuple[int, int] | None:
        """The longest silence that ended after ``since`` and not after ``t``."""
        best: tuple[int, int] | None = None
        for start, end in reversed(self.gaps):
            if end > t:
                continue
            if end <= since:
                break
            if best is None or end - start > best[1] - best[0]:
                best = (start, end)
        return best

    def note_wait(self, came: int | None, last: int) -> None:
        """Take a long wait that it took part in; ``came``: None: that record was lost."""
        alike = (-1 if came is None else came // _ALIKE, last // _ALIKE)
        known = self.waits.get(alike, (came, last))
        first = None if came is None or known[0] is None else min(came, known[0])
        self.waits[alike] = (first, min(last, known[1]))
        if len(self.waits) > _KEPT_WAITS:
            self.waits.popitem(last=False)

    def held_until(self, t: int) -> int:
        """End of the last long wait that it was in at ``t``, unix ns; 0: in none."""
        ends = (last for came, last in self.waits.values() if came is not None and came <= t < last)
        return max(ends, default=0)

    def note_group_ends(self, ends: m.GroupEnds) -> dict[int, bool]:
        """Remember how groups ended; those that were in flight before -> whether they failed."""
        closed: dict[int, bool] = {}
        for group, t, rc in zip(
            ends.group.tolist(), ends.t_enter.tolist(), ends.rc.tolist(), strict=True
        ):
            before = self.groups.get(group)
            if before is not None and before.open:
                closed[group] = m.not_run(rc)
            self.groups[group] = GroupEnd(t, rc)
        return closed

    def trim_groups(self, queued: bool) -> None:
        """Forget groups whose calls have been taken; ``queued``: some have not."""
        most = _KEPT_QUEUED if queued else _KEPT_GROUPS
        while len(self.groups) > most:
            self.groups.popitem(last=False)

    def note_enter(self, e: m.Enter) -> None:
        """A call is still inside, or was when its thread or the process ended."""
        if (e.thread, e.t) not in self.cut:
            self.inside[e.thread, e.t] = Inside(e.api, e.t, e.thread, e.comm, e.group, e.ord)
        self.newest = max(self.newest, e.t)
        self.last_activity = max(self.last_activity, e.t)
        self.alive_until = max(self.alive_until, e.t)
        if e.api == "ncclGroupEnd" and e.group:
            self.groups.setdefault(e.group, GroupEnd(e.t, m.RC_NONE, open=True))

    @property
    def as_of(self) -> int:
        """The moment that it is judged as of, unix ns; 0: by all that is known."""
        return self._as_of

    def note_broken_off(self, c: m.Call) -> None:
        """A call failed after it had waited."""
        self._broken_off.append((Inside(c.api, c.t, c.thread, c.comm, c.group, c.ord), c.t_exit))

    def note_abort(self, t: int) -> None:
        """It begins to abort a communicator; the first time since its last call counts."""
        if not self.last_call < self.gave_up <= t:
            self.gave_up = t

    def judge_as_of(self, t: int) -> None:
        """Until ``restore`` it is as it was at ``t``, unix ns, before it gave up or ended."""
        if self._as_of:
            return
        self._later = (self.coverage, self.main_since, self.last_activity, self.inside, self.newest)
        self._as_of, self.set_aside, self.end = t, self.end, None
        seen = next((x for x in reversed(self._mains) if x[0] < t), None)
        if self.coverage is not None and seen is not None:
            self.main_since = seen[0]
            self.coverage = replace(self.coverage, alive=True, main=seen[1], syscall=seen[2])
        both = {**self.inside, **self.cut}
        both |= {(c.thread, c.t): c for c, t_exit in self._broken_off if t_exit >= t}
        self.inside = {at: call for at, call in both.items() if call.t < t}
        self.newest = min(self.newest, t)
        returns = (x for _, x in self.waits.values() if x < t)
        entries = (c.t for c in self.inside.values())
        self.last_activity = min(self.last_activity, max((self.last_call, *returns, *entries)))

    def restore(self) -> None:
        """It is as it is again."""
        if self._later is not None:
            self.coverage, self.main_since, self.last_activity = self._later[:3]
            self.inside, self.newest = self._later[3:]
            self._as_of, self.end, self.set_aside, self._later = 0, self.set_aside, None, None

    def note_cut(self, e: m.Enter) -> None:
        """A call never returned, as its thread or the process ended."""
        if len(self.cut) < _KEPT_LOSSES:
            self.cut[e.thread, e.t] = Inside(e.api, e.t, e.thread, e.comm, e.group, e.ord)

    def all_inside(self) -> list[Inside]:
        """The calls that it is inside of, or was when it ended."""
        if not self.inside and not self.cut:
            return []
        return [*self.inside.values(), *(self.cut.values() if self.ended else ())]

    def inside_of(self, lane: int) -> Inside | None:
        """As ``inside_now``, for one thread only when ``lane`` names one."""
        calls = [c for c in self.all_inside() if lane in (0, c.thread)]
        return min(calls, key=lambda c: c.t, default=None)

    def inside_now(self) -> Inside | None:
        """The call it has been inside of for longest (until its end); None: outside NCCL."""
        return min(self.all_inside(), key=lambda c: c.t, default=None)
