"""Lost sends and receives are told by what their peers wait for, and a left out one by its step."""

from __future__ import annotations

import pytest
from support.analysis import Run, analyze_job, blamed
from support.tracegen import Comm, Job, unix

from nccluprobe.match.p2p_queue import Op, T

SEND, RECV, AR = "ncclSend", "ncclRecv", "ncclAllReduce"
SMALL, BIG = 1 << 8, 1 << 24


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


@pytest.mark.parametrize("lost", [False, True])
def test_of_a_send_to_oneself_the_receive_was_made(lost: bool) -> None:
    """NCCL takes none without it; what others wait for came later, and was not made."""
    job = Job()
    comms = job.world(3)
    for c in comms:
        c.proc.call(c, AR, 1)
    own = {"peer": 0, "count": BIG}
    zero = comms[0].proc
    zero.group([(comms[0], SEND, own), (comms[0], RECV, own | ({"lost": True} if lost else {}))], 2)
    zero.call(comms[0], RECV, 3, peer=2, count=BIG)
    for i in range(2):
        comms[1].proc.call(comms[1], RECV, 2 + i, peer=0, count=BIG)
    for c in comms:
        c.proc.cover(0.5, 4)
        c.proc.cover(4, 400, lost_kernel=int(lost and c is comms[0]))
    found = analyze_job(job)
    roots = [f for f in found if f.role == "root_cause" and f.state == "open"]
    assert {w["rank"] for f in roots for w in f.named} == {2}
    assert {f.details["confidence"] for f in roots} == {"observed"}


def end(job: Job, t: float, lost: int) -> None:
    """All stand still since ``t``; rank 2 lost so many events."""
    for p in job.procs:
        p.cover(0.5, t)
        p.cover(t + 0.5, 400, lost_kernel=lost * (p.rank == 2))


@pytest.mark.parametrize("lost", [1, 2])
def test_lost_sends_of_a_rank_that_sent_nothing_else_were_made(lost: int) -> None:
    job = Job()
    comms = job.world(3)
    for c in comms:
        c.proc.call(c, AR, 1.0)
    for i in range(lost):
        comms[2].proc.call(comms[2], SEND, 2.0 + 0.01 * i, peer=0, count=BIG, lost=True)
        comms[0].proc.call(comms[0], RECV, 2.0 + 0.01 * i, peer=2, count=BIG)
    for c in comms:
        c.proc.call(c, AR, 2.1)
    end(job, 1.9, lost)
    assert analyze_job(job) == []


def test_a_lost_collective_was_no_send() -> None:
    """Two events are lost, and two sends awaited: but one was a call that all have made."""
    job = Job()
    comms = job.world(3)
    comms[2].proc.call(comms[2], SEND, 1.0, peer=1, count=BIG)
    comms[1].proc.call(comms[1], RECV, 1.0, peer=2, count=BIG)
    for i in range(5):
        for c in comms:
            c.proc.call(c, AR, 1.1 + 0.1 * i, lost=i == 3 and c is comms[2])
        if i == 3:
            comms[2].proc.call(comms[2], SEND, 1.42, peer=0, count=BIG, lost=True)
            for t in (1.42, 1.43):
                comms[0].proc.call(comms[0], RECV, t, peer=2, count=BIG)
    end(job, 1.35, 2)
    (f,) = analyze_job(job)
    assert (f.severity, [w["rank"] for w in f.named]) == ("error", [2])


def test_a_lost_send_is_the_one_that_is_awaited_between_the_same_collectives() -> None:
    """Rank 2 left out a send to rank 0; what it lost three steps later was one to rank 1."""
    job = Job()
    comms = job.world(3)
    for i in range(7):
        for c in comms:
            c.proc.call(c, AR, 1.0 + i)
        if i in (0, 1, 2, 5):
            comms[2].proc.call(comms[2], SEND, 1.1 + i, peer=1, count=BIG, lost=i == 5)
            comms[1].proc.call(comms[1], RECV, 1.1 + i, peer=2, count=BIG)
        if i == 2:
            comms[0].proc.call(comms[0], RECV, 1.2 + i, peer=2, count=BIG)
    end(job, 6.05, 1)
    (f,) = analyze_job(job)
    assert (f.severity, f.details["entered_comm_ranks"]) == ("error", [0])


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("first", [SEND, AR])
def test_the_first_of_its_kind_was_lost_where_the_second_is_seen(first: str, at: int) -> None:
    """So the hole before it is not what another rank waits for."""
    job = Job()
    comms = job.world(3)
    zero, one, two = comms
    for n in range(1 + (first == SEND)):
        one.proc.call(one, RECV, 1.0 + 0.1 * n, peer=2, count=SMALL)
        two.proc.call(two, SEND, 1.0 + 0.1 * n, peer=1, count=SMALL, lost=first == SEND and n == 0)
    for i in range(4):
        if i == at:
            zero.proc.call(zero, SEND, 1.2 + 0.1 * i, peer=2, count=BIG)
        for c in comms if i in (1, 2) else ():
            c.proc.call(c, AR, 1.2 + 0.1 * i, lost=first == AR and i == 1 and c is two)
    end(job, 0.8, 1)
    (f,) = (f for f in analyze_job(job) if f.hang_type == "p2p_unmatched")
    assert (f.severity, f.details["missing_comm_ranks"]) == ("error", [2])


def test_a_hole_before_later_receives_is_none_that_was_left_out_though_both_have_ended() -> None:
    """The record of the first receive was lost, which the last coverage does not tell so far."""
    job = Job()
    a, b = job.world(2)
    for i in range(4):
        a.proc.call(a, "ncclSend", 1 + 0.1 * i, peer=1, count=64)
        b.proc.call(b, "ncclRecv", 1.01 + 0.1 * i, peer=0, count=64, lost=i == 1)
    for c in (a, b):
        c.proc.coverage(1.5, 1.05)
        c.proc.comm_end(c, 1.6)
    run = Run(job)
    run.all()
    assert run.scan(unix(1.7)) == []
    for c in (a, b):
        c.proc.coverage(2.5, 2.4, **({"lost_kernel": 1} if c is b else {}))
    assert analyze_job(job) == []


@pytest.mark.parametrize("before", [0, 1])
def test_a_first_send_that_does_not_return_was_not_received(before: int) -> None:
    """Else the two would be connected.  A later one may be inside for its full queue."""
    job = Job()
    comms = job.world(3)
    for i in range(before):
        comms[0].proc.call(comms[0], SEND, 1 + i, peer=1, count=BIG)
        comms[1].proc.call(comms[1], RECV, 1 + i, peer=0, count=BIG)
    comms[0].proc.enter(comms[0], SEND, 2, peer=1, count=BIG)
    for c in comms[1:]:
        c.proc.enter(c, AR, 3)
    for c in comms:
        c.proc.cover(0.5, 2)
        c.proc.cover(2, 400, lost_kernel=int(c is comms[1]))
    found = analyze_job(job)
    roots = [f for f in found if f.role == "root_cause" and f.state == "open"]
    assert {w["rank"] for f in roots for w in f.named} == (set() if before else {1})


def test_who_may_have_got_what_was_lost_is_held_by_who_is_inside_all_the_same() -> None:
    """Rank 2 may have sent to rank 1, which waits in the same group for rank 0."""
    job = Job()
    comms = job.world(4)
    calls = [(comms[0], SEND, {"peer": r, "count": BIG}) for r in (1, 2)]
    comms[0].proc.group(calls, 2, state="inside")
    calls = [(comms[1], RECV, {"peer": r, "count": BIG}) for r in (0, 2)]
    comms[1].proc.group(calls, 2)
    for c in comms[2:]:
        c.proc.enter(c, AR, 3)
    for c in comms:
        c.proc.cover(0.5, 2)
        c.proc.cover(2, 400, lost_kernel=int(c is comms[2]))
    found = analyze_job(job)
    roots = [f for f in found if f.role == "root_cause" and f.state == "open"]
    assert {w["rank"] for f in roots for w in f.named} == {2}


@pytest.mark.parametrize("crashed", [False, True])
@pytest.mark.parametrize(("lost", "confidence"), [(False, "observed"), (True, "reduced")])
def test_a_send_that_is_counted_over_a_hole_is_less_sure(
    lost: bool, confidence: str, crashed: bool
) -> None:
    """What is lost before it is taken for sends to the same peer, by their ordinals."""
    job = Job()
    a, b = job.world(2)
    for i in range(4):
        a.proc.call(a, SEND, 2 + i, peer=1, count=BIG, lost=lost and i == 1)
        b.proc.call(b, RECV, 2 + i, peer=0, count=BIG)
    a.proc.call(a, SEND, 7, peer=1, count=BIG)
    for c in (a, b):
        c.proc.cover(0.5, 2)
        c.proc.cover(6.5, 7.5 if crashed and c is b else 400, lost_kernel=int(lost and c is a))
    if crashed:
        b.proc.end(7.6, how="signaled", signal=11)
    (f,) = analyze_job(job)
    assert ([w["rank"] for w in f.named], f.details["confidence"]) == ([1], confidence)


@pytest.mark.parametrize("api", [SEND, RECV])
def test_where_a_send_or_receive_may_have_been_met_neither_of_its_ranks_is_blamed(
    api: str,
) -> None:
    """Rank 1 may have made its half, unseen, and waits for rank 0: else it left it out."""
    job = Job()
    xs = job.world(2)
    ys = [x.proc.comm("00000000000000bb", r, 2) for r, x in enumerate(xs)]
    for c in (*xs, *ys):
        c.proc.call(c, AR, 1.0)
    xs[0].proc.call(xs[0], api, 2.0, peer=1, count=BIG)
    ys[1].proc.enter(ys[1], AR, 3.0)
    for p in job.procs:
        p.cover(0.5, 1.6)
        p.cover(2.6, 400.0, lost_kernel=int(p.rank == 1))
    (f,) = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert (f.hang_type, f.named) == ("p2p_unmatched", [])
    assert f.details["confidence"] == "reduced"


@pytest.mark.parametrize(("filled", "told"), [(False, 1), (True, 0)])
def test_where_a_lost_receive_stood_among_calls_of_two_communicators_nobody_knows(
    filled: bool, told: int
) -> None:
    """Rank 0 sends and then calls, rank 1 the other way round, as far as is known."""
    job = Job()
    xs = job.world(3)
    ys = [c.proc.comm("00000000000000bb", r, 3) for r, c in enumerate(xs)]
    xs[0].proc.call(xs[0], SEND, 4.0, peer=1, count=BIG)
    for r, y in enumerate(ys):
        y.proc.call(y, AR, 5.0 + 0.1 * r)
    received = xs[1].proc.call(xs[1], RECV, 6.0, peer=0, count=BIG)
    xs[2].proc.call(xs[2], AR, 7.0)
    for c in xs:
        c.proc.cover(0.5, 400)
    run = Run(job)
    run.all()
    if filled:
        run.analysis.matcher.processes[1].losses.filled = {xs[1].id: {received["idx"]}}
    found = run.scan()
    assert len([f for f in found if f.hang_type == "p2p_order_inversion"]) == told


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize(("filled", "named"), [(False, {2}), (True, set())])
def test_nor_has_one_made_a_call_too_many_beside_it(
    filled: bool, named: set[int], head: bool
) -> None:
    """Rank 2 is a call ahead, by which the streams of the others might be shifted.

    ``head``: the receive is before the call of rank 1, and the send behind that of rank 0.
    """
    job = Job()
    xs = job.world(3)
    ys = [c.proc.comm("00000000000000bb", r, 3) for r, c in enumerate(xs)]
    for r, y in enumerate(ys):
        y.proc.call(y, AR, 5.0 + 0.1 * r)
    xs[0].proc.call(xs[0], SEND, 6.0 if head else 4.0, peer=1, count=BIG)
    received = xs[1].proc.call(xs[1], RECV, 4.0 if head else 6.0, peer=0, count=BIG)
    ys[2].proc.call(ys[2], AR, 7.0)
    for c in xs:
        c.proc.cover(0.5, 400)
    run = Run(job)
    run.all()
    if filled:
        run.analysis.matcher.processes[1].losses.filled = {xs[1].id: {received["idx"]}}
    assert blamed(run.scan()) == named


def test_what_was_lost_was_not_made_before_a_collective_that_stands_before_it() -> None:
    job = Job()
    comms = job.world(2)
    for c, api in zip(comms, (SEND, RECV), strict=True):
        c.proc.call(c, api, 1.0, peer=1 - comms.index(c), count=8)
        c.proc.call(c, AR, 5.0)
        c.proc.cover(0.5, 10)
    run = Run(job)
    run.all()
    side = run.analysis.matcher.p2p.sides[1, comms[1].id]
    (op,) = (Op(*row) for row in side.recent().tolist())
    assert side.restore((False, 0), 1, op, 2)
    assert [row[T] for row in side.recent().tolist()] == [unix(1.0), unix(5.0)]
