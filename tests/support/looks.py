"""``inspect`` lines of made-up processes."""

from __future__ import annotations

from typing import Any

from support.tracegen import UNIX, Host, S

_ZERO = {"Broadcast": 0, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": 0}


def comm(
    comm_hash: str, rank: int, nranks: int, moving: bool = False, **counts: int
) -> dict[str, Any]:
    """A communicator as found in memory; ``counts``: AllReduce=3."""
    return {
        "hash": comm_hash,
        "comm_rank": rank,
        "nranks": nranks,
        "dev": rank,
        "name": None,
        "seqs": list({**_ZERO, **counts}.values()),
        "async_error": 0,
        "moving": moving,
    }


def look(
    rank: int,
    t: float,
    comms: list[dict[str, Any]],
    inside: str | None = None,
    host: Host | None = None,
    **more: Any,
) -> dict[str, Any]:
    """What ``inspect --json`` writes of the process that ``Job.proc(rank)`` is."""
    where = host or Host()
    thread: dict[str, Any] = {"tid": 1000 + rank, "name": "python3", "state": "R"}
    if inside:
        thread["api"] = inside
    return {
        "kind": "inspect",
        "schema": 1,
        "t": where.at(t),
        "unix": UNIX + round(t * S),
        "host": where.name,
        "boot_id": where.boot_id,
        "pid": 1000 + rank,
        "ns_pid": None,
        "start": (1000 + rank) * 1000,
        "exe": "python3",
        "rank": rank,
        "rank_source": "torchrun",
        "world_size": None,
        "local_rank": rank,
        "probe_version": "0.1.0",
        "alive": True,
        "main": "syscall",
        "syscall": "hrtimer_nanosleep",
        "cpu": 0,
        "threads": [thread],
        "libs": [],
        "comms": comms,
        "complete": True,
        "searched": 0,
        "took": 0,
        "notes": [],
        **more,
    }
