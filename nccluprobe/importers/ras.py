"""Reports of NCCL RAS (``ncclras``), text and JSON, to looks at counters.

RAS counts launches of five functions; what ranks have not launched shows by
comparison, and whether they stand still by a second report.  A text names only
ranks that stand out: all others have the count that is left.
"""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from nccluprobe.importers.common import SECOND, Numbers
from nccluprobe.match import model as m
from nccluprobe.nccl.enums import SEQ_NAMES

_MAX_BYTES = 1 << 30
_MAX_COUNT = 2**62
#: NCCL 2.28 and 2.29 leave out this comma.
_NO_COMMA = re.compile(rb'("nvml_dev": ?\d+)(\s*"status")')

_HASH = re.compile(r"(?:0x)?([0-9a-f]{1,16})", re.IGNORECASE | re.ASCII)
_GROUP = re.compile(
    r"\s*(\d{1,9})\s+(\d+)\s+([\d-]+)\s+([\d-]+)\s+(\d{1,9})(?:-\d+)?\s+(\d+)\s+([A-Z]+)\s",
    re.ASCII,
)
_COMM = re.compile(r"#(\d{1,9})-(\d+) \(([0-9a-f]{1,16})\)", re.ASCII)
_COUNTS = re.compile(r"\s+Communicator ranks have different (\w+) operation counts")
_OTHER = re.compile(r"\s+Communicator ranks have different (?!\w+ operation)")
_DONE = r"(?:launched up to operation (\d+)|not launched any operations)"
_LAUNCHED = re.compile(rf"\s+(\d{{1,9}}) ranks? (?:has|have) {_DONE}", re.ASCII)
#: Where each count is of one rank (NCCL 2.28: two ranks), one line tells both.
_ONE = re.compile(
    rf"\s+Rank (\d{{1,9}}) has {_DONE}"
    r"(?: -- GPU \S+ managed by process (\d{1,10}) on node (\S{1,200}))?",
    re.ASCII,
)
_RANK = re.compile(
    r"\s+(?:The missing rank: |Rank )(\d{1,9})"
    r"(?: -- GPU \S+ managed by process (\d{1,10}) on node (\S{1,200}))?",
    re.ASCII,
)
_MISSING = re.compile(r"\s+Missing communicator data from \d+ ranks?")
_DEAD = re.compile(r"\s+\d+ job process(?:es)? (?:is|are) considered dead")
_PROCESS = re.compile(r"\s+Process (\d{1,10}) on node (\S{1,200})", re.ASCII)


@dataclass
class _Rank:
    rank: int
    host: str
    pid: int
    counts: tuple[int, ...] | None
    alive: bool = True
    answers: bool = True


@dataclass
class _Comm:
    hash: str
    nranks: int
    ranks: list[_Rank] = field(default_factory=list)


@dataclass
class Report:
    """One answer of RAS."""

    t: int
    comms: list[_Comm] = field(default_factory=list)
    is_text: bool = False


def read_report(path: str) -> Report:
    """Read a report; ValueError says what is wrong with it."""
    found = Path(path).stat()
    if found.st_size > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
    data = Path(path).read_bytes()
    start = data.lstrip()
    # The answer to "SET FORMAT json" comes first where the socket was read directly.
    if start.startswith(b"OK\n"):
        start = start[3:].lstrip()
    if start.startswith(b"{"):
        return _from_json(start, found.st_mtime_ns)
    report = _from_text(start.decode("utf-8", "replace"), found.st_mtime_ns)
    if not report.comms and b"Communicators..." not in data:
        raise ValueError("it is no report of ncclras")
    return report


# -- JSON ------------------------------------------------------------------


def _from_json(data: bytes, written: int) -> Report:
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            content = orjson.loads(_NO_COMMA.sub(rb"\1,\2", data))
        except orjson.JSONDecodeError as error:
            raise ValueError("it is no JSON, or was cut") from error
    try:
        report = Report(_stamp(content.get("timestamp")) or written)
        for c in content["communicators"]:
            comm = _Comm(_hash(c["hash"]), _size(c["size"]))
            comm.ranks += [_present(r) for r in c.get("ranks") or ()]
            comm.ranks += [_absent(r) for r in c.get("missing_ranks") or ()]
            comm.ranks = [r for r in comm.ranks if 0 <= r.rank < comm.nranks]
            report.comms.append(comm)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError("its contents are not those of a report of RAS") from error
    return report


def _stamp(text: Any) -> int | None:
    if not isinstance(text, str):
        return None
    try:
        return calendar.timegm(time.strptime(text, "%Y-%m-%d %H:%M:%S")) * SECOND
    except ValueError:
        return None


def _hash(value: Any) -> str:
    found = _HASH.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError("a communicator's hash is no hexadecimal number of 64 bits")
    return f"{int(found[1], 16):016x}"


def _size(value: Any) -> int:
    if type(value) is not int or not 0 < value <= m.MAX_NRANKS:
        raise ValueError("a communicator has no size, or one that cannot be")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise TypeError("a number is no integer, or out of range")
    return value


def _present(r: dict[str, Any]) -> _Rank:
    counts = r.get("collective_counts") or {}
    return _Rank(
        rank=_whole(r["rank"]),
        host=str(r["host"])[:200],
        pid=_whole(r["pid"]),
        counts=tuple(_whole(counts.get(name, 0)) for name in SEQ_NAMES),
    )


def _absent(r: dict[str, Any]) -> _Rank:
    status = r.get("status") or {}
    return _Rank(
        rank=_whole(r["rank"]),
        host=str(r["host"])[:200],
        pid=_whole(r["pid"]),
        counts=None,
        alive=status.get("considered_dead") is not True,
        answers=False,
    )


# -- text ------------------------------------------------------------------


class _Text:
    """Reads the lines of a report, one block for each communicator."""

    def __init__(self, written: int) -> None:
        self.report = Report(written, is_text=True)
        self.sizes: dict[int, int] = {}  # group -> ranks per communicator
        self.dead: set[tuple[str, int]] = set()
        self.comms: dict[str, _Comm] = {}
        #: (hash, function) -> count -> ranks that are named
        self.counts: dict[tuple[str, str], dict[int, list[int]]] = {}
        self.named: dict[tuple[str, int], tuple[str, int]] = {}  # (hash, rank) -> host, pid
        self.missing: dict[str, list[int]] = {}
        self._comm: _Comm | None = None
        self._function: str | None = None
        self._count: int | None = None
        self._section = ""

    def line(self, line: str) -> None:
        """Take a line."""
        if (g := _GROUP.match(line)) is not None:
            self.sizes[int(g[1])] = int(g[5])
        elif (c := _COMM.match(line)) is not None:
            self._section = ""
            nranks = self.sizes.get(int(c[1]), 0)
            hash_ = f"{int(c[3], 16):016x}"
            known = self.comms.get(hash_)
            if known is None and 0 < nranks <= m.MAX_NRANKS:
                known = self.comms[hash_] = _Comm(hash_, nranks)
            self._comm = known
        elif (f := _COUNTS.match(line)) is not None:
            self._section, self._function, self._count = "counts", f[1], None
        elif _OTHER.match(line) is not None:
            self._section = ""
        elif _MISSING.match(line) is not None:
            self._section = "missing"
        elif _DEAD.match(line) is not None:
            self._section = "dead"
        elif self._section == "dead" and (p := _PROCESS.match(line)) is not None:
            self.dead.add((p[2], int(p[1])))
        elif self._comm is not None and self._section:
            self._detail(self._comm, line)

    def _detail(self, comm: _Comm, line: str) -> None:
        if self._section == "counts" and (n := _LAUNCHED.match(line)) is not None:
            self._take_count(comm, n[2])
            return
        if self._section == "counts" and (one := _ONE.match(line)) is not None:
            self._take_count(comm, one[2])
            if one[3] is not None:
                self.named[comm.hash, int(one[1])] = (one[4], int(one[3]))
            if self._count is not None and self._function is not None:
                self.counts[comm.hash, self._function][self._count].append(int(one[1]))
            return
        found = _RANK.match(line)
        if found is None:
            return
        rank = int(found[1])
        if found[2] is not None:
            self.named[comm.hash, rank] = (found[3].rstrip(":"), int(found[2]))
        if self._section == "missing":
            self.missing.setdefault(comm.hash, []).append(rank)
        elif self._count is not None and self._function is not None:
            self.counts[comm.hash, self._function][self._count].append(rank)

    def _take_count(self, comm: _Comm, number: str | None) -> None:
        """The count that the next ranks have; none: they have launched nothing."""
        number = number or "0"
        self._count = int(number) if len(number) < 19 else None
        if self._count is not None and self._function is not None:
            self.counts.setdefault((comm.hash, self._function), {}).setdefault(self._count, [])

    def finish(self) -> Report:
        """All that the text tells."""
        for comm in self.comms.values():
            counts: dict[int, dict[str, int]] = {}
            for (hash_, function), values in self.counts.items():
                if hash_ == comm.hash:
                    for rank, count in _spread(comm, values, self.missing.get(hash_, [])).items():
                        counts.setdefault(rank, {})[function] = count
            missing = self.missing.get(comm.hash, [])
            if missing and not counts:
                # All others answer, and are level.
                counts = {r: {} for r in range(comm.nranks) if r not in missing}
            for rank, by_function in sorted(counts.items()):
                host, pid = self.named.get((comm.hash, rank), (f"rank {rank} of {comm.hash}", 0))
                seqs = _seqs(by_function)
                comm.ranks.append(_Rank(rank, host, pid, seqs))
            for rank in (r for r in missing if r < comm.nranks):
                host, pid = self.named.get((comm.hash, rank), (f"rank {rank} of {comm.hash}", 0))
                if not pid and len(self.dead) == 1:
                    host, pid = next(iter(self.dead))
                gone = (host, pid) in self.dead
                comm.ranks.append(_Rank(rank, host, pid, None, not gone, answers=False))
            self.report.comms.append(comm)
        return self.report


def _seqs(by_function: dict[str, int]) -> tuple[int, ...]:
    """The five counts; what all ranks agree in is not told, and taken as 0."""
    if "collective" in by_function:  # before 2.26: one count for all functions
        return (*(0 for _ in SEQ_NAMES[1:]), by_function["collective"])
    return tuple(by_function.get(name, 0) for name in SEQ_NAMES)


def _spread(comm: _Comm, values: dict[int, list[int]], missing: list[int]) -> dict[int, int]:
    """Rank -> count: those that are not named have the one count whose ranks are not."""
    found = {rank: count for count, ranks in values.items() for rank in ranks}
    unnamed = [count for count, ranks in values.items() if not ranks]
    if len(unnamed) == 1:
        for rank in range(comm.nranks):
            if rank not in missing:
                found.setdefault(rank, unnamed[0])
    return {r: c for r, c in found.items() if 0 <= r < comm.nranks}


def _from_text(text: str, written: int) -> Report:
    reader = _Text(written)
    for line in text.splitlines():
        reader.line(line[:1000])
    return reader.finish()


# -- items -----------------------------------------------------------------


def items(report: Report, numbers: Numbers) -> Iterator[list[m.Item]]:
    """A look at each process that the report speaks of."""
    by_process: dict[tuple[str, int], list[tuple[_Comm, _Rank]]] = {}
    for comm in report.comms:
        for r in comm.ranks:
            by_process.setdefault((r.host, r.pid), []).append((comm, r))
    for (host, pid), ranks in sorted(by_process.items()):
        largest = max((c for c, _ in ranks), key=lambda c: c.nranks)
        own = [r.rank for c, r in ranks if c is largest]
        source = numbers.take()
        traced = (host, pid) in numbers.known
        look = m.Looked(
            source=source,
            key=numbers.key("ras", host, pid),
            t=report.t,
            host=host,
            rank=own[0] if len(own) == 1 else None,  # it may drive several GPUs
            alive=all(r.alive for _, r in ranks),
            main="unknown",
            syscall=None,
            inside=(),
            comms=tuple(
                m.LookedComm(c.hash, r.rank, c.nranks, None, r.counts, moving=False)
                for c, r in ranks
            ),
        )
        made: list[m.Item] = [m.SourceOpened(source, host)]
        if not traced:
            made.append(
                m.ProcessInfo(
                    source=source,
                    key=look.key,
                    run_id="ras",
                    host=host,
                    rank=look.rank,
                    front="nccl ras",
                )
            )
        yield [*made, look, m.Progress(source, report.t, caught_up=True)]
