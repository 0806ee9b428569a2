"""Sends and receives: pairs that differ, calls without partner; with silent twins."""

from __future__ import annotations

import pytest
from support.analysis import Run, analyze_job, blamed, cover, kinds
from support.messages import RECV, SEND, exchange, post
from support.tracegen import Job, unix


def test_equal_pairs_are_silent_and_keep_nothing() -> None:
    job = Job()
    t = exchange(job.world(2), 500, counts=(7, 8, 9))
    cover(job.procs, t + 400)
    run = Run(job)
    run.all()
    assert run.scan() == []
    p2p = run.analysis.matcher.p2p
    assert not p2p.pairs.open
    assert all(q.n == 0 and q.end == 500 for s in p2p.sides.values() for q in s.queues.values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_pair_of_different_sizes(ranks: int) -> None:
    job = Job()
    comms = job.world(ranks)
    for i in range(12):
        for r, c in enumerate(comms):
            wrong = i == 5 and r == 1
            post(c, SEND, (r + 1) % ranks, 1 + i, 64 if wrong else 1000 + i)
            post(c, RECV, (r - 1) % ranks, 1.1 + i, 1000 + i)
    cover(job.procs, 30)
    found = analyze_job(job)
    assert kinds(found) == [("p2p_mismatch", "error")]
    assert found[0].details["differs_in"] == ["bytes"]
    assert [op["count"] for op in found[0].details["pair"]] == [64, 1005]
    assert "Rank 1" in found[0].details["summary"]
    # With others that do the same, the odd one is known; two alone are a tie.
    assert blamed(found) <= {1} and (ranks == 2 or blamed(found) == {1})


def test_history_tells_which_of_two_is_wrong() -> None:
    job = Job()
    comms = job.world(2)
    sizes = (10, 20, 30)
    for i in range(30):
        post(comms[0], SEND, 1, 1 + i, sizes[i % 3])
        post(comms[1], RECV, 0, 1.1 + i, 999 if i == 20 else sizes[i % 3])
    cover(job.procs, 60)
    found = analyze_job(job)
    assert kinds(found) == [("p2p_mismatch", "error")]
    assert blamed(found) == {1}


def test_same_bytes_and_other_type_is_a_notice() -> None:
    job = Job()
    comms = job.world(2)
    for i in range(12):
        post(comms[0], SEND, 1, 1 + i, 100, datatype="float32")
        post(comms[1], RECV, 0, 1.1 + i, 400, datatype="uint8")
    cover(job.procs, 30)
    found = analyze_job(job)
    assert kinds(found) == [("p2p_mismatch", "notice")]
    assert found[0].details["explanation"] == "same bytes, other type"
    assert blamed(found) == set()


def test_two_in_the_other_order_are_no_shift() -> None:
    job = Job()
    comms = job.world(2)
    t = exchange(comms, 10)
    for count in (60, 50):
        post(comms[0], SEND, 1, t, count)
    for count in (50, 60):
        post(comms[1], RECV, 0, t, count)
    t = exchange(comms, 10, t + 1)
    cover(job.procs, t + 20)
    found = analyze_job(job)
    assert kinds(found) == [("p2p_mismatch", "error")]
    assert found[0].details["reason"] == "calls_swapped"


@pytest.mark.parametrize(
    ("others", "named"), [((50, 60), {0}), ((50, 50), set()), ((60, 60), set())]
)
def test_of_two_in_the_other_order_the_peers_tell_in_both_places(
    others: tuple[int, int], named: set[int]
) -> None:
    """A receive left out looks like it as well, when what follows is alike."""
    job = Job()
    comms = job.world(4)
    for c, sizes in ((0, (60, 50)), (2, others)):
        for i, count in enumerate(sizes):
            post(comms[c], SEND, c + 1, 1 + i, count)
        for i, count in enumerate(sizes if c else (50, 60)):
            post(comms[c + 1], RECV, c, 1 + i, count)
    cover(job.procs, 60)
    found = analyze_job(job)
    assert [f.details["reason"] for f in found] == ["calls_swapped"]
    assert blamed(found) == named
    assert found[0].details["confidence"] == ("inferred" if named else "observed")


@pytest.mark.parametrize("counts", [(60, 50), (50, 60)])
def test_one_side_with_one_more_is_shifted_and_not_in_another_order(
    counts: tuple[int, int],
) -> None:
    """What both sides have made looks like two calls that changed places."""
    job = Job()
    comms = job.world(2)
    one, two = counts
    for count in (one, two):
        post(comms[0], SEND, 1, 1, count)
    for count in (two, one, two):
        post(comms[1], RECV, 0, 1, count)
    cover(job.procs, 60)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.details["reason"]) == ("p2p_unmatched", "call_skipped")


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("has", [0, 1])
def test_several_calls_left_out_need_more_than_a_wrong_argument(has: int, ahead: int) -> None:
    """One receive is left to tell: it fits the next but one, as well as any of its size does."""
    job = Job()
    comms = job.world(2)
    apis = (SEND, RECV)
    for count in (900, *[7] * (ahead - 1), 30, 31):
        post(comms[has], apis[has], 1 - has, 1, count)
    post(comms[1 - has], apis[1 - has], has, 1, 30)
    cover(job.procs, 60)
    found = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert kinds(found) == [("p2p_unmatched" if ahead == 1 else "p2p_mismatch", "error")]


@pytest.mark.parametrize("lacking", [SEND, RECV])
def test_a_shift_by_a_call_left_out(lacking: str) -> None:
    job = Job()
    comms = job.world(2)
    for i in range(40):
        for r, api in enumerate((SEND, RECV)):
            if not (i == 20 and api == lacking):
                post(comms[r], api, 1 - r, 1 + i + 0.1 * r, 10 + i % 5, stream=0)
    cover(job.procs, 45)
    found = analyze_job(job)
    assert ("p2p_unmatched", "error") in kinds(found)
    first = found[0]
    assert first.details["reason"] in ("call_skipped", "call_extra")
    assert first.details["unmatched"][0]["count"] == 10
    assert blamed(found) == {0 if lacking == SEND else 1}


def test_provisional_until_what_follows_is_seen() -> None:
    job = Job()
    comms = job.world(2)
    t = exchange(comms, 5)
    post(comms[0], SEND, 1, t, 1)
    post(comms[1], RECV, 0, t, 2)
    cover(job.procs, t + 60)
    run = Run(job)
    run.until(t + 2)
    (early,) = run.scan(unix(t + 2))
    assert early.details["provisional"] and early.severity == "notice" and not early.culprits
    run.all()
    (late,) = run.scan(unix(t + 20))
    assert not late.details["provisional"] and late.severity == "error"


def test_a_receive_that_lacks_its_send() -> None:
    job = Job()
    comms = job.world(2)
    t = exchange(comms, 10)
    post(comms[1], RECV, 0, t)
    cover(job.procs[:1], t + 100, main="syscall", syscall="read")
    cover(job.procs[1:], t + 100)
    run = Run(job)
    run.until(t + 50)
    assert run.scan(unix(t + 50)) == []
    run.all()
    (found,) = run.scan(unix(t + 70))
    assert (found.hang_type, found.severity, found.role) == (
        "p2p_unmatched",
        "notice",
        "root_cause",
    )
    assert [n["rank"] for n in found.named] == [0]
    assert found.details["reason"] == "rank_alive_but_not_entered"
    assert found.details["missing_comm_ranks"] == [0]
    assert "ncclRecv #10 from rank 0" in found.details["summary"]


def test_it_is_an_error_after_the_phase_timeout_and_ends_with_its_partner() -> None:
    job = Job()
    comms = job.world(2)
    t = exchange(comms, 10)
    post(comms[1], RECV, 0, t)
    post(comms[0], SEND, 1, t + 320)
    cover(job.procs[:1], t + 400, main="syscall", syscall="read")
    cover(job.procs[1:], t + 400)
    run = Run(job)
    run.until(t + 310)
    (found,) = run.scan(unix(t + 310))
    assert found.severity == "error"
    run.all()
    (ended,) = run.scan(unix(t + 330))
    assert ended.state == "resolved"


def test_a_crashed_peer_is_proof() -> None:
    job = Job()
    comms = job.world(2)
    t = exchange(comms, 10)
    post(comms[1], RECV, 0, t)
    job.procs[0].cover(0.5, t)
    job.procs[0].end(t + 0.1, how="signaled", signal=9)
    job.procs[1].cover(0.5, t + 30)
    found = analyze_job(job)
    assert kinds(found) == [("p2p_unmatched", "error")]
    assert blamed(found) == {0}
    assert found[0].details["reason"] == "rank_exit_or_crash_suspected"


def test_lost_events_are_never_an_error() -> None:
    job = Job()
    comms = job.world(2)
    t = exchange(comms, 10)
    post(comms[1], RECV, 0, t)
    post(comms[0], SEND, 1, t, lost=True)
    job.procs[0].cover(0.5, t - 0.5)
    job.procs[0].cover(t + 0.5, t + 400, lost_kernel=1)
    job.procs[1].cover(0.5, t + 400)
    found = analyze_job(job)
    assert all(f.severity == "notice" for f in found)
    assert blamed(found) == set()


def test_a_hole_pairs_with_anything() -> None:
    job = Job()
    comms = job.world(2)
    for i in range(20):
        post(comms[0], SEND, 1, 1 + i, 10 + i, lost=i == 7)
        post(comms[1], RECV, 0, 1 + i, 10 + i)
    cover(job.procs, 400, lost_kernel=0)
    assert analyze_job(job) == []


def test_small_sends_wait_for_nobody() -> None:
    job = Job()
    comms = job.world(2)
    t = exchange(comms, 10)
    for i in range(5):
        post(comms[0], SEND, 1, t + i, 64)
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_a_large_send_holds_a_silent_sender() -> None:
    job = Job()
    comms = job.world(2)
    t = exchange(comms, 10)
    post(comms[0], SEND, 1, t)
    cover(job.procs, t + 400)
    found = analyze_job(job)
    assert kinds(found) == [("p2p_unmatched", "error")]
    assert blamed(found) == {1}


def test_a_sender_that_goes_on_waits_for_nobody() -> None:
    job = Job()
    comms = job.world(3)
    t = exchange(comms, 10)
    post(comms[0], SEND, 1, t, 64)
    for i in range(200):
        post(comms[0], SEND, 2, t + i, 64)
        post(comms[2], RECV, 0, t + i, 64)
    cover(job.procs, t + 200)
    assert analyze_job(job) == []


def test_unobserved_peers_are_not_missed() -> None:
    job = Job()
    (comm,) = job.world(1, nranks=2)
    for i in range(300):
        post(comm, SEND, 1, 1 + i)
        post(comm, RECV, 1, 1.1 + i)
    cover(job.procs, 700)
    run = Run(job)
    run.all()
    assert run.scan() == []
    (side,) = run.analysis.matcher.p2p.sides.values()
    assert max(q.n for q in side.queues.values()) <= 64


def test_inside_for_long_behind_an_unobserved_peer_is_said() -> None:
    job = Job()
    (comm,) = job.world(1, nranks=2)
    post(comm, RECV, 1, 1.0)
    comm.proc.enter(comm, RECV, 2.0, peer=1)
    cover(job.procs, 100)
    (found,) = analyze_job(job)
    assert (found.hang_type, found.severity) == ("waiting_for_unobserved", "notice")
    assert found.culprits == ()


@pytest.mark.parametrize("late", [(0, 1), (1,)])
def test_ordinals_of_late_attached_ranks_are_not_compared(late: tuple[int, ...]) -> None:
    job = Job()
    learnt = ["struct" if r in late else "init" for r in range(2)]
    comms = [job.proc(r).comm("00000000000000aa", r, 2, learnt=learnt[r]) for r in range(2)]
    for i in range(50):
        post(comms[0], SEND, 1, 1 + i, 100 + i)
        if i > 5:
            post(comms[1], RECV, 0, 1 + i, 100 + i)
    cover(job.procs, 400)
    assert analyze_job(job) == []
