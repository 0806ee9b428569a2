"""Numbers to bytes and back for each NCCL datatype, and reductions, without numpy."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import cache, reduce

STRUCT_CODES = {
    "int8": "b",
    "uint8": "B",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float16": "e",
    "float32": "f",
    "float64": "d",
}
FLOAT8 = {"float8e4m3": (4, 3), "float8e5m2": (5, 2)}


def bits_of(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def to_bf16(value: float) -> int:
    """bfloat16 of a float32 value: nearest, ties to even."""
    bits = bits_of(value)
    if math.isnan(value):
        return bits >> 16 | 64
    low, high = bits & 0xFFFF, bits >> 16
    if low > 0x8000 or (low == 0x8000 and high & 1):
        high += 1
    return high & 0xFFFF


def from_bf16(number: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", number << 16))[0])


@cache
def float8_table(dtype: str) -> tuple[float, ...]:
    """The value of each of the 128 non-negative codes."""
    exponent, mantissa = FLOAT8[dtype]
    bias = (1 << (exponent - 1)) - 1
    values = []
    for code in range(128):
        e, m = code >> mantissa, code & ((1 << mantissa) - 1)
        if dtype == "float8e5m2" and e == 31:
            values.append(math.nan if m else math.inf)
        elif dtype == "float8e4m3" and code == 127:
            values.append(math.nan)
        elif e == 0:
            values.append(m * 2.0 ** (1 - bias - mantissa))
        else:
            values.append((1 + m / (1 << mantissa)) * 2.0 ** (e - bias))
    return tuple(values)


def pack(dtype: str, values: Sequence[float]) -> bytes:
    """Bytes of `values`; those of float8 must be exact."""
    if dtype in STRUCT_CODES:
        whole = dtype.startswith(("int", "uint"))
        return struct.pack(
            f"<{len(values)}{STRUCT_CODES[dtype]}", *[int(v) if whole else v for v in values]
        )
    if dtype == "bfloat16":
        return struct.pack(f"<{len(values)}H", *map(to_bf16, values))
    table = float8_table(dtype)
    return bytes(table.index(abs(v)) | (128 if v < 0 else 0) for v in values)


def unpack(dtype: str, raw: bytes) -> list[float]:
    if dtype in STRUCT_CODES:
        code = STRUCT_CODES[dtype]
        return list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))
    if dtype == "bfloat16":
        return [from_bf16(v) for v in struct.unpack(f"<{len(raw) // 2}H", raw)]
    table = float8_table(dtype)
    return [-table[v & 127] if v & 128 else table[v] for v in raw]


OPERATIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "prod": lambda values: reduce(lambda a, b: a * b, values),
    "max": max,
    "min": min,
    "avg": lambda values: sum(values) / len(values),
}


def reduced(op: str, dtype: str, columns: Sequence[Sequence[float]]) -> list[float]:
    """Element by element over the ranks' values; an integer average is cut to a whole number."""
    results = [OPERATIONS[op](values) for values in zip(*columns, strict=True)]
    whole = dtype.startswith(("int", "uint"))
    return [math.trunc(v) for v in results] if whole else [float(v) for v in results]
