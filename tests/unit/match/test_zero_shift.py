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
