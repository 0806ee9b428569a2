"""The ``process`` line: who is traced, as much as is known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nccluprobe.collect import lines
from nccluprobe.trace.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from nccluprobe.collect.process import Traced


def process_line(process: Traced, libs: Iterable[dict[str, Any]]) -> str:
    """The line; ``libs``: the copies of NCCL that it has called."""
    info, around = process.info, process.around
    line: lines.Line = {
        "kind": "process",
        "schema": SCHEMA_VERSION,
        "run_id": process.run_id,
        "host": info.host,
        "boot_id": info.boot_id,
        "pid": process.pid,
        "ns_pid": info.ns_pid,
        "start": info.start_ns,
        "exe": info.exe,
        "rank": process.rank,
        "rank_source": process.rank_source,
        "world_size": process.world_size,
        "local_rank": info.ranks.local_rank,
        "front": around.front,
        "probe_version": around.version,
        "libs": list(libs),
        "exits": around.exits,
        "cannot_see": list(around.cannot_see),
        "part": process.file.part,
    }
    if info.ranks.job:
        line["job"] = info.ranks.job
    return lines.dump(line)
