"""Lines of finished calls, parsed one by one, as a table of calls.

One pass per field over all rows, whatever they call, and numpy from there on.
The native reader (fastcalls) makes the same of plain lines; this one takes all.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
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
from nccluprobe.trace import scanner as c

Line = dict[str, Any]

#: What a function is to the reader; collectives and transfers are numbered from DATA on.
UNKNOWN, LIFECYCLE, OTHER, OPENS, ENDS, SIMULATES, DATA = range(7)
_GROUPS = {"ncclGroupStart": OPENS, "ncclGroupEnd": ENDS, "ncclGroupSimulateEnd": SIMULATES}
MATCHED = [n for n, a in BY_NAME.items() if a.kind in (Kind.COLLECTIVE, Kind.P2P)]
CODES: dict[Any, int] = dict.fromkeys(BY_NAME, OTHER)
CODES |= {n: LIFECYCLE for n, a in BY_NAME.items() if a.kind is Kind.LIFECYCLE}
CODES |= _GROUPS
CODES |= {n: DATA + i for i, n in enumerate(MATCHED)}
#: Calls whose entry counts, and ends of groups.
COUNTED = frozenset({*MATCHED, "ncclGroupEnd"})
IS_P2P = np.array([False] * DATA + [BY_NAME[n].kind is Kind.P2P for n in MATCHED])
IS_SEND = np.array([False] * DATA + [BY_NAME[n].direction == "send" for n in MATCHED])

_common = itemgetter("api", "t", "dur", "rc", "thread")

Codes = NDArray[np.int16]


@dataclass
class CallCounts:
    """What was odd in the calls of a chunk."""

    blind_calls: int = 0
    unknown_apis: Counter[str] = field(default_factory=Counter)


@dataclass
class Calls:
    """Finished calls of a chunk.

    ``table``: (scanner.COLUMNS, n), times as in the trace.  ``site``: ids of call
    sites; None: of no call.  ``rare``: what lifecycle and failed calls say.
    ``rows``: the lines that were parsed one by one; only they can have an ``end``
    other than enter_only.
    """

    table: m.Int64
    site: m.Int64 | None = None
    rare: list[m.Item] = field(default_factory=list)
    rows: list[Line] = field(default_factory=list)

    def __len__(self) -> int:
        return int(self.table.shape[1])

    def without(self, at: list[int]) -> Calls:
        """Without the calls at these indices; what lifecycle and failed calls say stays."""
        site = None if self.site is None else np.delete(self.site, at)
        return Calls(np.delete(self.table, at, axis=1), site, self.rare, self.rows)


def merged(fast: Calls, slow: Calls, before: m.Int64) -> Calls:
    """Both in order of their lines; ``before``: calls of ``fast`` before each of ``slow``."""
    site = None
    if slow.site is not None:
        site = np.insert(np.zeros(len(fast), np.int64), before, slow.site)
    return Calls(np.insert(fast.table, before, slow.table, axis=1), site, slow.rare, slow.rows)


def joined(parts: list[Calls]) -> Calls:
    """One behind the other."""
    if len(parts) == 1:
        return parts[0]
    site = None
    if any(p.site is not None for p in parts):
        site = np.concatenate(
            [np.zeros(len(p), np.int64) if p.site is None else p.site for p in parts]
        )
    return Calls(
        np.concatenate([np.empty((c.COLUMNS, 0), np.int64), *[p.table for p in parts]], axis=1),
        site,
        [item for p in parts for item in p.rare],
        [row for p in parts for row in p.rows],
    )


#: So many signatures of a function are remembered, before all are forgotten.
_MOST_KNOWN = 1 << 14


class RowReader:
    """Makes calls of lines; remembers the signatures that it has seen."""

    def __init__(self, table: SignatureTable) -> None:
        self._table = table
        self._readers = [_Signatures(table, name) for name in MATCHED]
        self._epoch = table.epoch

    def read(self, state: SourceState, rows: list[Line], counts: CallCounts) -> Calls:
        """Calls of lines; raises what a wrong line raises (lines.BAD)."""
        if self._epoch != self._table.epoch:
            self._epoch = self._table.epoch
            for reader in self._readers:
                reader.forget()
        apis, times, durations, returned, threads = zip(*map(_common, rows), strict=True)
        table = np.empty((c.COLUMNS, len(rows)), np.int64)
        t = table[c.T] = column(times)
        if bool((t + state.offset < state.offset).any()):
            raise ValueError("negative time")
        dur = table[c.DUR] = nullable(durations)
        rc: m.Int64 = nullable(returned).astype(np.int32).astype(np.int64)
        table[c.RC] = rc
        table[c.THREAD] = column(threads)
        table[c.GROUP] = column([r.get("group", 0) for r in rows])
        codes = np.frombuffer(array("h", map(CODES.get, apis, repeat(UNKNOWN))), np.int16)
        table[c.CODE] = codes
        found = Calls(table, rows=rows)
        ends = np.flatnonzero((codes == ENDS) | (codes == SIMULATES))
        if len(ends):
            table[c.GDEPTH, ends] = column([rows[i].get("gdepth", 1) for i in ends.tolist()])
        self._data(found, codes, counts)
        times_ = (t + state.offset, np.where(dur >= 0, t + state.offset + dur, m.NO_TIME), rc)
        self._rare(found, state, codes, times_, counts)
        return found

    def _data(self, found: Calls, codes: Codes, counts: CallCounts) -> None:
        """Columns of collectives, sends and receives."""
        data = codes >= DATA
        rows = found.rows
        at: m.Int64 | None = None
        if not data.all():
            at = np.flatnonzero(data)
            if not len(at):
                return
            rows = list(compress(rows, data.tolist()))
        comms = [r["comm"] for r in rows]
        if None in comms:
            known = [x is not None for x in comms]
            at = np.arange(len(rows)) if at is None else at
            blind = at[~np.array(known)]
            counts.blind_calls += int((~IS_P2P[codes[blind]]).sum())
            # Without a communicator they are no more than a sign of life.
            found.table[c.CODE, blind] = OTHER
            rows, comms = list(compress(rows, known)), list(compress(comms, known))
            at = at[known]
            if not rows:
                return
        codes = codes if at is None else codes[at]
        pick: Any = slice(None) if at is None else at
        table = found.table
        table[c.COMM, pick] = column(comms)
        table[c.SIG, pick] = self._signatures(rows, codes)
        table[c.ORD, pick] = column([r["ord"] for r in rows])
        table[c.IDX, pick] = column([r["idx"] for r in rows])
        table[c.STREAM, pick] = nullable([r.get("stream") for r in rows])
        if any("site" in r for r in rows):
            found.site = np.zeros(len(found), np.int64)
            found.site[pick] = column([self._table.sites.id_of(r.get("site")) for r in rows])
        pairs = IS_P2P[codes]
        if not pairs.all():
            table[c.SEQ, pick] = column([r.get("seq", m.NO_SEQ) for r in rows])
        if pairs.any():
            peer = column([r["peer"] for r in compress(rows, pairs.tolist())])
            if bool((np.abs(peer) > m.MAX_NRANKS).any()):
                raise ValueError("peer is out of range")
            table[c.PEER, np.flatnonzero(pairs) if at is None else at[pairs]] = peer

    @staticmethod
    def _rare(
        found: Calls,
        state: SourceState,
        codes: Codes,
        times: tuple[m.Int64, m.Int64, m.Int64],
        counts: CallCounts,
    ) -> None:
        """Lifecycle calls, then calls that returned an error."""

        def three(i: int) -> tuple[int, int, int]:
            return int(times[0][i]), int(times[1][i]), int(times[2][i])

        rows, rc = found.rows, times[2]
        for i in np.flatnonzero(codes <= LIFECYCLE).tolist():
            if codes[i] == LIFECYCLE:
                found.rare.append(rare.lifecycle_call(rows[i], state, *three(i)))
            else:
                counts.unknown_apis[str(rows[i]["api"])[:64]] += 1
        failed = (rc != 0) & (rc != IN_PROGRESS) & (rc != m.RC_NONE)
        if failed.any():
            found.rare += [
                rare.failed_call(rows[i], state, *three(i))
                for i in np.flatnonzero(failed & (codes != LIFECYCLE)).tolist()
            ]

    def _signatures(self, rows: list[Line], codes: Codes) -> m.Int32:
        if bool((codes == codes[0]).all()):
            return np.array(self._readers[codes[0] - DATA].read(rows), np.int32)
        found = np.empty(len(rows), np.int32)
        by_code = np.argsort(codes, kind="stable")
        rows = [rows[i] for i in by_code.tolist()]
        ends = np.cumsum(np.bincount(codes)).tolist()
        for code, (start, end) in enumerate(pairwise([0, *ends])):
            if end > start:
                read = self._readers[code - DATA].read(rows[start:end])
                found[by_code[start:end]] = read
        return found


#: What of a call must agree, in the order of ``SignatureTable.intern_call``.
_ROLES = (Role.COUNT, Role.DATATYPE, Role.OP, Role.ROOT)


def compared(api: str) -> tuple[bool, ...]:
    """Which of count, datatype, op and root make a function's signature."""
    found = tuple(BY_NAME[api].has(r) for r in _ROLES)
    return (*found[:2], False, False) if BY_NAME[api].kind is Kind.P2P else found


class _Signatures:
    """Signatures of the calls of one function."""

    def __init__(self, table: SignatureTable, api: str) -> None:
        self._api = api
        self._intern = table.intern_call
        self._present = compared(api)
        self._get: Callable[[Line], Any] = itemgetter(
            *[r.value for r, has in zip(_ROLES, self._present, strict=True) if has]
        )
        self._known: dict[Any, int] = {}

    def forget(self) -> None:
        """Ask the table anew for all that comes."""
        self._known.clear()

    def read(self, rows: list[Line]) -> list[int]:
        if len(self._known) > _MOST_KNOWN:
            self.forget()
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


def column(values: Sequence[Any]) -> m.Int64:
    """Integers only: anything else raises, where numpy would convert."""
    return np.frombuffer(array("q", values), np.int64)


def nullable(values: Sequence[Any]) -> m.Int64:
    """As ``column``, with -1 for None."""
    try:
        return column(values)
    except TypeError:
        return column([-1 if v is None else v for v in values])
