"""Rings of one group each: who ended its group without what the next one lacks."""

from __future__ import annotations

import pytest
from support.analysis import analyze_job, blamed, cover
from support.messages import AR, BIG, RECV, SEND
from support.tracegen import Comm, Job


def causes(job: Job) -> list[tuple[str, list[int]]]:
    """Reason, and who is named."""
    return [
        (f.details["reason"], [who["rank"] for who in f.named])
        for f in analyze_job(job)
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


@pytest.mark.parametrize("n", [3, 4, 6])
def test_who_has_ended_its_group_of_a_step_has_left_out_what_others_lack(n: int) -> None:
    """All others are through: that they are silent is no sign of a device that hangs.

    In a ring of more than three the group hangs together with what lacks it through all others.
    """
    job = Job()
    comms = job.world(n)
    for c in comms:
        c.proc.call(c, AR, 1.0)
    ring(comms, 2.0, without=2)
    cover(job.procs, 400)
    assert causes(job) == [("call_skipped", [2])]


def test_who_makes_its_part_of_a_ring_of_all_in_several_groups_may_only_be_late() -> None:
    """Rank 2 receives twice from rank 1, in a group each, before it sends to rank 3."""
    job = Job()
    comms = job.world(4)
    twice = [(comms[1], SEND, {"peer": 2, "count": BIG})] * 2
    comms[1].proc.group([*twice, (comms[1], RECV, {"peer": 0, "count": BIG})], 2.0)
    for t in (2.0, 2.1):
        comms[2].proc.group([(comms[2], RECV, {"peer": 1, "count": BIG})], t)
    for r in (0, 3):
        to, of = (r + 1) % 4, (r - 1) % 4
        ops = [(comms[r], api, {"peer": p, "count": BIG}) for api, p in ((SEND, to), (RECV, of))]
        comms[r].proc.group(ops, 2.0)
    cover(job.procs, 400)
    assert "call_skipped" not in dict(causes(job))


def test_a_ring_of_some_ranks_only_shows_nothing() -> None:
    """Others may have a part in the step, and come to it later."""
    job = Job()
    comms = job.world(5)
    ring(comms[:4], 2.0, without=2)
    cover(job.procs, 400)
    assert "call_skipped" not in dict(causes(job))


def test_who_lacks_what_one_made_besides_a_ring_of_all_has_left_out_nothing() -> None:
    """Rank 3 wants a message of rank 0 that no program has."""
    job = Job()
    comms = job.world(6)
    for r, c in enumerate(comms):
        ops = [(c, SEND, {"peer": (r + 1) % 6, "count": BIG})]
        ops += [(c, RECV, {"peer": (r - 1) % 6, "count": BIG})]
        ops += [(c, RECV, {"peer": 0, "count": BIG})] if r == 3 else []
        c.proc.group(ops, 2.0)
    cover(job.procs, 400)
    assert "call_skipped" not in dict(causes(job))


@pytest.mark.parametrize("end", [{"state": "open"}, {"rc": 3}])
def test_a_group_that_has_not_ended_leaves_out_nothing(end: dict[str, object]) -> None:
    job = Job()
    comms = job.world(3)
    ring(comms, 2.0, without=2, **end)
    cover(job.procs, 400)
    assert "call_skipped" not in dict(causes(job))


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
    assert "call_skipped" not in dict(causes(job))


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
