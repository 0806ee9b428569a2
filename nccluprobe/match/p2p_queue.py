"""Sends and receives of one endpoint: a queue of open ones per direction and peer.

A send's or receive's position is its place among those of its direction and
peer that NCCL ran: the n-th send pairs with the n-th receive.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nccluprobe.match import model as m
from nccluprobe.match.endpoint import MAX_UNJOINED, Endpoint
from nccluprobe.match.p2p_open import GROUP as GROUP
from nccluprobe.match.p2p_open import IDX as IDX
from nccluprobe.match.p2p_open import ORD as ORD
from nccluprobe.match.p2p_open import PEER as PEER
from nccluprobe.match.p2p_open import SEND as SEND
from nccluprobe.match.p2p_open import SIG as SIG
from nccluprobe.match.p2p_open import STREAM as STREAM
from nccluprobe.match.p2p_open import THREAD as THREAD
from nccluprobe.match.p2p_open import WIDTH as WIDTH
from nccluprobe.match.p2p_open import Lane as Lane
from nccluprobe.match.p2p_open import Op as Op
from nccluprobe.match.p2p_open import Queue as Queue
from nccluprobe.match.p2p_open import T as T
from nccluprobe.match.p2p_open import Table as Table
from nccluprobe.match.tail import IDX as CALL_IDX
from nccluprobe.match.tail import T as CALL_T
from nccluprobe.nccl.enums import IN_PROGRESS

#: A hole longer than this is not a loss but a broken trace.
_MAX_HOLE = 100_000
#: So many of the newest operations are remembered, for who has changed its habits.
TAIL = 192


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
        #: The newest operation seen of each direction and peer: call_idx and entry.
        self.newest: dict[Lane, tuple[int, int]] = {}
        #: Newest operations in order of the program, in parts.
        self.tail: deque[Table] = deque()
        #: Operations with a ``call_idx`` below this have surely ended on their devices.
        self.over = 0
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

    def awaits(self, lane: Lane, order: int) -> bool:
        """Whether this one of a direction and peer is seen, and has not taken effect."""
        return order in self._pending.get(lane, ())

    def is_inside(self, op: Op) -> bool:
        """Whether an operation's call has not returned."""
        return op.ord in self._inside.get((bool(op.send), op.peer), ())

    @property
    def unsettled(self) -> int:
        """How many have not taken effect, plus how many have not returned."""
        known = (*self._pending.values(), *self._inside.values())
        return sum(map(len, known)) if known else 0

    def hole(self, lane: Lane) -> bool:
        """Whether an operation is known by one after it only, and may still be told."""
        pending = self._pending.get(lane)
        return pending is not None and self._next.get(lane, 0) not in pending

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
        entry = table[:, T].copy()
        ready = self._ready(table, rc)
        self._note(table)
        lanes = table[:, PEER] * 2 + table[:, SEND]
        if lanes[0] == lanes[-1] and bool((lanes == lanes[0]).all()):
            bounds = [0, len(table)]
        else:
            by_lane = np.argsort(lanes, kind="stable")
            table, rc, lanes = table[by_lane], rc[by_lane], lanes[by_lane]
            entry = entry[by_lane]
            ready = None if ready is None else ready[by_lane]
            cuts = (np.flatnonzero(lanes[1:] != lanes[:-1]) + 1).tolist()
            bounds = [0, *cuts, len(table)]
        for start, end in pairwise(bounds):
            key = int(lanes[start])
            lane = (bool(key & 1), key >> 1)
            self._note_newest(lane, int(table[end - 1, IDX]), int(entry[end - 1]))
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

    def _note_newest(self, lane: Lane, idx: int, t: int) -> None:
        if idx > self.newest.get(lane, (-1, 0))[0]:
            self.newest[lane] = (idx, t)

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
                self._leave(lane, op.ord)
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
        stream = e.stream
        if stream is None:  # as the one before
            stream = int(self.tail[-1][-1, STREAM]) if self.tail else 0
        op = Op(e.ord, e.sig, e.t, idx, e.group, e.thread, e.peer, int(e.send), stream)
        self.tail.append(np.array([op], np.int64))
        self._note_newest(lane, idx, e.t)
        self._inside.setdefault(lane, set()).add(e.ord)
        self._pending.setdefault(lane, {})[e.ord] = (op, m.RC_NONE)
        self.drain_lane(lane)

    def _returned(self, lane: Lane, order: int, rc: int) -> None:
        """An operation that was taken has returned, or is told late: it may have failed."""
        self._leave(lane, order)
        if m.not_run(rc):
            self._remove(lane, order)

    def _leave(self, lane: Lane, order: int) -> None:
        orders = self._inside.get(lane)
        if orders is not None:
            orders.discard(order)
            if not orders:
                del self._inside[lane]

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
                self._leave(lane, op.ord)
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
            while pending and (order := self._next.get(lane, 0)) not in pending:
                first = min(pending)
                t = pending[first][0].t
                if t >= through:
                    break
                self.suppose(lane, first - order, t)
                self.drain_lane(lane)

    def suppose(self, lane: Lane, n: int, t: int) -> None:
        """Take ``n`` lost operations, entered before ``t``."""
        order, queue = self._next.get(lane, 0), self.queue(*lane)
        if n > _MAX_HOLE:
            queue.odd = True
        else:
            hole = Op(0, m.SIG_LOST, t, -1, 0, self.endpoint.thread, lane[1], int(lane[0]))
            rows = [hole._replace(ord=o) for o in range(order, order + n)]
            queue.push(np.array(rows, np.int64))
            self.fresh[lane] = None
        self.lost += n
        queue.lost += n
        self._next[lane] = order + n

    def restore(self, lane: Lane, order: int, peers: Op, idx: int) -> bool:
        """Put in an operation that was lost, by what its peer made; whether it fits.

        ``peers``: the peer's side of it; ``idx``: its call_idx.
        """
        if self._next.get(lane, 0) != order or lane in self._pending:
            return False
        rows = self.recent()
        at = int(np.searchsorted(rows[:, IDX], idx))
        near = [Op(*rows[i].tolist()) for i in (at - 1, at) if 0 <= i < len(rows)]
        if lane[1] == self.endpoint.comm_rank:
            near = [peers, peers]  # with oneself: both are in one group
        group = near[0].group if len(near) == 2 and near[0].group == near[1].group else 0
        like = near[0] if near else peers
        # Nor was it made before a collective that stands before it.
        calls = self.endpoint.tail.rows()
        before = calls[calls[:, CALL_IDX] < idx, CALL_T]
        t = max(like.t, int(before.max(initial=0))) if not group else like.t
        op = Op(order, peers.sig, t, idx, group, like.thread, lane[1], int(lane[0]))
        row = np.array([op._replace(stream=like.stream if near else 0)], np.int64)
        self.tail.append(row)
        self.queue(*lane).push(row)
        self.queue(*lane).lost += 1
        self._next[lane] = order + 1
        self.endpoint.process.losses.filled.setdefault(self.endpoint.info.id, set()).add(idx)
        self._note_newest(lane, idx, op.t)
        return True

    def limit(self) -> None:
        """Keep memory bounded while the endpoint cannot be joined."""
        for queue in self.queues.values():
            if queue.n > MAX_UNJOINED:
                queue.drop(queue.n - MAX_UNJOINED // 2)

    def recent(self) -> Table:
        """The newest operations in order of the program, each once."""
        if not self.tail:
            return np.empty((0, WIDTH), np.int64)
        if len(self.tail) > 1:
            self.tail = deque([np.concatenate(self.tail)])
        rows = self.tail[0]
        if bool((rows[1:, IDX] > rows[:-1, IDX]).all()):
            if len(rows) > TAIL:
                rows = self.tail[0] = rows[-TAIL:].copy()
            return rows
        rows = rows[::-1]  # of a call that was seen twice, the newest
        _, at = np.unique(rows[:, IDX], return_index=True)
        return rows[at][-TAIL:]
