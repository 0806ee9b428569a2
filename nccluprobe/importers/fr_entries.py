"""Entries of a flight recorder dump, as Python has them, to columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from nccluprobe.importers.fr_numbers import BIG, checked, int64, times
from nccluprobe.match.model import Int32, Int64

SCHEDULED, STARTED, COMPLETED = 0, 1, 2
_STATES = {"scheduled": SCHEDULED, "started": STARTED, "completed": COMPLETED}


@dataclass(frozen=True)
class Columns:
    """Columns of equal length over the entries, as ``Dump`` has them.

    ``group``: index in ``groups`` (pg_id, name, description); ``call``: row of ``calls``.
    ``created``: 0 when not known; ``begun``: whether any entry says that it has begun.
    """

    record: Int64
    seq: Int64
    p2p_seq: Int64
    op: Int64
    is_p2p: np.ndarray[Any, np.dtype[np.bool_]]
    group: Int32
    call: Int32
    state: Int32
    created: Int64
    ended: Int64
    timeout: Int64
    calls: Int64
    begun: bool
    groups: list[tuple[Any, Any, Any]]
    names: list[str]
    datatypes: list[Any]


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


def columns_of(entries: list[Any]) -> Columns:
    """The columns of some entries; raises whatever an odd one leads it to."""
    try:
        rows = list(map(_all_fields, entries))
    except KeyError:
        rows = [_older(at, e) for at, e in enumerate(entries)]
    (record, seq, p2p_seq, is_p2p, pg_id, pg, name, in_types, out_types, in_sizes, out_sizes) = (
        columns := list(zip(*rows, strict=True))
    )[:11]
    state, created, begun, completed, timeout, op = columns[11:]
    groups, names, datatypes = _Numbers(), _Numbers(), _Numbers()
    calls, elements = _Numbers(), _Elements()
    ends = times(completed)
    types = (
        datatypes[i[0] if i else o[0] if o else ""]
        for i, o in zip(in_types, out_types, strict=True)
    )
    sizes = (map(elements.of, in_sizes), map(elements.of, out_sizes))
    called = zip(map(names.__getitem__, name), types, *sizes, strict=True)
    found = Columns(
        record=int64(record),
        seq=int64(seq),
        p2p_seq=int64(p2p_seq),
        op=int64(op),
        is_p2p=np.array([x is True for x in is_p2p], np.bool_),
        group=np.array([groups[i, g[0], g[1]] for i, g in zip(pg_id, pg, strict=True)], np.int32),
        call=np.array([calls[c] for c in called], np.int32),
        state=np.array([_STATES.get(s, SCHEDULED) for s in state], np.int32),
        created=int64(times(created)),
        ended=int64(ends),
        timeout=int64([checked(t) for t in times(timeout)]),
        calls=np.array(list(calls), np.int64).reshape(-1, 4),
        begun=any(times(begun)),
        groups=list(groups),
        names=list(names),
        datatypes=list(datatypes),
    )
    for end in {*ends}:
        checked(end)
    if not all(isinstance(n, str) for n in names):
        raise TypeError("a name is no text")
    return found
