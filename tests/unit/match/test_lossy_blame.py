"""Nobody is blamed whom another reading of what was lost would clear."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import Run, analyze_job, blamed, cover, steps
from support.messages import AR, BIG, RECV, SEND, post
from support.tracegen import Comm, Job

from nccluprobe.match import p2p_shape
from nccluprobe.match.finding import Finding
from nccluprobe.match.model import ProcessKey
from nccluprobe.match.temper import temper

SLEEPS: dict[str, Any] = {"main": "syscall", "syscall": "poll"}


def roots(found: list[Finding]) -> list[tuple[str, str]]:
    return [(f.hang_type, f.details["reason"]) for f in found if f.role == "root_cause"]


def lose(comms: list[Comm], who: int, lost: int, t: float, **state: Any) -> None:
    """All are watched; one loses some events after ``t`` that have no place."""
    for r, c in enumerate(comms):
        c.proc.cover(0.5, t, **state)
        c.proc.cover(t + 1.5, 400, **state, lost_kernel=lost if r == who else 0)


@pytest.mark.parametrize(("lost", "named"), [(0, {0}), (1, set())])
def test_a_call_left_out_looks_like_another_order_where_the_last_one_may_be_lost(
    lost: int, named: set[int]
) -> None:
    job = Job()
    comms = job.world(4)
    for c, sizes in ((0, (60, 50)), (2, (50, 60))):
        for i, count in enumerate(sizes):
            post(comms[c], SEND, c + 1, 1 + i, count)
        for i, count in enumerate((50, 60)):
            post(comms[c + 1], RECV, c, 1 + i, count)
    lose(comms, 0, lost, 3)
    found = analyze_job(job)
    assert {f.details["reason"] for f in found} == {"calls_swapped"}
    assert blamed(found) == named


@pytest.mark.parametrize(("ended", "named"), [(2, {4}), (1, {0})])
def test_several_that_end_in_order_have_not_all_ended_too_early(
    ended: int, named: set[int]
) -> None:
    """Rank 4 makes one call more; who is not there is not seen to wait for anything."""
    job = Job()
    comms = job.world(5)
    t = steps(comms, 5)
    steps(comms[4:], 1, start=t)
    for c in comms[:ended]:
        c.proc.comm_end(c, t + 1)
        c.proc.cover(0.5, t + 2)
        c.proc.end(t + 2.5, code=0)
    cover([c.proc for c in comms[ended:]], t + 400)
    assert blamed(analyze_job(job)) == named


def test_a_call_that_does_not_return_is_no_cause_beside_a_receive_left_out() -> None:
    """It stands in a queue that what was left out has filled."""

    def finding(hang_type: str, reason: str, pid: int, **more: Any) -> Finding:
        who = ProcessKey("node0", pid, pid)
        status = [{"reason": reason, "host": "a", "pid": pid, "main": "nccl"}]
        details = {"reason": reason, "missing_rank_status": status, **more}
        key = (hang_type, pid)
        return Finding(
            key, hang_type, "run", str(pid), 5, 1, details, "error", "root_cause", job="a",
            culprits=(who,),
        )  # fmt: skip

    left = finding("p2p_unmatched", "call_skipped", 1, confidence="observed")
    left.comm_seq = None
    held = finding("nccl_missing_exit", "call_not_returned", 4, confidence="inferred")
    temper([left, held])
    assert (left.role, held.role, held.culprits) == ("root_cause", "unknown", ())


@pytest.mark.parametrize("end_lost", [False, True])
def test_whether_a_group_has_ended_is_not_known_where_its_end_may_be_lost(end_lost: bool) -> None:
    """Rank 0 receives from rank 1, whose group is seen to have begun only; a receive is lost."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 2)
    post(comms[0], RECV, 1, t)
    both = [(comms[1], SEND, {"peer": r, "count": BIG}) for r in (0, 2)]
    lost = {"peer": 2, "count": BIG, "lost": True}
    comms[1].proc.group([both[0], (comms[1], RECV, lost), both[1]], t, state="open")
    post(comms[2], SEND, 1, t)
    post(comms[2], RECV, 1, t)
    lose(comms, 1, 1 + end_lost, t)
    (f,) = (f for f in analyze_job(job) if f.details["entered_comm_ranks"] == [0])
    assert f.details["reason"] == (
        "probe_event_loss_possible" if end_lost else "rank_alive_but_not_entered"
    )


def ring(c: Comm, t: float, n: int, but: str = "") -> None:
    r = c.proc.rank or 0
    both = {SEND: (r + 1) % n, RECV: (r - 1) % n}
    calls = [(c, x, {"peer": p, "count": BIG, "stream": 7}) for x, p in both.items() if x != but]
    c.proc.group(calls, t)


@pytest.mark.parametrize("lost", [0, 1])
def test_what_was_lost_after_a_half_does_not_hide_that_it_stands_behind_a_call(lost: int) -> None:
    """Rank 2 left out a receive; rank 1, which waits in its send, may have made more."""
    job = Job()
    world = job.world(5)
    t = steps(world, 1, stream=7)
    for i in range(3):
        for r, c in enumerate(world):
            if r == 1 and i == 2:
                continue
            ring(c, t + i, 5, RECV if (i, r) == (1, 2) else "")
            if r != 1 or not i:
                c.proc.call(c, AR, t + i + 0.5, stream=7)
    lose(world, 1, lost, t + 1.9)
    found = analyze_job(job)
    assert blamed(found) == {2}
    assert ("p2p_unmatched", "call_skipped") in roots(found)


@pytest.mark.parametrize(("lost", "shape"), [(False, (2, 0)), (True, None)])
def test_what_one_made_in_a_step_is_not_known_where_a_call_of_it_is_lost(
    lost: bool, shape: tuple[int, int] | None
) -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 3)
    calls = [(comms[0], SEND, {"peer": r, "count": BIG}) for r in (1, 2)]
    if lost:
        calls.insert(1, (comms[0], RECV, {"peer": 1, "count": BIG, "lost": True}))
    comms[0].proc.group(calls, t)
    steps(comms, 1, start=t + 1)
    lose(comms, 0, int(lost), t + 0.05)
    run = Run(job)
    run.all()
    run.analysis.matcher.settle()
    side = next(s for s in run.analysis.matcher.p2p.sides.values() if s.endpoint.comm_rank == 0)
    rows = p2p_shape._in_epoch(side.endpoint, side, 3)
    made = None if rows is None else p2p_shape._shape(rows)
    assert p2p_shape._group(side, 1) == made == shape


def test_what_was_queued_of_a_communicator_that_its_rank_aborted_does_not_begin() -> None:
    """Ranks 0 and 1 come to the call after it; rank 0 is missed in a later one, of a pair."""
    job = Job()
    world = job.world(3)
    other = [c.proc.comm("00000000000000bb", r, 3) for r, c in enumerate(world)]
    pair = [c.proc.comm("00000000000000cc", r, 2) for r, c in enumerate(world[:2])]
    t = steps(other, 3, start=steps(world, 3, stream=0), stream=0)
    t = steps(pair, 3, start=t, stream=0)
    for c in (world[2], other[2]):
        c.proc.call(c, AR, t, stream=0)
    other[2].proc.comm_end(other[2], t + 0.1, "abort")
    for r in (0, 1):
        for c in (other[r], world[r]):
            c.proc.call(c, AR, t + 1, stream=0)
    pair[1].proc.call(pair[1], AR, t + 2, stream=0)
    for c in world:
        c.proc.cover(0.5, 400, **SLEEPS)
    found = analyze_job(job)
    assert [kind for kind, _ in roots(found)] == ["comm_ended_under_waiters"]
    assert blamed(found) == {2}


@pytest.mark.parametrize(("main", "named"), [("running", {1}), ("sleeps", set())])
def test_who_runs_waits_for_no_device_where_all_who_wait_sleep(main: str, named: set[int]) -> None:
    """Rank 0 waits for rank 1 and sleeps; rank 2 has made all its calls and is silent."""
    job = Job()
    comms = job.world(3)
    pair = [comms[r].proc.comm("00000000000000bb", r, 2) for r in (0, 1)]
    t = steps(pair, 3, start=steps(comms, 5))
    pair[0].proc.call(pair[0], AR, t)
    for r, c in enumerate(comms):
        c.proc.cover(0.5, t + 400, **({} if r and main == "running" else SLEEPS))
    found = analyze_job(job)
    assert blamed(found) == named
    (root,) = (f for f in found if f.role == "root_cause")
    assert root.details["confidence"] == "inferred"


@pytest.mark.parametrize(("state", "named"), [("inside", set()), ("ended", {1})])
def test_who_is_inside_a_call_of_which_all_is_lost_may_wait_in_it(
    state: str, named: set[int]
) -> None:
    """On two communicators others wait for rank 1 in more calls than it has lost."""
    job = Job()
    comms = job.world(4)
    more = [c.proc.comm("00000000000000bb", r, 4) for r, c in enumerate(comms)]
    t = steps(more, 2, start=steps(comms, 2))
    for r, c in enumerate(comms):
        lost = {"lost": True} if r == 1 else {}
        calls = [(c, SEND, (r + 1) % 4), (c, RECV, (r - 1) % 4)]
        c.proc.group([(c, x, {"peer": p, "count": BIG, **lost}) for c, x, p in calls], t,
                     state=state if r == 1 else "ended")  # fmt: skip
        for i in range(0 if r == 1 else 2):
            c.proc.call(more[r], AR, t + 1 + i)
    lose(comms, 1, 2, t)
    assert blamed(analyze_job(job)) == named


def test_a_group_of_which_only_the_end_is_lost_was_made() -> None:
    """Two others wait for it: what does not end is the device."""
    job = Job()
    comms = job.world(4)
    trio = [comms[r].proc.comm("00000000000000bb", r, 3) for r in range(3)]
    t = steps(trio, 3, start=steps(comms, 2, stream=0), stream=1)
    for r, c in enumerate(trio):
        ops = [(c, x, {"peer": p, "count": BIG, "stream": 1})
               for p in range(3) if p != r for x in (SEND, RECV)]  # fmt: skip
        c.proc.group(ops, t, state="open" if r == 0 else "ended")
    comms[3].proc.call(comms[3], AR, t + 1, stream=0)
    lose(comms, 0, 1, t)
    assert blamed(analyze_job(job)) == set()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_send_to_oneself_has_its_receive_where_one_was_lost(lost: int) -> None:
    """NCCL takes no send to oneself without it: rank 0 has not left it out."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 2)
    ops = [(comms[0], SEND, {"peer": 0, "count": BIG})]
    ops += [(comms[0], RECV, {"peer": 0, "count": BIG, "lost": True})] * lost
    comms[0].proc.group(ops, t, state="inside")
    lose(comms, 0, lost, t)
    said = [f.details["reason"] for f in analyze_job(job)]
    assert ("call_skipped" in said) is not bool(lost)
