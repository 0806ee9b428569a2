"""What every rank must have after an operation, computed on the host.

Reductions get small whole numbers, whose results are exact in every datatype as
long as they fit its significand; beyond that a bound of rounding is allowed.
Operations that only move data get bytes of any pattern and are compared by byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nccluprobe.canary.datatypes import PRECISION, Values, decode, encode, is_float


@dataclass(frozen=True)
class Wrong:
    """Elements that are not what they must be; the first of them in words."""

    count: int
    of: int
    first: str


def moved(source: int, nbytes: int, seed: int, part: int = 0) -> bytes:
    """`nbytes` of the pattern that rank `source` gives (`part`: to whom, of all-to-all)."""
    start = source * 17 + seed * 7 + part * 53
    pattern = (np.arange(start, start + 31 * 256, 31) % 256).astype(np.uint8).tobytes()
    whole, rest = divmod(nbytes, len(pattern))
    return pattern * whole + pattern[:rest]


def contribution(
    rank: int, world: int, count: int, dtype: str, op: str, seed: int
) -> NDArray[np.int64]:
    """What `rank` gives to a reduction: `count` whole numbers."""
    at = np.arange(count, dtype=np.int64)
    if op == "prod":
        return np.where((at + seed) % max(world, 2) == rank, 2, 1)
    narrow = dtype.startswith("float8")
    if op == "avg":  # the sum is a multiple of the number of ranks
        turn = np.where((at + rank + seed) % world == 0, world, 0)
        return (at + seed) % 2 * (1 if narrow else 2) + turn
    return (at * 7 + rank * 3 + seed) % (2 if narrow else 4)


def reduced(world: int, count: int, dtype: str, op: str, seed: int) -> NDArray[np.int64]:
    """The result of the reduction of all contributions."""
    total = contribution(0, world, count, dtype, op, seed)
    for rank in range(1, world):
        value = contribution(rank, world, count, dtype, op, seed)
        if op == "prod":
            total = total * value
        elif op == "max":
            total = np.maximum(total, value)
        elif op == "min":
            total = np.minimum(total, value)
        else:
            total = total + value
    return total // world if op == "avg" else total


def given(rank: int, world: int, count: int, dtype: str, op: str, seed: int) -> bytes:
    """Elements that `rank` gives to a reduction."""
    period = contribution(rank, world, _period(world), dtype, op, seed)
    return _tiled(encode(period, dtype), _period(world), count)


def result(world: int, count: int, dtype: str, op: str, seed: int, start: int = 0) -> bytes:
    """Elements `start` to `start + count` of a reduction's result."""
    period = reduced(world, _period(world), dtype, op, seed)
    return _tiled(encode(np.roll(period, -start), dtype), len(period), count)


def _period(world: int) -> int:
    """After so many elements contributions and results repeat."""
    return 4 * max(world, 2)


def _tiled(period: bytes, length: int, count: int) -> bytes:
    width = len(period) // length
    whole, rest = divmod(count, length)
    return period * whole + period[: rest * width]


def tolerance(expected: Values, world: int, dtype: str, op: str) -> float:
    """Largest difference that rounding explains; 0 where the result must be exact."""
    if not is_float(dtype) or op in ("max", "min"):
        return 0.0
    largest = float(np.max(np.abs(expected), initial=0.0))
    exact = 2.0 ** PRECISION[dtype]
    if op != "avg" and largest <= exact:
        return 0.0
    return largest * (world + 1) / exact


def compare_values(data: bytes, expected: bytes, world: int, dtype: str, op: str) -> Wrong | None:
    """Compares the elements of a reduction's result; None when they are right."""
    if data == expected:
        return None
    got, want = decode(data, dtype), decode(expected, dtype)
    limit = tolerance(want, world, dtype, op)
    # The negation: a NaN is bad.
    bad = ~(np.abs(got - want) <= limit) if limit else got != want
    return _wrong(bad, got, want)


def compare_bytes(data: bytes, expected: bytes) -> Wrong | None:
    """Compares moved data; None when it is right."""
    if data == expected:
        return None
    got, want = np.frombuffer(data, np.uint8), np.frombuffer(expected, np.uint8)
    return _wrong(got != want, got, want)


def _wrong(bad: NDArray[np.bool_], got: Values, want: Values) -> Wrong | None:
    wrong = np.flatnonzero(bad)
    if not len(wrong):
        return None
    first = int(wrong[0])
    text = f"element {first} is {got[first]:g}, must be {want[first]:g}"
    return Wrong(len(wrong), len(bad), text)
