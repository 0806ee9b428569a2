"""A table of finished calls as the matcher's items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nccluprobe.match import model as m
from nccluprobe.match.callrows import DATA, ENDS, IS_P2P, IS_SEND, OPENS, SIMULATES, Calls
from nccluprobe.match.lines import SourceState
from nccluprobe.nccl.enums import IN_PROGRESS, SUCCESS
from nccluprobe.trace import scanner as c

_SIMULATED = 5  # return code given to the calls of a simulated group: they never run

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Columns:
    """What every call has, as columns of equal length; times in unix ns.

    ``ends``: calls that end a group.  ``grouped``: whether any stands in a group.
    ``whole``: all groups have their start and end here, and every start says of which.
    """

    codes: m.Int64
    t: m.Int64
    t_exit: m.Int64
    rc: m.Int32
    group: m.Int64
    thread: m.Int64
    ends: Mask
    grouped: bool
    whole: bool


def columns_of(table: m.Int64, offset: int) -> Columns:
    """The columns of a table of calls."""
    codes, group = table[c.CODE], table[c.GROUP]
    t, dur = table[c.T] + offset, table[c.DUR]
    t_exit = t + dur
    if len(dur) and int(dur.min()) < 0:
        t_exit[dur < 0] = m.NO_TIME
    grouped = bool(group.any())
    ends = (codes == ENDS) | (codes == SIMULATES)
    rc = table[c.RC].astype(np.int32)
    opened = codes == OPENS
    whole = not grouped and not opened.any()
    if grouped:
        started = set(group[opened].tolist())
        whole = 0 not in started and started == set(group[ends].tolist()) - {0}
        whole = whole and started == set(group.tolist()) - {0}
    return Columns(codes, t, t_exit, rc, group, table[c.THREAD], ends, grouped, whole)


def count_aborted(x: Columns, aborts: Iterable[int]) -> None:
    """Calls that failed as the process aborted what they waited in were made, as others were.

    ``aborts``: when it began to, unix ns.
    """
    if not x.rc.any():
        return
    failed = (x.rc != SUCCESS) & (x.rc != IN_PROGRESS) & (x.t_exit - x.t >= m.WAITED)
    for t in aborts:
        x.rc[failed & (x.t < t) & (t <= x.t_exit)] = m.RC_NONE


def items_of(source: int, calls: Calls, x: Columns) -> list[m.Item]:
    """Ends of groups first: they say when and whether the calls took effect."""
    made: list[m.Item] = []
    if x.grouped and x.ends.any():
        made += _group_ends(source, calls.table, x)
    made += _batches(source, calls, x)
    made += calls.rare
    return made


def _group_ends(source: int, table: m.Int64, x: Columns) -> list[m.Item]:
    ends = np.flatnonzero(x.ends)
    ends = ends[(table[c.GDEPTH, ends] <= 1) & (x.group[ends] != 0)]
    if not len(ends):
        return []
    rc = x.rc[ends]
    rc = np.where((x.codes[ends] == SIMULATES) & (rc == 0), np.int32(_SIMULATED), rc)
    return [m.GroupEnds(source, x.group[ends], x.t[ends], x.t_exit[ends], rc)]


def _batches(source: int, calls: Calls, x: Columns) -> Iterator[m.Item]:
    """Collectives, then sends and receives, of one communicator after the other."""
    codes, comm = x.codes, calls.table[c.COMM]
    data = codes >= DATA
    pairs = IS_P2P[codes]
    if not len(codes):
        return
    order: m.Int64 | None = None
    mixed = bool(pairs.any())
    if mixed:
        collectives = _by_comm(comm, np.flatnonzero(data & ~pairs))
        transfers = _by_comm(comm, np.flatnonzero(pairs))
        border = len(collectives)
        order = np.concatenate((collectives, transfers))
    elif data.all():
        border = len(data)
        if bool((comm != comm[0]).any()):
            order = np.argsort(comm, kind="stable")
    else:
        order = _by_comm(comm, np.flatnonzero(data))
        border = len(order)
    if order is not None and not len(order):
        return
    rows = _Rows(calls, x, order)
    comm = rows.comm
    cuts = np.flatnonzero(comm[1:] != comm[:-1]) + 1
    bounds = sorted({0, border, len(comm), *cuts.tolist()})
    for start, end in pairwise(bounds):
        at = slice(start, end)
        yield rows.batch(source, at) if start < border else rows.pairs(source, at)


def _by_comm(comm: m.Int64, at: m.Int64) -> m.Int64:
    """Places, those of one communicator together."""
    mine = comm[at]
    if len(mine) and bool((mine != mine[0]).any()):
        return at[np.argsort(mine, kind="stable")]
    return at


class _Rows:
    """Calls with a communicator, in an order; None: as they come."""

    def __init__(self, calls: Calls, x: Columns, order: m.Int64 | None) -> None:
        pick: Any = slice(None) if order is None else order
        table = calls.table if order is None else calls.table.take(order, axis=1)
        self.table = table
        self.comm = table[c.COMM]
        self.codes = table[c.CODE]
        self.sig = table[c.SIG].astype(np.int32)
        self.t, self.t_exit, self.rc = x.t[pick], x.t_exit[pick], x.rc[pick]
        self.group, self.thread = table[c.GROUP], table[c.THREAD]
        # In a group the counters stand still; a call that returns before it is
        # done lets another thread move them.
        wrong = self.rc == IN_PROGRESS
        if x.grouped:
            wrong |= self.group != 0
        self.seq = np.where(wrong, m.NO_SEQ, table[c.SEQ]) if wrong.any() else table[c.SEQ]
        self.site = None if calls.site is None else calls.site[pick]

    def batch(self, source: int, at: slice) -> m.Batch:
        """Collectives of one communicator."""
        return m.Batch(
            **self._shared(source, at),
            seq=self.seq[at],
            site=None if self.site is None else self.site[at],
        )

    def pairs(self, source: int, at: slice) -> m.P2PBatch:
        """Sends and receives of one communicator."""
        return m.P2PBatch(
            **self._shared(source, at),
            send=IS_SEND[self.codes[at]],
            peer=self.table[c.PEER, at].astype(np.int32),
        )

    def _shared(self, source: int, at: slice) -> dict[str, Any]:
        """What calls of one communicator have, of whichever kind."""
        table = self.table
        return {
            "source": source,
            "comm": int(self.comm[at.start]),
            "ord": table[c.ORD, at],
            "idx": table[c.IDX, at],
            "sig": self.sig[at],
            "t_enter": self.t[at],
            "t_exit": self.t_exit[at],
            "rc": self.rc[at],
            "group": self.group[at],
            "thread": self.thread[at],
            "stream": table[c.STREAM, at],
        }


def groups_left_open(state: SourceState, x: Columns) -> list[m.Item]:
    """Groups whose end was lost: their thread has gone on without it."""
    known = state.open_groups
    if x.whole and not known:
        return []
    ended = x.group[x.ends]
    inside = (x.group != 0) & (x.codes != OPENS)
    over = set(ended.tolist())
    for g in over & known.keys():
        del known[g]
    if not over.issuperset(x.group[inside].tolist()):
        inside &= ~np.isin(x.group, ended)
        columns = (x.group[inside], x.thread[inside], x.t[inside])
        for g, thread, at in zip(*(v.tolist() for v in columns), strict=True):
            known[g] = (thread, max(at, known.get(g, (0, 0))[1]))
    if not known:
        return []
    newest: dict[int, tuple[int, int]] = {}  # thread -> newest entry, its group
    for thread in {thread for thread, _ in known.values()}:
        mine = np.flatnonzero(x.thread == thread)
        if len(mine):
            last = mine[len(mine) - 1 - int(np.argmax(x.t[mine][::-1]))]
            newest[thread] = (int(x.t[last]), int(x.group[last]))
    lost = []
    for g, (thread, at) in list(known.items()):
        seen = newest.get(thread)
        if seen is not None and seen[0] > at and seen[1] != g:
            lost.append((g, at))
            del known[g]
    if not lost:
        return []
    return [
        m.GroupEnds(
            source=state.source,
            group=np.array([g for g, _ in lost], np.int64),
            t_enter=np.array([at for _, at in lost], np.int64),
            t_exit=np.full(len(lost), m.NO_TIME, np.int64),
            rc=np.full(len(lost), m.RC_NONE, np.int32),
        )
    ]
