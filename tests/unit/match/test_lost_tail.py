"""Records lost after the last call that is seen, beside others that have run ahead."""

from __future__ import annotations

import pytest
from support.analysis import analyze_job, blamed
from support.tracegen import Job

AR = "ncclAllReduce"


@pytest.mark.parametrize(("lost", "named"), [(1, True), (2, False), (5, False)])
def test_who_may_have_come_as_far_as_some_others_is_not_named(lost: int, named: bool) -> None:
    """Rank 3 is seen in 5 calls, rank 2 in 7, the others in 12: it may have stopped in between."""
    job = Job()
    comms = job.world(4)
    for c, calls in zip(comms, (12, 12, 7, 5), strict=True):
        for i in range(calls):
            c.proc.call(c, AR, 1 + 0.1 * i)
    for c in comms:
        c.proc.cover(0.5, 1.45)
        c.proc.cover(2.5, 400, **({"lost_kernel": lost} if c is comms[3] else {}))
    found = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert [w["rank"] for f in found for w in f.named] == ([3] if named else [])


def test_nor_beside_calls_that_differ() -> None:
    job = Job()
    comms = job.world(4)
    for c, calls in zip(comms, (12, 12, 7, 5), strict=True):
        for i in range(calls):
            c.proc.call(c, AR, 1 + 0.1 * i, datatype="int8" if (c, i) == (comms[1], 5) else "uint8")
    for c in comms:
        c.proc.cover(0.5, 1.45)
        c.proc.cover(2.5, 400, **({"lost_kernel": 3} if c is comms[3] else {}))
    found = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert [(f.hang_type, [w["rank"] for w in f.named]) for f in found] == [
        ("collective_mismatch", [1])
    ]


@pytest.mark.parametrize(("lost", "severities"), [(0, ["error"]), (1, ["notice"])])
def test_one_lost_group_end_hides_all_calls_of_the_group(lost: int, severities: list[str]) -> None:
    """Rank 3 has exited in order; of its last group, with two calls, no end is seen."""
    job = Job()
    comms = job.world(4)
    for c in comms:
        c.proc.call(c, AR, 1.0)
        mine = c is comms[3]
        c.proc.group([(c, AR, {}), (c, AR, {})], 1.1, state="open" if mine else "ended")
        c.proc.cover(0.5, 1.05)
        c.proc.cover(2.5, 3 if mine else 20, **({"lost_kernel": lost} if mine else {}))
        c.proc.end(3 if mine else 20)
    found = analyze_job(job)
    assert [f.severity for f in found] == severities
    assert all(not f.culprits for f in found if f.role == "root_cause") == bool(lost)


def test_what_comes_after_a_call_that_was_made_unseen_lacks_others() -> None:
    """Rank 4 lost its last two calls on one communicator; the second is one that rank 0 left out.

    Rank 3 waits for it on its device, the others for rank 3 on the other communicator.
    """
    job = Job()
    xs = job.world(5)
    ys = [c.proc.comm("b" * 16, r, 5) for r, c in enumerate(xs)]
    for c in (*xs, *ys):
        c.proc.call(c, AR, 1.0)
    for r, c in enumerate(xs):
        for i in range(2 if r else 1):
            c.proc.call(c, AR, 2.0 + 0.1 * i, lost=r == 4)
    for r in (0, 1, 2, 4):
        ys[r].proc.call(ys[r], AR, 2.3)
    for r, c in enumerate(xs):
        c.proc.cover(0.5, 1.6)
        c.proc.cover(2.6, 400, **({"lost_kernel": 2} if r == 4 else {}))
    assert blamed(analyze_job(job)) == {0}
