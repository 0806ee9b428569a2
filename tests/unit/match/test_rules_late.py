"""Rules of places among calls and of numbers that no other test would miss."""

from __future__ import annotations

import numpy as np
import pytest

from nccluprobe.match import model as m
from nccluprobe.match.align import ALIGNED, AMBIGUOUS, align
from nccluprobe.match.counters import FUNCTIONS, Stream
from nccluprobe.match.signature import UNCOUNTED


def stream(functions: list[int], before: int) -> Stream:
    """Calls of one rank; ``before``: the first counter at the first of them."""
    n = len(functions)
    return Stream(
        shape=np.arange(1, n + 1, dtype=np.int32),
        function=np.array(functions, np.int32),
        seq=np.full(n, m.NO_SEQ, np.int64),
        t=np.arange(n, dtype=np.int64),
        before=(before,) + (0,) * (FUNCTIONS - 1),
        before_sure=True,
    )


@pytest.mark.parametrize("odd", [None, 0, 1])
def test_counters_do_not_place_beyond_calls_that_are_not_counted(odd: int | None) -> None:
    """The streams do not overlap: how many uncounted calls lie between is not known."""
    calls = [[0, 0, 0, 0], [0, 0, 0, 0]]
    if odd is not None:
        calls[odd][2] = UNCOUNTED
    found = align(stream(calls[0], 0), stream(calls[1], 10))
    assert (found.shift, found.base) == ((10, ALIGNED) if odd is None else (0, AMBIGUOUS))
