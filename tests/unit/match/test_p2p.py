"""Sends and receives: each rule with its silent twin."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import Run, analyze_job, cover
from support.tracegen import Comm, Job, unix

from nccluprobe.match.finding import Finding
from nccluprobe.match.options import SECOND, Options

SEND, RECV = "ncclSend", "ncclRecv"
AR = "ncclAllReduce"
BIG = 1 << 24


def post(c: Comm, api: str, peer: int, t: float, count: int = BIG, **more: Any) -> None:
    c.proc.call(c, api, t, peer=peer, count=count, **more)


def exchange(comms: list[Comm], n: int, t: float = 1.0, counts: tuple[int, ...] = (BIG,)) -> float:
    """Rank 0 sends to rank 1 ``n`` times; returns the time after it."""
    for i in range(n):
        post(comms[0], SEND, 1, t + 0.1 * i, counts[i % len(counts)])
        post(comms[1], RECV, 0, t + 0.1 * i + 0.01, counts[i % len(counts)])
    return t + 0.1 * n


def blamed(found: list[Finding]) -> set[int]:
    return {
        who["rank"]
        for f in found
        if f.role == "root_cause" and f.state == "open"
        for who in f.named
    }


def kinds(found: list[Finding]) -> list[tuple[str, str]]:
    return [(f.hang_type, f.severity) for f in found if f.state == "open"]


# -- pairs that differ -------------------------------------------------------


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


# -- operations without partner ------------------------------------------------


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


def test_ordinals_of_late_attached_ranks_are_not_compared() -> None:
    job = Job()
    comms = [job.proc(r).comm("00000000000000aa", r, 2, learnt="struct") for r in range(2)]
    for i in range(50):
        post(comms[0], SEND, 1, 1 + i, 100 + i)
        if i > 5:
            post(comms[1], RECV, 0, 1 + i, 100 + i)
    cover(job.procs, 400)
    assert analyze_job(job) == []


# -- groups ------------------------------------------------------------------


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


# -- orders that exclude each other --------------------------------------------


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


# -- gone past, misplaced, left over --------------------------------------------


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
