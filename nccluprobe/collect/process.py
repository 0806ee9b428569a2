"""One traced process: its identity, its file, its lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nccluprobe import memory
from nccluprobe.capture.source import Library, Losses
from nccluprobe.collect import lines
from nccluprobe.collect.decode import who_key
from nccluprobe.collect.describe import process_line
from nccluprobe.collect.fast import Router, Thread
from nccluprobe.collect.identity import Comm, Identity
from nccluprobe.collect.inflight import InFlight
from nccluprobe.collect.phases import Phases
from nccluprobe.collect.ports import Clock, Notify, ProcInfo, ProcState
from nccluprobe.collect.vanished import Ending
from nccluprobe.collect.writer import TraceFile
from nccluprobe.nccl.api import BY_ID, Kind
from nccluprobe.nccl.comm_struct import CommState, read_comm
from nccluprobe.nccl.layout.model import Layout
from nccluprobe.record import (
    FLAG_NO_RETURN,
    KIND_CALL,
    KIND_IDENTITY,
    KIND_NAME,
    KIND_NEW_COMM,
    Record,
)

#: Threads with a place on the hot path; beyond it they are met anew.
_MOST_THREADS = 4096


@dataclass(frozen=True)
class Surroundings:
    """What all processes of one collector share."""

    front: str
    exits: bool
    version: str
    cannot_see: tuple[str, ...]
    clock: Clock
    library: Callable[[int], Library | None]
    notify: Notify
    inflight: InFlight
    router: Router[Traced]


class Traced:
    """A process with a trace file."""

    def __init__(
        self, around: Surroundings, pid: int, epoch: int, info: ProcInfo, run_id: str, first_t: int
    ) -> None:
        self.around = around
        self.pid = pid
        self.epoch = epoch
        self.info = info
        self.run_id = run_id
        self.first_t = first_t
        self.born_in_cycle = around.inflight.cycle
        self.ids = Identity(around.library)
        self.file: TraceFile  # set by open_file
        self.ending: Ending | None = None
        self.next_coverage = 0
        self.next_clock = 0
        #: Records that the collector itself lost.
        self.lost_queue = 0
        self._captured = 0
        self._lines: list[str] = []
        self._beside = 0  # how many of them are not from the hot path
        self._threads: dict[bytes, Thread[Traced]] = {}
        self._libs: dict[int, dict[str, Any]] = {}
        self._last = 0
        self._no_returns: list[int] = []
        self._coverage: lines.Line = {}
        self._phases = Phases(pid, info, lambda text: around.notify("problem", text))
        ranks = info.ranks
        known = ranks.rank is not None and ranks.source != "unknown"
        self.rank = ranks.rank if known else None
        self.rank_source = ranks.source if known else "unknown"
        self.world_size = ranks.world_size
        self._learn_rank = not known
        self._world: tuple[int, int | None] = (1, None)  # size, hash

    @property
    def key(self) -> tuple[int, int]:
        """(pid, epoch)."""
        return self.pid, self.epoch

    @property
    def name(self) -> str:
        """For messages."""
        rank = "rank unknown" if self.rank is None else f"rank {self.rank}"
        return f"pid {self.pid} ({self.info.exe or '?'}, {rank})"

    def open_file(self, file: TraceFile, now: int) -> None:
        """Begin the file.  A failure is the file's affair."""
        self.file = file
        self.file.write([], now)
        self._put(lines.state(now, "attached"))

    # -- lines

    def _put(self, line: str) -> None:
        self._lines.append(line)
        self._beside += 1

    @property
    def captured(self) -> int:
        """Records received for it."""
        return self._captured + len(self._lines) - self._beside

    @property
    def waiting_lines(self) -> int:
        """Lines not handed to the file yet."""
        return len(self._lines)

    def flush(self, now: int) -> None:
        """Hand the lines to the file."""
        batch = self._lines
        self._captured += len(batch) - self._beside
        self._beside = 0
        if batch:
            # The list stays the same object: the threads hold its append.
            taken = batch[:]
            batch.clear()
            self.file.write(taken, now)
        elif self.file.full:
            self.file.write([], now)

    def process_line(self) -> str:
        """The ``process`` line, as much as is known."""
        return process_line(self, self._libs.values())

    def clock_line(self) -> str:
        """A ``clock`` line of now."""
        r = self.around.clock.reading()
        return lines.clock(r.mono, r.unix, r.synced, r.err)

    def header(self, part: int, now: int) -> list[str]:
        """First lines of a part: all that later lines of it refer to."""
        found = [self.process_line(), self.clock_line()]
        for comm in self.ids.live.values():
            found.append(lines.dump(comm.line()))
            found.extend(lines.comm_end(comm.id, t, how) for t, how in comm.ends)
        found.extend(lines.again(t.group) for t in self._threads.values() if t.group is not None)
        found.extend(
            lines.dump(lines.enter(rec, self._ids(rec)))
            for rec in self.around.inflight.written_of(self.pid, self.epoch)
        )
        if self._coverage:
            # Lines since the last one are in the earlier part: its `through` holds.
            found.append(self._coverage_line(now))
        return found + ([] if self._phases.line is None else [self._phases.line])

    # -- records

    def meet(self, tid: int) -> Thread[Traced]:
        """The thread, with a place on the hot path."""
        key = who_key(self.pid, tid, self.epoch)
        thread = self._threads.get(key)
        if thread is None:
            if len(self._threads) >= _MOST_THREADS:
                self._forget_threads()
            thread = self._threads[key] = Thread(self, tid, self._lines.append)
            self.around.router.threads[key] = thread
        return thread

    def record(self, rec: Record) -> None:
        """Any record of this process."""
        self._captured += 1
        self._library(rec.lib)
        if rec.kind == KIND_NAME:
            named = self.ids.named(rec)
            if named is not None:
                self._put(lines.dump(named.line()))
        elif rec.kind == KIND_IDENTITY:
            comm = self.ids.identified(rec, self._memory)
            if comm is not None:
                self._made([comm])
        elif rec.kind == KIND_NEW_COMM:
            self._made(self.ids.bound(rec))
        elif rec.kind == KIND_CALL and rec.api in BY_ID:
            self._call(rec)
        else:
            self.lost_queue += 1  # a front that knows more than this collector

    def _memory(self, address: int, layout: Layout) -> CommState | None:
        """The live struct of a communicator, read from here."""

        def read(at: int, size: int) -> bytes | None:
            return memory.read(self.pid, at, size)

        try:
            return read_comm(read, address, layout)
        except OSError:  # not permitted, or gone
            return None

    def _call(self, rec: Record) -> None:
        api = BY_ID[rec.api]
        if api.kind is Kind.HELPER:
            return
        made = self.ids.made(rec) if api.makes_comm else []
        self._made(made)
        self._ended(rec)
        ids = self._ids(rec, made[-1].id if made else None)
        line = lines.dump(lines.call(rec, ids))
        self._put(line)
        thread = self.meet(rec.tid)
        thread.last = rec.t_exit or rec.t_enter
        thread.note_group(rec, line)
        thread.learn(rec, ids)
        if rec.flags & FLAG_NO_RETURN:
            self._no_returns = [*self._no_returns[-4095:], rec.t_exit]

    def enter(self, rec: Record) -> None:
        """A call that is inside."""
        if BY_ID[rec.api].kind is Kind.HELPER:
            return
        self._library(rec.lib)
        self._ended(rec)
        self._put(lines.dump(lines.enter(rec, self._ids(rec))))
        self._last = max(self._last, rec.t_enter)

    def close_call(self, rec: Record, end: str, t_exit: int) -> None:
        """The ``call`` line of a call that has no record of its exit."""
        if BY_ID[rec.api].kind is Kind.HELPER:
            return
        ended = rec._replace(t_exit=max(t_exit, rec.t_enter) if t_exit else 0)
        self._ended(rec)
        self._put(lines.dump(lines.call(ended, self._ids(rec), end)))

    def _ids(self, rec: Record, new_comm: int | None = None) -> lines.Ids:
        comm, new = self.ids.seen(rec)
        if comm is not None and new:
            self._put(lines.dump(comm.line()))
        stream = self.ids.stream(rec.stream) if lines.has_stream(rec.api) else None
        return lines.Ids(comm.id if comm is not None else None, stream, new_comm)

    def _made(self, comms: Iterable[Comm]) -> None:
        for comm in comms:
            self._put(lines.dump(comm.line()))
            self.around.notify("communicator", f"{self.name}: {comm.text()}")
            self._learn_from(comm)

    def _ended(self, rec: Record) -> None:
        if BY_ID[rec.api].ends_comm is None:
            return
        self._ids(rec)  # its comm line comes first
        ended = self.ids.ended(rec)
        if ended is not None:
            comm, how = ended
            self._put(lines.comm_end(comm.id, rec.t_enter, how))

    def _learn_from(self, comm: Comm) -> None:
        """The rank, when no launcher told it: that in the largest communicator."""
        if not self._learn_rank or comm.learnt not in ("init", "init_all"):
            return
        size, world = self._world
        nranks = comm.nranks or 0
        alone = comm.learnt == "init"
        if nranks > size:
            self._world = nranks, comm.hash
            rank = comm.comm_rank if alone else None
        elif nranks == size and comm.hash == world and comm.comm_rank != self.rank:
            rank = None  # one process drives several ranks of it
        else:
            return
        self.rank = rank
        self.rank_source = "unknown" if rank is None else "world_communicator"
        if self.info.ranks.world_size is None:
            self.world_size = nranks
        self._put(self.process_line())

    def _library(self, lib: int) -> None:
        if lib in self._libs:
            return
        found = self.around.library(lib)
        if found is None:
            return
        self._libs[lib] = {
            "lib": lib,
            "path": found.path,
            "nccl_version": found.version,
            "build_id": found.build_id,
        }
        self._put(self.process_line())
        version = found.version or "of unknown version"
        self.around.notify("library", f"{self.name}: NCCL {version}, {found.path}")

    # -- coverage

    def coverage(
        self, now: int, through: int, cycle: int, losses: Losses, state: ProcState | None
    ) -> None:
        """Write a ``coverage`` line.

        ``through`` comes from snapshots up to ``cycle``; before this process was
        known to them, only its own first call bounds it.
        """
        self._cover(now, through, cycle, losses, state)
        self._put(self._coverage_line(now))
        self._phases.look(self.file.folder, self.rank, self.around.clock, self._put)

    def _cover(
        self, now: int, through: int, cycle: int, losses: Losses, state: ProcState | None
    ) -> None:
        """Make the newest coverage but for the counts of the file."""
        inflight = self.around.inflight
        inside = inflight.of(self.pid, self.epoch)
        if cycle <= self.born_in_cycle:
            unwritten = (r.t_enter for r in inside if not inflight.is_written(r))
            through = min(through, self.first_t, *unwritten)
        self._last = max(
            self._last,
            max((t.last for t in self._threads.values()), default=0),
            max((r.t_enter for r in inside), default=0),
        )
        line = lines.coverage(now, max(through, self._coverage.get("through", 0)))
        line.update(lines.losses(losses, self.key, self.lost_queue))
        line["in_flight"] = len(inside)
        line.update(lines.state_of(state, any(r.tid == self.pid for r in inside)))
        line["last_call_age"] = max(0, now - self._last) if self._last else None
        self._coverage = line

    def _coverage_line(self, now: int) -> str:
        self._counted(now)
        return lines.dump(self._coverage)

    def _counted(self, now: int) -> None:
        line = self._coverage
        line["t"] = now
        line["captured"] = self.captured
        line["skipped_disk"] = self.file.skipped
        if self.file.dropped:
            line["dropped"] = self.file.dropped

    def clock(self) -> None:
        """Write a ``clock`` line."""
        self._put(self.clock_line())

    def state(self, now: int, name: str) -> None:
        """Write a ``state`` line."""
        self._put(lines.state(now, name))

    # -- ending

    def expire(self, now: int) -> None:
        """Forget communicators that ended."""
        busy = {r.comm_gen for r in self.around.inflight.of(self.pid, self.epoch)}
        busy |= {r.comm_gen for r in self.around.inflight.written_of(self.pid, self.epoch)}
        if self.ids.expire(now, busy):
            for thread in self._threads.values():
                thread.templates.clear()

    def close(
        self,
        now: int,
        through: tuple[int, int],
        losses: Losses,
        state: ProcState | None,
        ending: Ending,
        inside: int,
    ) -> bool:
        """Write the last lines; False: there was no room for them, not even in the reserve.

        ``through``: the watermark, and the cycle that it comes from.  ``inside``: calls besides
        those whose records said so.
        """
        if not self.file.full:
            self._phases.look(self.file.folder, self.rank, self.around.clock, self._put)
        self.flush(now)
        self._cover(now, *through, losses, state)
        e = ending
        recent = sum(1 for at in self._no_returns if at >= e.t - 1_000_000_000)
        end = lines.process_end(e.t, e.how, e.code, e.signal, inside + recent)
        left = [lines.state(now, "detaching")] if e.how == "detached" else []
        return self.file.last(lambda: [*left, self._coverage_line(now), end], now)

    def forget(self) -> None:
        """Leave the hot path."""
        self._forget_threads()

    def _forget_threads(self) -> None:
        for key in self._threads:
            self.around.router.threads.pop(key, None)
        self._threads.clear()
