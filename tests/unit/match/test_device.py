"""What the devices can have done, and what it tells of who waits for whom."""

from __future__ import annotations

import pytest
from support.analysis import Run, analyze_job, cover
from support.tracegen import Comm, Job

from nccluprobe.match.cycles import cycle_finding
from nccluprobe.match.finding import Finding
from nccluprobe.match.graph import Cycle
from nccluprobe.match.options import SECOND, Options

AR, SEND, RECV = "ncclAllReduce", "ncclSend", "ncclRecv"
BIG, FEW = 1 << 24, 64


def world(n: int, comms: int = 1, steps: int = 2) -> tuple[Job, list[list[Comm]]]:
    """``n`` ranks on some communicators, which made a few calls on each."""
    job = Job()
    made = [job.world(n)]
    for k in range(1, comms):
        made.append([c.proc.comm(f"{0xAA + k:016x}", r, n) for r, c in enumerate(made[0])])
    for step in range(steps):
        for k, cs in enumerate(made):
            for c in cs:
                c.proc.call(c, AR, 1 + step + 0.1 * k, stream=0)
    return job, made


def post(c: Comm, api: str, peer: int, t: float, count: int = BIG) -> None:
    c.proc.call(c, api, t, peer=peer, count=count, stream=0)


def blamed(found: list[Finding]) -> set[int]:
    return {
        who["rank"]
        for f in found
        if f.role == "root_cause" and f.state == "open"
        for who in f.named
    }


def kinds(found: list[Finding]) -> set[str]:
    return {f.hang_type for f in found if f.role == "root_cause" and f.state == "open"}


def stuck(job: Job) -> set[tuple[int, int]]:
    """(rank, ordinal of the call on its communicator) at heads of streams that cannot end."""
    run = Run(job)
    run.all()
    run.scan()
    matcher = run.analysis.matcher
    stalls = matcher.p2p.run_devices(matcher.comms, matcher._context, matcher.waits)
    return {(s.endpoint.process.rank or 0, p.idx) for s in stalls.stalls for p in s.parts}


def test_a_call_that_all_made_is_stuck_behind_an_open_send() -> None:
    """Rank 1's send waits for rank 2, which waits for the collective behind it."""
    job, (cs,) = world(3)
    post(cs[1], SEND, 2, 5)
    for c in cs:
        c.proc.call(c, AR, 6, stream=0)
    c = cs[0]
    c.proc.call(c, AR, 7, stream=0)
    cover(job.procs, 400)
    assert stuck(job) == {(0, 2), (1, 2), (2, 2)}


def test_a_small_send_holds_nothing() -> None:
    job, (cs,) = world(3)
    post(cs[1], SEND, 2, 5, FEW)
    for c in cs:
        c.proc.call(c, AR, 6, stream=0)
    cs[0].proc.call(cs[0], AR, 7, stream=0)
    cover(job.procs, 400)
    assert stuck(job) == {(0, 3)}


def test_calls_of_another_stream_go_on() -> None:
    job, (cs,) = world(3)
    post(cs[1], SEND, 2, 5)
    for c in cs:
        c.proc.call(c, AR, 6, stream=1)
    cs[0].proc.call(cs[0], AR, 7, stream=1)
    cover(job.procs, 400)
    assert stuck(job) == {(0, 3), (1, 2)}


@pytest.mark.parametrize("count", [FEW, BIG])
def test_the_root_of_a_small_broadcast_waits_for_nobody(count: int) -> None:
    job, (cs,) = world(3)
    for c in cs[:2]:
        c.proc.call(c, "ncclBroadcast", 5, count=count, root=0, op=None, stream=0)
    cover(job.procs, 400)
    assert stuck(job) == (set() if count == FEW else {(0, 2), (1, 2)})


def test_who_made_one_call_more_than_most_is_named() -> None:
    """What it queued behind the extra call holds up the others."""
    job, (cs,) = world(3)
    cs[1].proc.call(cs[1], AR, 5, stream=0)
    for a, b in ((0, 1), (1, 0), (1, 2), (2, 1)):
        post(cs[a], SEND if a < b else RECV, b, 6 + 0.1 * min(a, b))
    cover(job.procs, 400)
    found = analyze_job(job)
    assert blamed(found) == {1}, found
    assert kinds(found) == {"skipped_or_extra_call"}


def test_who_made_one_call_more_is_named_though_one_is_free() -> None:
    """Would rank 4 come to the call, the others waited on for rank 1, which waits for them."""
    job, (cs,) = world(5)
    cs[1].proc.call(cs[1], AR, 5, stream=0)
    for a in (0, 2, 3):
        post(cs[a], RECV, 1, 6)
        post(cs[1], SEND, a, 6.1 + 0.1 * a)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert blamed(found) == {1}, found
    assert kinds(found) == {"skipped_or_extra_call"}


def test_who_is_inside_a_send_has_not_left_out_a_call_that_most_have_not_made() -> None:
    """Rank 1 makes its sends after the call: the others make theirs without it."""
    job, (cs,) = world(5)
    cs[1].proc.call(cs[1], AR, 5, stream=0)
    for a in (0, 2, 3):
        post(cs[a], RECV, 1, 6)
        post(cs[1], SEND, a, 6.1 + 0.1 * a)
    send = {"peer": 0, "count": BIG, "stream": 0}
    cs[4].proc.group([(cs[4], SEND, send)], 6, state="inside")
    cover(job.procs, 400)
    assert blamed(analyze_job(job)) == {1}


def test_who_left_out_a_call_that_most_made_is_named() -> None:
    job, (cs,) = world(3)
    for c in (cs[0], cs[2]):
        c.proc.call(c, AR, 5, stream=0)
    for a, b in ((0, 1), (1, 0), (1, 2), (2, 1)):
        post(cs[a], SEND if a < b else RECV, b, 6 + 0.1 * min(a, b))
    cover(job.procs, 400)
    found = analyze_job(job)
    assert blamed(found) == {1}, found
    assert kinds(found) == {"collective_missing_enter"}


def test_of_two_nobody_is_named() -> None:
    job, (cs,) = world(2)
    cs[1].proc.call(cs[1], AR, 5, stream=0)
    post(cs[0], SEND, 1, 6)
    post(cs[1], RECV, 0, 6)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert blamed(found) == set()
    assert kinds(found) == {"skipped_or_extra_call"}


def test_what_stands_behind_a_call_on_another_communicator_may_have_been_left_out() -> None:
    """Rank 1 made a call that rank 0 has not: too early, or it left out the send before it."""
    job, (cs, ds) = world(2, comms=2)
    ds[1].proc.call(ds[1], AR, 5, stream=0)
    post(cs[0], SEND, 1, 6)
    post(cs[1], RECV, 0, 6)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert blamed(found) == set()
    assert "p2p_order_inversion" in kinds(found) and "skipped_or_extra_call" not in kinds(found)


def test_a_half_that_is_missing_is_told_before_a_call_too_many() -> None:
    """Rank 1 is inside a send, and its receive before, that rank 0 lacks, is with its device."""
    job, (cs,) = world(2)
    post(cs[1], RECV, 0, 5)
    for c, times in ((cs[0], (6.0,)), (cs[1], (6.0, 6.1))):
        for t in times:
            c.proc.call(c, AR, t, stream=0)
    cs[1].proc.enter(cs[1], SEND, 7, peer=0, count=BIG)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert blamed(found) == set()
    assert "skipped_or_extra_call" not in kinds(found)


def test_several_that_made_a_call_before_others_are_not_all_wrong() -> None:
    """Ranks 1 and 2 made a call, and sends behind it that others wait for."""
    job, (cs, ds) = world(6, comms=2)
    for r in (1, 2):
        ds[r].proc.call(ds[r], AR, 5, stream=0)
        post(cs[r], SEND, r + 2, 6)
        post(cs[r + 2], RECV, r, 5)
    cover(job.procs, 400)
    run = Run(job)
    run.all()
    run.scan()
    matcher = run.analysis.matcher
    (call,) = (w for w in matcher.waits if w.seq is not None and not w.device)
    few = tuple(e.actor for e in call.entered)
    everyone = (*few, *(e.actor for e in call.absent))
    f = cycle_finding(Cycle(0, tuple(matcher.waits), everyone, False, few), matcher._context)
    assert f is not None
    assert (f.hang_type, f.culprits) == ("p2p_order_inversion", ())


def test_a_rank_whose_work_is_held_up_elsewhere_is_no_cause() -> None:
    """Rank 0 has not come to the last call of Y: its device is held by X, which lacks rank 2."""
    job, (xs, ys) = world(3, comms=2)
    for c in xs[:2]:
        c.proc.call(c, AR, 5, stream=0)
    ys[1].proc.call(ys[1], AR, 6, stream=0)
    cover(job.procs, 400)
    assert blamed(analyze_job(job)) == {2}


def test_a_call_whose_group_has_not_ended_has_not_begun() -> None:
    """Rank 2's receive is posted, and waits for rank 1, that is inside its group for rank 0."""
    job = Job()
    cs = job.world(3)
    one = [(cs[1], SEND, {"peer": 2, "count": BIG}), (cs[1], RECV, {"peer": 0, "count": BIG})]
    cs[1].proc.group(one, 5.0, state="inside")
    post(cs[2], RECV, 1, 5)
    cover(job.procs, 400)
    assert stuck(job) >= {(2, 0), (1, 1)}


def crossed_streams() -> tuple[Job, list[Comm]]:
    """Two made both, a send and a call; the orders on one stream exclude each other."""
    job, (cs,) = world(4)
    post(cs[0], SEND, 1, 5)
    for c in cs:
        c.proc.call(c, AR, 6, stream=0)
    post(cs[1], RECV, 0, 7)
    return job, cs


def test_what_two_crossed_streams_hold_is_found_among_sends_and_calls() -> None:
    job, _ = crossed_streams()
    cover(job.procs, 400)
    assert kinds(analyze_job(job)) == {"p2p_order_inversion"}


@pytest.mark.parametrize(("stood", "told"), [(300.0, True), (3.0, True), (1.0, False)])
@pytest.mark.parametrize("number", [15, 9])
def test_crossed_streams_of_a_job_that_was_killed_as_it_hung(
    stood: float, told: bool, number: int
) -> None:
    """What stood for longer than the limit before the end was not brought about by it."""
    job, cs = crossed_streams()
    cover(job.procs, 7 + stood)
    for i, c in enumerate(cs):
        c.proc.end(7 + stood + i / 10, "signaled", signal=number)
    run = Run(job, Options(missing_after=2 * SECOND))
    run.all()
    run.scan()
    found = run.analysis.matcher.book.all()
    assert ("p2p_order_inversion" in kinds(found)) == told


@pytest.mark.parametrize("code", [0, None])
def test_crossed_streams_of_ranks_that_ended_in_order_hold_up_nobody(code: int | None) -> None:
    """A rank that ends by itself did not wait; ``None``: both are there."""
    job, cs = crossed_streams()
    cover(job.procs, 400)
    for c in cs[:2] if code == 0 else ():
        c.proc.end(400, code=code)
    assert ("p2p_order_inversion" in kinds(analyze_job(job))) == (code is None)


def behind_a_receive(stream: int) -> list[Finding]:
    """Rank 2 receives from rank 1, then all call on Y; rank 1 never sends."""
    job, (xs, ys) = world(4, comms=2)
    for step in range(4):
        for src, dst in ((0, 1), (1, 2), (2, 3)):
            post(xs[src], SEND, dst, 5 + step)
            post(xs[dst], RECV, src, 5.1 + step)
    post(xs[2], RECV, 1, 10)
    for y in ys:
        y.proc.call(y, AR, 11, stream=stream if y is ys[2] else 0)
    cover(job.procs, 400)
    return analyze_job(job)


def test_a_call_of_all_behind_a_receive_shuts_out_its_send() -> None:
    """It is left out, or due after the call: nobody is named, but the device is not to blame."""
    (f,) = behind_a_receive(stream=0)
    assert (f.hang_type, f.severity, f.role) == ("p2p_unmatched", "error", "root_cause")
    assert (f.details["reason"], f.named) == ("partner_gone_past", [])


def test_on_another_stream_the_call_ends_and_the_send_may_come() -> None:
    found = behind_a_receive(stream=1)
    assert found and {f.severity for f in found} == {"notice"}


@pytest.mark.parametrize("who", [1, 2, 4])
@pytest.mark.parametrize(
    ("stood", "how", "told"),
    [
        (200.0, "abort", True),
        (200.0, "revoke", True),
        (3.0, "abort", False),
        (200.0, "destroy", False),
    ],
)
def test_crossed_streams_that_stood_until_they_were_aborted(
    stood: float, how: str, told: bool, who: int
) -> None:
    """Some or all give up: that they stood is as true as before.  Who destroys was done."""
    job, cs = crossed_streams()
    cover(job.procs, 400)
    for c in cs[:who]:
        c.proc.comm_end(c, 7 + stood, how)
    assert ("p2p_order_inversion" in kinds(analyze_job(job))) == told
