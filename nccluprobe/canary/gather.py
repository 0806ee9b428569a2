"""Small values of all ranks, brought together over NCCL itself."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nccluprobe.canary.backend import NcclBackend


def _all_gather(backend: NcclBackend, data: bytes) -> bytes:
    send, recv = backend.alloc(len(data)), backend.alloc(len(data) * backend.world)
    send.write(data)
    backend.all_gather(send, recv, len(data), "uint8")
    backend.synchronize(backend.deadline)
    found = recv.read()
    send.free()
    recv.free()
    return found


def gather_values(backend: NcclBackend, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Equally many values of each rank: an array (world, len(values))."""
    if not len(values):  # NCCL has no call for it
        return np.empty((backend.world, 0), np.int64)
    data = _all_gather(backend, values.astype("<i8").tobytes())
    return np.frombuffer(data, "<i8").reshape(backend.world, len(values)).astype(np.int64)


def gather_objects(backend: NcclBackend, item: object) -> list[Any]:
    """One JSON object of each rank, in rank order."""
    text = json.dumps(item).encode()
    sizes = gather_values(backend, np.array([len(text)], np.int64))[:, 0]
    longest = int(sizes.max())
    data = _all_gather(backend, text.ljust(longest, b"\0"))
    return [
        json.loads(data[rank * longest : rank * longest + int(size)])
        for rank, size in enumerate(sizes)
    ]
