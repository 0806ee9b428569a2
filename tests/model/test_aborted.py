"""A job whose ranks give up waiting and abort is told like one that still hangs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from model.case import Case, broken
from model.judge import causes, findings, ranks
from model.process import Process, Record

pytestmark = pytest.mark.slow

#: ncclInternalError: what a call returns that an abort broke off.
BROKEN_OFF = 3


def abort(p: Process, t: float) -> float:
    """The watchdog of a rank aborts all its communicators; returns when it is done."""
    for e in list(p.comms.values()):
        fields = {"comm": e.id, "idx": e.idx}
        line = {"comm": e.id, "how": "abort"}
        p.records.append(Record(t, 7, "ncclCommAbort", fields, t + 0.02, line))
        e.idx += 1
        for r in p.records:
            if r.end is None and r.fields.get("comm") == e.id:
                r.end, r.fields = t + 0.03, {**r.fields, "rc": BROKEN_OFF}
        t += 0.05
    return t


def verdict(case: Case) -> tuple[set[int], set[str]]:
    found = causes(case, findings(case, 0.0)[0])
    assert case.truth is not None
    return ranks(found), {f["hang_type"] for f in found} & case.truth.types


@pytest.mark.parametrize("mode", ["all", "all exit", "all SIGABRT", "who is not to blame"])
@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("device_hang", 52),  # who gave up first left nobody
        ("split_subset", 49),  # a split that the abort broke off
        ("inverted", 53),  # sends that the abort broke off
        ("skipped", 86),
        ("missing_recv", 90),
        ("extra", 81),
    ],
)
def test_who_is_blamed_is_the_same(kind: str, seed: int, mode: str) -> None:
    case = broken(seed, kind)
    live: Any = verdict(case)
    last = max(r.t if r.end is None else r.end for p in case.engine.procs for r in p.records)
    at, rng = last + 200, random.Random(seed)
    assert case.truth is not None
    for p in case.engine.procs:
        if (p.ended and p.ended[0] <= at) or (
            mode == "who is not to blame" and p.rank in case.truth.culprits
        ):
            continue
        done = abort(p, at + rng.uniform(0, 1.5))
        if mode == "all exit":
            p.ended = (done + rng.uniform(0, 2), 1, None)
        elif mode == "all SIGABRT":
            p.ended = (done + 0.2, None, 6)
    case.horizon = at + 75
    assert verdict(case) == live
