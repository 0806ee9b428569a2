"""How far apart the ranks arrive at collectives.

Within a node the times are of one clock (CLOCK_MONOTONIC). Between nodes the
clocks' offset is estimated from the fastest of some exchanges with the first
rank, and half of its round trip bounds the error.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nccluprobe.canary.backend import NcclBackend
from nccluprobe.canary.gather import gather_objects, gather_values

_EXCHANGES = 8


def node_identity() -> str:
    """The same for processes that share a CLOCK_MONOTONIC."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    return boot


@dataclass(frozen=True)
class Offsets:
    """What to add to each rank's times to have rank 0's clock, and the error's bound; ns."""

    add: NDArray[np.int64]
    bound: NDArray[np.int64]

    @property
    def one_clock(self) -> bool:
        return not self.bound.any()


def estimate(backend: NcclBackend, node: str | None = None) -> Offsets:
    """Collective: the offsets of all ranks' clocks to that of rank 0."""
    nodes = gather_objects(backend, node_identity() if node is None else node)
    mine = np.zeros(2, np.int64)
    for rank in range(1, backend.world):
        if nodes[rank] != nodes[0] and backend.rank in (0, rank):
            found = _exchange(backend, rank)
            if backend.rank == rank:
                mine[:] = found
    everyone = gather_values(backend, mine)
    return Offsets(everyone[:, 0], everyone[:, 1])


def _exchange(backend: NcclBackend, rank: int) -> tuple[int, int]:
    """Rank `rank` asks rank 0 for its time; the offset and half of the shortest round trip."""
    buffer = backend.alloc(8)
    best: tuple[int, int] | None = None
    for _ in range(_EXCHANGES):
        if backend.rank == 0:
            backend.recv(buffer, 1, "int64", rank)
            backend.synchronize(backend.deadline)
            buffer.write(time.monotonic_ns().to_bytes(8, "little", signed=True))
            backend.send(buffer, 1, "int64", rank)
            backend.synchronize(backend.deadline)
            continue
        asked = time.monotonic_ns()
        backend.send(buffer, 1, "int64", 0)
        backend.recv(buffer, 1, "int64", 0)
        backend.synchronize(backend.deadline)
        answered = time.monotonic_ns()
        theirs = int.from_bytes(buffer.read(8), "little", signed=True)
        trip = answered - asked
        if best is None or trip // 2 < best[1]:
            best = (theirs - (asked + trip // 2), max(1, trip // 2))
    buffer.free()
    return best or (0, 0)


def summary(arrivals: NDArray[np.int64], offsets: Offsets) -> dict[str, Any]:
    """Spread over the ranks, and how far each is behind the first; microseconds.

    arrivals: (world, calls) in ns of each rank's own clock, as from gather_values.
    """
    if arrivals.size == 0:
        return {"calls": 0, "clock": None, "bound_us": 0.0, "spread_us": None, "ranks": []}
    times = arrivals + offsets.add[:, None]
    behind = (times - times.min(axis=0)) / 1000
    spread = behind.max(axis=0)
    last = behind.argmax(axis=0)
    return {
        "calls": int(arrivals.shape[1]),
        "clock": "one" if offsets.one_clock else "estimated",
        "bound_us": round(float(offsets.bound.max()) / 1000, 1),
        "spread_us": _quantiles(spread),
        "ranks": [
            {
                "rank": rank,
                "behind_first_us": _quantiles(behind[rank]),
                "last": int((last == rank).sum()) if arrivals.shape[0] > 1 else 0,
            }
            for rank in range(arrivals.shape[0])
        ],
    }


def _quantiles(values: NDArray[np.float64]) -> dict[str, float]:
    p50, p99 = np.quantile(values, [0.5, 0.99])
    return {
        "p50": round(float(p50), 1),
        "p99": round(float(p99), 1),
        "max": round(float(values.max()), 1),
    }
