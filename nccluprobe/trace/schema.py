"""The trace, version 1: every kind of line and every field, defined once.

``tools/generate`` writes from this ``nccluprobe/trace/trace.schema.json`` (a
JSON Schema that the tests validate real traces with) and docs/trace.md.

Promise of compatibility: a file of version 1 is read by every later release.
Fields may be added; none changes its meaning.  A reader keeps and counts kinds
and fields it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nccluprobe.nccl.api import API_TABLE, TRACED, Api, Kind, Role
from nccluprobe.nccl.enums import DATATYPES, REDUCTION_OPS

SCHEMA_VERSION = 1

_INT: dict[str, Any] = {"type": "integer"}
_NAT: dict[str, Any] = {"type": "integer", "minimum": 0}
_STR: dict[str, Any] = {"type": "string"}
_BOOL: dict[str, Any] = {"type": "boolean"}
_HASH: dict[str, Any] = {"type": "string", "pattern": "^[0-9a-f]{16}$"}


def _enum(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    if "enum" in schema:
        return {"enum": [*schema["enum"], None]}
    return {**schema, "type": [schema["type"], "null"]}


@dataclass(frozen=True)
class Field:
    """A field of a line.  ``nullable``: the key is there, the value unknown."""

    name: str
    schema: dict[str, Any]
    doc: str
    required: bool = True
    nullable: bool = False

    @property
    def json(self) -> dict[str, Any]:
        return _nullable(self.schema) if self.nullable else self.schema


@dataclass(frozen=True)
class LineKind:
    """A kind of line: its meaning and its fields, besides ``kind`` itself."""

    name: str
    doc: str
    fields: tuple[Field, ...] = field(default=())


def _opt(name: str, schema: dict[str, Any], doc: str) -> Field:
    return Field(name, schema, doc, required=False)


def _null(name: str, schema: dict[str, Any], doc: str) -> Field:
    return Field(name, schema, doc, nullable=True)


_TIME = "ns of the initial namespace's CLOCK_MONOTONIC"

_LIB: dict[str, Any] = {
    "type": "object",
    "required": ["lib", "path", "nccl_version", "build_id"],
    "properties": {
        "lib": _NAT,
        "path": _STR,
        "nccl_version": _nullable(_STR),
        "build_id": _nullable(_STR),
    },
}

#: Fields of ``call`` and ``enter`` that an api has because of its arguments.
ARGUMENT_FIELDS: dict[Role, tuple[Field, ...]] = {
    Role.COUNT: (Field("count", _NAT, "elements"),),
    Role.SIZE: (Field("count", _NAT, "bytes"),),
    Role.DATATYPE: (
        Field("datatype", _STR, "one of " + ", ".join(DATATYPES.values()) + "; a number if new"),
    ),
    Role.OP: (Field("op", _enum(*REDUCTION_OPS.values(), "custom"), "reduction"),),
    Role.ROOT: (Field("root", _INT, "root, as a rank of the communicator"),),
    Role.PEER: (Field("peer", _INT, "peer, as a rank of the communicator"),),
    Role.STREAM: (Field("stream", _NAT, "small id of the CUDA stream in this process"),),
    Role.NRANKS: (Field("nranks", _INT, "ranks asked for (shrink: ranks excluded)"),),
    Role.RANK: (Field("rank", _INT, "the caller's rank in the new communicator"),),
    Role.COLOR: (Field("color", _INT, "colour; -1: takes no part"),),
    Role.KEY: (Field("key", _INT, "key"),),
    Role.NEW_COMM: (
        _null("new_comm", _NAT, "id of the communicator made; null: none, or not known yet"),
    ),
}

_CALL_COMMON: tuple[Field, ...] = (
    Field("api", _enum(*(a.name for a in TRACED)), "NCCL function"),
    Field("t", _NAT, f"entry, {_TIME}"),
    Field("thread", _NAT, "thread id in the initial pid namespace"),
    _opt("group", _NAT, "id of the thread's open group; absent: none"),
    _opt("gpos", _NAT, "position of the call in that group, from 0"),
    _opt("gdepth", _NAT, "open GroupStarts at entry, when more than one"),
    _opt("seq", _NAT, "nccl_seq: the library's own counter of this function at entry"),
    _opt("site", _HASH, "callsite_id"),
    _opt("capture", _enum("yes", "no", "unknown"), "captured into a CUDA graph (absent: unknown)"),
    _opt("blind", _BOOL, "true: a full map left this call without identity and numbers"),
    _opt("nonblocking", _BOOL, "true: made with config.blocking = 0"),
    _opt("uid_hash", _HASH, "init calls: commHash of the unique id passed"),
    _opt(
        "again",
        _BOOL,
        "true: stands in an earlier part already; repeated because its group is still open",
    ),
)

_CALL_END: tuple[Field, ...] = (
    _null("dur", _NAT, "ns inside; null: the exit was not probed"),
    _null("rc", _INT, "ncclResult_t; null: never returned, or the exit was not probed"),
    _opt(
        "end",
        _enum("no_return", "unwound", "enter_only", "lost"),
        "why rc is null: its thread or process ended inside, it was left by longjmp, exits are not "
        "probed, or it is no longer inside and the record of its exit was lost",
    ),
)

LINE_KINDS: tuple[LineKind, ...] = (
    LineKind(
        "process",
        "Who is traced. First line of every part; written again when more is known: the last one "
        "holds.",
        (
            Field("schema", {"const": SCHEMA_VERSION}, "version of this format"),
            Field("run_id", _STR, "label of the run; never part of a match"),
            Field("host", _STR, "host name"),
            Field("boot_id", _STR, "boot id of the host: clocks compare only within it"),
            Field("pid", _NAT, "process id in the initial pid namespace"),
            _null("ns_pid", _NAT, "process id in its own pid namespace"),
            Field("start", _NAT, "start time of the process, ns since boot"),
            _null("exe", _STR, "name of the executable"),
            _null("rank", _INT, "rank in the job"),
            Field(
                "rank_source",
                _enum(
                    "torchrun",
                    "slurm",
                    "openmpi",
                    "pmi",
                    "environment",
                    "world_communicator",
                    "unknown",
                ),
                "how the rank was learnt",
            ),
            _null("world_size", _NAT, "ranks in the job"),
            _null("local_rank", _NAT, "rank on the node"),
            Field("front", _enum("ebpf", "preload"), "which capture front made the trace"),
            Field("probe_version", _STR, "version of nccluprobe"),
            Field("libs", {"type": "array", "items": _LIB}, "copies of NCCL seen in the process"),
            Field("exits", _BOOL, "false: only entries are probed (--no-exit)"),
            Field(
                "cannot_see",
                {"type": "array", "items": _STR},
                "what this tracer cannot see here, such as graph_replay",
            ),
            Field("part", _NAT, "number of this part of a rotated file, from 0"),
            _opt("job", _STR, "the launcher's job id"),
        ),
    ),
    LineKind(
        "clock",
        "The host's clocks, at start and every 10 s.",
        (
            Field("mono", _NAT, _TIME),
            Field("unix", _NAT, "the same moment in unix ns"),
            _null("synced", _BOOL, "whether the kernel says that the clock is synchronised"),
            _null("err", _NAT, "the kernel's bound of the clock's error, ns"),
        ),
    ),
    LineKind(
        "comm",
        "A communicator. Written again when more is known: the last one holds.",
        (
            Field("id", _NAT, "id in this file, used by the other lines"),
            Field("t", _NAT, f"first seen, {_TIME}"),
            _null("hash", _HASH, "NCCL's commHash (comm_uid_hash of a finding)"),
            Field(
                "instance",
                _NAT,
                "how many communicators with this hash came before in the process (at this "
                "endpoint, when the process drives several ranks); 0 when hash is null",
            ),
            _null("comm_rank", _INT, "rank of this process in it"),
            _null("nranks", _NAT, "its size"),
            _null("parent", _NAT, "id of the communicator it was made from"),
            _null("name", _STR, "config.commName"),
            Field(
                "learnt",
                _enum("init", "init_all", "split", "shrink", "grow", "struct", "unknown"),
                "how its identity was learnt",
            ),
            Field("lib", _NAT, "which copy of NCCL"),
            _opt("log_id", _HASH, "commId in NCCL's log where it differs from hash (2.18 - 2.25)"),
            _opt("child", _NAT, "ordinal of this child on its parent, from 1"),
            _opt("color", _INT, "colour of the split"),
            _opt(
                "base",
                _NAT,
                "calls made on it before the first one seen here; absent: none, "
                "or not known when learnt is unknown",
            ),
            _opt("dev", _INT, "CUDA device, by the live struct"),
            _opt(
                "seqs",
                {"type": "array", "items": _NAT, "minItems": 5, "maxItems": 5},
                "the library's own counters (Broadcast, Reduce, AllGather, ReduceScatter, "
                "AllReduce) when the first call seen here entered; absent: all 0 when it was seen "
                "from its making, else not known. Calls of a group that was open when the tracing "
                "began are missing in them: compare with `seq` of later calls",
            ),
            _opt("base_seq", _NAT, "sum of seqs: eager collectives before the first one seen here"),
            _opt("in_group", _BOOL, "true: made by InitAll together with others of this process"),
        ),
    ),
    LineKind(
        "comm_end",
        "A communicator begins to end.",
        (
            Field("comm", _NAT, "its id"),
            Field("t", _NAT, f"entry of the call that ends it, {_TIME}"),
            Field("how", _enum("finalize", "destroy", "abort", "revoke"), "by which call"),
        ),
    ),
    LineKind(
        "call",
        "A finished call. Further fields follow from its arguments (see the table of apis).",
        _CALL_COMMON + _CALL_END,
    ),
    LineKind(
        "enter",
        "A call that is still inside when written; its call line follows when it ends, with the "
        "same t and thread.",
        _CALL_COMMON,
    ),
    LineKind(
        "coverage",
        "What is known up to when, at least once a second, also without calls.",
        (
            Field("t", _NAT, f"when written, {_TIME}"),
            Field(
                "through",
                _NAT,
                "every call that entered before this time is in the file or counted as lost, "
                + _TIME,
            ),
            Field("captured", _NAT, "records received for this process so far"),
            Field(
                "lost_kernel",
                _NAT,
                "records lost so far because the ring was full, with those that could not be told "
                "by process",
            ),
            _opt(
                "lost_unattributed",
                _NAT,
                "part of lost_kernel that may be any process's; absent: 0",
            ),
            Field("lost_queue", _NAT, "records lost so far in the collector"),
            Field("overwritten", _NAT, "records overwritten unread so far (preload)"),
            Field("skipped_disk", _NAT, "lines not written so far because the disk was full"),
            _opt(
                "dropped",
                _NAT,
                "lines of oldest parts deleted so far to keep the bound of size; absent: 0",
            ),
            Field("blind", _NAT, "calls so far without identity because a map was full"),
            Field("in_flight", _NAT, "calls now inside"),
            _null("alive", _BOOL, "whether the process exists"),
            Field(
                "main",
                _enum(
                    "nccl", "syscall", "running", "stopped", "uninterruptible", "dead", "unknown"
                ),
                "what its main thread does",
            ),
            _opt("syscall", _STR, "the system call it is in: name, or number as text"),
            _null("last_call_age", _NAT, "ns since the last entry or exit of a call"),
            _opt("cpu", _NAT, "CPU time of the process so far, ns"),
        ),
    ),
    LineKind(
        "state",
        "Something about the tracing or the process changed.",
        (
            Field("t", _NAT, _TIME),
            Field(
                "state",
                _enum("attached", "exec", "disk_full", "disk_ok", "dropped_part", "detaching"),
                "what",
            ),
            _opt("detail", _STR, "more, for people"),
        ),
    ),
    LineKind(
        "process_end",
        "The process ended, or tracing it did.",
        (
            Field("t", _NAT, _TIME),
            Field("how", _enum("exited", "signaled", "gone", "exec", "detached"), "gone: no code"),
            _null("code", _INT, "exit code"),
            _null("signal", _INT, "signal number"),
            Field("in_flight", _NAT, "calls it was in"),
        ),
    ),
)

KIND_BY_NAME: dict[str, LineKind] = {k.name: k for k in LINE_KINDS}

#: Kinds that later versions will use; a reader of today must let them pass.
RESERVED_KINDS: tuple[str, ...] = ("span", "complete", "graph_launch")


def numbers_of(api: Api) -> tuple[Field, ...]:
    """The ordinals that a call of this api carries, besides its arguments.

    All are null together when the call has no identity: no communicator was
    passed, or a full map left it blind.
    """
    if not api.has(Role.COMM):
        return ()
    comm = _null("comm", _NAT, "id of a comm line of this part; null: no identity")
    idx = _null("idx", _NAT, "call_idx: ordinal of the call on its communicator as seen here")
    if api.kind is Kind.COLLECTIVE:
        return (comm, idx, _null("ord", _NAT, "ordinal among the communicator's collectives"))
    if api.kind is Kind.P2P:
        return (comm, idx, _null("ord", _NAT, "ordinal to this peer in this direction"))
    if api.makes_comm:
        return (comm, idx, _null("ord", _NAT, "ordinal of the child on its parent, from 1"))
    return (comm, idx)


def fields_of(api: Api, kind: str) -> tuple[Field, ...]:
    """All fields of a ``call`` or ``enter`` line of this api."""
    found: list[Field] = []
    for role in api.args:
        for arg in ARGUMENT_FIELDS.get(role, ()):
            # The communicator a call makes is not known before it returns.
            if not (role is Role.NEW_COMM and kind == "enter"):
                found.append(arg)
    return (*KIND_BY_NAME[kind].fields, *numbers_of(api), *found)


def _object(kind: str, fields: tuple[Field, ...], **const: str) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["kind", *(f.name for f in fields if f.required)],
        "properties": {
            "kind": {"const": kind},
            **{f.name: f.json for f in fields},
            **{name: {"const": value} for name, value in const.items()},
        },
    }


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of one line of a trace."""
    rules: list[dict[str, Any]] = []
    for line in LINE_KINDS:
        if line.name in ("call", "enter"):
            continue
        rules.append(
            {
                "if": {"properties": {"kind": {"const": line.name}}, "required": ["kind"]},
                "then": _object(line.name, line.fields),
            }
        )
    for name in ("call", "enter"):
        rules.append(
            {
                "if": {"properties": {"kind": {"const": name}}, "required": ["kind"]},
                "then": {
                    "required": ["api"],
                    "properties": {"api": _enum(*(a.name for a in TRACED))},
                },
            }
        )
        for api in API_TABLE:
            if api.kind is Kind.HELPER:
                continue
            rules.append(
                {
                    "if": {
                        "properties": {"kind": {"const": name}, "api": {"const": api.name}},
                        "required": ["kind", "api"],
                    },
                    "then": _object(name, fields_of(api, name), api=api.name),
                }
            )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "nccluprobe trace line, version 1",
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": {"type": "string"}},
        "allOf": rules,
    }
