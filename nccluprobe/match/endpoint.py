"""One rank of one communicator: its calls in order, numbered by slot.

A call's slot is its position among the calls that NCCL ran: the ordinal of the
trace, less error returns and failed groups.  Numbering is by position in the
queue, so taking a call out renumbers what follows.
"""

from __future__ import annotations

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match.align import ALIGNED, AMBIGUOUS, EXACT, UNKNOWN, Alignment
from nccluprobe.match.columns import Columns, Row
from nccluprobe.match.process import Actor, Process
from nccluprobe.match.tail import Tail

#: A hole longer than this is not a loss but a broken trace.
_MAX_HOLE = 1_000_000
#: A hole longer than this is not filled with rows when nothing before it is held.
_LONG_HOLE = 1000
#: An endpoint that cannot be joined keeps no more rows than this.
MAX_UNJOINED = 4096
#: So many first calls are remembered with their thread.
_HEAD = 256

#: Those of one peer, a send first.
TRANSFERS = ("ncclSend", "ncclRecv")


class Endpoint:
    """State of one endpoint: only what is open is kept."""

    def __init__(self, process: Process, info: m.CommInfo) -> None:
        self.process = process
        self.info = info
        #: Whether its calls have a place among those of the others: asked many times a scan.
        self.slotted = False
        self.rows = Columns()
        self.end: m.CommEnd | None = None
        #: Entered calls that were dropped from ``rows``, plus the base.
        self.dropped = 0 if info.base is None else info.base
        self.next_ord = 0
        self.last_t = 0  # newest entry of a collective
        self.last_idx: int | None = None
        self.thread = 0  # of its newest call
        self.tail = Tail()
        self.first_grouped = False  # its first call stood in a group whose start was seen
        self._head: dict[int, int] = {}  # ord -> thread of its first calls, when late
        self.lost = 0  # lost calls that were put in as holes
        self.broken = False
        #: Where it stands among the others, when it was attached late.
        self.placement: Alignment | None = None
        #: Slot of the first call seen, when it was attached late and has a place.
        self.first_slot: int | None = None
        self.tried = 0  # how much there was to compare at the last try
        #: The library's counters before the first call held, while it has no place.
        self.before = info.seqs
        #: Collectives with an ``ord`` below this are known to be complete on its device;
        #: None: its source does not see completion.
        self.completed: int | None = None
        #: Where completion is seen: (is a send, peer) -> {ord: entry} of sends and receives
        #: that are not complete.
        self.posted: dict[tuple[bool, int], dict[int, int]] = {}
        #: Its oldest call that is not complete, when completion is seen: slot, time, signature.
        self.oldest: tuple[int, int, int] | None = None
        #: Calls that are not complete and forgotten: slot, signature.
        self.undone: list[tuple[int, int]] = []
        self._pending: dict[int, Row] = {}
        self._inside: dict[int, int] = {}  # ord -> t of calls known by an enter line only
        #: group whose end is in flight -> ordinals of its calls in the queue
        self._in_open_end: dict[int, list[int]] = {}
        self._note_place()

    def tell(self, info: m.CommInfo) -> None:
        """More is known of its communicator."""
        self.info = info
        self._note_place()

    def _note_place(self) -> None:
        self.slotted = self.base != UNKNOWN

    @property
    def comm_rank(self) -> int | None:
        """Rank in the communicator."""
        return self.info.comm_rank

    @property
    def actor(self) -> Actor:
        """Who makes its calls."""
        return (self.process.who, self.thread if self.process.several_ranks else 0)

    @property
    def entered(self) -> int:
        """Slots entered so far: the slot that it enters next."""
        return self.dropped + len(self.rows)

    @property
    def base(self) -> str:
        """How sure the slot numbers are: exact, aligned or unknown."""
        if self.broken:
            return UNKNOWN
        if not self.late:
            return EXACT if self.info.from_start else ALIGNED
        return UNKNOWN if self.placement is None else self.placement.base

    @property
    def late(self) -> bool:
        """Whether its place among the others has to be found."""
        return not self.info.from_start and self.info.base is None

    @property
    def guessed(self) -> bool:
        """Whether its place is one of several that fit."""
        return self.base == AMBIGUOUS

    def placed(self, slot: int, placement: Alignment) -> None:
        """Its first held call is that of ``slot``."""
        if self.placement is None or self.placement.shift is None:
            self.first_slot = slot - self.dropped
        elif self.first_slot is not None:
            self.first_slot += slot - self.dropped
        self.dropped = slot
        self.place_by(placement)

    def place_by(self, placement: Alignment) -> None:
        """Take what a comparison with the others told of its place, though the slots stay."""
        self.placement = placement
        self._note_place()

    @property
    def before_sure(self) -> bool:
        """Whether ``before`` was read with no call of an unseen group waiting."""
        return self.before is not None and self.first_grouped

    @property
    def queued(self) -> bool:
        """Whether calls are seen that do not count as entered yet (open group, hole)."""
        return bool(self._pending)

    @property
    def queued_in_group(self) -> bool:
        """Whether the next call is queued in a group that has not ended."""
        row = self._pending.get(self.next_ord)
        return row is not None and row.group != 0

    @property
    def in_group(self) -> int:
        """How many calls are queued in groups that have not ended."""
        return sum(1 for row in self._pending.values() if row.group)

    def inside(self, other: bool = True) -> int | None:
        """Entry of its oldest call that has not returned; ``other``: not only of collectives."""
        times = [
            c.t
            for c in self.process.all_inside()
            if (c.comm == self.info.id and (other or c.is_collective))
            or (c.group and c.group in self._in_open_end)
        ]
        return min(times, default=None)

    def sig_at(self, slot: int) -> int | None:
        """Signature of an entered slot that is still held."""
        at = slot - self.dropped
        return int(self.rows.sig[at]) if 0 <= at < len(self.rows) else None

    def t_at(self, slot: int) -> int | None:
        """Entry time of an entered slot that is still held."""
        at = slot - self.dropped
        return int(self.rows.t[at]) if 0 <= at < len(self.rows) else None

    def idx_at(self, slot: int) -> int | None:
        """call_idx of an entered slot that is still held."""
        at = slot - self.dropped
        found = int(self.rows.idx[at]) if 0 <= at < len(self.rows) else -1
        return None if found < 0 else found

    def site_at(self, slot: int) -> int:
        """Call site of an entered slot that is still held; 0: not known."""
        at, sites = slot - self.dropped, self.rows.site
        return 0 if sites is None or not 0 <= at < len(sites) else int(sites[at])

    # -- taking calls ------------------------------------------------------

    def take(self, b: m.Batch) -> None:
        """Take finished calls."""
        if self.broken or len(b) == 0:
            return
        self.tail.add(b)
        if self.late and b.ord[0] < _HEAD:
            self.first_grouped |= bool(b.ord[0] == 0 and b.group[0])
            self._head.update(zip(b.ord[:_HEAD].tolist(), b.thread[:_HEAD].tolist(), strict=True))
        if self._pending or self._inside or not self._take_fast(b):
            self._take_slow(b)

    def _take_fast(self, b: m.Batch) -> bool:
        n = len(b)
        order = b.ord
        if order[0] != self.next_ord or order[-1] != self.next_ord + n - 1:
            return False
        if n > 1 and not bool((order[1:] - order[:-1] == 1).all()):
            return False
        t, rc = b.t_enter, b.rc
        if b.group.any():
            grouped = self._resolve_groups(b)
            if grouped is None:
                return False
            t, rc = grouped
        run = (rc == 0) | (rc == m.RC_NONE) | (rc == 7)
        if run.all():
            self.rows.extend(b.sig, t, b.idx, order, b.seq, b.site)
        else:
            seq = None if b.seq is None else b.seq[run]
            site = None if b.site is None else b.site[run]
            self.rows.extend(b.sig[run], t[run], b.idx[run], order[run], seq, site)
        self.next_ord += n
        if run.any():
            self.last_t = max(self.last_t, int(t[run][-1]))
        self.last_idx = int(b.idx[-1])
        return True

    def _resolve_groups(self, b: m.Batch) -> tuple[m.Int64, m.Int32] | None:
        ids, inverse = np.unique(b.group, return_inverse=True)
        ends = [self.process.groups.get(g) if g else None for g in ids.tolist()]
        if any(g and (e is None or e.open) for e, g in zip(ends, ids.tolist(), strict=True)):
            return None
        grouped = b.group != 0
        end_t = np.array([e.t if e else 0 for e in ends], np.int64)[inverse]
        end_rc = np.array([e.rc if e else 0 for e in ends], np.int32)[inverse]
        own_failed = (b.rc != 0) & (b.rc != 7) & (b.rc != m.RC_NONE)
        return (
            np.where(grouped, end_t, b.t_enter),
            np.where(grouped & ~own_failed, end_rc, b.rc).astype(np.int32),
        )

    def _take_slow(self, b: m.Batch) -> None:
        seq = np.full(len(b), m.NO_SEQ, np.int64) if b.seq is None else b.seq
        site = np.zeros(len(b), np.int64) if b.site is None else b.site
        columns = (b.sig, b.t_enter, b.idx, b.ord, b.rc, b.group, seq, site)
        for values in zip(*(c.tolist() for c in columns), strict=True):
            row = Row(*values)
            if row.ord < self.next_ord:
                self._returned(row)
            else:
                self._inside.pop(row.ord, None)
                self._pending[row.ord] = row
        self.drain()

    def take_inside(self, e: m.Enter) -> None:
        """Take a call that is still inside."""
        if self.broken or e.ord is None or e.sig is None:
            return
        if e.ord < self.next_ord or e.ord in self._pending:
            return
        if e.ord == 0 and e.group:
            self.first_grouped = True
        self._inside[e.ord] = e.t
        idx = -1 if e.idx is None else e.idx
        self._pending[e.ord] = Row(e.sig, e.t, idx, e.ord, m.RC_NONE, e.group, e.seq, e.site)
        self.drain()

    def _returned(self, row: Row) -> None:
        """A call that was counted while inside has returned: it may have failed."""
        if self._inside.pop(row.ord, None) is None or not m.not_run(row.rc):
            return
        at = int(np.searchsorted(self.rows.ord, row.ord))
        if at < len(self.rows) and int(self.rows.ord[at]) == row.ord:
            self.rows.delete(at)

    def drain(self) -> None:
        """Move calls that are next in order, and whose group has ended, to the queue."""
        pending = self._pending
        if self.next_ord not in pending:
            return
        taken: list[Row] = []
        while (row := pending.get(self.next_ord)) is not None:
            rc, t = row.rc, row.t
            if row.group:
                end = self.process.groups.get(row.group)
                if end is None:
                    break
                t = end.t
                if end.open:
                    self._in_open_end.setdefault(row.group, []).append(row.ord)
                if not m.not_run(rc):
                    rc = end.rc
            del pending[self.next_ord]
            self.next_ord += 1
            if m.not_run(rc):
                self._inside.pop(row.ord, None)
            else:
                taken.append(row._replace(t=t))
        if taken:
            sig, t_, idx, order, _, _, seq, site = zip(*taken, strict=True)
            self.rows.extend(
                np.array(sig, np.int32),
                np.array(t_, np.int64),
                np.array(idx, np.int64),
                np.array(order, np.int64),
                np.array(seq, np.int64),
                np.array(site, np.int64) if any(site) else None,
            )
            self.last_t = max(self.last_t, max(t_))
            self.last_idx = idx[-1]

    def unseen_group_failed(self, thread: int, t: int) -> None:
        """A group that was open when the tracer came has failed: its calls did not run."""
        for order in [o for o, x in self._head.items() if x == thread]:
            at = int(np.searchsorted(self.rows.ord, order))
            held = at < len(self.rows) and int(self.rows.ord[at]) == order
            if held and int(self.rows.t[at]) < t:
                self.rows.delete(at)

    def groups_closed(self, closed: dict[int, bool]) -> None:
        """Groups whose end was in flight have ended; failed ones did not run."""
        for group, failed in closed.items():
            for order in self._in_open_end.pop(group, ()):
                at = int(np.searchsorted(self.rows.ord, order))
                if failed and at < len(self.rows) and int(self.rows.ord[at]) == order:
                    self.rows.delete(at)

    # -- holes -------------------------------------------------------------

    def covered(self, through: int) -> int:
        """All that entered before ``through`` is known, so holes are lost calls: how many."""
        found = 0
        self.drain()
        while self._pending and self.next_ord not in self._pending:
            first = min(self._pending)
            if self._pending[first].t >= through:
                break
            n = first - self.next_ord
            found += n
            if len(self.rows) == 0 and n > _LONG_HOLE:
                self.dropped += n  # as good as attached late
                self.before = None
                self.next_ord = first
                self.drain()
                continue
            if n > _MAX_HOLE:
                self.broken = True
                self._note_place()
                self._pending.clear()
                return found
            t = self._pending[first].t
            lost, times = np.full(n, m.SIG_LOST, np.int32), np.full(n, t, np.int64)
            orders = np.arange(self.next_ord, first, dtype=np.int64)
            self.rows.extend(lost, times, np.full(n, -1, np.int64), orders)
            self.next_ord = first
            self.drain()
        self.lost += found
        return found

    def post(self, b: m.P2PBatch) -> None:
        """Remember sends and receives, until they are known to be complete."""
        columns = (b.send, b.peer, b.ord, b.t_enter)
        for send, peer, order, t in zip(*(c.tolist() for c in columns), strict=True):
            lane = self.posted.setdefault((send, peer), {})
            if len(lane) < MAX_UNJOINED:
                lane[order] = t

    def complete(self, c: m.Completed) -> None:
        """Take proof of completion."""
        self.completed = max(self.completed or 0, c.calls)
        for send, peer, bound in c.p2p:
            lane = self.posted.get((send, peer), {})
            for order in [o for o in lane if o < bound]:
                del lane[order]

    @property
    def done(self) -> int | None:
        """Slots before this are complete on its device; None: not seen."""
        return None if self.completed is None else (self.info.base or 0) + self.completed

    def note_oldest(self) -> None:
        """Remember the oldest call that is not complete, before it is forgotten."""
        done = self.done
        if done is None or (self.oldest is not None and self.oldest[0] >= done):
            return
        t, sig = self.t_at(done), self.sig_at(done)
        self.oldest = None if t is None or sig is None else (done, t, sig)

    def drop_to(self, slot: int) -> None:
        """Forget slots before ``slot``."""
        n = min(slot - self.dropped, len(self.rows))
        if self.completed is not None:
            self.note_oldest()
            first = max((self.done or 0) - self.dropped, 0)
            new = [(self.dropped + i, int(self.rows.sig[i])) for i in range(first, n)]
            self.undone = (self.undone + new)[-MAX_UNJOINED:]
        if n > 0:
            self.rows.drop(n)
            self.dropped += n

    def limit(self) -> None:
        """Keep memory bounded while the endpoint cannot be joined."""
        if len(self.rows) > MAX_UNJOINED:
            self.drop_to(self.dropped + len(self.rows) - MAX_UNJOINED // 2)
            self.before = None
