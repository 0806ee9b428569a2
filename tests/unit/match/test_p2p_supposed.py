"""A send that a rank waits for, and whose record may be lost: left out, or made."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import analyze_job
from support.messages import AR, BIG, RECV, SEND
from support.tracegen import Job

from nccluprobe.match import p2p_supposed
from nccluprobe.match.finding import Finding
from nccluprobe.match.model import ProcessKey

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


WHO = ProcessKey("node0", 7, 700)
LOST = "probe_event_loss_possible"


def finding(hang_type: str, reason: str, **more: Any) -> Finding:
    status = [{"pid": WHO.pid, "reason": reason, **WAITS}]
    details = {"reason": reason, "confidence": "reduced", "missing_rank_status": status}
    key = (hang_type, reason)
    return Finding(key, hang_type, "run", None, None, 1, details, "error", job="a", **more)


@pytest.mark.parametrize(
    ("hang_type", "reason", "role", "blamed"),
    [
        ("p2p_unmatched", LOST, "unknown", False),
        ("p2p_unmatched", "rank_waiting_elsewhere", "unknown", True),
        ("p2p_unmatched", LOST, "downstream", True),
        ("collective_missing_enter", LOST, "unknown", True),
    ],
)
def test_only_a_send_or_receive_that_may_be_lost_and_has_no_cause_takes_the_blame(
    hang_type: str, reason: str, role: str, blamed: bool
) -> None:
    alive = "rank_alive_but_not_entered"
    f = finding(
        "collective_missing_enter", alive, role="root_cause", culprits=(WHO,), supposes=True
    )
    g = finding(hang_type, reason, role=role, waiters=(WHO,))
    p2p_supposed.settle([f, g])
    assert (f.role, f.culprits) == (("root_cause", (WHO,)) if blamed else ("downstream", ()))
    assert g.role == (role if blamed else "root_cause")
