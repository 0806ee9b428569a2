"""Rules of devices and stalls that no other test would miss."""

from __future__ import annotations

import pytest
from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Job

from nccluprobe.match import device_ran
from nccluprobe.match.finding import Finding

AR, SEND, RECV, DESTROY = "ncclAllReduce", "ncclSend", "ncclRecv", "ncclCommDestroy"
BIG = 1 << 24


def causes(found: list[Finding]) -> list[tuple[str, list[int]]]:
    return [
        (f.hang_type, [who["rank"] for who in f.named])
        for f in found
        if f.role == "root_cause" and f.state == "open"
    ]


def stuck(job: Job) -> set[tuple[int | None, int]]:
    """(rank, call_idx) of what stands at the head of a stream and cannot end."""
    run = Run(job)
    run.all()
    run.scan()
    matcher = run.analysis.matcher
    stalls = matcher.p2p.run_devices(matcher.comms, matcher._context, matcher.waits).stalls
    return {(s.endpoint.comm_rank, s.node.idx) for s in stalls}


def test_a_send_that_was_received_long_ago_is_over() -> None:
    """Its receiver has sent and received since, more than is remembered."""
    job = Job()
    comms = job.world(3)
    a, b, c = comms
    t = steps(comms, 2, stream=0)
    a.proc.call(a, SEND, t, peer=1, count=BIG)
    b.proc.call(b, RECV, t, peer=0, count=BIG)
    for i in range(300):
        b.proc.call(b, SEND, t + 1 + i * 0.01, peer=2, count=BIG)
        c.proc.call(c, RECV, t + 1 + i * 0.01, peer=1, count=BIG)
    steps(comms, 1, start=t + 5)
    steps([b, c], 1, start=t + 6)
    cover(job.procs, 400)
    assert stuck(job) == {(1, 304), (2, 303)}
    assert causes(analyze_job(job)) == [("collective_missing_enter", [0])]


@pytest.mark.parametrize("alive", [True, None])
def test_all_silent_after_one_call_are_one_stall_also_when_one_alone_is_waited_for(
    alive: bool | None,
) -> None:
    """Rank 1 stands where rank 0 stands, which nobody waits for: it does not stand out.

    ``alive``: None where the source does not tell whether a process lives.
    """
    job = Job()
    a, b, c = (job.proc(r) for r in range(3))
    pair = [a.comm("00000000000000aa", 0, 2), b.comm("00000000000000aa", 1, 2)]
    other = [b.comm("00000000000000bb", 0, 2), c.comm("00000000000000bb", 1, 2)]
    t = steps(other, 5)
    t = steps(pair, 5, start=t)
    steps(other[1:], 1, start=t)
    cover(job.procs, 400, alive=alive)
    found = analyze_job(job)
    assert causes(found) == [("collective_all_ranks_stuck", [])]
    assert [f.role for f in found if f.hang_type == "collective_missing_enter"] == ["downstream"]


def test_two_that_are_inside_the_destroy_may_wait_for_each_other() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for c in comms:
        c.proc.comm_end(c, t)
        (c.proc.call if c is comms[2] else c.proc.enter)(c, DESTROY, t)
        c.proc.cover(0.5, 400)
    found = analyze_job(job)
    assert found and all(not f.named for f in found)
    assert not any("all others have returned" in f.details["summary"] for f in found)


def test_who_is_inside_the_destroy_as_well_has_not_returned_from_it() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for c in comms:
        c.proc.comm_end(c, t)
        c.proc.enter(c, DESTROY, t)
        c.proc.cover(0.5, 400)
    assert causes(analyze_job(job)) == [("collective_all_ranks_stuck", [])]


@pytest.mark.parametrize("few", [0, 1 << 30])
def test_what_a_thread_is_inside_of_is_not_with_the_device(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is what stands behind it in its stream, however many endpoints there are."""
    monkeypatch.setattr(device_ran, "_FEW", few)
    job = Job()
    comms = job.world(3)
    t = steps(comms, 3)
    for peer in (1, 0):
        api = SEND if peer else RECV
        comms[1 - peer].proc.call(comms[1 - peer], api, t, peer=peer, count=8)
    comms[0].proc.enter(comms[0], SEND, t + 1, peer=1, count=8)
    comms[0].proc.call(comms[0], AR, t + 2, thread=7)
    steps(comms[1:], 1, start=t + 2)
    cover(job.procs, 400)
    assert stuck(job) == {(1, 4), (2, 3)}


def test_who_is_away_does_not_wait_elsewhere() -> None:
    """Each waits for the other, and rank 0 is in a system call in which no device is waited for."""
    job = Job()
    xs = job.world(2)
    ys = [c.proc.comm("00000000000000bb", r, 2) for r, c in enumerate(xs)]
    t = steps(ys, 5, start=steps(xs, 5))
    xs[0].proc.call(xs[0], AR, t)
    ys[1].proc.call(ys[1], AR, t)
    xs[0].proc.cover(0.5, 400, main="syscall", syscall="read")
    xs[1].proc.cover(0.5, 400)
    found = analyze_job(job)
    assert causes(found) == [("collective_missing_enter", [0])]
    said = {s["global_rank"]: s["reason"] for f in found for s in f.details["missing_rank_status"]}
    assert said == {0: "rank_alive_but_not_entered", 1: "rank_waiting_elsewhere"}


@pytest.mark.parametrize("less", [False, True])
def test_streams_that_hold_up_each_other_are_no_deadlock_where_one_made_a_call_less(
    less: bool,
) -> None:
    """All that follows the call that it left out is shifted."""
    job = Job()
    a, b, c = job.world(3)
    t = steps([a, b, c], 5)
    a.proc.call(a, SEND, t, peer=1, count=BIG)
    steps([a, b, c], 1, start=t + 1)
    b.proc.call(b, RECV, t + 2, peer=0, count=BIG)
    steps([a, b] if less else [a, b, c], 1, start=t + 3)
    cover(job.procs, 400)
    kinds = {f.hang_type for f in analyze_job(job)}
    assert ("p2p_order_inversion" in kinds) != less
    assert ("collective_missing_enter" in kinds) == less


def test_a_call_that_all_made_ends_though_a_host_has_not_returned_from_it() -> None:
    """What follows in the streams of the others has begun, and lacks rank 1's call."""
    job = Job()
    comms = job.world(3)
    others = [c.proc.comm("00000000000000bb", r, 3) for r, c in enumerate(comms)]
    t = steps(others, 3, start=steps(comms, 3))
    for r, c in enumerate(comms):
        (c.proc.enter if r == 1 else c.proc.call)(c, AR, t)
    for r, c in enumerate(others):
        if r != 1:
            c.proc.call(c, AR, t + 1)
    cover(job.procs, t + 400)
    assert stuck(job) == {(0, 3), (2, 3)}


def test_a_call_that_differs_explains_who_wait_for_each_other_behind_it() -> None:
    """Calls that disagree are not run on the device: rank 0 may stand in its one."""
    job = Job()
    comms = job.world(4)
    pairs = [[c.proc.comm(f"{k:016x}", r, 2) for r, c in enumerate(comms[:2])] for k in (7, 8)]
    t = steps(pairs[0], 3, start=steps(pairs[1], 3, start=steps(comms, 5)))
    for r, c in enumerate(comms):
        c.proc.call(c, AR, t, count=7 if r == 3 else 1024)
    for r in (0, 2):
        comms[r].proc.call(comms[r], AR, t + 0.1)
    pairs[0][0].proc.call(pairs[0][0], AR, t + 1)
    pairs[1][1].proc.call(pairs[1][1], AR, t + 1)
    cover(job.procs, t + 400)
    found = analyze_job(job)
    assert causes(found) == [("collective_mismatch", [3])]
    (mismatch,) = (f for f in found if f.role == "root_cause")
    absences = [f for f in found if f is not mismatch]
    assert [(f.role, f.downstream_of) for f in absences] == [("downstream", mismatch.id)] * 2


@pytest.mark.parametrize(
    ("api", "op", "made", "stand"),
    [
        # Data go out from rank 0: it needs nobody, and the others only it.
        ("ncclBroadcast", None, (0, 1), set()),
        ("ncclBroadcast", None, (1, 2), {1, 2}),
        # Data come in to rank 0: it needs all, and who sends needs nobody.
        ("ncclReduce", "sum", (0, 1), {0}),
        ("ncclReduce", "sum", (1, 2), set()),
    ],
)
def test_who_needs_whom_in_a_small_call_with_a_root(
    api: str, op: str | None, made: tuple[int, ...], stand: set[int]
) -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 3, stream=0)
    for r in made:
        comms[r].proc.call(comms[r], api, t, root=0, op=op, count=16, stream=0)
    cover(job.procs, 400)
    run = Run(job)
    run.all()
    run.scan()
    matcher = run.analysis.matcher
    stalls = matcher.p2p.run_devices(matcher.comms, matcher._context, matcher.waits).stalls
    assert {s.endpoint.comm_rank for s in stalls} == stand
    needed = {e.comm_rank for s in stalls for e in s.lack.missing}
    assert needed == (set() if not stand else {0} if api == "ncclBroadcast" else {2, 3})
