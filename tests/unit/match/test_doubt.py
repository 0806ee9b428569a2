"""Lost events that may stand behind a rank that does not come."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import analyze_job
from support.messages import AR, BIG, RECV, SEND
from support.tracegen import Job

WAITS: dict[str, Any] = {"main": "syscall", "syscall": "futex"}
AWAY: dict[str, Any] = {"main": "syscall", "syscall": "read"}


def confidence(what: str | None, main: dict[str, Any], older: int = 0) -> str:
    """Rank 2 does not come to a collective; rank 0 lost a record before."""
    job = Job()
    comms = job.world(3)
    other = (
        comms[0].proc.comm("00000000000000bb", 0, 2),
        comms[1].proc.comm("00000000000000bb", 1, 2),
    )
    for i in range(3):
        for c in other:
            lost = i == 1 and c is other[0]
            c.proc.call(c, AR, 1.0 + i, lost=lost and what == "collective")
        for c, api, peer in ((other[0], SEND, 1), (other[1], RECV, 0)):
            lost = i == 1 and c is other[0]
            c.proc.call(c, api, 1.1 + i, peer=peer, count=BIG, lost=lost and what == "send")
    for i in range(older):
        for c in other:
            c.proc.call(c, AR, 5.0 + i / 100)
        for c, api, peer in ((other[0], SEND, 1), (other[1], RECV, 0)):
            c.proc.call(c, api, 5.005 + i / 100, peer=peer, count=BIG)
    for c in comms:
        c.proc.call(c, AR, 0.9)
    for c in comms[:2]:
        c.proc.call(c, AR, 20.0)
    for r, c in enumerate(comms):
        lost = {"lost_kernel": 1} if r == 0 and what else {}
        c.proc.cover(0.5, 400, **(main if r == 2 else {}), **lost)
    (f,) = (f for f in analyze_job(job) if f.role == "root_cause")
    assert [who["rank"] for who in f.named] == [2]
    return str(f.details["confidence"])


@pytest.mark.parametrize("main", [WAITS, AWAY])
def test_without_loss_it_is_seen(main: dict[str, Any]) -> None:
    assert confidence(None, main) == "observed"


def test_who_may_wait_for_its_device_is_less_sure_where_a_message_was_lost() -> None:
    assert confidence("send", WAITS) == "reduced"


def test_who_is_away_waits_for_nothing() -> None:
    assert confidence("send", AWAY) == "observed"


def test_a_lost_collective_between_others_hides_nothing() -> None:
    assert confidence("collective", WAITS) == "observed"


def test_what_was_lost_long_ago_hides_nothing() -> None:
    assert confidence("send", WAITS, older=200) == "observed"
