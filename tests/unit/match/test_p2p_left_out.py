"""A send or receive that was left out, and what is no sign of it."""

from __future__ import annotations

import pytest
from support import messages
from support.analysis import analyze_job, blamed, cover
from support.messages import AR, BIG, RECV, SEND
from support.tracegen import Comm, Job

from nccluprobe.match.finding import Finding


def roots(found: list[Finding]) -> list[tuple[str, list[int]]]:
    return [
        (f.details["reason"], [who["rank"] for who in f.named])
        for f in found
        if f.role == "root_cause" and f.state == "open"
    ]


def ring(comms: list[Comm], t: float, without: int | None = None, **end: object) -> None:
    """Each rank sends to the next in one group; one of them sends nothing."""
    n = len(comms)
    for r, c in enumerate(comms):
        ops: list[tuple[Comm, str, dict[str, object]]] = []
        if r != without:
            ops.append((c, SEND, {"peer": (r + 1) % n, "count": BIG}))
        ops.append((c, RECV, {"peer": (r - 1) % n, "count": BIG}))
        c.proc.group(ops, t, **(end if r == (without or 0) else {}))


def test_who_has_ended_its_group_of_a_step_has_left_out_what_others_lack() -> None:
    """All others are through: that they are silent is no sign of a device that hangs."""
    job = Job()
    comms = job.world(3)
    for c in comms:
        c.proc.call(c, AR, 1.0)
    ring(comms, 2.0, without=2)
    cover(job.procs, 400)
    assert roots(analyze_job(job)) == [("call_skipped", [2])]


@pytest.mark.parametrize("end", [{"state": "open"}, {"rc": 3}])
def test_a_group_that_has_not_ended_leaves_out_nothing(end: dict[str, object]) -> None:
    job = Job()
    comms = job.world(3)
    ring(comms, 2.0, without=2, **end)
    cover(job.procs, 400)
    assert "call_skipped" not in [reason for reason, _ in roots(analyze_job(job))]


def test_who_makes_two_groups_in_a_step_may_only_be_late() -> None:
    """Rank 2 has its receive in one group and its send in the next."""
    job = Job()
    comms = job.world(3)
    for step in range(3):
        t = 2.0 + step
        ring(comms, t, without=2)
        if step < 2:
            comms[2].proc.group([(comms[2], SEND, {"peer": 0, "count": BIG})], t + 0.1)
    cover(job.procs, 400)
    assert "call_skipped" not in [reason for reason, _ in roots(analyze_job(job))]


def test_what_belongs_to_a_group_is_not_on_the_wrong_communicator() -> None:
    """Rank 1 left out a send in a ring, and waits in the same ring on another communicator."""
    job = Job()
    comms = job.world(4)
    more = [c.proc.comm("00000000000000bb", r, 4) for r, c in enumerate(comms)]
    ring(comms, 2.0, without=1)
    for r in (0, 1, 3):
        ops = [
            (more[r], SEND, {"peer": (r + 1) % 4, "count": BIG}),
            (more[r], RECV, {"peer": (r - 1) % 4, "count": BIG}),
        ]
        comms[r].proc.group(ops, 3.0, **({"state": "inside"} if r == 1 else {}))
    cover(job.procs, 400)
    found = analyze_job(job)
    assert "wrong_communicator" not in [f.details["reason"] for f in found]
    assert blamed(found) <= {1}


def test_both_the_peer_and_the_communicator_cannot_be_wrong() -> None:
    """Rank 1 sends to rank 3 on another communicator, where it always sent to rank 2."""
    job = Job()
    comms = job.world(4)
    more = {r: comms[r].proc.comm("00000000000000bb", i, 3) for i, r in enumerate((1, 3, 2))}
    post = messages.post
    for i in range(10):
        post(more[1], SEND, 2, 1.0 + i)
        post(more[2], RECV, 0, 1.05 + i)
        for r, c in enumerate(comms):
            if i == 9 and r == 1:
                post(more[1], SEND, 1, 1.2 + i)
            else:
                post(c, SEND, (r + 1) % 4, 1.2 + i)
            post(c, RECV, (r - 1) % 4, (1.3 if r == 0 else 1.1) + i)
    cover(job.procs, 400)
    assert "wrong_peer" not in [f.details["reason"] for f in analyze_job(job)]


def test_who_is_held_behind_another_stream_has_not_gone_past() -> None:
    """Rank 1 waits for rank 0's send, which stands behind a call that rank 2 has not made."""
    job = Job()
    comms = job.world(3)
    more = {r: comms[r].proc.comm("00000000000000bb", i, 2) for i, r in enumerate((0, 2))}
    for c in (*comms, *more.values()):
        c.proc.call(c, AR, 1.0)
    comms[0].proc.call(more[0], AR, 2.0, stream=1)
    messages.post(comms[0], SEND, 1, 2.1, stream=1)
    messages.post(comms[1], RECV, 0, 2.1)
    messages.post(comms[0], RECV, 1, 2.2)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert roots(found) == [("rank_alive_but_not_entered", [2])]
    assert "partner_gone_past" not in [f.details["reason"] for f in found]
