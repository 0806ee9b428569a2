"""The measurement: every result checked, times, bandwidths and arrivals of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nccluprobe.canary import arrival
from nccluprobe.canary.backend import NcclBackend
from nccluprobe.canary.cases import REDUCTIONS, Case, bus_factor
from nccluprobe.canary.checks import Wrong
from nccluprobe.canary.gather import gather_objects, gather_values
from nccluprobe.canary.settings import Settings

Tick = Callable[[str], None]


def cases_of(settings: Settings, room: int = 1) -> list[Case]:
    """All combinations that make sense, operation by operation."""
    return list(_combinations(settings, room))


def _combinations(settings: Settings, room: int) -> Iterator[Case]:
    for op in settings.ops:
        if op == "barrier":
            yield Case(op, "int32", 4)
            continue
        for dtype in settings.dtypes:
            for redop in settings.redops if op in REDUCTIONS else ("sum",):
                for nbytes in settings.sizes:
                    yield Case(op, dtype, nbytes, redop, room=room)


def measure(backend: NcclBackend, settings: Settings, tick: Tick) -> dict[str, Any]:
    """Collective: measures all cases; every rank gets the same report."""
    offsets = arrival.estimate(backend)
    rows = []
    arrived: list[int] = []
    for case in cases_of(settings):
        case.open(backend)
        rows.append(_measure(case, settings, arrived))
        case.close()  # after an error the backend does it, once nothing is stuck any more
        tick(case.label)
    times = gather_values(backend, np.array(arrived, np.int64))
    return {
        "results": _together(backend, rows),
        "arrival": arrival.summary(times, offsets),
    }


def _measure(case: Case, settings: Settings, arrived: list[int]) -> dict[str, Any]:
    """One case at this rank: `iters` one by one and checked, then `iters` in a row."""
    backend = case.backend
    wrongs: list[Wrong] = []
    alone: list[int] = []
    for number in range(settings.iters):
        case.fill(number)
        start = time.monotonic_ns()
        case.call()
        backend.synchronize(settings.deadline)
        alone.append(time.monotonic_ns() - start)
        arrived.append(start)
        if wrong := case.check():
            wrongs.append(wrong)
    for _ in range(settings.warmup):
        case.call()
    backend.synchronize(settings.deadline)
    begun = time.monotonic_ns()
    for _ in range(settings.iters):
        case.call()
    backend.synchronize(settings.deadline)
    each = (time.monotonic_ns() - begun) / settings.iters
    if wrong := case.check():
        wrongs.append(wrong)
    return {
        "op": case.op,
        "dtype": case.dtype,
        "redop": case.redop if case.op in REDUCTIONS else None,
        "bytes": case.nbytes,
        "count": case.count,
        "checked": settings.iters + 1,
        "ns": each,
        "alone_ns": float(np.median(alone)),
        "wrong": len(wrongs),
        "first_wrong": wrongs[0].first if wrongs else None,
    }


def _together(backend: NcclBackend, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of all ranks as one: mean times, sums of what was wrong, and on which ranks."""
    everyone = gather_objects(backend, rows)
    found = []
    for number, row in enumerate(rows):
        same = [ranks[number] for ranks in everyone]
        ns = sum(r["ns"] for r in same) / len(same)
        algorithm = row["bytes"] / ns if row["op"] != "barrier" else None
        factor = bus_factor(row["op"], backend.world)
        bad = [rank for rank, r in enumerate(same) if r["wrong"]]
        found.append(
            {key: row[key] for key in ("op", "dtype", "redop", "bytes", "count")}
            | {
                "checked": sum(r["checked"] for r in same),
                "time_us": round(ns / 1000, 2),
                "latency_us": round(sum(r["alone_ns"] for r in same) / len(same) / 1000, 2),
                "algbw_gbs": None if algorithm is None else round(algorithm, 4),
                "busbw_gbs": None if algorithm is None else round(algorithm * factor, 4),
                "wrong": sum(r["wrong"] for r in same),
                "wrong_ranks": bad,
                "first_wrong": same[bad[0]]["first_wrong"] if bad else None,
            }
        )
    return found
