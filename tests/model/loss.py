"""Which records a tracer loses: one by one, or in bursts as a full ring does."""

from __future__ import annotations

import random

from model.process import Process

#: Records of a communicator's making are few and early: they are kept, as the
#: trace would name the communicator by its struct instead.
KEPT = ("ncclCommInitRankConfig", "ncclCommSplit")


def lose(proc: Process, rate: float, rng: random.Random, burst: int = 1) -> set[int]:
    """Indices of the process's records that vanish.  ``burst``: mean run of losses."""
    lost: set[int] = set()
    if not rate:
        return lost
    left = 0
    for i, record in enumerate(proc.records):
        if left == 0 and rng.random() < rate / burst:
            left = 1 if burst == 1 else 1 + int(rng.expovariate(1 / (burst - 1)))
        if left:
            left -= 1
            if record.api not in KEPT and record.end is not None:
                lost.add(i)
    return lost
