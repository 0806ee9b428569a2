"""Sends and receives: groups, orders that exclude each other, what is misplaced or left over."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import Run, analyze_job, blamed, cover, kinds
from support.messages import AR, BIG, RECV, SEND, exchange, post
from support.tracegen import Job

from nccluprobe.match.options import SECOND, Options


def test_a_group_takes_effect_at_its_end_and_waits_for_all_its_peers() -> None:
    job = Job()
    comms = job.world(3)
    calls = [(comms[0], RECV, {"peer": 1}), (comms[0], RECV, {"peer": 2})]
    comms[0].proc.group(calls, 1.0, state="inside")
    post(comms[1], SEND, 0, 1.0, 1024)
    cover(job.procs, 400)
    run = Run(job)
    run.all()
    run.scan()
    (found,) = run.analysis.matcher.book.all()
    assert found.details["missing_comm_ranks"] == [2]
    assert found.details["inside"] and "in a group" in found.details["summary"]
    assert blamed([found]) == {2}


@pytest.mark.parametrize("end", [{"state": "open"}, {"rc": 5}])
def test_an_open_or_failed_group_has_no_effect(end: dict[str, Any]) -> None:
    job = Job()
    comms = job.world(2)
    comms[0].proc.group([(comms[0], RECV, {"peer": 1})], 1.0, **end)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert not [f for f in found if f.hang_type.startswith("p2p")]


def test_a_failed_group_counts_for_no_pair() -> None:
    job = Job()
    comms = job.world(2)
    for i in range(12):
        group = [(comms[0], SEND, {"peer": 1, "count": 50 + i})]
        if i == 4:
            comms[0].proc.group([(comms[0], SEND, {"peer": 1, "count": 1})], 1.0 + i, rc=5)
        comms[0].proc.group(group, 1.5 + i)
        post(comms[1], RECV, 0, 1.5 + i, 50 + i)
    cover(job.procs, 100)
    assert not [f for f in analyze_job(job) if f.hang_type.startswith("p2p")]


def test_asymmetric_groups_pairs_without_data_and_a_send_to_oneself() -> None:
    job = Job()
    comms = job.world(4)
    for i in range(50):
        t = 1.0 + i
        comms[0].proc.group(
            [
                (comms[0], SEND, {"peer": 1}),
                (comms[0], SEND, {"peer": 0, "count": 0}),
                (comms[0], RECV, {"peer": 0, "count": 0}),
            ],
            t,
        )
        post(comms[1], RECV, 0, t + 0.1, 1024)
        comms[2].proc.group([(comms[2], SEND, {"peer": 3}), (comms[2], RECV, {"peer": 3})], t)
        comms[3].proc.group([(comms[3], RECV, {"peer": 2})], t)
        comms[3].proc.group([(comms[3], SEND, {"peer": 2})], t + 0.2)
    cover(job.procs, 400)
    assert analyze_job(job) == []


def test_two_that_receive_first() -> None:
    job = Job()
    comms = job.world(2)
    t = exchange(comms, 2)
    for r, c in enumerate(comms):
        c.proc.enter(c, RECV, t, peer=1 - r, count=BIG)
    cover(job.procs, t + 10)
    (found,) = analyze_job(job)
    assert (found.hang_type, found.severity) == ("p2p_order_inversion", "error")
    assert found.details["confidence"] == "observed"
    assert blamed([found]) == set()  # a tie


@pytest.mark.parametrize(("left_out", "next_"), [(SEND, RECV), (RECV, SEND)])
def test_who_waits_in_its_next_step_has_left_one_out_and_no_other_order(
    left_out: str, next_: str
) -> None:
    """Each of the two needs the other, but rank 1 has come to an end with the step of rank 0."""
    job = Job()
    comms = job.world(2)
    for step in range(5):
        for r, c in enumerate(comms):
            calls = [
                (c, api, {"peer": 1 - r, "count": BIG, "stream": 0})
                for api in (SEND, RECV)
                if not (step == 4 and r == 1 and api == left_out)
            ]
            c.proc.group(calls, 1.0 + step, state="inside" if step == 4 and r == 0 else "ended")
    last = (comms[1], next_, {"peer": 0, "count": BIG, "stream": 0})
    comms[1].proc.group([last], 6.0, state="inside")
    cover(job.procs, 400)
    found = analyze_job(job)
    assert {f.hang_type for f in found} == {"p2p_unmatched"}
    assert blamed(found) == {1}


def test_two_that_receive_first_where_a_send_may_be_lost() -> None:
    job = Job()
    comms = job.world(2)
    t = exchange(comms, 2)
    for r, c in enumerate(comms):
        c.proc.enter(c, RECV, t, peer=1 - r, count=BIG)
        c.proc.cover(0.5, t)
        c.proc.cover(t + 0.3, t + 100, lost_kernel=int(r == 0))
    (found,) = analyze_job(job)
    assert (found.hang_type, found.severity) == ("p2p_order_inversion", "notice")
    assert found.details["confidence"] == "reduced"


@pytest.mark.parametrize(("inside_for", "told"), [(8.0, True), (0.2, False)])
def test_two_that_were_killed_while_each_needed_the_other(inside_for: float, told: bool) -> None:
    job = Job()
    comms = job.world(2)
    t = exchange(comms, 2)
    for r, c in enumerate(comms):
        c.proc.enter(c, RECV, t, peer=1 - r, count=BIG)
    cover(job.procs, t + inside_for)
    for r, c in enumerate(comms):
        c.proc.end(t + inside_for + 0.1 + 0.3 * r, how="signaled", signal=15, in_flight=1)
    found = [f for f in analyze_job(job) if f.hang_type == "p2p_order_inversion"]
    assert [f.severity for f in found] == (["error"] if told else [])
    assert all("was inside" in f.details["summary"] for f in found)
    assert blamed(found) == set()


def test_the_one_that_left_its_order_is_named() -> None:
    job = Job()
    comms = job.world(2)
    t = 1.0
    for i in range(20):
        for r, order in ((0, (SEND, RECV)), (1, (RECV, SEND))):
            for k, api in enumerate(order):
                post(comms[r], api, 1 - r, t + i + 0.1 * k)
    for r, c in enumerate(comms):
        c.proc.enter(c, RECV, t + 20, peer=1 - r, count=BIG)
    cover(job.procs, t + 40)
    (found,) = analyze_job(job)
    assert found.hang_type == "p2p_order_inversion"
    assert blamed([found]) == {0}


@pytest.mark.parametrize(("count", "hangs"), [(64, False), (BIG, True)])
def test_head_to_head_in_streams(count: int, hangs: bool) -> None:
    job = Job()
    comms = job.world(2)
    for r, c in enumerate(comms):
        post(c, SEND, 1 - r, 1.0, count)
        post(c, RECV, 1 - r, 1.1, count)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert kinds(found) == ([("p2p_order_inversion", "error")] if hangs else [])


def test_on_two_streams_the_same_order_is_fine() -> None:
    job = Job()
    comms = job.world(2)
    for r, c in enumerate(comms):
        post(c, SEND, 1 - r, 1.0, stream=0)
        post(c, RECV, 1 - r, 1.1, stream=1)
    cover(job.procs, 400)
    assert analyze_job(job) == []


def test_a_peer_that_went_on_to_a_collective() -> None:
    job = Job()
    comms = job.world(3)
    t = exchange(comms, 10)
    post(comms[1], RECV, 0, t)
    for r in (0, 2):
        comms[r].proc.enter(comms[r], AR, t + 0.1)
    cover(job.procs, t + 100)
    found = analyze_job(job)
    (root,) = [f for f in found if f.role == "root_cause"]
    assert (root.hang_type, root.severity) == ("p2p_unmatched", "error")
    assert root.details["reason"] == "partner_gone_past"
    assert blamed(found) == {0}
    assert all(
        f.role == "downstream" and f.downstream_of == root.id for f in found if f is not root
    )


@pytest.mark.parametrize("other", [True, False])
def test_a_call_with_the_wrong_peer_or_communicator(other: bool) -> None:
    job = Job()
    comms = job.world(3)
    more = [c.proc.comm("00000000000000bb", r, 3) for r, c in enumerate(comms)]
    for i in range(10):
        for r, c in enumerate(comms):
            wrong = i == 9 and r == 1
            to = 0 if wrong and not other else (r + 1) % 3
            post(more[1] if wrong and other else c, SEND, to, 1.2 + i)
            post(c, RECV, (r - 1) % 3, (1.3 if r == 0 else 1.1) + i)
    cover(job.procs, 400)
    found = analyze_job(job)
    roots = [f for f in found if f.role == "root_cause"]
    assert [f.details["reason"] for f in roots] == ["wrong_communicator" if other else "wrong_peer"]
    assert blamed(found) == {1}


@pytest.mark.parametrize("how", ["destroy", "abort"])
def test_a_send_left_over_at_an_orderly_end(how: str) -> None:
    job = Job()
    comms = job.world(3)
    t = exchange(comms, 10)
    for i in range(10):
        post(comms[1], SEND, 2, t + i, 64)
        post(comms[2], RECV, 1, t + i, 64)
    post(comms[0], SEND, 1, t + 11, 64)
    for c in comms:
        c.proc.comm_end(c, t + 12, how)
    cover(job.procs, t + 20)
    found = analyze_job(job)
    if how == "abort":
        assert found == []
        return
    assert kinds(found) == [("p2p_unmatched", "notice")]
    assert blamed(found) == {0}  # all others have done ten


def test_state_is_forgotten_with_its_communicator() -> None:
    job = Job()
    comms = job.world(2)
    t = exchange(comms, 50)
    for c in comms:
        c.proc.comm_end(c, t)
    cover(job.procs, t + 20)
    run = Run(job)
    run.all()
    run.scan()
    p2p = run.analysis.matcher.p2p
    assert not p2p.sides and not p2p.pairs.open


def test_pipeline_warm_up_is_silent() -> None:
    job = Job()
    comms = job.world(2)
    for i in range(4):
        post(comms[0], SEND, 1, 1.0 + i, 64)
    post(comms[0], RECV, 1, 5.0, 64)
    post(comms[1], RECV, 0, 55.0, 64)
    post(comms[1], SEND, 0, 56.0, 64)
    for i in range(3):
        post(comms[1], RECV, 0, 57.0 + i, 64)
    cover(job.procs, 90)
    assert analyze_job(job, missing_after=60 * SECOND) == []


def test_order_of_arrival_does_not_matter() -> None:
    job = Job()
    comms = job.world(2)
    t = exchange(comms, 30)
    post(comms[1], RECV, 0, t)
    cover(job.procs, t + 100)
    results = []
    for order in ((0, 1), (1, 0)):
        run = Run(job, Options())
        for i in order:
            for _ in range(200):
                run.feed(i, 1)
            run.feed(i)
        run.scan()
        results.append([f.to_json() for f in run.analysis.matcher.book.all()])
    assert results[0] == results[1] and len(results[0]) == 1
