"""NCCL's datatypes on the host: numbers to bytes and back, by numpy.

numpy has no bfloat16 and no float8: these are rounded and widened here.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Datatypes that numpy has.
_PLAIN = {
    "int8": "i1",
    "uint8": "u1",
    "int32": "<i4",
    "uint32": "<u4",
    "int64": "<i8",
    "uint64": "<u8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
}
#: Bits of the significand, the hidden one included: whole numbers up to 2**bits are exact.
PRECISION = {
    "float16": 11,
    "float32": 24,
    "float64": 53,
    "bfloat16": 8,
    "float8e4m3": 4,
    "float8e5m2": 3,
}
_FLOAT8 = {"float8e4m3": (4, 3), "float8e5m2": (5, 2)}

Values = NDArray[Any]


def is_float(dtype: str) -> bool:
    return dtype in PRECISION


@functools.cache
def _float8_values(dtype: str) -> NDArray[np.float64]:
    """The value of each of the 256 bytes."""
    exponent_bits, mantissa_bits = _FLOAT8[dtype]
    bias = (1 << (exponent_bits - 1)) - 1
    top = (1 << exponent_bits) - 1
    values = np.empty(256)
    for byte in range(256):
        sign = -1.0 if byte & 0x80 else 1.0
        exponent = (byte >> mantissa_bits) & top
        mantissa = (byte & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
        if dtype == "float8e5m2" and exponent == top:
            value = np.inf if mantissa == 0 else np.nan
        elif dtype == "float8e4m3" and byte & 0x7F == 0x7F:
            value = np.nan
        elif exponent == 0:
            value = mantissa * 2.0 ** (1 - bias)
        else:
            value = (1 + mantissa) * 2.0 ** (exponent - bias)
        values[byte] = sign * value
    return values


@functools.cache
def _float8_order(dtype: str) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """Finite values, ascending, and their bytes."""
    values = _float8_values(dtype)
    finite = np.flatnonzero(np.isfinite(values))
    order = finite[np.argsort(values[finite], kind="stable")]
    return values[order], order.astype(np.uint8)


def encode(values: Values, dtype: str) -> bytes:
    """`values` as elements of `dtype`; integers wrap, floats round to nearest (even)."""
    if dtype in _PLAIN:
        plain: Values = values.astype(_PLAIN[dtype])
        return plain.tobytes()
    if dtype == "bfloat16":
        bits = values.astype("<f4").view("<u4").astype("<u8")
        rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
        return bytes(rounded.astype("<u2").tobytes())
    known, codes = _float8_order(dtype)
    at = np.clip(np.searchsorted(known, values), 1, len(known) - 1)
    lower = np.abs(known[at - 1] - values) < np.abs(known[at] - values)
    found: Values = codes[np.where(lower, at - 1, at)]
    return found.tobytes()


def decode(data: bytes, dtype: str) -> Values:
    """Elements of `dtype` as numbers: float64 for floats, their own type for integers."""
    if dtype in _PLAIN:
        values: Values = np.frombuffer(data, _PLAIN[dtype])
        return values.astype(np.float64) if is_float(dtype) else values
    if dtype == "bfloat16":
        bits = np.frombuffer(data, "<u2").astype("<u4") << np.uint32(16)
        with np.errstate(invalid="ignore"):  # signalling NaNs are quietened
            wide: Values = bits.view("<f4").astype(np.float64)
        return wide
    table: Values = _float8_values(dtype)
    return table[np.frombuffer(data, np.uint8)]
