"""Records of the NCCL Inspector plug-in to the matcher's items.

One JSON object for each operation that is complete; numbers count per function.
Where nothing is missing they give each call its place.  Where records are missing
(the plug-in drops some without a word) only the counters are of use.  A rank that
has written nothing is not taken to have come late: its records may not be written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from nccluprobe.importers.common import Numbers, Told, lines_of
from nccluprobe.match import model as m
from nccluprobe.match.signature import SignatureTable
from nccluprobe.match.status import UNKNOWN_CLOCK
from nccluprobe.nccl.enums import SEQ_NAMES
from nccluprobe.plural import counted

_BIG = 2**62
_MAX_OBJECT = 1 << 20
#: NCCL counts no others, so their numbers give no place.
_COUNTED = frozenset(SEQ_NAMES)


@dataclass
class _Endpoint:
    """One rank of one communicator: (function, number, bytes, start, known exactly)."""

    id: int
    hash: str
    rank: int
    nranks: int
    name: str | None
    rows: list[tuple[str, int, int, int, bool]] = field(default_factory=list)

    def first(self, function: str) -> int | None:
        """Number of its first record of a function."""
        return min((r[1] for r in self.rows if r[0] == function), default=None)

    def in_order(self) -> list[tuple[str, int, int, int, bool]]:
        """Records as the calls were made: by their starts, else as they were written."""
        if all(r[4] for r in self.rows):
            return sorted(self.rows, key=lambda r: (r[3], r[1]))
        return self.rows

    def gapless(self) -> bool:
        """Whether it has every record between its first and its last."""
        numbers: dict[str, list[int]] = {}
        for function, number, *_ in self.rows:
            numbers.setdefault(function, []).append(number)
        return all(
            len(set(n)) == len(n) and max(n) - min(n) == len(n) - 1 for n in numbers.values()
        )


@dataclass
class _Process:
    host: str
    pid: int
    name: str
    endpoints: dict[tuple[str, int], _Endpoint] = field(default_factory=dict)
    newest: int = 0


class Inspector:
    """All Inspector files of an analysis."""

    def __init__(self, table: SignatureTable, numbers: Numbers, told: Told) -> None:
        self.table = table
        self.numbers = numbers
        self.told = told
        self.processes: dict[tuple[str, int], _Process] = {}

    def read(self, path: str) -> None:
        """Take a file: objects one a line, or over several lines."""
        bad = good = 0
        for raw in _objects(path, self.told):
            try:
                good += self._record(path, orjson.loads(raw))
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
                bad += 1
        if bad:
            self.told.problem(f"{path}: {counted(bad, 'record')} could not be read")
        elif not good:
            self.told.problem(f"{path}: no record of a collective")

    def _record(self, path: str, record: dict[str, Any]) -> bool:
        perf = record.get("coll_perf")
        if perf is None:
            return False
        head, meta = record["header"], record["metadata"]
        hash_ = f"{int(str(head['id']), 16):016x}"
        rank, nranks = _whole(head["rank"]), _whole(head["n_ranks"])
        if rank >= nranks or nranks > m.MAX_NRANKS:
            raise ValueError("a rank is out of range")
        key = (str(meta["hostname"])[:200], _whole(meta["pid"]))
        dumped = _whole(meta["dump_timestamp_us"]) * 1000
        start = (perf.get("event_trace_ts") or {}).get("coll_start_ts")
        p = self.processes.get(key)
        if p is None:
            p = self.processes[key] = _Process(*key, path)
        p.newest = max(p.newest, dumped)
        e = p.endpoints.get((hash_, rank))
        if e is None:
            name = head.get("comm_name")
            e = p.endpoints[hash_, rank] = _Endpoint(
                len(p.endpoints) + 1,
                hash_,
                rank,
                nranks,
                name if isinstance(name, str) and name != "unknown" else None,
            )
        exact = start is not None
        e.rows.append(
            (
                str(perf["coll"])[:40],
                _whole(perf["coll_sn"]),
                _whole(perf["coll_msg_size_bytes"]),
                _whole(start) * 1000 if exact else dumped,
                exact,
            )
        )
        self.told.calls += 1
        return True

    # -- items -------------------------------------------------------------

    def items(self) -> Iterator[list[m.Item]]:
        """Items, a list for each process."""
        bases = self._bases()
        times = self._times(bases)
        for p in self.processes.values():
            yield list(self._process_items(p, bases, times))

    def _bases(self) -> dict[tuple[str, int], dict[int, int]]:
        """(hash, ranks) -> rank -> slot of its first record; empty: there is no telling."""
        groups: dict[tuple[str, int], list[_Endpoint]] = {}
        for p in self.processes.values():
            for e in p.endpoints.values():
                groups.setdefault((e.hash, e.nranks), []).append(e)
        found: dict[tuple[str, int], dict[int, int]] = {}
        for key, endpoints in groups.items():
            functions = {r[0] for e in endpoints for r in e.rows}
            firsts = {e.rank: [e.first(f) for f in sorted(functions)] for e in endpoints}
            sound = functions <= _COUNTED and all(e.gapless() for e in endpoints)
            if not sound or len(firsts) < len(endpoints):
                continue
            if any(None in f for f in firsts.values()):
                continue
            bases = {r: sum(n for n in f if n is not None) for r, f in firsts.items()}
            if _agree(endpoints, bases):
                found[key] = bases
        return found

    def _times(self, bases: dict[tuple[str, int], dict[int, int]]) -> dict[tuple[str, int], int]:
        """(hash, slot) -> first time that anybody gives it, where starts are not known."""
        found: dict[tuple[str, int], int] = {}
        for p in self.processes.values():
            for e in p.endpoints.values():
                base = bases.get((e.hash, e.nranks), {}).get(e.rank)
                if base is None:
                    continue
                for at, row in enumerate(e.in_order()):
                    key = (e.hash, base + at)
                    found[key] = min(found.get(key, _BIG), row[3])
        return found

    def _process_items(
        self,
        p: _Process,
        bases: dict[tuple[str, int], dict[int, int]],
        times: dict[tuple[str, int], int],
    ) -> Iterator[m.Item]:
        source = self.numbers.take()
        key = self.numbers.key("inspector", p.host, p.pid)
        placed = [e for e in p.endpoints.values() if (e.hash, e.nranks) in bases]
        world = max(p.endpoints.values(), key=lambda e: e.nranks)
        yield m.SourceOpened(source, p.name)
        yield m.ProcessInfo(
            source=source,
            key=key,
            run_id="inspector",
            host=p.host,
            rank=world.rank,
            front="nccl inspector",
            cannot_see=("calls that are not complete", "send_recv"),
        )
        yield m.ClockState(source, UNKNOWN_CLOCK)
        for e in placed:
            yield m.CommInfo(
                source=source,
                id=e.id,
                t=min(r[3] for r in e.rows),
                hash=e.hash,
                instance=0,
                comm_rank=e.rank,
                nranks=e.nranks,
                learnt="inspector",
                name=e.name,
                base=bases[e.hash, e.nranks][e.rank],
            )
        for e in placed:
            yield self._batch(source, e, bases[e.hash, e.nranks][e.rank], times)
            yield m.Completed(source, e.id, len(e.rows))
        starts = sorted(r[3] for e in placed for r in e.rows if r[4])
        if starts:
            known = np.array(starts, np.int64)
            yield m.Activity(source, known, known)
        yield m.Coverage(
            source=source,
            t=p.newest,
            through=p.newest,
            lost=0,
            blind=0,
            in_flight=0,
            alive=None,
            main="unknown",
        )
        yield m.Progress(source, p.newest, caught_up=True)

    def _batch(
        self, source: int, e: _Endpoint, base: int, times: dict[tuple[str, int], int]
    ) -> m.Batch:
        rows = e.in_order()
        n = len(rows)
        t = np.array(
            [r[3] if r[4] else times[e.hash, base + at] for at, r in enumerate(rows)], np.int64
        )
        sigs = [self.table.intern_call(f"nccl{r[0]}", r[2], "bytes", None, None) for r in rows]
        return m.Batch(
            source=source,
            comm=e.id,
            ord=np.arange(n, dtype=np.int64),
            idx=np.full(n, -1, np.int64),
            sig=np.array(sigs, np.int32),
            t_enter=t,
            t_exit=t,
            rc=np.zeros(n, np.int32),
            group=np.zeros(n, np.int64),
            thread=np.zeros(n, np.int64),
        )


def _agree(endpoints: list[_Endpoint], bases: dict[int, int]) -> bool:
    """Whether all ranks have the same function in each slot: what is complete was one call.

    Calls that overlap may be written in another order on another rank.
    """
    known: dict[int, str] = {}
    for e in endpoints:
        for at, row in enumerate(e.in_order()):
            if known.setdefault(bases[e.rank] + at, row[0]) != row[0]:
                return False
    return True


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _BIG:
        raise TypeError("a number is no integer, or out of range")
    return value


def _objects(path: str, told: Told) -> Iterator[bytes]:
    """Top-level objects: a line each, or laid out over lines that begin at column 0."""
    parts: list[bytes] = []
    size = 0
    for line in lines_of(path, told):
        text = line.rstrip()
        if not parts and text.startswith(b"{") and text.endswith(b"}"):
            yield text
            continue
        if not text or (not parts and not text.startswith(b"{")):
            continue
        parts.append(text)
        size += len(text)
        if text == b"}" and line.startswith(b"}"):
            yield b"\n".join(parts)
            parts, size = [], 0
        elif size > _MAX_OBJECT:
            told.problem(f"{path}: a record of more than {_MAX_OBJECT} bytes, not read")
            parts, size = [], 0
    if parts:
        yield b"\n".join(parts)
