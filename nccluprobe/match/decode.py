"""Lines of a trace to the matcher's items.

Pure: bytes in, items out.  Lines are parsed many at once; where that fails,
one by one, so that a bad line costs only itself.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import orjson

from nccluprobe.match import lines as rare
from nccluprobe.match import model as m
from nccluprobe.match.calls import CallCounts, CallDecoder, Columns, columns_of, groups_left_open
from nccluprobe.match.lines import BAD, BadLine, SourceState
from nccluprobe.match.signature import SignatureTable
from nccluprobe.trace.schema import KIND_BY_NAME, RESERVED_KINDS

Line = dict[str, Any]
#: Whole lines: in one piece, each with its newline, or one by one without.
Lines = bytes | Sequence[bytes]


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
    unknown_apis: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)


class Decoder:
    """Decodes the chunks of all sources of one analysis."""

    def __init__(self, table: SignatureTable) -> None:
        self.table = table
        self.counts = DecodeCounts()
        self.boots: dict[str, int] = {}  # boot id -> unix minus monotonic time
        self._sources: dict[int, SourceState] = {}
        self._decoder = CallDecoder(table)

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
        rows, numbers = self._parse(path, first_line, data)
        items: list[m.Item] = []
        late: list[m.Item] = []
        calls, call_lines = rows, numbers
        kinds = [r["kind"] for r in rows]
        if kinds.count("call") != len(kinds):
            at = [i for i, kind in enumerate(kinds) if kind != "call"]
            others = [(rows[i], int(numbers[i])) for i in at]
            calls = list(compress(rows, [kind == "call" for kind in kinds]))
            call_lines = np.delete(numbers, at)
            self._rare(state, others, items, late)
        if calls:
            state.watch_returns = any(isinstance(i, m.Enter) for i in late)
            self._calls(state, calls, call_lines, items)
        items += [i for i in late if not self._has_returned(state, i)]
        state.returned.clear()
        items.append(m.Progress(source, state.through, caught_up))
        return items

    # -- parsing -----------------------------------------------------------

    def _parse(self, path: str, first_line: int, data: bytes) -> tuple[list[Line], m.Int64]:
        n = data.count(b"\n")
        self.counts.lines += n
        if not n:
            return [], np.empty(0, np.int64)
        if b'"capture":"yes"' in data:
            self.counts.captured += data.count(b'"capture":"yes"')
        try:
            rows = orjson.loads(b"[" + data[:-1].replace(b"\n", b",") + b"]")
            if len(rows) == n:
                for r in rows:
                    r["kind"]  # an object, and with a kind
                return rows, np.arange(first_line, first_line + n)
        except (orjson.JSONDecodeError, TypeError, KeyError, IndexError):
            pass
        good: list[Line] = []
        numbers = array("q")
        for number, line in enumerate(data[:-1].split(b"\n"), first_line):
            try:
                row = orjson.loads(line)
                if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
                    raise BadLine("not an object with a kind")
            except (orjson.JSONDecodeError, BadLine) as error:
                self._bad(path, number, str(error))
                continue
            good.append(row)
            numbers.append(number)
        return good, np.frombuffer(numbers, np.int64)

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
            if not isinstance(kind, str):
                self._bad(state.path, number, "kind is not a text")
                continue
            convert = rare.CONVERTERS.get(kind)
            if convert is None:
                if kind not in KIND_BY_NAME and kind not in RESERVED_KINDS:
                    self.counts.unknown_kinds[kind[:64]] += 1
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
        self, state: SourceState, rows: list[Line], numbers: m.Int64, out: list[m.Item]
    ) -> None:
        counts = CallCounts()
        try:
            c = columns_of(rows, state.offset)
            made = self._decoder.items(state, rows, c, counts)
        except BAD as error:
            if len(rows) == 1:
                what = type(error).__name__
                self._bad(state.path, int(numbers[0]), f"call: {what}: {error!s}"[:200])
                return
            # A bad line costs only itself: the halves are taken by themselves.
            half = len(rows) // 2
            self._calls(state, rows[:half], numbers[:half], out)
            self._calls(state, rows[half:], numbers[half:], out)
            return
        self.counts.calls += len(rows)
        self.counts.blind_calls += counts.blind_calls
        self.counts.unknown_apis.update(counts.unknown_apis)
        ordered = bool((c.t[1:] >= c.t[:-1]).all())
        order = slice(None) if ordered else np.argsort(c.t, kind="stable")
        out.append(m.Activity(state.source, c.t[order], c.t_exit[order]))
        if state.inside:
            out += _returns(state, c)
        if bool((c.rc == m.RC_NONE).any()):
            out += _cut(state, rows, self.table)
        if state.watch_returns:
            state.returned.update(zip(c.thread.tolist(), c.t.tolist(), strict=True))
        if state.open_groups or c.group.any():
            out += groups_left_open(state, c)
        out += made
        state.through = max(state.through, int(c.t.max()))


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


def _cut(state: SourceState, rows: list[Line], table: SignatureTable) -> list[m.Item]:
    """Calls that their end cut off, whether or not they were told of as inside before."""
    found: list[m.Enter] = []
    for row in rows:
        if row.get("end") == "no_return":
            try:
                made = rare.CONVERTERS["enter"](row, state, {}, table)
            except BAD:
                continue  # its call line is taken for what it is
            if isinstance(made, m.Enter):
                found.append(made)
    return [m.Cut(state.source, tuple(found))] if found else []
