"""Which processes get a file, and what came before they did."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from nccluprobe.capture.source import Source
from nccluprobe.collect.decode import who_key
from nccluprobe.collect.fast import outermost_end
from nccluprobe.collect.ports import Notify, Procs
from nccluprobe.nccl.api import BY_ID, Kind
from nccluprobe.plural import counted
from nccluprobe.record import FLAG_ENTER_ONLY, KIND_CALL, KIND_NEW_COMM, Record

Key = tuple[int, int]

_MOST = 4096
_MOST_BEFORE = 256
_SWEEP = 64

#: Calls that make a process one of a job: only these begin a file.  A communicator that an
#: earlier collector has the call of (KIND_NEW_COMM) does so, too.
_BEGINS = frozenset(
    api.id
    for api in BY_ID.values()
    if api.makes_comm or api.kind in (Kind.COLLECTIVE, Kind.P2P, Kind.ONE_SIDED)
)


def is_inside(rec: Record) -> bool:
    """Whether it comes from the table of calls inside, and is no record of the ring."""
    return rec.kind == KIND_CALL and not rec.t_exit and not rec.flags & FLAG_ENTER_ONLY


@dataclass
class Stats:
    """What became of records, of those in no file above all."""

    denied: int = 0  # of processes that are not wanted
    late: int = 0  # of processes that had ended and were closed
    undecided: int = 0  # of processes that were gone before anyone could look
    before: int = 0  # before a process's first NCCL init or data call
    traced: int = 0  # processes, not records: with a file
    skipped: int = 0  # lines, not records: of closed files, not written for want of room
    unclosed: int = 0  # files, not records: without the lines that close them

    def note_unclosed(self, name: str, skipped: int, notify: Notify) -> None:
        """The last lines of a process's trace could not be written, so nobody reads the count."""
        self.unclosed += 1
        notify(
            "problem",
            f"{name}: the lines that close its trace could not be written, so the trace does not "
            f"tell what it lacks; {counted(skipped, 'line', 'was')} skipped before",
        )


class Verdict(Enum):
    """What to do with a record of a process without a file."""

    OPEN = auto()
    DENIED = auto()
    UNDECIDED = auto()
    WAIT = auto()


@dataclass
class _Waiting:
    """A wanted process without a file: records that its file will begin with."""

    before: list[Record] = field(default_factory=list)


class Admission:
    """Asks ``wanted`` once per process and remembers, within bounds."""

    def __init__(
        self,
        source: Source,
        wanted: Callable[[int], bool | None],
        procs: Procs,
        threads: MutableMapping[bytes, Any],
    ) -> None:
        self._source = source
        self._wanted = wanted
        self._procs = procs
        self._threads = threads
        self._waiting: OrderedDict[Key, _Waiting] = OrderedDict()
        self._denied: OrderedDict[Key, set[bytes]] = OrderedDict()
        self._undecided: OrderedDict[Key, int] = OrderedDict()

    def ask(self, rec: Record) -> tuple[Verdict, list[Record]]:
        """The verdict, and with OPEN the earlier records that belong into the file."""
        key = (rec.pid, rec.epoch)
        waiting = self._waiting.get(key)
        if waiting is None:
            if key not in self._denied:
                wanted = self._wanted(rec.pid)
                if wanted is None:
                    dropped = 0 if is_inside(rec) else 1
                    self._undecided[key] = self._undecided.get(key, 0) + dropped
                    _trim(self._undecided)
                    return Verdict.UNDECIDED, []
                if wanted:
                    waiting = self._waiting[key] = _Waiting()
                    _trim(self._waiting)
                else:
                    self._source.deny(*key)
                    self._denied[key] = set()
                    if len(self._denied) > _MOST:
                        self._release(next(iter(self._denied)))
            if waiting is None:
                self._silence(key, rec)
                return Verdict.DENIED, []
        if rec.kind in (KIND_CALL, KIND_NEW_COMM) and rec.api in _BEGINS:
            del self._waiting[key]
            return Verdict.OPEN, waiting.before
        if not is_inside(rec):
            self._keep(waiting, rec)
        return Verdict.WAIT, []

    def undecided(self, key: Key) -> int:
        """Records of a process that were dropped before it could be decided on."""
        return self._undecided.pop(key, 0)

    @staticmethod
    def _keep(waiting: _Waiting, rec: Record) -> None:
        """Keep what the file will need: open groups, names; nothing that is over."""
        if rec.kind == KIND_CALL:
            api = BY_ID.get(rec.api)
            if api is None or api.kind is not Kind.GROUP:
                return
            if outermost_end(rec):
                waiting.before = [
                    r for r in waiting.before if r.kind != KIND_CALL or r.tid != rec.tid
                ]
                return
        waiting.before.append(rec)
        del waiting.before[:-_MOST_BEFORE]

    def _silence(self, key: Key, rec: Record) -> None:
        who = who_key(rec.pid, rec.tid, rec.epoch)
        self._denied[key].add(who)
        self._threads[who] = None

    def _release(self, key: Key) -> None:
        for who in self._denied.pop(key, ()):
            self._threads.pop(who, None)

    def sweep(self) -> None:
        """Forget processes that are gone; a few at a time."""
        for table in (self._denied, self._waiting):
            for key in list(table)[:_SWEEP]:
                table.move_to_end(key)
                try:
                    alive = self._procs.read_state(key[0]).alive
                except (OSError, ValueError):
                    alive = False
                if not alive:
                    self._waiting.pop(key, None)
                    self._release(key)
                    self._source.forget(*key)


def _trim(table: OrderedDict[Key, Any]) -> None:
    if len(table) > _MOST:
        table.popitem(last=False)
