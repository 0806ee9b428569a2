"""Rules of devices and stalls that no other test would miss."""

from __future__ import annotations

from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Job

from nccluprobe.match.finding import Finding

AR, SEND, RECV, DESTROY = "ncclAllReduce", "ncclSend", "ncclRecv", "ncclCommDestroy"
BIG = 1 << 24


def causes(found: list[Finding]) -> list[tuple[str, list[int]]]:
    return [
        (f.hang_type, [who["rank"] for who in f.named])
        for f in found
        if f.role == "root_cause" and f.state == "open"
    ]


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
    run = Run(job)
    run.all()
    run.scan()
    matcher = run.analysis.matcher
    stalls = matcher.p2p.run_devices(matcher.comms, matcher._context, matcher.waits).stalls
    assert {(s.endpoint.comm_rank, s.node.idx) for s in stalls} == {(1, 304), (2, 303)}
    assert causes(analyze_job(job)) == [("collective_missing_enter", [0])]


def test_all_silent_after_one_call_are_one_stall_also_when_one_alone_is_waited_for() -> None:
    """Rank 1 stands where rank 0 stands, which nobody waits for: it does not stand out."""
    job = Job()
    a, b, c = (job.proc(r) for r in range(3))
    pair = [a.comm("00000000000000aa", 0, 2), b.comm("00000000000000aa", 1, 2)]
    other = [b.comm("00000000000000bb", 0, 2), c.comm("00000000000000bb", 1, 2)]
    t = steps(other, 5)
    t = steps(pair, 5, start=t)
    steps(other[1:], 1, start=t)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert causes(found) == [("collective_all_ranks_stuck", [])]
    assert [f.role for f in found if f.hang_type == "collective_missing_enter"] == ["downstream"]


def test_who_is_inside_the_destroy_as_well_has_not_returned_from_it() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for c in comms:
        c.proc.comm_end(c, t)
        c.proc.enter(c, DESTROY, t)
        c.proc.cover(0.5, 400)
    assert causes(analyze_job(job)) == []
