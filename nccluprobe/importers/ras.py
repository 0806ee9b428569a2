"""Reports of NCCL RAS (``ncclras``), text and JSON, to looks at counters.

RAS counts launches of five functions; what ranks have not launched shows by
comparison, and whether they stand still by a second report.
"""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Iterator
from typing import Any

import orjson

from nccluprobe.importers.common import SECOND, Numbers, read_whole
from nccluprobe.importers.ras_model import Comm, Rank, Report, check, check_size
from nccluprobe.importers.ras_text import from_text
from nccluprobe.match import model as m
from nccluprobe.nccl.enums import SEQ_NAMES

_MAX_BYTES = 512 << 20
_MAX_COUNT = 2**62
#: NCCL 2.28 and 2.29 leave out this comma.
_NO_COMMA = re.compile(rb'("nvml_dev": ?\d+)(\s*"status")')
_HASH = re.compile(r"(?:0x)?([0-9a-f]{1,16})", re.IGNORECASE | re.ASCII)


def read_report(path: str) -> Report:
    """Read a report; ValueError says what is wrong with it."""
    data, written = read_whole(path, _MAX_BYTES)
    start = data.lstrip()
    # The answer to "SET FORMAT json" comes first where the socket was read directly.
    if start.startswith(b"OK\n"):
        start = start[3:].lstrip()
    if start.startswith(b"{"):
        report = _from_json(start, written)
    else:
        report = from_text(start.decode("utf-8", "replace"), written)
        if not report.comms and b"Communicators..." not in data:
            raise ValueError("it is no report of ncclras")
    report.path = path
    for comm in report.comms:
        check(comm, report)
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
        told = 0
        report = Report(_stamp(content.get("timestamp")) or written)
        for c in content["communicators"]:
            comm = Comm(_hash(c["hash"]), _size(c["size"]))
            present, absent = c.get("ranks") or (), c.get("missing_ranks") or ()
            told += len(present) + len(absent)
            check_size(max(comm.nranks, len(present), len(absent)), told)
            comm.ranks += [_present(r) for r in present]
            comm.ranks += [_absent(r) for r in absent]
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


def _present(r: dict[str, Any]) -> Rank:
    counts = r.get("collective_counts") or {}
    return Rank(
        rank=_whole(r["rank"]),
        host=str(r["host"])[:200],
        pid=_whole(r["pid"]),
        counts=tuple(_whole(counts.get(name, 0)) for name in SEQ_NAMES),
    )


def _absent(r: dict[str, Any]) -> Rank:
    status = r.get("status") or {}
    return Rank(
        rank=_whole(r["rank"]),
        host=str(r["host"])[:200],
        pid=_whole(r["pid"]),
        counts=None,
        alive=status.get("considered_dead") is not True,
        answers=False,
    )


# -- items -----------------------------------------------------------------


def items(report: Report, numbers: Numbers) -> Iterator[list[m.Item]]:
    """A look at each process that the report speaks of."""
    by_process: dict[tuple[str, int], list[tuple[Comm, Rank]]] = {}
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
