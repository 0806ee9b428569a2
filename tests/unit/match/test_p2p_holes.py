"""Lost calls that were sends or receives: nobody can have come to a collective in them."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import analyze_job, steps
from support.messages import AR, RECV, SEND
from support.tracegen import Comm, Job


def reason(job: Job, comms: list[Comm], t: float) -> str:
    """Why rank 1, which lost one event, is missed in a call at ``t``."""
    for c in comms:
        if c is not comms[1]:
            c.proc.call(c, AR, t)
        c.proc.cover(0.5, 1.6)
        c.proc.cover(2.6, t + 400, lost_kernel=int(c is comms[1]))
    (f,) = (f for f in analyze_job(job) if f.hang_type == "collective_missing_enter")
    found: str = f.details["reason"]
    return found


@pytest.mark.parametrize(
    ("lost", "why"), [(1, "rank_alive_but_not_entered"), (2, "probe_event_loss_possible")]
)
def test_what_is_missing_of_one_direction_and_peer_is_no_collective(lost: int, why: str) -> None:
    """Of three receives of rank 1 that are numbered one is lost; of the last nobody knows."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 3)
    for i in range(3):
        comms[0].proc.call(comms[0], SEND, t + 0.1 * i, peer=1, count=8)
        comms[1].proc.call(comms[1], RECV, t + 0.1 * i, peer=0, count=8, lost=i == lost)
    comms[1].proc.call(comms[1], SEND, t + 0.5, peer=2, count=8)
    comms[2].proc.call(comms[2], RECV, t + 0.5, peer=1, count=8)
    assert reason(job, comms, t + 1) == why


@pytest.mark.parametrize(
    ("before", "lost", "why"),
    [
        (RECV, 1, "rank_alive_but_not_entered"),
        (RECV, 3, "probe_event_loss_possible"),
        (AR, 1, "probe_event_loss_possible"),
    ],
)
def test_what_is_missing_between_the_sends_of_a_group_is_no_collective(
    before: str, lost: int, why: str
) -> None:
    """``before``: what the program has put into such groups; call ``lost`` of the last is lost."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 3)
    for c in comms if before == AR else ():
        c.proc.group([(c, AR, {}), (c, SEND, {"peer": c.proc.rank, "count": 8})], t)
        c.proc.call(c, RECV, t + 0.1, peer=c.proc.rank, count=8)
    for peer in (0, 2, 3):
        comms[peer].proc.call(comms[peer], RECV, t + 0.5, peer=1, count=8)
    ops: list[tuple[Comm, str, dict[str, Any]]] = [
        (comms[1], SEND, {"peer": peer, "count": 8, "lost": i == lost})
        for i, peer in enumerate((0, 2, 3))
    ]
    comms[1].proc.group(ops, t + 0.5)
    if lost == 3:
        comms[1].proc.call(comms[1], SEND, t + 0.6, peer=2, count=8, lost=True)
        comms[2].proc.call(comms[2], RECV, t + 0.6, peer=1, count=8)
    comms[1].proc.call(comms[1], SEND, t + 0.7, peer=0, count=8)
    comms[0].proc.call(comms[0], RECV, t + 0.7, peer=1, count=8)
    assert reason(job, comms, t + 1) == why
