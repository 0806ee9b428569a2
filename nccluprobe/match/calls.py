"""Lines of finished calls to columns: the reader's hot path.

What a call costs here is what a large trace costs, so rows are handled many at
once: one pass per field over all rows of a chunk, whatever they call, and numpy
from there on.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise, repeat
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nccluprobe.match import lines as rare
from nccluprobe.match import model as m
from nccluprobe.match.lines import SourceState
from nccluprobe.match.signature import SignatureTable
from nccluprobe.nccl.api import BY_NAME, Kind, Role
from nccluprobe.nccl.enums import IN_PROGRESS

Line = dict[str, Any]

_SIMULATED = 5  # return code given to the calls of a simulated group: they never run

#: What a function is to the reader; collectives and transfers are numbered from _DATA on.
_UNKNOWN, _LIFECYCLE, _OTHER, _START, _END, _SIMULATE, _DATA = range(7)
_MATCHED = [n for n, a in BY_NAME.items() if a.kind in (Kind.COLLECTIVE, Kind.P2P)]
_CODES: dict[Any, int] = dict.fromkeys(BY_NAME, _OTHER)
_CODES |= {n: _LIFECYCLE for n, a in BY_NAME.items() if a.kind is Kind.LIFECYCLE}
_CODES |= {"ncclGroupStart": _START, "ncclGroupEnd": _END, "ncclGroupSimulateEnd": _SIMULATE}
_CODES |= {n: _DATA + i for i, n in enumerate(_MATCHED)}
_IS_P2P = np.array([False] * _DATA + [BY_NAME[n].kind is Kind.P2P for n in _MATCHED])
_IS_SEND = np.array([False] * _DATA + [BY_NAME[n].direction == "send" for n in _MATCHED])

_common = itemgetter("api", "t", "dur", "rc", "thread")

Codes = NDArray[np.int16]
Mask = NDArray[np.bool_]


@dataclass
class CallCounts:
    """What was odd in the calls of a chunk."""

    blind_calls: int = 0
    unknown_apis: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Columns:
    """What every call line has, as columns of equal length; times in unix ns."""

    codes: Codes
    t: m.Int64
    t_exit: m.Int64
    rc: m.Int32
    group: m.Int64
    thread: m.Int64

    @property
    def ends(self) -> Mask:
        """Rows that end a group."""
        found: Mask = (self.codes == _END) | (self.codes == _SIMULATE)
        return found


def columns_of(rows: list[Line], offset: int) -> Columns:
    """The columns of call lines; raises what a wrong line raises (lines.BAD)."""
    apis, times, durations, codes, threads = zip(*map(_common, rows), strict=True)
    t = column(times) + offset
    if bool((t < offset).any()):
        raise ValueError("negative time")
    dur = nullable(durations)
    return Columns(
        codes=np.frombuffer(array("h", map(_CODES.get, apis, repeat(_UNKNOWN))), np.int16),
        t=t,
        t_exit=np.where(dur >= 0, t + dur, m.NO_TIME),
        rc=nullable(codes).astype(np.int32),
        group=column([r.get("group", 0) for r in rows]),
        thread=column(threads),
    )


class CallDecoder:
    """Makes items of call lines; remembers the signatures that it has seen."""

    def __init__(self, table: SignatureTable) -> None:
        self._table = table
        self._readers = [_Signatures(table, name) for name in _MATCHED]

    def items(
        self, state: SourceState, rows: list[Line], c: Columns, counts: CallCounts
    ) -> list[m.Item]:
        """Ends of groups first: they say when and whether the calls took effect."""
        data = c.codes >= _DATA
        made: list[m.Item] = []
        ends = np.flatnonzero(c.ends)
        if len(ends):
            made += _group_ends(state.source, rows, c, ends)
        if data.all():
            made += self._batches(state.source, rows, c, None, counts)
        else:
            at = np.flatnonzero(data)
            mine = list(compress(rows, data.tolist()))
            made += self._batches(state.source, mine, c, at, counts)
        for i in np.flatnonzero(c.codes <= _LIFECYCLE).tolist():
            if c.codes[i] == _LIFECYCLE:
                made.append(rare.lifecycle_call(rows[i], state, *_times(c, i)))
            else:
                counts.unknown_apis[str(rows[i]["api"])[:64]] += 1
        failed = (c.rc != 0) & (c.rc != IN_PROGRESS) & (c.rc != m.RC_NONE)
        if failed.any():
            made += [
                rare.failed_call(rows[i], state, *_times(c, i))
                for i in np.flatnonzero(failed & (c.codes != _LIFECYCLE)).tolist()
            ]
        return made

    def _batches(
        self, source: int, rows: list[Line], c: Columns, at: m.Int64 | None, counts: CallCounts
    ) -> Iterator[m.Item]:
        """Batches of ``rows``, which are those ``at`` these places of the columns."""
        comms = [r["comm"] for r in rows]
        codes = c.codes if at is None else c.codes[at]
        if None in comms:
            known = [x is not None for x in comms]
            counts.blind_calls += int((~np.array(known) & ~_IS_P2P[codes]).sum())
            rows, comms = list(compress(rows, known)), list(compress(comms, known))
            at = np.flatnonzero(known) if at is None else at[known]
            codes = c.codes[at]
        if not rows:
            return
        comm = column(comms)
        sig = self._signatures(rows, codes)
        order = column([r["ord"] for r in rows])
        idx = column([r["idx"] for r in rows])
        pairs = _IS_P2P[codes]
        stream = nullable([r.get("stream") for r in rows])
        site = self._sites(rows)
        if not pairs.all():
            seq = column([r.get("seq", m.NO_SEQ) for r in rows])
        for pick in _by_comm(comm, np.flatnonzero(~pairs)) if pairs.any() else _by_comm(comm, None):
            rc, group = _pick(c.rc, at, pick), _pick(c.group, at, pick)
            # In a group the counters stand still; a call that returns before it is
            # done lets another thread move them.
            wrong = (group != 0) | (rc == IN_PROGRESS)
            yield m.Batch(
                source=source,
                comm=int(comm[0] if pick is None else comm[pick[0]]),
                ord=_of(order, pick),
                idx=_of(idx, pick),
                sig=_of(sig, pick),
                t_enter=_pick(c.t, at, pick),
                t_exit=_pick(c.t_exit, at, pick),
                rc=rc,
                group=group,
                thread=_pick(c.thread, at, pick),
                seq=np.where(wrong, m.NO_SEQ, _of(seq, pick)) if wrong.any() else _of(seq, pick),
                stream=_of(stream, pick),
                site=None if site is None else _of(site, pick),
            )
        if not pairs.any():
            return
        peer = np.zeros(len(rows), np.int64)
        peer[pairs] = column([r["peer"] for r in compress(rows, pairs.tolist())])
        if bool((np.abs(peer) > m.MAX_NRANKS).any()):
            raise ValueError("peer is out of range")
        for pick in _by_comm(comm, np.flatnonzero(pairs)):
            yield m.P2PBatch(
                source=source,
                comm=int(comm[0] if pick is None else comm[pick[0]]),
                send=_IS_SEND[_of(codes, pick)],
                peer=_of(peer, pick).astype(np.int32),
                ord=_of(order, pick),
                idx=_of(idx, pick),
                sig=_of(sig, pick),
                t_enter=_pick(c.t, at, pick),
                t_exit=_pick(c.t_exit, at, pick),
                rc=_pick(c.rc, at, pick),
                group=_pick(c.group, at, pick),
                thread=_pick(c.thread, at, pick),
                stream=_of(stream, pick),
            )

    def _sites(self, rows: list[Line]) -> m.Int64 | None:
        """Ids of call sites; None: no row has one."""
        if not any("site" in r for r in rows):
            return None
        return column([self._table.sites.id_of(r.get("site")) for r in rows])

    def _signatures(self, rows: list[Line], codes: Codes) -> m.Int32:
        if bool((codes == codes[0]).all()):
            return np.array(self._readers[codes[0] - _DATA].read(rows), np.int32)
        found = np.empty(len(rows), np.int32)
        by_code = np.argsort(codes, kind="stable")
        rows = [rows[i] for i in by_code.tolist()]
        ends = np.cumsum(np.bincount(codes)).tolist()
        for code, (start, end) in enumerate(pairwise([0, *ends])):
            if end > start:
                read = self._readers[code - _DATA].read(rows[start:end])
                found[by_code[start:end]] = read
        return found


class _Signatures:
    """Signatures of the calls of one function."""

    def __init__(self, table: SignatureTable, api: str) -> None:
        roles = [Role.COUNT, Role.DATATYPE, Role.OP, Role.ROOT]
        if BY_NAME[api].kind is Kind.P2P:
            roles = roles[:2]
        self._api = api
        self._intern = table.intern_call
        self._present = [BY_NAME[api].has(r) for r in roles] + [False] * (4 - len(roles))
        self._get: Callable[[Line], Any] = itemgetter(
            *[r.value for r, has in zip(roles, self._present, strict=False) if has]
        )
        self._known: dict[Any, int] = {}

    def read(self, rows: list[Line]) -> list[int]:
        raw = list(map(self._get, rows))
        try:
            return list(map(self._known.__getitem__, raw))
        except KeyError:
            return [self._one(arguments) for arguments in raw]

    def _one(self, arguments: Any) -> int:
        found = self._known.get(arguments)
        if found is None:
            values = iter(arguments)
            four = [next(values) if has else None for has in self._present]
            found = self._intern(self._api, *four)
            self._known[arguments] = found
        return found


def _times(c: Columns, i: int) -> tuple[int, int, int]:
    return int(c.t[i]), int(c.t_exit[i]), int(c.rc[i])


def _group_ends(source: int, rows: list[Line], c: Columns, ends: m.Int64) -> list[m.Item]:
    depth = column([rows[i].get("gdepth", 1) for i in ends.tolist()])
    ends = ends[(depth <= 1) & (c.group[ends] != 0)]
    if not len(ends):
        return []
    rc = c.rc[ends]
    rc = np.where((c.codes[ends] == _SIMULATE) & (rc == 0), np.int32(_SIMULATED), rc)
    return [m.GroupEnds(source, c.group[ends], c.t[ends], c.t_exit[ends], rc)]


def _by_comm(comm: m.Int64, at: m.Int64 | None) -> Iterator[m.Int64 | None]:
    """The places ``at`` (None: all) split by communicator; None: all rows."""
    mine = comm if at is None else comm[at]
    if not len(mine):
        return
    if bool((mine == mine[0]).all()):
        yield at
        return
    order = np.argsort(mine, kind="stable")
    cuts = np.flatnonzero(np.diff(mine[order])) + 1
    for start, end in pairwise([0, *cuts.tolist(), len(order)]):
        pick = order[start:end]
        yield pick if at is None else at[pick]


def _of(values: Any, pick: m.Int64 | None) -> Any:
    return values if pick is None else values[pick]


def _pick(values: Any, at: m.Int64 | None, pick: m.Int64 | None) -> Any:
    """Rows of a column: ``pick`` counts among the places ``at``; None: all."""
    if at is None:
        return values if pick is None else values[pick]
    return values[at if pick is None else at[pick]]


def groups_left_open(state: SourceState, c: Columns) -> list[m.Item]:
    """Groups whose end was lost: their thread has gone on without it."""
    known = state.open_groups
    ended = c.group[c.ends]
    inside = (c.group != 0) & (c.codes != _START)
    over = set(ended.tolist())
    for g in over & known.keys():
        del known[g]
    if not over.issuperset(c.group[inside].tolist()):
        inside &= ~np.isin(c.group, ended)
        columns = (c.group[inside], c.thread[inside], c.t[inside])
        for g, thread, at in zip(*(x.tolist() for x in columns), strict=True):
            known[g] = (thread, max(at, known.get(g, (0, 0))[1]))
    if not known:
        return []
    newest: dict[int, tuple[int, int]] = {}  # thread -> newest entry, its group
    for thread in {thread for thread, _ in known.values()}:
        mine = np.flatnonzero(c.thread == thread)
        if len(mine):
            last = mine[len(mine) - 1 - int(np.argmax(c.t[mine][::-1]))]
            newest[thread] = (int(c.t[last]), int(c.group[last]))
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


def column(values: Sequence[Any]) -> m.Int64:
    """Integers only: anything else raises, where numpy would convert."""
    return np.frombuffer(array("q", values), np.int64)


def nullable(values: Sequence[Any]) -> m.Int64:
    """As ``column``, with -1 for None."""
    try:
        return column(values)
    except TypeError:
        return column([-1 if v is None else v for v in values])
