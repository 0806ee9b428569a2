"""The line that ``inspect --json`` writes."""

from __future__ import annotations

from typing import Any

from nccluprobe.trace.fields import (
    BOOL,
    INT,
    NAT,
    SCHEMA_VERSION,
    STR,
    TIME,
    Field,
    LineKind,
    null,
    opt,
)

_OBJECTS: dict[str, Any] = {"type": "array", "items": {"type": "object"}}

#: Stands alone, in files of its own: nothing of the other kinds belongs to it.
INSPECT = LineKind(
    "inspect",
    "A process as `nccluprobe inspect --json` saw it, in one line: where it stands on each of its "
    "communicators, with no event at all. It stands alone and needs no `process` line.",
    (
        Field("schema", {"const": SCHEMA_VERSION}, "version of this format"),
        Field("t", NAT, f"when the counters were read, {TIME}"),
        Field("unix", NAT, "the same moment in unix ns"),
        Field("host", STR, "host name"),
        Field("boot_id", STR, "boot id of the host"),
        Field("pid", NAT, "process id in the initial pid namespace"),
        null("ns_pid", NAT, "process id in its own pid namespace"),
        Field("start", NAT, "start time of the process, ns since boot"),
        null("exe", STR, "name of the executable"),
        null("rank", INT, "rank in the job"),
        Field("rank_source", STR, "how the rank was learnt, as in `process`"),
        null("world_size", NAT, "ranks in the job"),
        null("local_rank", NAT, "rank on the node"),
        opt("job", STR, "the launcher's job id"),
        Field("probe_version", STR, "version of nccluprobe"),
        Field("alive", BOOL, "whether the process exists"),
        Field("main", STR, "what its main thread does, as in `coverage`"),
        opt("syscall", STR, "the system call it is in"),
        Field("cpu", NAT, "CPU time of the process so far, ns"),
        Field(
            "threads",
            _OBJECTS,
            "tid, name, state; syscall and wchan where known; api: the NCCL function that the "
            "thread is likely inside, by its stack",
        ),
        Field("libs", _OBJECTS, "copies of NCCL: path, nccl_version, build_id, layout, confidence"),
        Field(
            "comms",
            _OBJECTS,
            "communicators: hash, comm_rank, nranks, dev, name, async_error; seqs: the library's "
            "counters (Broadcast, Reduce, AllGather, ReduceScatter, AllReduce) or null; moving: "
            "they changed within the look; init_state, finalized, destroyed where set",
        ),
        Field("complete", BOOL, "false: a bound was reached, there may be more communicators"),
        Field("searched", NAT, "bytes of memory read"),
        Field("took", NAT, "time of the search, ns"),
        Field("notes", {"type": "array", "items": STR}, "for people"),
    ),
)
