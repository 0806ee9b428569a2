"""A send that a rank waits for, and whose record may be lost: left out, or made."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import analyze_job
from support.messages import AR, BIG, RECV, SEND
from support.tracegen import Job

WAITS: dict[str, Any] = {"main": "syscall", "syscall": "futex"}
AWAY: dict[str, Any] = {"main": "syscall", "syscall": "read"}


@pytest.mark.parametrize("main", [WAITS, AWAY])
def test_who_waits_for_a_send_that_may_be_lost_is_not_blamed(main: dict[str, Any]) -> None:
    """Rank 1 is in an AllReduce to which rank 0 has not come, which waits for a send of it."""
    job = Job()
    comms = job.world(3)
    pair = [comms[r].proc.comm("00000000000000bb", r, 2) for r in (0, 1)]
    for i in range(2):
        pair[0].proc.call(pair[0], RECV, 1.0 + 0.1 * i, peer=1, count=BIG)
    pair[1].proc.call(pair[1], SEND, 1.0, peer=0, count=BIG)
    for c in comms[1:]:
        c.proc.call(c, AR, 1.2)
    for r, c in enumerate(comms):
        c.proc.cover(0.5, 0.9)
        c.proc.cover(2.5, 400, **(main if r == 0 else WAITS), lost_kernel=int(r == 1))
    found = analyze_job(job)
    (root,) = (f for f in found if f.role == "root_cause")
    if main is AWAY:
        assert [w["rank"] for w in root.named] == [0]
        return
    assert (root.hang_type, root.details["reason"]) == (
        "p2p_unmatched",
        "probe_event_loss_possible",
    )
    assert root.named == []
    (other,) = (f for f in found if f is not root)
    assert (other.hang_type, other.downstream_of) == ("collective_missing_enter", root.id)
