"""One dump of PyTorch's flight recorder: pickle or JSON to columns.

Pure Python types only: the unpickler refuses every class and function.
"""

from __future__ import annotations

import functools
import io
import json
import pickle
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import orjson

from nccluprobe.importers.common import read_whole
from nccluprobe.importers.fr_entries import COMPLETED, Columns, columns_of
from nccluprobe.importers.fr_native import read_natively
from nccluprobe.importers.fr_numbers import BIG, at_least, in_order, shortest
from nccluprobe.match.model import Int32, Int64

#: A dump is about 2 kB an entry, and rings have some thousand entries.
MAX_BYTES = 1 << 30
_MAX_ENTRIES = 4_000_000
_MAX_GROUPS = 100_000
_AHEAD = 128 << 10
#: A pickle of protocol 2 or later, as PyTorch writes it, begins so.
_PICKLE = b"\x80"
_NEITHER = "neither a pickle nor JSON"
#: Ranks of groups that are kept as they were read: texts up to so long.
_KEPT_TEXT = 256 << 10
EMPTY = "it is empty"


@dataclass
class Group:
    """A process group as a dump describes it.  ``ranks``: global, by group rank."""

    name: str
    desc: str
    ranks: tuple[int, ...]


@dataclass
class Dump:
    """One rank's dump, as columns of equal length over its entries.

    ``group``: index in ``groups_seen``; ``call``: row of ``calls``; ``state``: SCHEDULED ...
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
    #: Calls that differ, a row each: places in ``names`` and ``datatypes``, elements of all
    #: inputs and of all outputs, -1: there are none.
    calls: Int64 = field(default_factory=lambda: np.empty((0, 4), np.int64))
    group: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    call: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    record: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    seq: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    p2p_seq: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    #: Operations of the group so far, each part of what was put together by itself; 0: not told.
    op: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    is_p2p: np.ndarray[Any, np.dtype[np.bool_]] = field(
        default_factory=lambda: np.empty(0, np.bool_)
    )
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
    #: Whether its process had made groups before that a restart has made again.
    restarted: bool = False
    #: When the newest call on such a group was made that has been left out, unix ns; 0: none.
    former_until: int = 0

    def __len__(self) -> int:
        return len(self.seq)

    @property
    def name(self) -> Int64:
        """Of each entry the place in ``names``."""
        return self.calls[:, 0][self.call]

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

    @property
    def from_first(self) -> bool:
        """Whether nothing has left the ring, as it holds record 0.

        All versions with a status number their records.
        """
        return bool(self.status) and int(self.record.min(initial=1)) == 0


#: What an entry has, column by column.
_COLUMNS = (
    "group", "call", "record", "seq", "p2p_seq", "op", "is_p2p", "state", "created", "ended",
    "timeout",
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
    data, _ = read_whole(path, MAX_BYTES)
    if not data.strip():
        raise ValueError(EMPTY)
    return parse_dump(data)


def natively(data: bytes) -> Dump | None:
    """The dump in these bytes, by the native reader; None: it is left to Python."""
    if data[:1] != _PICKLE:
        return None
    found = read_natively(data, _MAX_ENTRIES, _from_pickle)
    if found is None:
        return None
    dump = _dump(found[0])
    _fill(dump, found[1])
    return dump


def parse_dump(data: bytes) -> Dump:
    """The dump in these bytes; ValueError says what is wrong with them."""
    try:
        if (found := natively(data)) is not None:
            return found
        first = data.lstrip()[:1]
        content = _from_json(data) if first == b"{" else _from_pickle(data)
        if not isinstance(content, dict) or not ({"entries", "pg_config"} & content.keys()):
            raise ValueError("it is no flight recorder dump: it has neither entries nor pg_config")
        entries = content.get("entries") or []
        if not isinstance(entries, list) or len(entries) > _MAX_ENTRIES:
            raise ValueError("its entries are no list, or too many")
        dump = _dump(content)
        if entries:
            _fill(dump, columns_of(entries))
        return dump
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
    """What is beside the entries."""
    version = content.get("nccl_version")
    return Dump(
        version=str(content.get("version", ""))[:20],
        nccl_version=version[:40] if isinstance(version, str) else None,
        groups=_groups(content.get("pg_config")),
        status=_status(content.get("pg_status")),
        timed=_is_timed(content.get("pg_status")),
    )


def _groups(config: Any) -> dict[str, Group]:
    found: dict[str, Group] = {}
    if not isinstance(config, dict):
        return found
    for key, value in list(config.items())[:_MAX_GROUPS]:
        if isinstance(value, dict):
            name, desc, ranks = value.get("name", key), value.get("desc", ""), value.get("ranks")
        else:  # versions before 2.0: a list of ranks
            name, desc, ranks = key, "", value
        members = _members(ranks)
        if members is not None:
            found[str(key)] = Group(str(name)[:200], str(desc)[:200], members)
    return found


def _members(ranks: Any) -> tuple[int, ...] | None:
    """The ranks of a group, a list or a text; None: they are none."""
    if isinstance(ranks, str):
        # All members tell the same text.
        return _listed(ranks) if len(ranks) < _KEPT_TEXT else _listed.__wrapped__(ranks)
    if not isinstance(ranks, list) or not _are_ranks(ranks):
        return None
    return tuple(ranks)


def _are_ranks(ranks: list[Any]) -> bool:
    return all(type(r) is int and 0 <= r < BIG for r in ranks)


@functools.lru_cache(maxsize=256)
def _listed(text: str) -> tuple[int, ...] | None:
    """The ranks of a text such as "[0, 1, 2]"."""
    inside = text.strip().strip("[]").strip()
    if not inside or len(inside) > 16 << 20:
        return ()
    parts = inside.split(",")
    try:
        ranks = [int(p) for p in parts if len(p) < 20]
    except ValueError:
        return ()
    return tuple(ranks) if _are_ranks(ranks) else None


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


def _fill(dump: Dump, c: Columns) -> None:
    for name in _COLUMNS:
        setattr(dump, name, getattr(c, name))
    dump.created = in_order(at_least(c.created, c.ended), c.record)
    dump.newest = int(max(dump.created.max(), c.ended.max(), 0))
    dump.timed = dump.timed or c.begun
    dump.timeout_ms = shortest(c.timeout[c.state != COMPLETED])
    dump.calls = c.calls
    dump.names = [n[:200] for n in c.names]
    dump.datatypes = [str(d)[:40] for d in c.datatypes]
    dump.groups_seen = [(str(name)[:200], str(desc)[:200]) for _, name, desc in c.groups]
    dump.pg_ids = [str(pg_id)[:40] for pg_id, _, _ in c.groups]
