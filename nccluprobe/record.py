"""The record: what both capture fronts write for every call.

One layout, defined here once.  ``tools/generate`` writes the C header from it
(``ebpf/include/ncp_record.h``, with a static assert on every offset), and
Python decodes with the ``STRUCT`` below.  Fields are little-endian, naturally
aligned, without padding.

Contract: a record is written once per call, at its exit, with both times.  A
call that is still inside is read from the front's in-flight state in the same
layout with ``t_exit`` 0.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

#: Layout version; both fronts put it into what they share with the collector.
RECORD_VERSION = 1

_CODES = {"u64": "Q", "u32": "I", "i32": "i", "u16": "H", "u8": "B"}
_SIZES = {"u64": 8, "u32": 4, "i32": 4, "u16": 2, "u8": 1}


class FieldDef(NamedTuple):
    """A field of the record: name, C type, meaning."""

    name: str
    ctype: str
    doc: str


FIELDS: tuple[FieldDef, ...] = (
    FieldDef("t_enter", "u64", "entry, ns of the initial namespace's CLOCK_MONOTONIC"),
    FieldDef("t_exit", "u64", "exit, same clock; 0 while inside or when exits are not probed"),
    FieldDef("comm", "u64", "ncclComm_t of the call, 0 when it has none"),
    FieldDef("new_comm", "u64", "communicator made by the call, 0 when none or not yet known"),
    FieldDef("count", "u64", "elements (bytes for registration calls)"),
    FieldDef("stream", "u64", "cudaStream_t"),
    FieldDef("call_idx", "u64", "ordinal of the call on its communicator as seen here, from 0"),
    FieldDef(
        "order_idx",
        "u64",
        "collectives: ordinal among the collectives of the communicator, from 0; "
        "p2p: ordinal for this communicator, direction and peer, from 0; "
        "split, shrink, grow: ordinal of the child on its parent, from 1",
    ),
    FieldDef(
        "nccl_seq", "u64", "ncclComm.seqNumber[] of this function at entry; all ones: unknown"
    ),
    FieldDef("callsite_id", "u64", "hash of the user's stack; 0: not taken"),
    FieldDef("uid_hash", "u64", "commHash made from the unique id (init calls), else 0"),
    FieldDef("log_hash", "u64", "commId of NCCL's own log where it differs from commHash, else 0"),
    FieldDef("pid", "u32", "process (tgid) in the initial pid namespace"),
    FieldDef("tid", "u32", "thread in the initial pid namespace"),
    FieldDef("epoch", "u32", "incarnation of the pid, to tell a reused pid apart"),
    FieldDef("comm_gen", "u32", "generation of `comm`: unique per tracer, 0: no identity"),
    FieldDef("new_gen", "u32", "generation of `new_comm` (first of nranks for InitAll)"),
    FieldDef("group_id", "u32", "open group of the thread, unique per tracer, 0: none"),
    FieldDef("rc", "i32", "ncclResult_t; valid when t_exit is set and FLAG_NO_RETURN is not"),
    FieldDef("peer", "i32", "peer or root; own rank for init calls; key for split"),
    FieldDef("nranks", "i32", "ranks of an init; devices of InitAll; excluded ranks of a shrink"),
    FieldDef("color", "i32", "colour of a split"),
    FieldDef("op", "u32", "ncclRedOp_t"),
    FieldDef("api", "u16", "id in the API table"),
    FieldDef("lib", "u16", "which copy of NCCL, as numbered by the front"),
    FieldDef("group_pos", "u16", "position in the open group, from 0 (saturates)"),
    FieldDef("group_depth", "u8", "open GroupStarts of the thread at entry"),
    FieldDef("datatype", "u8", "ncclDataType_t"),
    FieldDef("kind", "u8", "KIND_*"),
    FieldDef("flags", "u8", "FLAG_*"),
    FieldDef("reserved", "u16", "0"),
)

STRUCT = struct.Struct("<" + "".join(_CODES[f.ctype] for f in FIELDS))
SIZE = STRUCT.size
OFFSETS: dict[str, int] = {}
_at = 0
for _field in FIELDS:
    OFFSETS[_field.name] = _at
    _at += _SIZES[_field.ctype]
assert _at == SIZE and SIZE % 8 == 0

KIND_CALL = 1
#: A communicator's name: bytes [NAME_OFFSET, NAME_OFFSET + NAME_SIZE) hold it,
#: NUL-terminated, in place of the fields there; new_gen says whose it is.
KIND_NAME = 2
#: A communicator made by an earlier call, seen only now: a split, shrink or
#: grow in a group or non-blocking writes its handle after it has returned.
#: ``api``, ``t_enter`` and ``color`` are those of that call, ``comm_gen`` is the
#: parent's, ``order_idx`` the ordinal of the child; ``new_comm`` and ``new_gen``
#: are the child's, ``t_exit`` is when it was seen.  It is no call: no rc, no idx.
KIND_NEW_COMM = 3
#: What the live struct of a communicator says, at the first call on it that was
#: seen (and, for one that was then still being made, that found it ready); it
#: comes before the record of that call.  ``comm`` and ``comm_gen`` say which;
#: ``peer``, ``nranks`` and ``color`` are rank, nRanks and cudaDev, ``uid_hash`` is
#: commHash; ``count``, ``stream``, ``call_idx``, ``order_idx`` and ``nccl_seq`` are
#: the five counters of seqNumber[] at entry, all 0 where they are not known.
#: ``t_enter``, ``api``, ``group_id`` and ``group_depth`` are the call's.  ``rc`` is
#: one of READ_*.
KIND_IDENTITY = 4
KINDS = {
    "CALL": KIND_CALL,
    "NAME": KIND_NAME,
    "NEW_COMM": KIND_NEW_COMM,
    "IDENTITY": KIND_IDENTITY,
}
READ_OK = 0
READ_FAULT = 1  # a page was not present: to be read again from user space
READ_OTHER = 2  # no communicator that this layout fits
NAME_OFFSET = OFFSETS["count"]
NAME_SIZE = 64

FLAG_NO_RETURN = 1  # the thread ended inside the call; t_exit is when
FLAG_UNWOUND = 2  # left by longjmp or the like; t_exit is when it was noticed
FLAG_ENTER_ONLY = 4  # exits are not probed: t_exit and rc are not known
FLAG_NONBLOCKING = 8  # init, split, ...: config.blocking is 0
FLAG_COMM_LATE = 16  # the communicator was first seen in mid-life
FLAG_BLIND = 32  # a full map: no identity, call_idx or order for this call
FLAGS = {
    "NO_RETURN": FLAG_NO_RETURN,
    "UNWOUND": FLAG_UNWOUND,
    "ENTER_ONLY": FLAG_ENTER_ONLY,
    "NONBLOCKING": FLAG_NONBLOCKING,
    "COMM_LATE": FLAG_COMM_LATE,
    "BLIND": FLAG_BLIND,
}

UNKNOWN_SEQ = 2**64 - 1


class Record(NamedTuple):
    """A decoded record; field meanings are those of ``FIELDS``."""

    t_enter: int
    t_exit: int
    comm: int
    new_comm: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    stream: int
    call_idx: int
    order_idx: int
    nccl_seq: int
    callsite_id: int
    uid_hash: int
    log_hash: int
    pid: int
    tid: int
    epoch: int
    comm_gen: int
    new_gen: int
    group_id: int
    rc: int
    peer: int
    nranks: int
    color: int
    op: int
    api: int
    lib: int
    group_pos: int
    group_depth: int
    datatype: int
    kind: int
    flags: int
    reserved: int


assert Record._fields == tuple(f.name for f in FIELDS)
