"""The trace, version 1: every kind of line and every field, defined once.

``tools/generate`` writes from this ``nccluprobe/trace/trace.schema.json`` (a
JSON Schema that the tests validate real traces with) and docs/trace.md.

Promise of compatibility: a file of version 1 is read by every later release.
Fields may be added; none changes its meaning.  A reader keeps and counts kinds
and fields it does not know.
"""

from __future__ import annotations

from typing import Any

from nccluprobe.nccl.api import API_TABLE, TRACED, Api, Kind, Role
from nccluprobe.nccl.enums import DATATYPES, REDUCTION_OPS
from nccluprobe.trace.fields import (
    BOOL,
    HASH,
    INT,
    NAT,
    SCHEMA_VERSION,
    STR,
    TIME,
    Field,
    LineKind,
    enum,
    null,
    nullable,
    opt,
)
from nccluprobe.trace.inspect_kind import INSPECT

__all__ = ["ARGUMENT_FIELDS", "LINE_KINDS", "SCHEMA_VERSION", "Field", "LineKind", "json_schema"]


_LIB: dict[str, Any] = {
    "type": "object",
    "required": ["lib", "path", "nccl_version", "build_id"],
    "properties": {
        "lib": NAT,
        "path": STR,
        "nccl_version": nullable(STR),
        "build_id": nullable(STR),
    },
}

#: Fields of ``call`` and ``enter`` that an api has because of its arguments.
ARGUMENT_FIELDS: dict[Role, tuple[Field, ...]] = {
    Role.COUNT: (Field("count", NAT, "elements"),),
    Role.SIZE: (Field("count", NAT, "bytes"),),
    Role.DATATYPE: (
        Field("datatype", STR, "one of " + ", ".join(DATATYPES.values()) + "; a number if new"),
    ),
    Role.OP: (Field("op", enum(*REDUCTION_OPS.values(), "custom"), "reduction"),),
    Role.ROOT: (Field("root", INT, "root, as a rank of the communicator"),),
    Role.PEER: (Field("peer", INT, "peer, as a rank of the communicator"),),
    Role.STREAM: (Field("stream", NAT, "small id of the CUDA stream in this process"),),
    Role.NRANKS: (Field("nranks", INT, "ranks asked for (shrink: ranks excluded)"),),
    Role.RANK: (Field("rank", INT, "the caller's rank in the new communicator"),),
    Role.COLOR: (Field("color", INT, "colour; -1: takes no part"),),
    Role.KEY: (Field("key", INT, "key"),),
    Role.NEW_COMM: (
        null("new_comm", NAT, "id of the communicator made; null: none, or not known yet"),
    ),
}

_CALL_COMMON: tuple[Field, ...] = (
    Field("api", enum(*(a.name for a in TRACED)), "NCCL function"),
    Field("t", NAT, f"entry, {TIME}"),
    Field("thread", NAT, "thread id in the initial pid namespace"),
    opt("group", NAT, "id of the thread's open group; absent: none"),
    opt("gpos", NAT, "position of the call in that group, from 0"),
    opt("gdepth", NAT, "open GroupStarts at entry, when more than one"),
    opt(
        "seq",
        NAT,
        "nccl_seq: the library's own counter of this function at entry, where it is known and no "
        "group is open",
    ),
    opt("site", HASH, "callsite_id"),
    opt("capture", enum("yes", "no", "unknown"), "captured into a CUDA graph (absent: unknown)"),
    opt("blind", BOOL, "true: a full map left this call without identity and numbers"),
    opt("nonblocking", BOOL, "true: made with config.blocking = 0"),
    opt("uid_hash", HASH, "init calls: commHash of the unique id passed"),
    opt(
        "again",
        BOOL,
        "true: stands in an earlier part already; repeated because its group is still open",
    ),
)

_CALL_END: tuple[Field, ...] = (
    null("dur", NAT, "ns inside; null: the exit was not probed"),
    null("rc", INT, "ncclResult_t; null: never returned, or the exit was not probed"),
    opt(
        "end",
        enum("no_return", "unwound", "enter_only", "lost"),
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
            Field("run_id", STR, "label of the run; never part of a match"),
            Field("host", STR, "host name"),
            Field("boot_id", STR, "boot id of the host: clocks compare only within it"),
            Field("pid", NAT, "process id in the initial pid namespace"),
            null("ns_pid", NAT, "process id in its own pid namespace"),
            Field("start", NAT, "start time of the process, ns since boot"),
            null("exe", STR, "name of the executable"),
            null("rank", INT, "rank in the job"),
            Field(
                "rank_source",
                enum(
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
            null("world_size", NAT, "ranks in the job"),
            null("local_rank", NAT, "rank on the node"),
            Field("front", enum("ebpf", "preload"), "which capture front made the trace"),
            Field("probe_version", STR, "version of nccluprobe"),
            Field("libs", {"type": "array", "items": _LIB}, "copies of NCCL seen in the process"),
            Field("exits", BOOL, "false: only entries are probed (--no-exit)"),
            Field(
                "cannot_see",
                {"type": "array", "items": STR},
                "what this tracer cannot see here, such as graph_replay",
            ),
            Field("part", NAT, "number of this part of a rotated file, from 0"),
            opt("job", STR, "the launcher's job id"),
        ),
    ),
    LineKind(
        "clock",
        "The host's clocks, at start and every 10 s.",
        (
            Field("mono", NAT, TIME),
            Field("unix", NAT, "the same moment in unix ns"),
            null("synced", BOOL, "whether the kernel says that the clock is synchronised"),
            null("err", NAT, "the kernel's bound of the clock's error, ns"),
        ),
    ),
    LineKind(
        "comm",
        "A communicator. Written again when more is known: the last one holds.",
        (
            Field("id", NAT, "id in this file, used by the other lines"),
            Field("t", NAT, f"first seen, {TIME}"),
            null("hash", HASH, "NCCL's commHash (comm_uid_hash of a finding)"),
            Field(
                "instance",
                NAT,
                "how many communicators with this hash came before in the process (at this "
                "endpoint, when the process drives several ranks); 0 when hash is null",
            ),
            null("comm_rank", INT, "rank of this process in it"),
            null("nranks", NAT, "its size"),
            null("parent", NAT, "id of the communicator it was made from"),
            null("name", STR, "config.commName"),
            Field(
                "learnt",
                enum("init", "init_all", "split", "shrink", "grow", "struct", "unknown"),
                "how its identity was learnt",
            ),
            Field("lib", NAT, "which copy of NCCL"),
            opt("log_id", HASH, "commId in NCCL's log where it differs from hash (2.18 - 2.25)"),
            opt("child", NAT, "ordinal of this child on its parent, from 1"),
            opt("color", INT, "colour of the split"),
            opt(
                "base",
                NAT,
                "calls made on it before the first one seen here; absent: none, "
                "or not known when learnt is unknown",
            ),
            opt("dev", INT, "CUDA device, by the live struct"),
            opt(
                "seqs",
                {"type": "array", "items": NAT, "minItems": 5, "maxItems": 5},
                "the library's own counters (Broadcast, Reduce, AllGather, ReduceScatter, "
                "AllReduce) when the first call seen here entered; absent: all 0 when it was seen "
                "from its making, else not known. Calls of a group that was open when the tracing "
                "began are missing in them: compare with `seq` of later calls",
            ),
            opt("base_seq", NAT, "sum of seqs: eager collectives before the first one seen here"),
            opt("in_group", BOOL, "true: made by InitAll together with others of this process"),
        ),
    ),
    LineKind(
        "comm_end",
        "A communicator begins to end.",
        (
            Field("comm", NAT, "its id"),
            Field("t", NAT, f"entry of the call that ends it, {TIME}"),
            Field("how", enum("finalize", "destroy", "abort", "revoke"), "by which call"),
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
            Field("t", NAT, f"when written, {TIME}"),
            Field(
                "through",
                NAT,
                "every call that entered before this time is in the file or counted as lost, "
                + TIME,
            ),
            Field("captured", NAT, "records received for this process so far"),
            Field(
                "lost_kernel",
                NAT,
                "records lost so far because the ring was full, with those that could not be told "
                "by process",
            ),
            opt(
                "lost_unattributed",
                NAT,
                "part of lost_kernel that may be any process's; absent: 0",
            ),
            Field("lost_queue", NAT, "records lost so far in the collector"),
            Field("overwritten", NAT, "records overwritten unread so far (preload)"),
            Field("skipped_disk", NAT, "lines not written so far because the disk was full"),
            opt(
                "dropped",
                NAT,
                "lines of oldest parts deleted so far to keep the bound of size; absent: 0",
            ),
            Field("blind", NAT, "calls so far without identity because a map was full"),
            Field("in_flight", NAT, "calls now inside"),
            null("alive", BOOL, "whether the process exists"),
            Field(
                "main",
                enum("nccl", "syscall", "running", "stopped", "uninterruptible", "dead", "unknown"),
                "what its main thread does",
            ),
            opt("syscall", STR, "the system call it is in: name, or number as text"),
            null("last_call_age", NAT, "ns since the last entry or exit of a call"),
            opt("cpu", NAT, "CPU time of the process so far, ns"),
        ),
    ),
    LineKind(
        "state",
        "Something about the tracing or the process changed.",
        (
            Field("t", NAT, TIME),
            Field(
                "state",
                enum(
                    "attached", "exec", "disk_full", "disk_ok", "dropped_part", "detaching", "phase"
                ),
                "what",
            ),
            opt("detail", STR, "more, for people"),
            opt("phase", nullable(STR), "phase: its name, as the job declared it; null: in none"),
            opt("since", NAT, f"phase: when it began (null: ended), {TIME}"),
            opt("beat", NAT, f"phase: when the job wrote this, {TIME}"),
            opt("every", NAT, "phase: the job writes again within this, ns; absent: not promised"),
            opt("limit", NAT, "phase: how long it may take by the job's own word, ns"),
            opt("step", NAT, "phase: progress, as the job counts it"),
        ),
    ),
    INSPECT,
    LineKind(
        "process_end",
        "The process ended, or tracing it did.",
        (
            Field("t", NAT, TIME),
            Field("how", enum("exited", "signaled", "gone", "exec", "detached"), "gone: no code"),
            null("code", INT, "exit code"),
            null("signal", INT, "signal number"),
            Field("in_flight", NAT, "calls it was in"),
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
    comm = null("comm", NAT, "id of a comm line of this part; null: no identity")
    idx = null("idx", NAT, "call_idx: ordinal of the call on its communicator as seen here")
    if api.kind is Kind.COLLECTIVE:
        return (comm, idx, null("ord", NAT, "ordinal among the communicator's collectives"))
    if api.kind is Kind.P2P:
        return (comm, idx, null("ord", NAT, "ordinal to this peer in this direction"))
    if api.makes_comm:
        return (comm, idx, null("ord", NAT, "ordinal of the child on its parent, from 1"))
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


def known_fields() -> dict[str, frozenset[str]]:
    """Kind -> every field that a line of it may have, of whatever api."""
    found = {k.name: {"kind", *(f.name for f in k.fields)} for k in LINE_KINDS}
    for api in TRACED:
        for kind in ("call", "enter"):
            found[kind].update(f.name for f in fields_of(api, kind))
    return {kind: frozenset(names) for kind, names in found.items()}


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
                    "properties": {"api": enum(*(a.name for a in TRACED))},
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
