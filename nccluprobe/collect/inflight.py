"""Calls that are inside, and up to when the trace is complete.

The front writes a record when a call ends, and keeps the calls that are inside
in a table, which is read here every quarter of a second (a snapshot).  The
table is copied while threads run, so an entry is believed when two snapshots
in a row show the same call.

**Why ``through`` is safe.**  Let snapshot k be read between the times a(k) and
b(k), with a(k) taken before the read begins, and let the drain D(k) begin after
b(k).  A call that entered at time e < a(k-1) - GUARD is, at b(k), one of:

1. *Over, and its record was visible in the ring at D(k) or before*: its line is
   written.
2. *In both snapshots*: the two agree (a call does not change while inside), so
   an ``enter`` line is written after D(k), unless D(k) brought its record.
3. *In neither, though its record is not visible*: not possible but for a short
   time.  A front takes the entry's time, then enters the call into the table,
   and at the exit writes the record, then (or just before) takes the call out.
   GUARD bounds the first gap: e < a(k-1) - GUARD means it was in the table
   before snapshot k-1 began, unless it had left already.  A call that left
   before b(k) has its record visible by b(k) + GUARD (a record behind one that
   another CPU has reserved and not yet committed is not).
4. *In snapshot k-1 only*: it left before b(k); as in 3.

So a(k-1) - GUARD may be published once a drain has been worked off that began
at b(k) + GUARD or later, and the lines of it are in the file.  A record that
was lost in between was counted by the front before it would have become
visible; the coverage line reads the counters after that drain.

An entry missing from one snapshot by accident only delays its ``enter`` line
and would break this; fronts must give every entry that is in the table during
the whole read (a hash map's walk that restarts may repeat entries, never skip
them).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from nccluprobe.collect.decode import records
from nccluprobe.nccl.api import BY_ID
from nccluprobe.record import KIND_CALL, Record

SNAPSHOT_NS = 250_000_000
GUARD_NS = 50_000_000


class CallKey(NamedTuple):
    """One call, among all that a front ever saw."""

    pid: int
    tid: int
    epoch: int
    t: int


def key_of(rec: Record) -> CallKey:
    """The key of a record's call."""
    return CallKey(rec.pid, rec.tid, rec.epoch, rec.t_enter)


@dataclass
class Through:
    """The watermark, and the one that waits for its drain.

    ``cycle`` numbers the snapshot pair that it comes from, so that a process
    which became known later can tell whether it was looked at.
    """

    value: int = 0
    cycle: int = 0
    _waiting: list[tuple[int, int, int]] = field(default_factory=list)

    def candidate(self, value: int, cycle: int, ready_at: int) -> None:
        """A new watermark, good after a drain that began at ``ready_at`` or later."""
        self._waiting.append((ready_at, value, cycle))

    def drained(self, began: int) -> bool:
        """A drain that began then is worked off: whether the watermark moved."""
        moved = False
        while self._waiting and self._waiting[0][0] <= began:
            _, value, cycle = self._waiting.pop(0)
            if value > self.value:
                self.value, self.cycle, moved = value, cycle, True
        return moved


class InFlight:
    """What the snapshots say.

    ``watch`` is shared with the hot path: entry times of all calls that were
    seen inside, so that their exits come to ``exited``.
    """

    def __init__(self, watch: set[int]) -> None:
        self.watch = watch
        self.through = Through()
        self.cycle = 0
        #: Calls of the last snapshot that have not ended since.
        self.inside: dict[CallKey, Record] = {}
        #: Calls with an ``enter`` line and no ``call`` line yet.
        self.written: dict[CallKey, Record] = {}
        self._agreed: dict[CallKey, Record] = {}
        self._absent: dict[CallKey, int] = {}
        self._last_began: int | None = None

    def due(self, now: int) -> bool:
        """Whether it is time for a snapshot."""
        return self._last_began is None or now - self._last_began >= SNAPSHOT_NS

    def snapshot(self, data: bytes, began: int, ended: int) -> None:
        """A snapshot, read between these times; the drain that follows comes after it."""
        current: dict[CallKey, Record] = {}
        for rec in records(data):
            if rec.kind == KIND_CALL and rec.t_enter and not rec.t_exit and rec.api in BY_ID:
                current[key_of(rec)] = rec
        self.cycle += 1
        self._agreed = {
            key: rec
            for key, rec in current.items()
            if key in self.inside and self.inside[key].call_idx == rec.call_idx
        }
        for key in self.written:
            self._absent[key] = 0 if key in current else self._absent.get(key, 0) + 1
        self.inside = current
        self._rewatch()
        if self._last_began is not None:
            self.through.candidate(self._last_began - GUARD_NS, self.cycle, ended + GUARD_NS)
        self._last_began = began

    def _rewatch(self) -> None:
        self.watch.clear()
        self.watch.update(key.t for key in self.inside)
        self.watch.update(key.t for key in self.written)

    def exited(self, rec: Record) -> None:
        """The record of a watched call came."""
        key = key_of(rec)
        self.inside.pop(key, None)
        self._agreed.pop(key, None)
        self.written.pop(key, None)
        self._absent.pop(key, None)

    def confirmed(self) -> list[Record]:
        """After the drain: calls inside that have no ``enter`` line yet."""
        return [rec for key, rec in self._agreed.items() if key not in self.written]

    def wrote(self, rec: Record) -> None:
        """Its ``enter`` line is written."""
        self.written[key_of(rec)] = rec

    def is_written(self, rec: Record) -> bool:
        """Whether the call has an ``enter`` line and no ``call`` line yet."""
        return key_of(rec) in self.written

    def vanished(self) -> list[Record]:
        """Calls written as entered that are inside no more and gave no record.

        Gone from three snapshots in a row, with a drain after each: the record
        of their exit was lost.
        """
        gone = [key for key, times in self._absent.items() if times >= 3]
        found = []
        for key in gone:
            del self._absent[key]
            rec = self.written.pop(key, None)
            if rec is not None:
                found.append(rec)
        return found

    def of(self, pid: int, epoch: int) -> list[Record]:
        """Calls of a process in the last snapshot."""
        return [r for k, r in self.inside.items() if k.pid == pid and k.epoch == epoch]

    def written_of(self, pid: int, epoch: int) -> list[Record]:
        """Calls of a process with an ``enter`` line only."""
        return [r for k, r in self.written.items() if k.pid == pid and k.epoch == epoch]

    def forget(self, pid: int, epoch: int) -> None:
        """The process is gone."""
        for table in (self.inside, self.written, self._agreed, self._absent):
            for key in [k for k in table if k.pid == pid and k.epoch == epoch]:
                del table[key]
        self._rewatch()
