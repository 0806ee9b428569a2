"""The collector: from one capture front to the trace files of its processes.

``step`` is called every few milliseconds and never blocks on anything but the
disk.  Nothing here knows which front it serves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import nccluprobe
from nccluprobe import procinfo
from nccluprobe.capture.source import Source
from nccluprobe.collect import runs
from nccluprobe.collect.admission import Admission, Stats, Verdict, is_inside
from nccluprobe.collect.clock import Clock as HostClock
from nccluprobe.collect.decode import pieces, record_at, records
from nccluprobe.collect.fast import Router
from nccluprobe.collect.inflight import GUARD_NS, InFlight, key_of
from nccluprobe.collect.introductions import Introductions
from nccluprobe.collect.places import Places
from nccluprobe.collect.ports import (
    Clock,
    Exec,
    Exit,
    ExitWatcher,
    Notify,
    ProcInfo,
    Procs,
    ProcState,
)
from nccluprobe.collect.process import Surroundings, Traced
from nccluprobe.collect.safedir import Owner
from nccluprobe.collect.vanished import Ended, Ending, Vanished
from nccluprobe.collect.writer import Limits
from nccluprobe.record import Record

#: A coverage line is due after this long, when the watermark moves; and at the latest then.
_COVERAGE_NS = 700_000_000
_COVERAGE_LATEST_NS = 950_000_000
_CLOCK_NS = 10_000_000_000
_EXPIRE_NS = 1_000_000_000
#: Records between looks at how many lines wait: bounds a batch.
_PIECE = 8192
_BATCH = 4096
#: For a process that is found dead: the exit code may come a moment later.
_GONE_NS = 600_000_000
#: Keys of processes that ended, for records that come too late.
_ENDED = 1024
Key = tuple[int, int]


def _silent(kind: str, text: str, /) -> None:
    """No messages."""


class Collector:
    """Drains a front and writes one trace file per wanted process.

    ``wanted(pid)`` says whether to trace a process; None: it is gone, nobody
    knows.  ``watcher`` tells how processes end; without one, and in any case,
    /proc is looked at once a second.  ``out`` gets ``tracing/<run id>/...``.
    """

    def __init__(
        self,
        source: Source,
        out: Path,
        *,
        wanted: Callable[[int], bool | None],
        watcher: ExitWatcher | None = None,
        procs: Procs = procinfo,
        clock: Clock | None = None,
        run_id: str | None = None,
        owner: Owner | None = None,
        limits: Limits | None = None,
        cannot_see: tuple[str, ...] = ("graph_replay",),
        notify: Notify = _silent,
    ) -> None:
        self.source = source
        self.stats = Stats()
        self._watcher = watcher
        self._procs = procs
        self._clock: Clock = clock if clock is not None else HostClock()
        self._run_id = run_id
        self._notify = notify
        self._router: Router[Traced] = Router(self._slow)
        self._inflight = InFlight(self._router.watch)
        self._around = Surroundings(
            front=source.front,
            exits=source.exits,
            version=nccluprobe.__version__,
            cannot_see=cannot_see,
            clock=self._clock,
            library=source.library,
            notify=notify,
            inflight=self._inflight,
            router=self._router,
        )
        self._introductions = Introductions(procs, watcher)
        self._wanted = wanted
        self._admission = Admission(source, self._is_wanted, procs, self._router.threads)
        self._open: dict[Key, Traced] = {}
        self._ended: OrderedDict[Key, int] = OrderedDict()
        self._now = self._clock.mono()
        self._next_expire = 0
        self._date = runs.dated(self._clock.reading().unix / 1e9)
        self._closer: ThreadPoolExecutor | None = None
        self._places = Places(
            out, owner, limits or Limits(), lambda text: self._notify("problem", text)
        )

    # -- the loop

    @property
    def processes(self) -> list[Traced]:
        """Processes with an open file."""
        return list(self._open.values())

    def introduce(self, pid: int) -> bool:
        """Announce a wanted process before its first record; False: it is gone.

        Call it as soon as a process is found: it may end milliseconds after its
        first call, and then nobody could say who it was and how it ended.
        """
        return self._introductions.introduce(pid)

    def _is_wanted(self, pid: int) -> bool | None:
        answer = self._wanted(pid)
        known = self._introductions.get(pid)
        if answer or known is None:
            return answer
        # A process that is over has no name any more to be judged by.
        over = answer is None or self._introductions.is_over(pid)
        return True if over else answer

    def step(self, now_ns: int | None = None) -> None:
        """One round.  ``now_ns`` is CLOCK_MONOTONIC, read just before the call."""
        now = self._now = self._clock.mono() if now_ns is None else now_ns
        self._take_exits(now)
        looked = self._inflight.due(now)
        if looked:
            self._look(now)
        self._drain(now)
        if looked:
            self._write_inside()
        # In this order: the watermark moves only after the drain was worked off and
        # written, and its coverage line stands behind the lines that it speaks of.
        self._flush(now)
        moved = self._inflight.through.drained(now)
        self._coverage(now, moved)
        for process in list(self._open.values()):
            process.flush(now)
            if process.ending is not None and now >= process.ending.finish_at:
                self._finish(process, process.ending, now)
        if now >= self._next_expire:
            self._next_expire = now + _EXPIRE_NS
            for process in self._open.values():
                process.expire(now)
            self._admission.sweep()
            self._introductions.expire(now)

    def close(self, now_ns: int | None = None) -> None:
        """Stop tracing: last lines, all files synced and closed."""
        now = self._now = self._clock.mono() if now_ns is None else now_ns
        self._take_exits(now)
        self._look(now)
        self._drain(now)
        self._write_inside()
        self._flush(now)
        self._inflight.through.drained(now)
        for process in list(self._open.values()):
            if process.ending is not None:
                self._finish(process, process.ending, now)
                continue
            self._finish(process, Ending(now, "detached", None, None, now), now)
        if self._closer is not None:
            self._closer.shutdown(wait=True)
            self._closer = None

    def _flush(self, now: int) -> None:
        for process in self._open.values():
            process.flush(now)

    def _look(self, now: int) -> None:
        data = self.source.in_flight()
        self._inflight.snapshot(data, now, self._clock.mono())

    def _drain(self, now: int) -> None:
        for chunk in self.source.drain():
            for piece in pieces(chunk, _PIECE):
                self._router.run(piece)
                for process in self._open.values():
                    if process.waiting_lines >= _BATCH:
                        process.flush(now)

    def _write_inside(self) -> None:
        for rec in self._inflight.confirmed():
            process = self._process(rec)
            if process is not None:
                process.enter(rec)
                self._inflight.wrote(rec)
        for rec in self._inflight.vanished():
            process = self._open.get((rec.pid, rec.epoch))
            if process is not None:
                process.close_call(rec, "lost", 0)

    # -- records off the hot path

    def _slow(self, piece: bytes | memoryview, offset: int) -> None:
        rec = record_at(piece, offset)
        if rec.t_enter in self._router.watch:
            self._inflight.exited(rec)
        process = self._process(rec)
        if process is not None:
            process.record(rec)

    def _process(self, rec: Record) -> Traced | None:
        """The process of a record, met now if need be; None: no line for it."""
        key = (rec.pid, rec.epoch)
        process = self._open.get(key)
        if process is not None:
            ending = process.ending
            if ending is None or ending.how != "exec" or rec.t_enter <= ending.t:
                return process
            # A front that did not begin another epoch: its state is that of the new program.
            self._finish(process, ending, self._now, forget=False)
        if rec.t_enter <= self._ended.get(key, -1):
            self.stats.late += 1
            return None
        verdict, before = self._admission.ask(rec)
        if is_inside(rec) and verdict is not Verdict.OPEN:
            return None  # no record was dropped
        if verdict is Verdict.OPEN:
            process = self._begin(rec, self._admission.undecided(key))
            for earlier in before:
                process.record(earlier)
            return process
        if verdict is Verdict.DENIED:
            self.stats.denied += 1
        elif verdict is Verdict.UNDECIDED:
            self.stats.undecided += 1
        else:
            self.stats.before += 1
        return None

    # -- processes

    def _begin(self, rec: Record, missed: int) -> Traced:
        """A file for the process; ``missed`` records of it were dropped before."""
        pid, now = rec.pid, self._now
        for other in list(self._open.values()):
            if other.pid == pid and other.ending is None:
                self._replaced(other, rec)
        known = self._introductions.at(pid, rec.t_enter)
        try:
            info: ProcInfo = self._procs.read(pid)
        except (OSError, ValueError):
            info = known.info if known is not None else Vanished(pid)
        run = runs.run_id(self._run_id, info.ranks.job, self._date)
        process = Traced(self._around, pid, rec.epoch, info, run, rec.t_enter)
        process.lost_queue = missed
        process.open_file(self._places.file(process, info), now)
        self._open[process.key] = process
        self.stats.traced += 1
        losses, state = self.source.losses(), self._state(process)
        process.coverage(now, self._inflight.through.value, 0, losses, state)
        process.next_coverage = now + _COVERAGE_NS
        process.next_clock = now + _CLOCK_NS
        self._notify("process", f"{process.name}: traced into {run}/{process.file.name}")
        end = known.exit if known is not None else None
        if end is not None:
            process.ending = _ending(end, now)
        elif self._watcher is not None:
            ticks = info.start_ticks or None
            if not self._watcher.watch(pid, ticks):
                process.ending = Ending(now, "gone", None, None, now + _GONE_NS)
        return process

    def _replaced(self, process: Traced, rec: Record) -> None:
        """Its pid has a new epoch: it called exec, or another process has the pid."""
        try:
            same = self._procs.read(rec.pid).start_ticks == process.info.start_ticks
        except (OSError, ValueError):
            same = False
        if same:
            process.ending = Ending(rec.t_enter, "exec", None, None, self._now + GUARD_NS)
        else:
            process.ending = Ending(rec.t_enter, "gone", None, None, self._now + _GONE_NS)

    def _state(self, process: Traced) -> ProcState | None:
        try:
            return self._procs.read_state(process.pid)
        except (OSError, ValueError):
            return None

    def _take_exits(self, now: int) -> None:
        if self._watcher is None:
            return
        ends = self._watcher.poll()
        for end in ends:
            self._introductions.ended(end, now)
        # In the order of time: an exec may be followed by the end, an end by
        # another process with the same pid that calls exec.
        events: list[Exit | Exec] = [*ends, *self._watcher.take_execs()]
        for event in sorted(events, key=lambda e: e.t_ns):
            process = self._of(event.pid, event.t_ns)
            if process is None:
                continue
            known = process.ending
            how: str | None = getattr(event, "how", None)
            if how is None and known is None:
                process.state(event.t_ns, "exec")
                process.ending = Ending(event.t_ns, "exec", None, None, now + GUARD_NS)
            elif how is not None and (known is None or known.how == "gone" or event.t_ns < known.t):
                process.ending = _ending(cast(Exit, event), now)

    def _of(self, pid: int, t: int) -> Traced | None:
        """The process that had the pid at that time: the last one whose calls began before."""
        found = [p for p in self._open.values() if p.pid == pid and p.first_t <= t]
        return max(found, key=lambda p: p.first_t, default=None)

    # -- coverage and ends

    def _coverage(self, now: int, moved: bool) -> None:
        due = [
            p
            for p in self._open.values()
            if now >= p.next_coverage
            and not p.file.full
            and (moved or now >= p.next_coverage + _COVERAGE_LATEST_NS - _COVERAGE_NS)
        ]
        if not due:
            return
        losses = self.source.losses()
        through = self._inflight.through
        for process in due:
            state = self._state(process)
            if state is not None and state.start_ticks not in (0, process.info.start_ticks):
                state = None  # another process has the pid by now
            gone = state is None or not state.alive
            if gone and process.ending is None:
                process.ending = Ending(now, "gone", None, None, now + _GONE_NS)
            process.coverage(now, through.value, through.cycle, losses, state)
            process.next_coverage = now + _COVERAGE_NS
            if now >= process.next_clock:
                process.next_clock = now + _CLOCK_NS
                process.clock()

    def _finish(self, process: Traced, ending: Ending, now: int, forget: bool = True) -> None:
        """Last lines of a process; then nothing of it is left here."""
        key = process.key
        detached = ending.how == "detached"
        inside = {key_of(r): r for r in self._inflight.written_of(*key)}
        through = self._inflight.through
        value, cycle = through.value, through.cycle
        if not detached:
            # It does not run any more, so one look at the table is enough: what
            # it is in now, it died in.  And it enters nothing after its end.
            for rec in records(self.source.in_flight()):
                if (rec.pid, rec.epoch) == key and rec.t_enter and not rec.t_exit:
                    inside.setdefault(key_of(rec), rec)
            inside = {k: r for k, r in inside.items() if k.t <= ending.t}
            for rec in inside.values():
                process.close_call(rec, "no_return", ending.t)
            value, cycle = max(value, ending.t), 1 << 62
        alive = detached or ending.how == "exec"
        state = self._state(process) if alive else Ended()
        losses = self.source.losses()
        if not process.close(now, (value, cycle), losses, state, ending, len(inside)):
            self.stats.note_unclosed(process.name, process.file.skipped, self._notify)
        self.stats.skipped += process.file.skipped
        process.forget()
        del self._open[key]
        self._inflight.forget(*key)
        if not detached:
            self._ended[key] = ending.t
            if len(self._ended) > _ENDED:
                self._ended.popitem(last=False)
            if forget:
                self.source.forget(*key)
        done = process.file.detach()
        if done is not None:
            # A sync may take seconds; the ring does not wait so long.
            if self._closer is None:
                self._closer = ThreadPoolExecutor(1, "nccluprobe-sync")
            self._closer.submit(done)
        self._notify("end", f"{process.name}: {ending.how}")


def _ending(end: Exit, now: int) -> Ending:
    """An end that the watcher told; its last records come before the guard is over."""
    return Ending(end.t_ns, end.how, end.code, end.signal, max(now, end.t_ns) + GUARD_NS)
