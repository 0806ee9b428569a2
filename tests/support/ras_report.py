"""What ``ncclras -f json`` (NCCL 2.29) answers of one communicator."""

from __future__ import annotations

from typing import Any

#: The functions that RAS counts.
_COUNTED = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")


def ras_report(
    time: str, counts: dict[int, int], host: str = "node0", first_pid: int = 1000, **other: Any
) -> dict[str, Any]:
    """``time``: on one day, HH:MM:SS; ``counts``: rank -> its AllReduce calls; ``other``: more
    fields of the communicator.
    """
    ranks = [
        {
            "rank": rank,
            "host": host,
            "pid": first_pid + rank,
            "cuda_dev": rank,
            "nvml_dev": rank,
            "status": {"init_state": 0, "async_error": 0, "abort_flag": False},
            "collective_counts": {**dict.fromkeys(_COUNTED, 7), "AllReduce": count},
        }
        for rank, count in counts.items()
    ]
    comm = {
        "hash": "0xa1349768e9517ed7",
        "size": len(ranks),
        "ranks_count": len(ranks),
        "missing_ranks_count": 0,
        "ranks": ranks,
        "missing_ranks": [],
    }
    return {
        "nccl_version": "2.29.1",
        "timestamp": f"2026-06-19 {time}",
        "communicators_count": 1,
        "communicators": [comm | other],
    }
