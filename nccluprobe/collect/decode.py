"""Chunks of bytes to tuples.

Two views of the record.  ``HOT`` reads only what a data call's line needs, with
neighbouring fields taken together so that they serve as dictionary keys
without being looked at one by one: 90 ns a record, where unpacking all fields
into a named tuple takes 700.  ``record_at`` reads everything, for the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from nccluprobe.record import FIELDS, OFFSETS, SIZE, STRUCT, Record

#: (first field, last field, struct code) in the order of the record.
_HOT_FIELDS = (
    ("t_enter", "t_enter", "Q"),
    ("t_exit", "t_exit", "Q"),
    ("count", "count", "Q"),
    ("stream", "stream", "Q"),
    ("call_idx", "call_idx", "Q"),
    ("order_idx", "order_idx", "Q"),
    ("nccl_seq", "nccl_seq", "q"),  # signed: unknown is -1
    ("callsite_id", "callsite_id", "Q"),
    ("pid", "epoch", "12s"),  # the thread: pid, tid, epoch
    ("comm_gen", "comm_gen", "I"),
    ("group_id", "group_id", "I"),
    ("rc", "rc", "i"),
    ("peer", "peer", "i"),
    ("op", "lib", "Q"),  # what: op, api, lib
    ("group_pos", "group_pos", "H"),
    ("group_depth", "flags", "I"),  # form: group_depth, datatype, kind, flags
)


def _hot_struct() -> struct.Struct:
    code = "<"
    at = 0
    names = [f.name for f in FIELDS]
    ends = {n: OFFSETS[names[i + 1]] if i + 1 < len(names) else SIZE for i, n in enumerate(names)}
    for first, last, part in _HOT_FIELDS:
        # Fails at import when the record's order changes, not silently later.
        assert struct.calcsize("<" + part) == ends[last] - OFFSETS[first], (first, last)
        code += f"{OFFSETS[first] - at}x{part}"
        at = ends[last]
    return struct.Struct(f"{code}{SIZE - at}x")


HOT = _hot_struct()
assert HOT.size == SIZE

_WHO = struct.Struct("<III")
_WHAT = struct.Struct("<IHH")
_FORM = struct.Struct("<BBBB")
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")


def who_key(pid: int, tid: int, epoch: int) -> bytes:
    """The key of a thread, as ``HOT`` reads it."""
    return _WHO.pack(pid, tid, epoch)


def what_key(rec: Record) -> int:
    """op, api and lib in one number, as ``HOT`` reads them."""
    value: int = _U64.unpack(_WHAT.pack(rec.op, rec.api, rec.lib))[0]
    return value


def form_key(rec: Record) -> int:
    """group_depth, datatype, kind and flags in one number, as ``HOT`` reads them."""
    packed = _FORM.pack(rec.group_depth, rec.datatype, rec.kind, rec.flags)
    value: int = _U32.unpack(packed)[0]
    return value


def record_at(chunk: bytes | memoryview, offset: int) -> Record:
    """The whole record at this offset."""
    return Record._make(STRUCT.unpack_from(chunk, offset))


def records(chunk: bytes | memoryview) -> Iterator[Record]:
    """All records of a chunk."""
    return map(Record._make, STRUCT.iter_unpack(chunk))


def pieces(chunk: bytes, most: int) -> Iterator[bytes | memoryview]:
    """A chunk in pieces of at most ``most`` records, to bound a batch of lines."""
    if len(chunk) <= most * SIZE:
        yield chunk
        return
    view = memoryview(chunk)
    for at in range(0, len(chunk), most * SIZE):
        yield view[at : at + most * SIZE]
