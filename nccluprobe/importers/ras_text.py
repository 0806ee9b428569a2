"""The text of ``ncclras``: only ranks that stand out are named.

All others have the count that is left.
"""

from __future__ import annotations

import re

from nccluprobe.importers.ras_model import Comm, Rank, Report, check_size
from nccluprobe.match import model as m
from nccluprobe.nccl.enums import SEQ_NAMES

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


class _Text:
    """Reads the lines of a report, one block for each communicator."""

    def __init__(self, written: int) -> None:
        self.report = Report(written, is_text=True)
        self.sizes: dict[int, int] = {}  # group -> ranks per communicator
        self.dead: set[tuple[str, int]] = set()
        self.comms: dict[str, Comm] = {}
        #: (hash, function) -> count -> ranks that are named
        self.counts: dict[tuple[str, str], dict[int, list[int]]] = {}
        self.named: dict[tuple[str, int], tuple[str, int]] = {}  # (hash, rank) -> host, pid
        self.missing: dict[str, list[int]] = {}
        self._comm: Comm | None = None
        self._function: str | None = None
        self._count: int | None = None
        self._section = ""
        #: (hash, function) -> count -> how many ranks are said to have it
        self._said: dict[tuple[str, str], dict[int, int]] = {}
        self._strangers: set[str] = set()

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
                known = self.comms[hash_] = Comm(hash_, nranks)
            elif known is None:
                self._strangers.add(hash_)
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

    def _detail(self, comm: Comm, line: str) -> None:
        if self._section == "counts" and (n := _LAUNCHED.match(line)) is not None:
            self._take_count(comm, n[2], int(n[1]))
            return
        if self._section == "counts" and (one := _ONE.match(line)) is not None:
            self._take_count(comm, one[2], 1)
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

    def _take_count(self, comm: Comm, number: str | None, ranks: int) -> None:
        """The count that the next ``ranks`` ranks have; none: they have launched nothing."""
        number = number or "0"
        self._count = int(number) if len(number) < 19 else None
        if self._count is not None and self._function is not None:
            at = (comm.hash, self._function)
            self.counts.setdefault(at, {}).setdefault(self._count, [])
            said = self._said.setdefault(at, {})
            said[self._count] = said.get(self._count, 0) + ranks

    def finish(self) -> Report:
        """All that the text tells."""
        for hash_ in sorted(self._strangers):
            self.report.problems.append(
                f"communicator {hash_} is in no group that the report describes: not compared"
            )
        told = 0
        functions: dict[str, list[str]] = {}
        for hash_, function in self.counts:
            functions.setdefault(hash_, []).append(function)
        for comm in self.comms.values():
            counts: dict[int, dict[str, int]] = {}
            missing = set(self.missing.get(comm.hash, ()))
            if missing or comm.hash in functions:
                told += comm.nranks
                check_size(comm.nranks, told)
            for function in functions.get(comm.hash, ()):
                at = (comm.hash, function)
                if not _agrees(comm, self.counts[at], self._said[at], missing):
                    self.report.problems.append(
                        f"what it says of {function} on communicator {comm.hash} is cut or "
                        "contradicts itself: not compared"
                    )
                    continue
                for rank, count in _spread(comm, self.counts[at], missing).items():
                    counts.setdefault(rank, {})[function] = count
            if missing and not counts:
                # All others answer, and are level.
                counts = {r: {} for r in range(comm.nranks) if r not in missing}
            for rank, by_function in sorted(counts.items()):
                host, pid = self.named.get((comm.hash, rank), (f"rank {rank} of {comm.hash}", 0))
                seqs = _seqs(by_function)
                comm.ranks.append(Rank(rank, host, pid, seqs))
            for rank in sorted(missing):
                host, pid = self.named.get((comm.hash, rank), (f"rank {rank} of {comm.hash}", 0))
                if not pid and len(self.dead) == 1:
                    host, pid = next(iter(self.dead))
                gone = (host, pid) in self.dead
                comm.ranks.append(Rank(rank, host, pid, None, not gone, answers=False))
            self.report.comms.append(comm)
        return self.report


def _seqs(by_function: dict[str, int]) -> tuple[int, ...]:
    """The five counts; what all ranks agree in is not told, and taken as 0."""
    if "collective" in by_function:  # before 2.26: one count for all functions
        return (*(0 for _ in SEQ_NAMES[1:]), by_function["collective"])
    return tuple(by_function.get(name, 0) for name in SEQ_NAMES)


def _agrees(
    comm: Comm, values: dict[int, list[int]], said: dict[int, int], missing: set[int]
) -> bool:
    """Whether as many ranks are named as are said to have each count, or none of them."""
    named = [rank for ranks in values.values() for rank in ranks]
    whole = all(not ranks or len(ranks) == said[n] for n, ranks in values.items())
    fits = sum(said.values()) <= comm.nranks - len(missing) and max(named, default=0) < comm.nranks
    return whole and fits and len(set(named)) == len(named)


def _spread(comm: Comm, values: dict[int, list[int]], missing: set[int]) -> dict[int, int]:
    """Rank -> count: those that are not named have the one count whose ranks are not."""
    found = {rank: count for count, ranks in values.items() for rank in ranks}
    unnamed = [count for count, ranks in values.items() if not ranks]
    if len(unnamed) == 1:
        for rank in range(comm.nranks):
            if rank not in missing:
                found.setdefault(rank, unnamed[0])
    return found


def from_text(text: str, written: int) -> Report:
    reader = _Text(written)
    for line in text.splitlines():
        reader.line(line[:1000])
    return reader.finish()
