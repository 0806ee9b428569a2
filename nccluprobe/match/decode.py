"""Lines of a trace to the matcher's items.

Pure: bytes in, items out.  Lines are parsed many at once; where that fails,
one by one, so that a bad line costs only itself.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import orjson

from nccluprobe.match import lines as rare
from nccluprobe.match import model as m
from nccluprobe.match.lines import BAD, BadLine, SourceState
from nccluprobe.match.p2p_decode import SENDS, PairDecoder
from nccluprobe.match.signature import SignatureTable
from nccluprobe.nccl.api import BY_NAME, Kind, Role
from nccluprobe.nccl.enums import IN_PROGRESS
from nccluprobe.trace.schema import KIND_BY_NAME, RESERVED_KINDS

Line = dict[str, Any]

_SIMULATED = 5  # return code given to the calls of a simulated group: they never run


@dataclass
class DecodeCounts:
    """What was odd in the lines, for the report."""

    lines: int = 0
    calls: int = 0
    bad_lines: int = 0
    blind_calls: int = 0
    unknown_kinds: Counter[str] = field(default_factory=Counter)
    unknown_apis: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)


_COLLECTIVES = {n for n, a in BY_NAME.items() if a.kind is Kind.COLLECTIVE}
_LIFECYCLE = {n for n, a in BY_NAME.items() if a.kind is Kind.LIFECYCLE}


def _signature_getter(name: str) -> Callable[[Line], tuple[Any, ...]]:
    """Reads (count, datatype, op, root) of one api; None for what it lacks."""
    api = BY_NAME[name]
    roles = (Role.COUNT, Role.DATATYPE, Role.OP, Role.ROOT)
    keys = [r.value if api.has(r) else None for r in roles]
    present = [k for k in keys if k is not None]
    get = itemgetter(*present)
    if len(present) == 4:
        return get

    def read(line: Line) -> tuple[Any, ...]:
        values = iter(get(line))
        return tuple(None if k is None else next(values) for k in keys)

    return read


class Decoder:
    """Decodes the chunks of all sources of one analysis."""

    def __init__(self, table: SignatureTable) -> None:
        self.table = table
        self.counts = DecodeCounts()
        self.boots: dict[str, int] = {}  # boot id -> unix minus monotonic time
        self._sources: dict[int, SourceState] = {}
        self._pairs = PairDecoder(table)
        self._getters = {n: _signature_getter(n) for n in _COLLECTIVES}
        # (api, raw arguments) -> signature id; the arguments as itemgetter gives them
        self._raw = {n: itemgetter(*_raw_keys(n)) for n in _COLLECTIVES}
        self._sig_cache: dict[str, dict[Any, int]] = {n: {} for n in _COLLECTIVES}

    def opened(self, source: int, name: str) -> m.Item:
        """A source exists; also to be called for sources without a line so far."""
        self._sources.setdefault(source, SourceState(source, name))
        return m.SourceOpened(source, name)

    def through(self, source: int) -> int:
        """How far in time a source has been decoded."""
        return self._sources[source].through

    def decode(
        self, source: int, path: str, first_line: int, lines: list[bytes], caught_up: bool
    ) -> list[m.Item]:
        """Items of one chunk, in the order that the matcher needs."""
        state = self._sources.get(source)
        if state is None:
            state = self._sources[source] = SourceState(source, path)
        state.path = path
        rows, numbers = self._parse(path, first_line, lines)
        self.counts.lines += len(lines)
        items: list[m.Item] = []
        late: list[m.Item] = []
        calls, call_lines = rows, numbers
        others = [(r, n) for r, n in zip(rows, numbers, strict=True) if r["kind"] != "call"]
        if others:
            calls, call_lines = [], []
            for r, n in zip(rows, numbers, strict=True):
                if r["kind"] == "call":
                    calls.append(r)
                    call_lines.append(n)
            self._rare(state, others, items, late)
        if calls:
            state.watch_returns = any(isinstance(i, m.Enter) for i in late)
            self._calls(state, calls, call_lines, items)
        items += [i for i in late if not self._has_returned(state, i)]
        state.returned.clear()
        items.append(m.Progress(source, state.through, caught_up))
        return items

    # -- parsing -----------------------------------------------------------

    def _parse(
        self, path: str, first_line: int, lines: list[bytes]
    ) -> tuple[list[Line], Iterable[int]]:
        if not lines:
            return [], []
        try:
            rows = orjson.loads(b"[" + b",".join(lines) + b"]")
            if len(rows) == len(lines):
                for r in rows:
                    r["kind"]
                return rows, range(first_line, first_line + len(rows))
        except (orjson.JSONDecodeError, TypeError, KeyError, IndexError):
            pass
        good: list[Line] = []
        numbers: list[int] = []
        for number, line in enumerate(lines, first_line):
            try:
                row = orjson.loads(line)
                if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
                    raise BadLine("not an object with a kind")
            except (orjson.JSONDecodeError, BadLine) as error:
                self._bad(path, number, str(error))
                continue
            good.append(row)
            numbers.append(number)
        return good, numbers

    def _bad(self, path: str, number: int, why: str) -> None:
        self.counts.bad_lines += 1
        if len(self.counts.examples) < 20:
            self.counts.examples.append(f"{path}:{number}: {why}")

    # -- rare lines --------------------------------------------------------

    def _rare(
        self,
        state: SourceState,
        rows: list[tuple[Line, int]],
        items: list[m.Item],
        late: list[m.Item],
    ) -> None:
        for row, number in rows:
            kind = row["kind"]
            convert = rare.CONVERTERS.get(kind) if isinstance(kind, str) else None
            if convert is None:
                if kind not in KIND_BY_NAME and kind not in RESERVED_KINDS:
                    self.counts.unknown_kinds[str(kind)[:64]] += 1
                continue
            try:
                made = convert(row, state, self.boots, self.table)
            except BAD as error:
                self._bad(state.path, number, f"{kind}: {error!s}"[:200])
                continue
            if made is None:
                continue
            (items if isinstance(made, rare.FIRST) else late).append(made)
            if isinstance(made, m.Coverage):
                state.through = max(state.through, made.through)

    @staticmethod
    def _has_returned(state: SourceState, item: m.Item) -> bool:
        if not isinstance(item, m.Enter):
            return False
        at = (item.thread, item.t)
        if at in state.returned:
            return True
        state.inside.add(at)
        return False

    # -- calls -------------------------------------------------------------

    def _calls(
        self, state: SourceState, rows: list[Line], numbers: Iterable[int], out: list[m.Item]
    ) -> None:
        try:
            self._call_columns(state, rows, out)
        except BAD:
            good = []
            for row, number in zip(rows, numbers, strict=True):
                try:
                    self._call_columns(state, [row], [], dry=True)
                except BAD as error:
                    what = type(error).__name__
                    self._bad(state.path, number, f"call: {what}: {error!s}"[:200])
                else:
                    good.append(row)
            if good:
                self._call_columns(state, good, out)

    def _call_columns(
        self, state: SourceState, rows: list[Line], out: list[m.Item], dry: bool = False
    ) -> None:
        offset = state.offset
        t = _column([r["t"] for r in rows]) + offset
        dur = _nullable([r["dur"] for r in rows])
        if (t < offset).any():
            raise ValueError("negative time")
        threads = _column([r["thread"] for r in rows])
        rc = _nullable([r["rc"] for r in rows]).astype(np.int32)
        t_exit = np.where(dur >= 0, t + dur, m.NO_TIME)
        group = _column([r.get("group", 0) for r in rows])
        apis = [r["api"] for r in rows]
        comm_rows, special = _sort_out(rows, apis)
        made: list[m.Item] = []
        for comm, at in comm_rows.items():
            if type(comm) is not int:
                raise TypeError("comm is not an integer")
            made.append(self._batch(state, comm, rows, at, (t, t_exit, rc, group, threads)))
        self._special(state, rows, special, (t, t_exit, rc, group, threads), made)
        if dry:
            return
        self.counts.calls += len(rows)
        order = np.argsort(t, kind="stable")
        out.append(m.Activity(state.source, t[order], t_exit[order]))
        if state.inside:
            ended = [c for c in zip(threads.tolist(), t.tolist(), strict=True) if c in state.inside]
            if ended:
                state.inside.difference_update(ended)
                out.append(m.Returned(state.source, tuple(ended)))
        if state.watch_returns:
            state.returned.update(zip(threads.tolist(), t.tolist(), strict=True))
        if group.any() or state.open_groups:
            out += rare.groups_left_open(state, apis, group, threads, t)
        # Ends of groups first: they say when and whether the calls took effect.
        made.sort(key=lambda item: not isinstance(item, m.GroupEnds))
        out += made
        state.through = max(state.through, int(t.max()))

    def _batch(
        self,
        state: SourceState,
        comm: int,
        rows: list[Line],
        at: Sequence[int],
        columns: tuple[m.Int64, m.Int64, m.Int32, m.Int64, m.Int64],
    ) -> m.Batch:
        t, t_exit, rc, group, threads = columns
        mine = rows if len(at) == len(rows) else [rows[i] for i in at]
        select = slice(None) if len(at) == len(rows) else np.array(at)
        return m.Batch(
            source=state.source,
            comm=comm,
            ord=_column([r["ord"] for r in mine]),
            idx=_column([r["idx"] for r in mine]),
            sig=np.array(self._signatures(mine), np.int32),
            t_enter=t[select],
            t_exit=t_exit[select],
            rc=rc[select],
            group=group[select],
            thread=threads[select],
            seq=_seqs(mine, rc[select], group[select]),
            stream=_streams(mine),
        )

    def _signatures(self, rows: list[Line]) -> list[int | None]:
        sigs: list[int | None]
        names = {r["api"] for r in rows}
        if len(names) == 1:
            (name,) = names
            sigs = list(map(self._sig_cache[name].get, map(self._raw[name], rows)))
        else:
            sigs = [self._sig_cache[r["api"]].get(self._raw[r["api"]](r)) for r in rows]
        if None in sigs:
            for i, sig in enumerate(sigs):
                if sig is None:
                    r = rows[i]
                    sigs[i] = self._new_signature(r["api"], r, self._raw[r["api"]](r))
        return sigs

    def _new_signature(self, api: str, r: Line, raw: Any) -> int:
        sig = self.table.intern_call(api, *self._getters[api](r))
        self._sig_cache[api][raw] = sig
        return sig

    def _special(
        self,
        state: SourceState,
        rows: list[Line],
        at: Sequence[int],
        columns: tuple[m.Int64, m.Int64, m.Int32, m.Int64, m.Int64],
        made: list[m.Item],
    ) -> None:
        t, t_exit, rc, group, _ = columns
        ends: list[int] = []
        p2p: dict[int, list[int]] = {}
        for i in at:
            r = rows[i]
            api = r["api"]
            if api in SENDS:
                if r["comm"] is not None:
                    p2p.setdefault(rare.integer(r["comm"]), []).append(i)
            elif api == "ncclGroupEnd" or api == "ncclGroupSimulateEnd":
                if r.get("gdepth", 1) <= 1 and group[i]:
                    ends.append(i)
            elif api in _COLLECTIVES:
                self.counts.blind_calls += 1
            elif api in _LIFECYCLE:
                made.append(rare.lifecycle_call(r, state, int(t[i]), int(t_exit[i]), int(rc[i])))
            elif api not in BY_NAME:
                self.counts.unknown_apis[str(api)[:64]] += 1
        if ends:
            pick = np.array(ends)
            code = rc[pick].copy()
            for n, i in enumerate(ends):
                if rows[i]["api"] == "ncclGroupSimulateEnd" and code[n] == 0:
                    code[n] = _SIMULATED
            made.append(m.GroupEnds(state.source, group[pick], t[pick], t_exit[pick], code))
        made += [self._pairs.batch(state.source, c, rows, mine, columns) for c, mine in p2p.items()]
        bad = (rc != 0) & (rc != 7) & (rc != m.RC_NONE)
        if bad.any():
            made += [
                rare.failed_call(rows[i], state, int(t[i]), int(t_exit[i]), int(rc[i]))
                for i in np.flatnonzero(bad).tolist()
                if rows[i]["api"] not in _LIFECYCLE
            ]


def _sort_out(rows: list[Line], apis: list[Any]) -> tuple[dict[int, Sequence[int]], Sequence[int]]:
    """Rows of collectives by communicator, and all others."""
    if _COLLECTIVES.issuperset(apis):
        comms = {r["comm"] for r in rows}
        if len(comms) == 1 and None not in comms:
            return {comms.pop(): range(len(rows))}, ()
    by_comm: dict[int, list[int]] = {}
    special: list[int] = []
    for i, api in enumerate(apis):
        comm = rows[i]["comm"] if api in _COLLECTIVES else None
        if comm is None:
            special.append(i)
        else:
            by_comm.setdefault(comm, []).append(i)
    return dict(by_comm), special


def _seqs(rows: list[Line], rc: m.Int32, group: m.Int64) -> m.Int64:
    """The library's counters, where they can be relied on.

    In a group they stand still; a call that returns before it is done lets
    another thread move them.
    """
    try:
        seq = _column([r["seq"] for r in rows])
    except KeyError:
        seq = _column([r.get("seq", m.NO_SEQ) for r in rows])
    wrong = (group != 0) | (rc == IN_PROGRESS)
    return np.where(wrong, m.NO_SEQ, seq) if wrong.any() else seq


def _streams(rows: list[Line]) -> m.Int64:
    """Ids of the streams; -1: not told."""
    try:
        return _column([r["stream"] for r in rows])
    except (KeyError, TypeError):
        return _nullable([r.get("stream") for r in rows])


def _raw_keys(name: str) -> list[str]:
    api = BY_NAME[name]
    roles = (Role.COUNT, Role.DATATYPE, Role.OP, Role.ROOT)
    return [r.value for r in roles if api.has(r)]


def _column(values: list[Any]) -> m.Int64:
    """Integers only: anything else raises, where numpy would convert."""
    return np.frombuffer(array("q", values), np.int64)


def _nullable(values: list[Any]) -> m.Int64:
    try:
        found = _column(values)
    except TypeError:
        return _column([-1 if v is None else v for v in values])
    return found
