"""One dump of PyTorch's flight recorder: pickle or JSON to columns.

Pure Python types only: the unpickler refuses every class and function.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import orjson

from nccluprobe.importers.fr_numbers import BIG, at_least, checked, int64, shortest, times
from nccluprobe.match.model import Int32, Int64

#: A dump is about 2 kB an entry, and rings have some thousand entries.
MAX_BYTES = 1 << 30
_MAX_ENTRIES = 4_000_000
_MAX_GROUPS = 100_000
_AHEAD = 128 << 10
#: A pickle of protocol 2 or later, as PyTorch writes it, begins so.
_PICKLE = b"\x80"
_NEITHER = "neither a pickle nor JSON"
EMPTY = "it is empty"

SCHEDULED, STARTED, COMPLETED = 0, 1, 2
_STATES = {"scheduled": SCHEDULED, "started": STARTED, "completed": COMPLETED}


@dataclass
class Group:
    """A process group as a dump describes it.  ``ranks``: global, by group rank."""

    name: str
    desc: str
    ranks: tuple[int, ...]


@dataclass
class Dump:
    """One rank's dump, as columns of equal length over its entries.

    ``group``, ``name``, ``datatype``: indices into ``groups_seen``, ``names``,
    ``datatypes``.  ``inputs``, ``outputs``: elements.  ``state``: SCHEDULED ...
    Times in unix ns, 0 when not known.
    """

    version: str
    nccl_version: str | None
    groups: dict[str, Group]
    #: pg_id as text -> (last enqueued, last completed).
    status: dict[str, tuple[int, int]]
    groups_seen: list[tuple[str, str]] = field(default_factory=list)
    #: index in groups_seen -> pg_id as text
    pg_ids: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    datatypes: list[str] = field(default_factory=list)
    group: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    name: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    datatype: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    record: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    seq: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    p2p_seq: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    #: Operations of the group so far, each part of what was put together by itself; 0: not told.
    op: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    is_p2p: np.ndarray[Any, np.dtype[np.bool_]] = field(
        default_factory=lambda: np.empty(0, np.bool_)
    )
    inputs: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    outputs: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    state: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    created: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    #: When its end was noticed; 0: not so far.
    ended: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    #: ms; 0: none.
    timeout: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    newest: int = 0
    #: Shortest timeout of what is not complete; 0: none.
    timeout_ms: int = 0
    #: Whether it is noticed when an operation begins (TORCH_NCCL_ENABLE_TIMING).
    timed: bool = False

    def __len__(self) -> int:
        return len(self.seq)

    def keep(self, rows: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Leave these rows only."""
        for name in _COLUMNS:
            setattr(self, name, getattr(self, name)[rows])
        seen, group = np.unique(self.group, return_inverse=True)
        self.group = group.astype(np.int32)
        self.groups_seen = [self.groups_seen[g] for g in seen]
        self.pg_ids = [self.pg_ids[g] for g in seen]
        self.newest = int(max(self.created.max(initial=0), self.ended.max(initial=0)))
        self.timeout_ms = shortest(self.timeout[self.state != COMPLETED])

    @property
    def whole(self) -> bool:
        """Whether no entry is missing between the oldest and the newest."""
        n = len(self)
        return n > 0 and int(self.record.max()) - int(self.record.min()) == n - 1


#: What an entry has, column by column.
_COLUMNS = (
    "group", "name", "datatype", "record", "seq", "p2p_seq", "op", "is_p2p",
    "inputs", "outputs", "state", "created", "ended", "timeout",
)  # fmt: skip


class _PlainUnpickler(pickle.Unpickler):
    """Plain types only."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse: a dump holds no object."""
        raise ValueError(f"it asks for {module}.{name}: a dump holds plain types only"[:200])

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse: a dump refers to nothing outside."""
        raise ValueError("it refers to objects outside: a dump holds plain types only")


def read_dump(path: str) -> Dump:
    """Read a dump; ValueError says what is wrong with it."""
    size = Path(path).stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES} bytes")
    data = Path(path).read_bytes()
    if not data.strip():
        raise ValueError(EMPTY)
    return parse_dump(data)


def parse_dump(data: bytes) -> Dump:
    """The dump in these bytes; ValueError says what is wrong with them."""
    first = data.lstrip()[:1]
    content = _from_json(data) if first == b"{" else _from_pickle(data)
    if not isinstance(content, dict) or not ({"entries", "pg_config"} & content.keys()):
        raise ValueError("it is no flight recorder dump: it has neither entries nor pg_config")
    try:
        return _dump(content)
    except (TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
        raise ValueError(_odd(error)) from error


def is_foreign(error: str) -> bool:
    """Whether what is wrong with a file is that it is no dump, be it named like one."""
    return error.startswith(
        ("it is no flight recorder dump", "its entries are", "its contents are")
    )


def _odd(error: Exception) -> str:
    """What is wrong with contents that no flight recorder writes."""
    if isinstance(error, KeyError):
        return f"its entries are not those of a flight recorder: they lack {error}"[:200]
    # What this module raises itself begins so; anything else says nothing to its reader.
    why = str(error) if str(error).startswith("a ") else "a value has a wrong type"
    return f"its contents are not those of a flight recorder dump: {why}"[:200]


def _from_json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        # Not-a-number and bytes that are no UTF-8 in a name do not spoil the rest.
        return json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        at = f" at byte {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"it is no JSON, or was cut{at}") from error


def _from_pickle(data: bytes) -> Any:
    try:
        # Buffered: the unpickler then reads ahead, which makes it twice as fast.
        stream = io.BufferedReader(io.BytesIO(data), _AHEAD)
        return _PlainUnpickler(stream, encoding="utf-8", errors="replace").load()
    except MemoryError:
        raise
    except ValueError as error:
        if "plain types only" in str(error):
            raise
        why = "its pickle is broken" if data[:1] == _PICKLE else _NEITHER
        raise ValueError(f"it is no flight recorder dump: {why}") from error
    except Exception as error:  # the unpickler raises whatever a broken stream leads it to
        if data[:1] != _PICKLE:
            raise ValueError(f"it is no flight recorder dump: {_NEITHER}") from error
        why = "its end is missing" if _is_cut(error) else "its pickle is broken"
        raise ValueError(f"{why}: it was cut, or read while it was written") from error


def _is_cut(error: Exception) -> bool:
    return isinstance(error, EOFError) or "truncated" in str(error) or "ran out" in str(error)


def _dump(content: dict[Any, Any]) -> Dump:
    entries = content.get("entries") or []
    if not isinstance(entries, list) or len(entries) > _MAX_ENTRIES:
        raise ValueError("its entries are no list, or too many")
    version = content.get("nccl_version")
    dump = Dump(
        version=str(content.get("version", ""))[:20],
        nccl_version=version[:40] if isinstance(version, str) else None,
        groups=_groups(content.get("pg_config")),
        status=_status(content.get("pg_status")),
        timed=_is_timed(content.get("pg_status")),
    )
    if entries:
        _columns(dump, entries)
    return dump


def _groups(config: Any) -> dict[str, Group]:
    found: dict[str, Group] = {}
    if not isinstance(config, dict):
        return found
    for key, value in list(config.items())[:_MAX_GROUPS]:
        if isinstance(value, dict):
            name, desc, ranks = value.get("name", key), value.get("desc", ""), value.get("ranks")
        else:  # versions before 2.0: a list of ranks
            name, desc, ranks = key, "", value
        if isinstance(ranks, str):
            ranks = _listed(ranks)
        if not isinstance(ranks, list) or not all(type(r) is int and 0 <= r < BIG for r in ranks):
            continue
        found[str(key)] = Group(str(name)[:200], str(desc)[:200], tuple(ranks))
    return found


def _listed(text: str) -> list[int]:
    """The ranks of a text such as "[0, 1, 2]"."""
    inside = text.strip().strip("[]").strip()
    if not inside or len(inside) > 16 << 20:
        return []
    parts = inside.split(",")
    try:
        return [int(p) for p in parts if len(p) < 20]
    except ValueError:
        return []


def _status(status: Any) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    if isinstance(status, dict):
        for key, value in list(status.items())[:_MAX_GROUPS]:
            if not isinstance(value, dict):
                continue
            enqueued = value.get("last_enqueued_collective")
            completed = value.get("last_completed_collective")
            if type(enqueued) is not int or type(completed) is not int:
                continue
            if max(abs(enqueued), abs(completed)) < BIG:
                found[str(key)] = (enqueued, completed)
    return found


def _is_timed(status: Any) -> bool:
    """Whether the status tells of operations that have begun."""
    groups = status.values() if isinstance(status, dict) else ()
    begun = [g.get("last_started_collective") for g in groups if isinstance(g, dict)]
    return any(type(n) is int and n >= 0 for n in begun)


class _Numbers(dict[Any, int]):
    """Values -> small numbers, in order of coming."""

    def __missing__(self, key: Any) -> int:
        found = self[key] = len(self)
        return found


class _Elements(dict[Any, int]):
    """Shape -> elements; most shapes come again and again."""

    def __missing__(self, shape: Any) -> int:
        elements = math.prod(shape)
        if type(elements) is not int or elements < 0:
            raise TypeError("a size is no integer, or negative")
        found = self[shape] = min(elements, BIG - 1)
        return found

    def of(self, shapes: Any) -> int:
        """Elements of all tensors; -1 when there are none."""
        if not shapes:
            return -1
        if len(shapes) == 1:
            return self[tuple(shapes[0])]
        return min(sum(self[tuple(s)] for s in shapes), BIG - 1)


#: What is read of an entry, and what stands for it in versions that lack it.
_FIELDS: dict[str, Any] = {
    "record_id": None,
    "collective_seq_id": None,
    "p2p_seq_id": 0,
    "is_p2p": False,
    "pg_id": "",
    "process_group": None,
    "profiling_name": "",
    "input_dtypes": (),
    "output_dtypes": (),
    "input_sizes": (),
    "output_sizes": (),
    "state": "scheduled",
    "time_created_ns": 0,
    "time_discovered_started_ns": None,
    "time_discovered_completed_ns": None,
    "timeout_ms": 0,
    "op_id": 0,
}
_all_fields = itemgetter(*_FIELDS)


def _older(at: int, e: dict[str, Any]) -> tuple[Any, ...]:
    """The fields of an entry of a version that lacks some."""
    values = {name: e.get(name, other) for name, other in _FIELDS.items()}
    if values["record_id"] is None:
        values["record_id"] = at
    if values["collective_seq_id"] is None:
        values["collective_seq_id"] = e["seq_id"]  # one count for all, before 2.0
    if values["process_group"] is None:
        values["process_group"] = (str(e["pg_id"]), "")
    return tuple(values.values())


def _columns(dump: Dump, entries: list[Any]) -> None:
    try:
        rows = list(map(_all_fields, entries))
    except KeyError:
        rows = [_older(at, e) for at, e in enumerate(entries)]
    (record, seq, p2p_seq, is_p2p, pg_id, pg, name, in_types, out_types, in_sizes, out_sizes) = (
        columns := list(zip(*rows, strict=True))
    )[:11]
    state, created, begun, completed, timeout, op = columns[11:]
    groups, names, datatypes, elements = _Numbers(), _Numbers(), _Numbers(), _Elements()
    dump.record = int64(record)
    dump.seq = int64(seq)
    dump.p2p_seq = int64(p2p_seq)
    dump.op = int64(op)
    dump.is_p2p = np.array([x is True for x in is_p2p], np.bool_)
    numbered = [groups[i, g[0], g[1]] for i, g in zip(pg_id, pg, strict=True)]
    dump.group = np.array(numbered, np.int32)
    dump.name = np.array([names[n] for n in name], np.int32)
    types = zip(in_types, out_types, strict=True)
    dump.datatype = np.array(
        [datatypes[i[0] if i else o[0] if o else ""] for i, o in types], np.int32
    )
    dump.inputs = int64([elements.of(s) for s in in_sizes])
    dump.outputs = int64([elements.of(s) for s in out_sizes])
    dump.state = np.array([_STATES.get(s, SCHEDULED) for s in state], np.int32)
    ends = times(completed)
    dump.ended = int64(ends)
    dump.created = at_least(int64(times(created)), dump.ended)
    dump.newest = max(int(dump.created.max()), *map(checked, {*ends}), 0)
    dump.timeout = int64([checked(t) for t in times(timeout)])
    dump.timed = dump.timed or any(times(begun))
    dump.timeout_ms = shortest(dump.timeout[dump.state != COMPLETED])
    if any(not isinstance(n, str) for n in names) or any(len(k) != 3 for k in groups):
        raise TypeError("a name is no text")
    dump.names = [n[:200] for n in names]
    dump.datatypes = [str(d)[:40] for d in datatypes]
    dump.groups_seen = [(str(k[1])[:200], str(k[2])[:200]) for k in groups]
    dump.pg_ids = [str(k[0])[:40] for k in groups]
