"""Sends and receives of one endpoint: a queue of open ones per direction and peer.

A send's or receive's position is its place among those of its direction and
peer that NCCL ran: the n-th send pairs with the n-th receive.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nccluprobe.match import model as m
from nccluprobe.match.endpoint import MAX_UNJOINED, Endpoint
from nccluprobe.nccl.enums import IN_PROGRESS

Table = NDArray[np.int64]
#: Columns of a row.
ORD, SIG, T, IDX, GROUP, THREAD, PEER, SEND, STREAM = range(9)
WIDTH = 9

#: A hole longer than this is not a loss but a broken trace.
_MAX_HOLE = 100_000
#: More open operations than this in one direction are not held.
_MAX_OPEN = 1 << 20
#: So many of the newest operations are remembered, for who has changed its habits.
TAIL = 192
#: (is a send, peer)
Lane = tuple[bool, int]


class Op(NamedTuple):
    """One open send or receive; times in unix ns."""

    ord: int
    sig: int
    t: int
    idx: int
    group: int
    thread: int
    peer: int
    send: int
    stream: int = 0


class Queue:
    """Open operations of one direction and peer, oldest first."""

    __slots__ = ("complete", "first", "n", "odd", "parts")

    def __init__(self) -> None:
        self.parts: deque[Table] = deque()
        self.n = 0
        #: Position of the oldest that is held.
        self.first = 0
        #: Operations with an ``ord`` below this are known to be complete.
        self.complete = 0
        #: Some cannot be placed any more: not judged.
        self.odd = False

    def __len__(self) -> int:
        return self.n

    @property
    def end(self) -> int:
        """Position of the next operation."""
        return self.first + self.n

    def push(self, rows: Table) -> None:
        """Append rows."""
        self.parts.append(rows)
        self.n += len(rows)
        if self.n > _MAX_OPEN:
            self.drop(self.n)
            self.odd = True

    def rows(self) -> Table:
        """All that is held, as one table."""
        if not self.parts:
            return np.empty((0, WIDTH), np.int64)
        if len(self.parts) > 1:
            joined = np.concatenate(self.parts)
            self.parts.clear()
            self.parts.append(joined)
        return self.parts[0]

    def head(self, n: int) -> Table:
        """The ``n`` oldest."""
        part = self.parts[0]
        return part[:n] if len(part) >= n else self.rows()[:n]

    def at(self, position: int) -> Op | None:
        """One operation that is held."""
        i = position - self.first
        return Op(*self.rows()[i].tolist()) if 0 <= i < self.n else None

    def drop(self, n: int) -> None:
        """Forget the ``n`` oldest."""
        self.first += n
        self.n -= n
        while n:
            part = self.parts[0]
            if len(part) > n:
                self.parts[0] = part[n:]
                return
            n -= len(part)
            self.parts.popleft()

    def give_up(self) -> None:
        """Forget all that is held: it cannot be placed."""
        self.drop(self.n)

    def settle(self) -> None:
        """Do not keep whole batches alive for the few rows that stay open."""
        if self.parts and (len(self.parts) > 1 or self.parts[0].base is not None):
            rows = self.rows()
            if rows.base is not None:
                self.parts[0] = rows.copy()

    def take_out(self, at: int, n: int = 1) -> None:
        """Remove rows at an index: they did not run, or pair with nothing."""
        self.parts = deque([np.delete(self.rows(), slice(at, at + n), axis=0)])
        self.n = len(self.parts[0])

    def find(self, order: int) -> int | None:
        """Index of the row with this ``ord``."""
        rows = self.rows()
        at = int(np.searchsorted(rows[:, ORD], order))
        return at if at < self.n and int(rows[at, ORD]) == order else None


class Side:
    """All sends and receives of one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.queues: dict[Lane, Queue] = {}
        #: Newest entry of a send or receive.
        self.last_t = 0
        self.last_idx: int | None = None
        #: Lost operations that were put in as holes.
        self.lost = 0
        #: Newest operations in order of the program, in parts.
        self.tail: deque[Table] = deque()
        #: Lanes with new rows.
        self.fresh: dict[Lane, None] = {}
        self._next: dict[Lane, int] = {}
        self._pending: dict[Lane, dict[int, tuple[Op, int]]] = {}
        self._inside: dict[Lane, set[int]] = {}
        self._in_open_end: dict[int, list[tuple[Lane, int]]] = {}

    @property
    def queued(self) -> bool:
        """Whether operations are seen that have not taken effect (open group, hole)."""
        return bool(self._pending)

    def is_pending(self, op: Op) -> bool:
        """Whether an operation has not taken effect so far."""
        return op.ord in self._pending.get((bool(op.send), op.peer), ())

    def is_inside(self, op: Op) -> bool:
        """Whether an operation's call has not returned."""
        return op.ord in self._inside.get((bool(op.send), op.peer), ())

    @property
    def inside_any(self) -> bool:
        """Whether the call of any operation has not returned."""
        return bool(self._inside)

    @property
    def hole(self) -> bool:
        """Whether an operation is known by those after it only."""
        return any(
            self._next.get(lane, 0) not in pending for lane, pending in self._pending.items()
        )

    @property
    def placed(self) -> bool:
        """Whether its operations were seen from the communicator's making on."""
        return self.endpoint.info.from_start

    def queue(self, send: bool, peer: int) -> Queue:
        """The queue of a direction and peer."""
        lane = (send, peer)
        found = self.queues.get(lane)
        if found is None:
            found = self.queues[lane] = Queue()
        return found

    # -- taking ------------------------------------------------------------

    def take(self, b: m.P2PBatch) -> None:
        """Take finished operations."""
        table = np.empty((len(b), WIDTH), np.int64)
        columns: list[NDArray[Any]]
        columns = [b.ord, b.sig, b.t_enter, b.idx, b.group, b.thread, b.peer, b.send]
        for at, column in enumerate(columns):
            table[:, at] = column
        table[:, STREAM] = 0 if b.stream is None else b.stream
        if len(b) > 1 and not bool((b.idx[1:] > b.idx[:-1]).all()):
            order = np.argsort(b.idx, kind="stable")
            table, rc = table[order], b.rc[order]
        else:
            rc = b.rc
        ready = self._ready(table, rc)
        self._note(table)
        lanes = table[:, PEER] * 2 + table[:, SEND]
        if lanes[0] == lanes[-1] and bool((lanes == lanes[0]).all()):
            bounds = [0, len(table)]
        else:
            by_lane = np.argsort(lanes, kind="stable")
            table, rc, lanes = table[by_lane], rc[by_lane], lanes[by_lane]
            ready = None if ready is None else ready[by_lane]
            cuts = (np.flatnonzero(lanes[1:] != lanes[:-1]) + 1).tolist()
            bounds = [0, *cuts, len(table)]
        for start, end in pairwise(bounds):
            key = int(lanes[start])
            lane = (bool(key & 1), key >> 1)
            # Up to here nothing needs a look at single rows.
            upto = end
            if ready is not None and not bool(ready[start:end].all()):
                upto = start + int(np.argmin(ready[start:end]))
            if lane in self._pending or lane in self._inside:
                upto = start
            if upto > start and not self._take_fast(lane, table[start:upto]):
                upto = start
            if upto < end:
                self._take_slow(lane, table[upto:end], rc[upto:end])

    def _note(self, table: Table) -> None:
        self.last_t = max(self.last_t, int(table[:, T].max()))
        self.last_idx = int(table[-1, IDX])
        self.tail.append(table[-TAIL:].copy() if len(table) > TAIL else table)
        while len(self.tail) > 1 and sum(map(len, self.tail)) - len(self.tail[0]) >= TAIL:
            self.tail.popleft()

    def _ready(self, table: Table, rc: m.Int32) -> NDArray[np.bool_] | None:
        """Rows that have taken effect; None: all.  Entries become those of the groups' ends."""
        ran = (rc == 0) | (rc == IN_PROGRESS) | (rc == m.RC_NONE)
        groups = table[:, GROUP]
        if groups.any():
            ids, inverse = np.unique(groups, return_inverse=True)
            known = self.endpoint.process.groups
            ends = [known.get(g) if g else None for g in ids.tolist()]
            over = [
                g == 0 or (end is not None and not end.open and not m.not_run(end.rc))
                for g, end in zip(ids.tolist(), ends, strict=True)
            ]
            t = np.array([0 if end is None else end.t for end in ends], np.int64)[inverse]
            np.copyto(table[:, T], t, where=(groups != 0) & (t != 0))
            ran &= np.array(over, np.bool_)[inverse]
        return None if ran.all() else ran

    def _take_fast(self, lane: Lane, part: Table) -> bool:
        first, n = self._next.get(lane, 0), len(part)
        order = part[:, ORD]
        if order[0] != first or order[-1] != first + n - 1:
            return False
        if n > 2 and not bool((order[1:] - order[:-1] == 1).all()):
            return False
        self._next[lane] = first + n
        self.queue(*lane).push(part)
        self.fresh[lane] = None
        return True

    def _take_slow(self, lane: Lane, part: Table, rc: m.Int32) -> None:
        for values, code in zip(part.tolist(), rc.tolist(), strict=True):
            op = Op(*values)
            if op.ord < self._next.get(lane, 0):
                self._returned(lane, op.ord, code)
            else:
                self._not_inside(lane, op.ord)
                self._pending.setdefault(lane, {})[op.ord] = (op, code)
        self.drain_lane(lane)

    def take_inside(self, e: m.Enter) -> None:
        """Take an operation that is still inside."""
        if e.send is None or e.peer is None or e.ord is None or e.sig is None:
            return
        lane = (e.send, e.peer)
        if e.ord < self._next.get(lane, 0) or e.ord in self._pending.get(lane, ()):
            return
        self.last_t = max(self.last_t, e.t)
        idx = -1 if e.idx is None else e.idx
        stream = int(self.tail[-1][-1, STREAM]) if self.tail else 0  # as the one before
        op = Op(e.ord, e.sig, e.t, idx, e.group, e.thread, e.peer, int(e.send), stream)
        self.tail.append(np.array([op], np.int64))
        self._inside.setdefault(lane, set()).add(e.ord)
        self._pending.setdefault(lane, {})[e.ord] = (op, m.RC_NONE)
        self.drain_lane(lane)

    def _returned(self, lane: Lane, order: int, rc: int) -> None:
        """An operation that was taken while inside has returned: it may have failed."""
        if self._not_inside(lane, order) and m.not_run(rc):
            self._remove(lane, order)

    def _not_inside(self, lane: Lane, order: int) -> bool:
        orders = self._inside.get(lane)
        if orders is None or order not in orders:
            return False
        orders.discard(order)
        if not orders:
            del self._inside[lane]
        return True

    def _remove(self, lane: Lane, order: int) -> None:
        queue = self.queue(*lane)
        if (at := queue.find(order)) is not None:
            queue.take_out(at)

    # -- groups and holes --------------------------------------------------

    def drain(self) -> None:
        """Move operations that are next in order, and whose group has ended, to the queues."""
        for lane in list(self._pending):
            self.drain_lane(lane)

    def drain_lane(self, lane: Lane) -> None:
        """As ``drain``, for one direction and peer."""
        pending = self._pending.get(lane)
        if pending is None:
            return
        groups = self.endpoint.process.groups
        taken: list[Op] = []
        order = self._next.get(lane, 0)
        while (found := pending.get(order)) is not None:
            op, rc = found
            if op.group:
                end = groups.get(op.group)
                if end is None:
                    break
                op = op._replace(t=end.t)
                if end.open:
                    self._in_open_end.setdefault(op.group, []).append((lane, order))
                if not m.not_run(rc):
                    rc = end.rc
            del pending[order]
            order += 1
            if m.not_run(rc):
                self._not_inside(lane, op.ord)
            else:
                taken.append(op)
        self._next[lane] = order
        if not pending:
            del self._pending[lane]
        if taken:
            self.queue(*lane).push(np.array(taken, np.int64))
            self.last_t = max(self.last_t, taken[-1].t)
            self.fresh[lane] = None

    def groups_ended(self, closed: dict[int, bool]) -> None:
        """Groups have ended; those that were in flight -> whether they failed."""
        for group, failed in closed.items():
            for lane, order in self._in_open_end.pop(group, ()):
                if failed:
                    self._remove(lane, order)
        self.drain()

    def covered(self, through: int) -> None:
        """Everything that entered before ``through`` is known: holes are losses."""
        for lane, pending in list(self._pending.items()):
            while pending and self._next.get(lane, 0) not in pending:
                first = min(pending)
                op = pending[first][0]
                order = self._next.get(lane, 0)
                if op.t >= through:
                    break
                if first - order > _MAX_HOLE:
                    self.queue(*lane).odd = True
                else:
                    hole = Op(0, m.SIG_LOST, op.t, -1, 0, op.thread, op.peer, op.send)
                    self.queue(*lane).push(
                        np.array([hole._replace(ord=o) for o in range(order, first)], np.int64)
                    )
                    self.fresh[lane] = None
                self.lost += first - order
                self._next[lane] = first
                self.drain_lane(lane)

    def limit(self) -> None:
        """Keep memory bounded while the endpoint cannot be joined."""
        for queue in self.queues.values():
            if queue.n > MAX_UNJOINED:
                queue.drop(queue.n - MAX_UNJOINED // 2)

    def recent(self) -> Table:
        """The newest operations in order of the program, each once."""
        if not self.tail:
            return np.empty((0, WIDTH), np.int64)
        rows = np.concatenate(self.tail)[::-1]  # of a call that was seen twice, the newest
        _, at = np.unique(rows[:, IDX], return_index=True)
        return rows[at][-TAIL:]
