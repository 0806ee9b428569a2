"""Lines of a trace to the matcher's items.

Pure: bytes in, items out.  Lines are parsed many at once; where that fails,
one by one, so that a bad line costs only itself.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import orjson

from nccluprobe.match import lines as rare
from nccluprobe.match import model as m
from nccluprobe.match.accounts import Accounts
from nccluprobe.match.callrows import COUNTED, CallCounts, Calls, RowReader, joined, merged
from nccluprobe.match.calls import (
    Columns,
    columns_of,
    count_aborted,
    groups_left_open,
    items_of,
)
from nccluprobe.match.fastcalls import FastCalls
from nccluprobe.match.lines import BAD, BadLine, Boots, SourceState
from nccluprobe.match.repeats import Repeats
from nccluprobe.match.signature import SignatureTable
from nccluprobe.trace import scanner
from nccluprobe.trace.schema import KIND_BY_NAME, RESERVED_KINDS, known_fields

Line = dict[str, Any]
#: Whole lines: in one piece, each with its newline, or one by one without.
Lines = bytes | Sequence[bytes]


_FIELDS = known_fields()
_MOST_NAMES = 1000


@dataclass
class DecodeCounts:
    """What was odd in the lines, for the report."""

    lines: int = 0
    calls: int = 0
    bad_lines: int = 0
    blind_calls: int = 0
    #: Calls that were captured into a CUDA graph, whose replays are not seen.
    captured: int = 0
    unknown_kinds: Counter[str] = field(default_factory=Counter)
    #: "kind.field" -> lines.
    unknown_fields: Counter[str] = field(default_factory=Counter)
    unknown_apis: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    #: Lines that are there a second time, as far as is known, and lines that were written before
    #: the line that stands before them; the first file that has some.
    repeated: int = 0
    out_of_order: int = 0
    first_repeated: str = ""


class Decoder:
    """Decodes the chunks of all sources of one analysis."""

    def __init__(self, table: SignatureTable, native: ctypes.CDLL | None = None) -> None:
        """``native``: what ``scanner.load`` gives; None: everything is read in Python."""
        self.table = table
        self.counts = DecodeCounts()
        self.boots = Boots()
        self._sources: dict[int, SourceState] = {}
        self._repeats: defaultdict[int, Repeats] = defaultdict(Repeats)
        self._reader = RowReader(table)
        self._accounts = Accounts()
        self._fast = None if native is None else FastCalls(table, native)

    def opened(self, source: int, name: str) -> m.Item:
        """A source exists; also to be called for sources without a line so far."""
        self._sources.setdefault(source, SourceState(source, name))
        return m.SourceOpened(source, name)

    def through(self, source: int) -> int:
        """How far in time a source has been decoded."""
        return self._sources[source].through

    def decode(
        self, source: int, path: str, first_line: int, lines: Lines, caught_up: bool
    ) -> list[m.Item]:
        """Items of one chunk, in the order that the matcher needs."""
        state = self._sources.get(source)
        if state is None:
            state = self._sources[source] = SourceState(source, path)
        state.path = path
        data = lines if isinstance(lines, bytes) else b"".join([x + b"\n" for x in lines])
        bad = self.counts.bad_lines
        fast, rest, places = self._split(data)
        rows, at = self._parse(path, first_line, rest, places[0])
        items: list[m.Item] = []
        late: list[m.Item] = []
        kinds = [r["kind"] for r in rows]
        if kinds.count("call") != len(kinds):
            is_call = [kind == "call" for kind in kinds]
            mine = np.array(is_call)
            numbers = (places[0, at[~mine]] + first_line).tolist()
            others = [row for row, call in zip(rows, is_call, strict=True) if not call]
            rows, at = list(compress(rows, is_call)), at[mine]
            self._rare(state, list(zip(others, numbers, strict=True)), items, late)
        calls = fast
        if rows:
            # Most calls have the same fields in the same order.
            for names, n in Counter(map(tuple, rows)).items():
                if (new := self._unknown("call", names, n)) and self._fast is not None:
                    self._fast.learn(new)
            parts: list[tuple[Calls, m.Int64]] = []
            self._read(state, rows, places[:, at], first_line, parts)
            if parts:
                slow = joined([part for part, _ in parts])
                before = np.concatenate([b for _, b in parts])
                calls = merged(fast, slow, before) if len(fast) else slow
        if len(calls):
            state.watch_returns = any(isinstance(i, m.Enter) for i in late)
            calls, twice, back = self._repeats[source].calls(calls)
            if twice or back:
                again = data.count(b'"again":true')  # as it should be
                self._repeated(path, max(0, twice - again), max(0, back - again))
        if len(calls):
            self._calls(state, calls, items)
        self._accounts.bad(source, self.counts.bad_lines - bad)
        items += self._accounts.items(source)
        items += [i for i in late if not self._has_returned(state, i)]
        state.returned.clear()
        items.append(m.Progress(source, state.through, caught_up))
        return items

    def unix(self, source: int, t: int) -> int:
        """Time since boot of a source's host, ns -> unix ns; 0 when its clock is not known."""
        state = self._sources.get(source)
        return t + state.offset if state is not None and state.offset else 0

    # -- parsing -----------------------------------------------------------

    def _split(self, data: bytes) -> tuple[Calls, bytes, m.Int64]:
        """What the native reader takes; the other lines, with numbers and calls before each."""
        if self._fast is None:
            n = data.count(b"\n")
            self.counts.lines += n
            if b'"capture":"yes"' in data:
                self.counts.captured += data.count(b'"capture":"yes"')
            return _NO_CALLS, data, np.stack((np.arange(n), np.zeros(n, np.int64)))
        found = self._fast.read(data)
        self.counts.lines += found.lines
        self.counts.captured += found.captured
        for name, n in found.learnt.items():
            self._unknown("call", (name,), n)
        rest = found.rest
        starts, ends = rest[scanner.START].tolist(), rest[scanner.END].tolist()
        left = b"".join([data[a : b + 1] for a, b in zip(starts, ends, strict=True)])
        self.counts.captured += left.count(b'"capture":"yes"')
        return Calls(found.calls), left, rest[scanner.LINE :]

    def _parse(
        self, path: str, first_line: int, data: bytes, places: m.Int64
    ) -> tuple[list[Line], m.Int64]:
        """Rows, and which of the lines they are; ``places``: numbers of the lines, from 0."""
        n = len(places)
        if not n:
            return [], np.empty(0, np.int64)
        try:
            # A number that no line can know stands between two: lines that are whole only
            # together would swallow it.
            between = int.from_bytes(hashlib.blake2s(data, digest_size=7).digest(), "big")
            lines = data[:-1].replace(b"\n", b",%d," % between)
            rows = orjson.loads(b"[" + lines + b"]")
            if len(rows) == 2 * n - 1 and rows[1::2] == [between] * (n - 1):
                rows = rows[::2]
                for r in rows:
                    r["kind"]  # an object, and with a kind
                return rows, np.arange(n)
        except (orjson.JSONDecodeError, TypeError, KeyError, IndexError):
            pass
        good: list[Line] = []
        at: list[int] = []
        for i, line in enumerate(data[:-1].split(b"\n")):
            try:
                row = orjson.loads(line)
                if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
                    raise BadLine("not an object with a kind")
            except (orjson.JSONDecodeError, BadLine) as error:
                # The place in it that the parser tells says nothing: a line was torn or damaged.
                why = str(error) if isinstance(error, BadLine) else "no JSON"
                self._bad(path, first_line + int(places[i]), why)
                continue
            good.append(row)
            at.append(i)
        return good, np.array(at, np.int64)

    def _bad(self, path: str, number: int, why: str) -> None:
        self.counts.bad_lines += 1
        if len(self.counts.examples) < 20:
            self.counts.examples.append(f"{path}:{number}: {why}")

    def _repeated(self, path: str, twice: int, back: int) -> None:
        self.counts.repeated += twice
        self.counts.out_of_order += back
        if twice or back:
            self.counts.first_repeated = self.counts.first_repeated or path

    def _unknown(self, kind: str, names: Iterable[str], lines: int = 1) -> set[str]:
        """Count fields that a later version may have added; ``kind`` is a known one."""
        seen = self.counts.unknown_fields
        new = set(names) - _FIELDS[kind]
        for name in new:
            full = f"{kind}.{name[:64]}"
            if full in seen or len(seen) < _MOST_NAMES:
                seen[full] += lines
        return new

    # -- rare lines --------------------------------------------------------

    def _rare(
        self,
        state: SourceState,
        rows: list[tuple[Line, int]],
        items: list[m.Item],
        late: list[m.Item],
    ) -> None:
        rows, twice, back = self._repeats[state.source].coverage(rows)
        self._repeated(state.path, twice, back)
        if not state.offset:  # times are by the clock, wherever in the chunk it stands
            rows = sorted(rows, key=lambda x: 2 - 2 * _is(x, "process") - _is(x, "clock"))
        for row, number in rows:
            kind = row["kind"]
            if not isinstance(kind, str):
                self._bad(state.path, number, "kind is not a text")
                continue
            convert = rare.CONVERTERS.get(kind)
            if convert is None:
                if kind not in KIND_BY_NAME and kind not in RESERVED_KINDS:
                    self.counts.unknown_kinds[kind[:64]] += 1
                continue
            self._unknown(kind, row)
            try:
                made = convert(row, state, self.boots, self.table)
            except BAD as error:
                self._bad(state.path, number, f"{kind}: {error!s}"[:200])
                continue
            if made is None:
                continue
            (items if isinstance(made, rare.FIRST) else late).append(made)
            if isinstance(made, m.CommEnd) and not made.orderly:
                state.aborts.append(made.t)
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

    def _read(
        self,
        state: SourceState,
        rows: list[Line],
        places: m.Int64,
        first_line: int,
        out: list[tuple[Calls, m.Int64]],
    ) -> None:
        """Calls of rows, and the calls before each; a bad row costs only itself."""
        counts = CallCounts()
        try:
            found = self._reader.read(state, rows, counts)
        except BAD as error:
            if len(rows) == 1:
                what = type(error).__name__
                number = first_line + int(places[0, 0])
                self._bad(state.path, number, f"call: {what}: {error!s}"[:200])
                return
            half = len(rows) // 2
            self._read(state, rows[:half], places[:, :half], first_line, out)
            self._read(state, rows[half:], places[:, half:], first_line, out)
            return
        self.counts.blind_calls += counts.blind_calls
        self.counts.unknown_apis.update(counts.unknown_apis)
        out.append((found, places[1]))

    def _calls(self, state: SourceState, calls: Calls, out: list[m.Item]) -> None:
        c = columns_of(calls.table, state.offset)
        count_aborted(c, state.aborts)
        self.counts.calls += len(calls)
        ordered = bool((c.t[1:] >= c.t[:-1]).all())
        order = slice(None) if ordered else np.argsort(c.t, kind="stable")
        out.append(m.Activity(state.source, c.t[order], c.t_exit[order]))
        cut = _cut(state, calls.rows, self.table) if calls.rows else ()
        told = state.inside.intersection((e.thread, e.t) for e in cut)
        if state.inside:
            out += _returns(state, c)
        if cut:
            out.append(m.Cut(state.source, cut))
        if state.watch_returns:
            state.returned.update(zip(c.thread.tolist(), c.t.tolist(), strict=True))
        if state.open_groups or c.grouped:
            out += groups_left_open(state, c)
        self._accounts.note(state.source, c, calls.rows, state.open_groups)
        state.through = max(state.through, int(c.t.max()))
        # Those that never returned count as entered, as what is inside does.
        calls, left = (calls, c) if not cut else _without(calls, c, cut, state.offset)
        if cut:
            count_aborted(left, state.aborts)
        out += items_of(state.source, calls, left)
        out += [e for e in cut if e.api in COUNTED and (e.thread, e.t) not in told]


def _is(row: tuple[Line, int], kind: str) -> bool:
    return bool(row[0]["kind"] == kind)


_NO_CALLS = Calls(np.empty((scanner.COLUMNS, 0), np.int64))


def _returns(state: SourceState, c: Columns) -> list[m.Item]:
    """Calls that an earlier chunk told of as inside, and that are finished now."""
    times = np.fromiter((t for _, t in state.inside), np.int64, len(state.inside))
    at = np.flatnonzero(np.isin(c.t, times)).tolist()
    ended = {(int(c.thread[i]), int(c.t[i])): i for i in at}
    ended = {call: i for call, i in ended.items() if call in state.inside}
    if not ended:
        return []
    state.inside.difference_update(ended)
    return [m.Returned(state.source, tuple(ended))]


def _without(
    calls: Calls, c: Columns, cut: tuple[m.Enter, ...], offset: int
) -> tuple[Calls, Columns]:
    names = {(call.thread, call.t) for call in cut}
    at = np.flatnonzero(c.rc == m.RC_NONE).tolist()
    left = calls.without([i for i in at if (int(c.thread[i]), int(c.t[i])) in names])
    return left, columns_of(left.table, offset)


def _cut(state: SourceState, rows: list[Line], table: SignatureTable) -> tuple[m.Enter, ...]:
    """Calls that their end cut off, whether or not they were told of as inside before."""
    found: list[m.Enter] = []
    for row in rows:
        if row["rc"] is None and row.get("end") == "no_return":
            try:
                made = rare.CONVERTERS["enter"](row, state, Boots(), table)
            except BAD:
                continue  # its call line is taken for what it is
            if isinstance(made, m.Enter):
                found.append(made)
    return tuple(found)
