"""Lost sends and receives are told by what their peers wait for, and a left out one by its step."""

from __future__ import annotations

import pytest
from support.analysis import analyze_job
from support.tracegen import Comm, Job

SEND, RECV, AR = "ncclSend", "ncclRecv", "ncclAllReduce"
SMALL = 1 << 8


def rounds(comms: list[Comm], n: int, last: float, lost: bool, skipped: bool) -> None:
    """A ring and an AllReduce, n times; in the last round rank 0's send is lost or left out."""
    for i in range(n):
        for r, c in enumerate(comms):
            wrong = i == n - 1 and r == 0
            if not (wrong and skipped):
                more = {"lost": True} if wrong and lost else {}
                c.proc.call(c, SEND, 1 + i, peer=(r + 1) % len(comms), count=SMALL + i, **more)
            c.proc.call(c, RECV, 1.1 + i, peer=(r - 1) % len(comms), count=SMALL + i)
            c.proc.call(c, AR, 1.2 + i)
    for r, c in enumerate(comms):
        c.proc.cover(0.5, 1 + n if r == 0 and lost else last)
        if r == 0 and lost:
            c.proc.coverage(last, lost_kernel=1)


@pytest.mark.parametrize("skipped", [False, True])
def test_a_lost_send_is_no_missing_one(skipped: bool) -> None:
    job = Job()
    rounds(job.world(4), 3, 400, lost=not skipped, skipped=skipped)
    found = analyze_job(job)
    roots = [f for f in found if f.role == "root_cause" and f.state == "open"]
    assert [{w["rank"] for w in f.named} for f in roots] == ([{0}] if skipped else [])
    assert skipped or found == []
