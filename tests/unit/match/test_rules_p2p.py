"""Rules of sends and receives that no other test would miss."""

from __future__ import annotations

from functools import partial

import pytest
from support import messages
from support.analysis import Run, analyze_job, cover
from support.messages import AR, BIG, RECV, SEND
from support.tracegen import Job

from nccluprobe.match.finding import Finding

#: All in one stream.
post = partial(messages.post, stream=0)
exchange = partial(messages.exchange, stream=0)


def roots(found: list[Finding]) -> list[tuple[str, list[int]]]:
    return [
        (f.details["reason"], [who["rank"] for who in f.named])
        for f in found
        if f.role == "root_cause" and f.state == "open"
    ]


def sent_to_the_wrong_peer(until: float, count: int = BIG, sent: float = 1.2) -> Job:
    """In the tenth round of a ring rank 1 sends to rank 0, and rank 2 waits for it.

    ``sent``: when in that round; rank 0 makes its last call at 1.3.
    """
    job = Job()
    comms = job.world(3)
    for i in range(10):
        for r, c in enumerate(comms):
            wrong = i == 9 and r == 1
            if wrong:
                post(c, SEND, 0, sent + i, count)
            else:
                post(c, SEND, (r + 1) % 3, 1.2 + i)
            post(c, RECV, (r - 1) % 3, (1.3 if r == 0 else 1.1) + i)
    cover(job.procs, until)
    return job


def test_the_wrong_peer_is_told_when_both_have_stood_for_long() -> None:
    assert roots(analyze_job(sent_to_the_wrong_peer(400))) == [("wrong_peer", [1])]
    assert analyze_job(sent_to_the_wrong_peer(40)) == []


def test_a_send_is_paired_when_its_group_ends() -> None:
    job = Job()
    a, b = job.world(2)
    post(b, RECV, 0, 1.0)
    a.proc.group([(a, SEND, {"peer": 1, "count": BIG})], 1.0, state="open")
    a.proc.call(None, "ncclGroupEnd", 20.0, group=a.proc.groups, gpos=1)
    cover(job.procs, 400)
    run = Run(job)
    run.until(10)
    run.scan()
    run.all()
    run.scan()
    assert not run.analysis.matcher.p2p.pairs.open
    assert run.analysis.matcher.book.all() == []


def test_without_habits_each_may_wait_for_whom_it_says() -> None:
    job = Job()
    comms = job.world(3)
    for c in comms:
        c.proc.call(c, AR, 1.0, stream=0)
    post(comms[0], RECV, 2, 2.2)
    post(comms[1], SEND, 0, 2.1)
    post(comms[2], RECV, 1, 2.0)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert found and "wrong_peer" not in [f.details["reason"] for f in found]


def test_who_waits_in_its_stream_has_come_as_far_as_the_wrong_send() -> None:
    assert roots(analyze_job(sent_to_the_wrong_peer(400, sent=1.4))) == [("wrong_peer", [1])]


def test_a_group_that_stands_behind_a_send_with_all_its_parts_has_gone_past_it() -> None:
    """Rank 1 left out a receive; what it receives then is relayed of later sends of rank 0."""
    job = Job()
    comms = job.world(4)
    for c in comms:
        c.proc.call(c, AR, 1, stream=0)
    for peer in (1, 2, 3):
        post(comms[0], SEND, peer, 2 + 0.1 * peer)
    for r in (2, 3):
        post(comms[r], RECV, 0, 2)
        post(comms[r], SEND, 1, 2.1)
    group = [(comms[1], RECV, {"peer": r, "count": BIG, "stream": 0}) for r in (2, 3)]
    comms[1].proc.group(group, 2)
    cover(job.procs, 400)
    assert roots(analyze_job(job)) == [("partner_gone_past", [1])]


def test_a_send_in_a_group_that_did_not_end_has_not_come_to_the_device() -> None:
    job = Job()
    comms = job.world(3)
    t = exchange(comms, 5)
    comms[0].proc.group([(comms[0], SEND, {"peer": 1, "count": BIG})], t, state="open")
    post(comms[1], RECV, 0, t)
    for c in comms[1:]:
        c.proc.call(c, AR, t + 0.1, stream=0)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert roots(found) == [("rank_alive_but_not_entered", [0])]
    assert {f.hang_type for f in found if f.role == "root_cause"} == {"p2p_unmatched"}


def test_of_two_that_each_need_the_other_first_nobody_is_named() -> None:
    """Rank 0 left out a receive, or rank 1 one: then the other one of each would have come."""
    job = Job()
    comms = job.world(3)
    for c in comms:
        c.proc.call(c, AR, 1.0, stream=0)
    for i in range(2):
        post(comms[1], SEND, 2, 1.1 + i / 10)
        post(comms[2], RECV, 1, 1.1 + i / 10)
    post(comms[0], SEND, 1, 2.0)
    post(comms[0], RECV, 1, 2.1)
    post(comms[1], SEND, 0, 2.0)
    cover(job.procs, 400)
    assert [named for _, named in roots(analyze_job(job))] == [[]]


def test_who_has_queued_what_stands_behind_a_send_has_gone_past_it() -> None:
    job = Job()
    comms = job.world(3)
    t = exchange(comms, 10)
    post(comms[0], SEND, 1, t)
    for c in comms:
        c.proc.call(c, AR, t + 0.1, stream=0)
    cover(job.procs, 400)
    assert roots(analyze_job(job)) == [("partner_gone_past", [1])]


def test_what_is_not_alike_is_not_misplaced() -> None:
    found = analyze_job(sent_to_the_wrong_peer(400, count=2 * BIG))
    assert found and "wrong_peer" not in [reason for reason, _ in roots(found)]


def test_a_first_send_to_a_peer_that_is_away_is_not_misplaced() -> None:
    """Rank 1 waits for its turn: rank 0 serves rank 2 first, which has not come so far."""
    job = Job()
    comms = job.world(3)
    t = exchange(comms, 10)
    post(comms[0], SEND, 2, t)
    post(comms[1], RECV, 0, t)
    cover(job.procs, 400)
    assert roots(analyze_job(job)) == [("rank_alive_but_not_entered", [2])]


@pytest.mark.parametrize("rc", [0, 3])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_receive_that_failed_in_the_end_was_none(rc: int, grouped: bool) -> None:
    """It counted while its thread was inside."""
    job = Job()
    comms = job.world(2)
    t = exchange(comms, 3)
    one, other = comms[1].proc, comms[0].proc
    if grouped:
        one.group([(comms[1], RECV, {"peer": 0})], t, state="inside")
        line = one.lines[-1][2]
    else:
        line = one.enter(comms[1], RECV, t, peer=0)
    one.cover(0.5, t + 20)
    one.add(t + 21, {**line, "kind": "call", "dur": 20_000_000_000, "rc": rc})
    one.cover(t + 22, t + 40)
    other.cover(0.5, t + 40)
    run = Run(job)
    run.until(t + 10)
    run.scan()
    run.all()
    run.scan()
    p2p = run.analysis.matcher.p2p
    ((side, queue),) = (
        (s, q) for s in p2p.sides.values() for lane, q in s.queues.items() if lane == (False, 0)
    )
    assert queue.n == (1 if rc == 0 else 0)
    op = queue.at(queue.first)
    assert op is None or not side.is_inside(op)


@pytest.mark.parametrize("left", [False, True])
def test_what_was_lost_before_the_newest_receive_explains_no_later_one(left: bool) -> None:
    job = Job()
    comms = job.world(2)
    exchange(comms, 2)
    t = exchange(comms, 3, t=5)
    post(comms[0], SEND, 1, t)
    for c in comms:
        c.proc.cover(0.5, 2)
        c.proc.cover(3, 400, lost_kernel=int(c is comms[1]))
    if left:
        comms[1].proc.comm_end(comms[1], t + 1)
    (f,) = analyze_job(job)
    reason = "rank_ended_communicator" if left else "rank_alive_but_not_entered"
    assert roots([f]) == [(reason, [1])]
    assert f.severity == "error"


def test_what_differed_before_explains_that_it_does_not_go_on() -> None:
    job = Job()
    comms = job.world(3)
    t = exchange(comms, 12)
    post(comms[0], SEND, 1, t)
    post(comms[1], RECV, 0, t, 2 * BIG)
    comms[1].proc.enter(comms[1], RECV, t + 0.1, peer=0, count=2 * BIG)
    cover(job.procs, 400)
    assert [f.hang_type for f in analyze_job(job)] == ["p2p_mismatch"]


def test_small_sends_hold_nobody_also_beside_a_peer_that_is_not_traced() -> None:
    """What its device has done is not known then: only that a small send is buffered."""
    job = Job()
    comms = job.world(2, nranks=3)
    t = exchange(comms, 10)
    post(comms[0], SEND, 1, t, 64)
    post(comms[0], SEND, 2, t + 0.1, 64)
    cover(job.procs, 400)
    assert analyze_job(job) == []


def test_who_keeps_its_habit_is_not_to_blame_for_a_receive_too_many() -> None:
    """Rank 0 has gone past it, and has made what it always made; rank 1 has not."""
    job = Job()
    comms = job.world(3)
    t = exchange(comms, 12, counts=(BIG, 2 * BIG))
    post(comms[1], RECV, 0, t, 3 * BIG)
    for r in (0, 2):
        comms[r].proc.enter(comms[r], AR, t + 0.1)
    cover(job.procs, 400)
    assert roots(analyze_job(job)) == [("partner_gone_past", [1])]


def test_a_peer_that_serves_others_is_not_quiet() -> None:
    job = Job()
    comms = job.world(3)
    t = exchange(comms, 3)
    post(comms[0], RECV, 1, t)
    for i in range(90):
        post(comms[1], SEND, 2, t + i, 64)
        post(comms[2], RECV, 1, t + i, 64)
    cover(job.procs, t + 100)
    assert analyze_job(job) == []


def whose_send_may_be_lost(how: str | None = None) -> Finding:
    """Rank 0 receives from rank 1, which lost an event and then ended, perhaps its communicator."""
    job = Job()
    comms = job.world(2)
    t = exchange(comms, 10)
    post(comms[0], RECV, 1, t)
    ended = comms[1].proc
    post(comms[1], SEND, 0, t, lost=True)
    ended.cover(0.5, t - 0.1)
    ended.coverage(t + 20, lost_kernel=1)
    if how is not None:
        ended.comm_end(comms[1], t + 20.5, how)
    ended.end(t + 21)
    comms[0].proc.cover(0.5, 400)
    (found,) = analyze_job(job)
    return found


def test_who_ended_in_order_may_have_sent_what_was_lost() -> None:
    found = whose_send_may_be_lost()
    assert (found.details["reason"], found.severity) == ("probe_event_loss_possible", "notice")
    assert roots([found]) == []
    assert found.details["confidence"] == "reduced"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("destroy", "probe_event_loss_possible"),
        ("abort", "rank_ended_communicator"),
        ("revoke", "rank_ended_communicator"),
    ],
)
def test_who_broke_off_its_communicator_left_whom_it_may_have_sent_to(
    how: str, reason: str
) -> None:
    assert whose_send_may_be_lost(how).details["reason"] == reason


@pytest.mark.parametrize("to", [1, 2])
def test_a_hole_that_may_still_be_filled_is_an_operation_that_was_made(to: int) -> None:
    """A send of rank 0 is known by the one after it only; one to rank 2 is not in question."""
    job = Job()
    comms = job.world(3)
    t = exchange(comms, 10)
    comms[1].proc.enter(comms[1], RECV, t, peer=0)
    zero = comms[0].proc
    post(comms[0], SEND, to, 399.4, 64, thread=7, lost=True)
    post(comms[0], SEND, to, 399.5, 64, thread=7)
    zero.cover(0.5, 399, main="syscall", syscall="read")
    zero.coverage(400, through=399, main="syscall", syscall="read")
    for c in comms[1:]:
        c.proc.cover(0.5, 400)
    found = analyze_job(job)
    reasons = [f.details["reason"] for f in found]
    assert ("probe_event_loss_possible" in reasons) == (to == 1)


def one_collective_less(step: str) -> list[tuple[str, list[int]]]:
    """Rank 1 stands in a receive and lacks the call before; rank 2 sends ``step`` that call."""
    job = Job()
    comms = job.world(4)
    for i in range(5):
        for c in comms:
            c.proc.call(c, AR, 1.0 + 0.1 * i, stream=0)
    if step == "before":
        post(comms[2], SEND, 3, 1.9)
        post(comms[3], RECV, 2, 1.9)
    for r in (0, 2, 3):
        comms[r].proc.call(comms[r], AR, 2.0, stream=0)
    if step == "after":
        comms[2].proc.enter(comms[2], SEND, 2.1, peer=3, count=BIG, stream=0)
    comms[1].proc.enter(comms[1], RECV, 2.1, peer=0, count=BIG, stream=0)
    cover(job.procs, 400)
    return roots(analyze_job(job))


def test_who_sends_and_receives_before_a_call_that_others_make_first_has_left_it_out() -> None:
    assert one_collective_less("after") == [("rank_inside_other_call", [1])]


@pytest.mark.parametrize("step", ["before", "never"])
def test_else_its_peer_has_left_out_its_half(step: str) -> None:
    assert one_collective_less(step) == [("partner_gone_past", [0])]


@pytest.mark.parametrize("made", [True, False])
def test_who_alone_makes_nothing_of_a_step_has_left_it_out(made: bool) -> None:
    """Between two collectives all send to the next rank; rank 0 twice, as the first.

    ``made``: rank 1 makes its own sends, and lacks the receives only.
    """
    job = Job()
    comms = job.world(5)
    for c in comms:
        c.proc.call(c, AR, 1.0, stream=0)
    for r, c in enumerate(comms):
        if r and r != 1:
            post(c, RECV, r - 1, 2.0 + 0.01 * r)
        if r == 0 or (r == 1 and made):
            post(c, SEND, r + 1, 2.0)
            post(c, SEND, r + 1, 2.1)
        elif 1 < r < 4:
            post(c, SEND, r + 1, 2.1)
    for c in comms:
        c.proc.call(c, AR, 3.0, stream=0)
    cover(job.procs, 500)
    found = [x for x in roots(analyze_job(job)) if x[0] == "partner_gone_past"]
    assert ([named for _, named in found] == [[1], [1]]) is not made


def test_a_send_that_could_only_follow_a_call_that_lacks_its_receiver_cannot_come() -> None:
    """Rank 0 stands in a call to which rank 1 comes only after the receive: nobody is named."""
    job = Job()
    comms = job.world(4)
    others = [c.proc.comm("00000000000000bb", r, 3) for r, c in enumerate(comms[:3])]
    for i in range(3):
        for c in (*comms, *others):
            c.proc.call(c, AR, 1 + i, stream=0)
    t = exchange(comms, 2, 5.0)
    post(comms[1], RECV, 0, t)
    for r in (0, 2):
        others[r].proc.call(others[r], AR, t, stream=0)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert roots(found) == [("partner_gone_past", [])]
    assert [f.role for f in found if f.hang_type == "collective_missing_enter"] == ["downstream"]
