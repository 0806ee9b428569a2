"""A job that is killed as it hangs is told like one that still hangs: nobody else is blamed."""

from __future__ import annotations

import random

import pytest

from model.case import broken
from model.judge import causes, findings, ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "seed", "signal", "after"),
    [
        ("extra", 5013, 15, 200.0),  # who is explained by what is wrong elsewhere
        ("device_hang", 5109, 15, 65.0),  # level members whose device does not go on
        ("skipped", 5016, 9, 100.0),  # one is reached first by SIGKILL
        ("init_missing", 5019, 15, 200.0),
    ],
)
def test_who_is_blamed_is_the_same(kind: str, seed: int, signal: int, after: float) -> None:
    case = broken(seed, kind)
    live = ranks(causes(case, findings(case, 0.0)[0]))
    last = max(r.t if r.end is None else r.end for p in case.engine.procs for r in p.records)
    rng = random.Random(seed)
    for p in case.engine.procs:
        if p.ended is None or p.ended[0] > last + after:
            p.ended = (last + after + rng.uniform(0, 0.02), None, signal)
    case.horizon = last + after + 5
    assert ranks(causes(case, findings(case, 0.0)[0])) == live
