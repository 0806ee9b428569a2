"""Numbers of a flight recorder dump, column by column, that nobody vouches for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nccluprobe.match.model import Int64

#: Every number is smaller.
BIG = 2**62
#: Times of calls that are further apart were not told by one clock, ns.
_NEAR = 1_000_000_000


def times(values: Sequence[Any]) -> list[Any]:
    """0 for what is not known: none, or not a number."""
    found = [t or 0 for t in values]
    if float in set(map(type, found)):
        found = [0 if type(t) is float and not math.isfinite(t) else t for t in found]
    return found


def at_least(created: Int64, ended: Int64) -> Int64:
    """Where it is not known when a call was made: when its end, or one before it, was seen."""
    known = np.where(created == 0, ended, created)
    return np.where(known == 0, np.maximum.accumulate(known), known)


def in_order(created: Int64, record: Int64) -> Int64:
    """Times that rise as calls were recorded, where they do so but for less than a second.

    What a rank waits in first is told by them: two of its calls may have one time, or have
    been given theirs in threads of their own.
    """
    if len(record) < 2 or (np.diff(record) <= 0).any():
        return created
    n = np.arange(len(created))
    rising: Int64 = np.maximum.accumulate(created - n) + n
    return rising if int((rising - created).max()) < _NEAR else created


def int64(values: Sequence[Any]) -> Int64:
    """Integers only: anything else raises, where numpy would convert."""
    try:
        found = np.array(values)
    except ValueError as error:  # lists of several lengths
        raise TypeError("a number is a list") from error
    if found.dtype != np.int64 or found.ndim != 1:
        raise TypeError("a number is no integer, or too large")
    if len(found) and (int(found.min()) <= -BIG or int(found.max()) >= BIG):
        raise OverflowError("a number is too large")
    return found


def shortest(timeouts: Int64) -> int:
    """The shortest that there is, ms; 0: none."""
    return int(timeouts[timeouts > 0].min(initial=BIG)) % BIG


def checked(value: Any) -> int:
    """The value, where it is an integer from 0 on; raises TypeError."""
    if type(value) is not int or not 0 <= value < BIG:
        raise TypeError("a number is no integer, or too large")
    return value
