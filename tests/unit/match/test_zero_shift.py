"""What one call of count 0, in place of a real one, makes of the calls after it."""

from __future__ import annotations

import pytest
from support.analysis import Run, analyze_job, cover
from support.tracegen import Comm, Job

from nccluprobe.match import device_ran
from nccluprobe.match.finding import Finding

AR, SEND, RECV = "ncclAllReduce", "ncclSend", "ncclRecv"
BIG = 1 << 24


def blamed(found: list[Finding]) -> set[int]:
    return {
        who["rank"]
        for f in found
        if f.role == "root_cause" and f.state == "open"
        for who in f.named
    }


def stuck(job: Job) -> set[tuple[int, int]]:
    """(rank, ordinal of the call on its communicator) at heads of streams that cannot end."""
    run = Run(job)
    run.all()
    run.scan()
    matcher = run.analysis.matcher
    stalls = matcher.p2p.run_devices(matcher.comms, matcher._context, matcher.waits)
    return {(s.endpoint.process.rank or 0, p.idx) for s in stalls.stalls for p in s.parts}


def explained(found: list[Finding]) -> bool:
    return all(
        "count 0" in f.details.get("explanation", "") for f in found if f.role == "root_cause"
    )


def shifted(job: Job, comms: list[Comm], at: int, calls: int = 8) -> float:
    """Equal calls of all, one of which rank 2 makes with count 0."""
    for i in range(calls):
        for r, c in enumerate(comms):
            count = 0 if (r, i) == (2, at) else 1024
            c.proc.call(c, AR, 1 + 0.1 * i, count=count, stream=0)
    return 1 + 0.1 * calls


@pytest.mark.parametrize("at", [0, 3, 7])
def test_who_is_ahead_by_a_call_of_count_0_is_named_where_all_are_inside(at: int) -> None:
    """The others wait for it in one call, it waits for one of them in the next."""
    job = Job()
    xs = job.world(4)
    ys = [xs[r].proc.comm("00000000000000bb", i, 2) for i, r in enumerate((1, 2))]
    t = shifted(job, xs, at)
    for c in xs:
        if c is not xs[2]:
            c.proc.enter(c, "ncclCommDestroy", t)
    ys[1].proc.enter(ys[1], AR, t)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert blamed(found) == {2}, found
    assert explained(found)


def test_hosts_that_wait_for_the_device_behind_it_are_not_named() -> None:
    """Nor is an order of the calls: what stands in one slot is not what was called together."""
    job = Job()
    xs = job.world(3)
    ys = [c.proc.comm("00000000000000bb", r, 3) for r, c in enumerate(xs)]
    t = shifted(job, xs, 3)
    ys[2].proc.enter(ys[2], AR, t, stream=0)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert blamed(found) == {2}, found
    assert explained(found)


@pytest.mark.parametrize("inside", [False, True])
def test_a_peer_in_a_collective_behind_it_has_not_gone_past_a_send(inside: bool) -> None:
    job = Job()
    xs = job.world(3)
    t = shifted(job, xs, 7)
    if inside:
        xs[2].proc.enter(xs[2], RECV, t, peer=1, count=BIG, stream=0)
    else:
        xs[2].proc.call(xs[2], RECV, t, peer=1, count=BIG, stream=0)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert blamed(found) == {2}, found
    assert explained(found)


@pytest.mark.parametrize("few", [0, 1 << 30])
@pytest.mark.parametrize("zero", [{1}, {0, 2}])
@pytest.mark.parametrize("sender", [0, 1])
def test_calls_before_it_keep_their_places_on_the_devices(
    sender: int, few: int, zero: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A send is not received: the call behind it, that all made, cannot end."""
    monkeypatch.setattr(device_ran, "_FEW", few)
    job = Job()
    xs = job.world(3)
    for i, count in enumerate([1, 2, 3, 0, 4, 5, 6, 7]):
        if i == 1:
            xs[sender].proc.call(xs[sender], SEND, 1.05, peer=2, count=BIG, stream=0)
        for r, c in enumerate(xs):
            if count or r in zero:
                c.proc.call(c, AR, 1 + 0.1 * i, count=count, stream=0)
    xs[0].proc.call(xs[0], AR, 3, stream=0)
    cover(job.procs, 400)
    assert stuck(job) == {(0, 1), (1, 1), (2, 1)}


def crossing(until: float) -> Job:
    """Rank 0 makes it; all have made as many calls, and a send stands before the last."""
    job = Job()
    xs = job.world(3)
    t = shifted(job, [xs[1], xs[2], xs[0]], 3)
    xs[0].proc.call(xs[0], SEND, t, peer=1, count=BIG, stream=0)
    xs[1].proc.call(xs[1], RECV, t, peer=0, count=BIG, stream=0)
    for i, c in enumerate([*xs, xs[0]]):
        c.proc.call(c, AR, t + 0.1 + 0.01 * i, count=1024, stream=0)
    cover(job.procs, until)
    return job


def test_streams_that_hold_up_each_other_because_of_it_are_no_order() -> None:
    assert analyze_job(crossing(40)) == []
    job = crossing(400)
    (f,) = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert (f.hang_type, f.severity) == ("collective_mismatch", "error")
    assert [d["rank"] for d in f.named] == [0]
    assert f.details["confidence"] == "inferred"
    assert "count 0" in f.details["explanation"]
    assert "one call ahead" in f.details["summary"]


def test_nor_are_those_of_two_communicators() -> None:
    job = Job()
    xs = job.world(3)
    ys = [c.proc.comm("00000000000000bb", r, 3) for r, c in enumerate(xs)]
    t = shifted(job, xs, 3)
    for c in (*ys, *xs):
        c.proc.call(c, AR, t, count=1024, stream=0)
    xs[2].proc.call(xs[2], AR, t + 0.1, count=1024, stream=0)
    ys[0].proc.call(ys[0], AR, t + 0.2, count=1024, stream=0)
    cover(job.procs, 400)
    found = analyze_job(job)
    (f,) = [f for f in found if f.role == "root_cause"]
    assert (f.hang_type, [d["rank"] for d in f.named]) == ("collective_mismatch", [2])
    assert {g.downstream_of for g in found if g is not f} == {f.id}


def test_one_that_came_after_it_does_not_explain_an_order() -> None:
    job = Job()
    xs = job.world(2)
    xs[0].proc.call(xs[0], SEND, 1.05, peer=1, count=BIG, stream=0)
    for c in xs:
        c.proc.call(c, AR, 1.1, count=1024, stream=0)
    xs[1].proc.call(xs[1], RECV, 1.15, peer=0, count=BIG, stream=0)
    for r, c in enumerate(xs):
        for i, count in enumerate([1, 2, 3, 4] if r else [1, 2, 0, 3, 4]):
            c.proc.call(c, AR, 1.2 + 0.1 * i, count=count, stream=0)
    cover(job.procs, 400)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.named) == ("p2p_order_inversion", [])


def test_one_that_did_no_harm_is_not_told() -> None:
    """The call that the others wait in is one that it has come to."""
    job = Job()
    xs = job.world(3)
    good = [1, 2, 3, 4, 5, 6]
    for r, c in enumerate(xs):
        for i, count in enumerate([*good[:3], 0, *good[3:]] if r == 2 else good):
            c.proc.call(c, AR, 1 + 0.1 * i, count=count, stream=0)
    ys = [c.proc.comm("00000000000000bb", r, 3) for r, c in enumerate(xs)]
    for c in (ys[0], ys[2]):
        c.proc.call(c, AR, 3, stream=0)
    job.procs[1].cover(0.5, 400, main="stopped")
    for p in (job.procs[0], job.procs[2]):
        p.cover(0.5, 400)
    assert blamed(analyze_job(job)) == {1}


@pytest.mark.parametrize("who", [0, 1])
def test_of_two_ranks_who_passed_count_0_has_made_the_odd_call(who: int) -> None:
    """It goes on to a step of sends and receives, where the other waits in the call before."""
    job = Job()
    xs = job.world(2)
    for i in range(8):
        for r, c in enumerate(xs):
            c.proc.call(c, AR, 1 + 0.1 * i, count=0 if (r, i) == (who, 3) else 1024, stream=0)
    c = xs[who]
    half = {"peer": 1 - who, "count": BIG, "stream": 0}
    c.proc.group([(c, SEND, dict(half)), (c, RECV, dict(half))], 2.0)
    for i in range(8):
        c.proc.call(c, AR, 2.1 + 0.1 * i, stream=0)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert 1 - who not in blamed(found), found
    assert any(f.role == "root_cause" for f in found)
