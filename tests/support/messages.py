"""Sends and receives of made-up jobs."""

from __future__ import annotations

from typing import Any

from support.tracegen import Comm

AR, SEND, RECV = "ncclAllReduce", "ncclSend", "ncclRecv"
#: Elements of a message that NCCL does not buffer.
BIG = 1 << 24


def post(c: Comm, api: str, peer: int, t: float, count: int = BIG, **more: Any) -> None:
    """A send or a receive that returns at once."""
    c.proc.call(c, api, t, peer=peer, count=count, **more)


def exchange(
    comms: list[Comm], n: int, t: float = 1.0, counts: tuple[int, ...] = (BIG,), **more: Any
) -> float:
    """Rank 0 sends to rank 1 ``n`` times; returns the time after it."""
    for i in range(n):
        post(comms[0], SEND, 1, t + 0.1 * i, counts[i % len(counts)], **more)
        post(comms[1], RECV, 0, t + 0.1 * i + 0.01, counts[i % len(counts)], **more)
    return t + 0.1 * n
