"""A send or receive that was left out, and what is no sign of it."""

from __future__ import annotations

import pytest
from support import messages
from support.analysis import analyze_job, blamed, cover, steps
from support.messages import AR, BIG, RECV, SEND
from support.tracegen import Job

from nccluprobe.match.finding import Finding


def roots(found: list[Finding]) -> list[tuple[str, list[int]]]:
    return [
        (f.details["reason"], [who["rank"] for who in f.named])
        for f in found
        if f.role == "root_cause" and f.state == "open"
    ]


def test_both_the_peer_and_the_communicator_cannot_be_wrong() -> None:
    """Rank 1 sends to rank 3 on another communicator, where it always sent to rank 2."""
    job = Job()
    comms = job.world(4)
    more = {r: comms[r].proc.comm("00000000000000bb", i, 3) for i, r in enumerate((1, 3, 2))}
    post = messages.post
    for i in range(10):
        post(more[1], SEND, 2, 1.0 + i)
        post(more[2], RECV, 0, 1.05 + i)
        for r, c in enumerate(comms):
            if i == 9 and r == 1:
                post(more[1], SEND, 1, 1.2 + i)
            else:
                post(c, SEND, (r + 1) % 4, 1.2 + i)
            post(c, RECV, (r - 1) % 4, (1.3 if r == 0 else 1.1) + i)
    cover(job.procs, 400)
    assert "wrong_peer" not in [f.details["reason"] for f in analyze_job(job)]


def test_who_is_held_behind_another_stream_has_not_gone_past() -> None:
    """Rank 1 waits for rank 0's send, which stands behind a call that rank 2 has not made."""
    job = Job()
    comms = job.world(3)
    more = {r: comms[r].proc.comm("00000000000000bb", i, 2) for i, r in enumerate((0, 2))}
    for c in (*comms, *more.values()):
        c.proc.call(c, AR, 1.0)
    comms[0].proc.call(more[0], AR, 2.0, stream=1)
    messages.post(comms[0], SEND, 1, 2.1, stream=1)
    messages.post(comms[1], RECV, 0, 2.1)
    messages.post(comms[0], RECV, 1, 2.2)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert roots(found) == [("rank_alive_but_not_entered", [2])]
    assert "partner_gone_past" not in [f.details["reason"] for f in found]


def test_halves_of_other_sizes_make_no_step() -> None:
    """Rank 2 left out a receive in the first of two steps, in which rank 0 still is."""
    job = Job()
    comms = job.world(3)
    for step, count in enumerate((BIG, 2 * BIG)):
        for r, c in enumerate(comms):
            args = [{"peer": p, "count": count} for p in range(3) if p != r]
            ops = [(c, api, a) for a in args for api in (SEND, RECV)]
            if (step, r) == (0, 2):
                ops.remove((c, RECV, {"peer": 0, "count": count}))
            if (step, r) != (1, 0):
                c.proc.group(ops, 2.0 + step)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert "p2p_mismatch" in [f.hang_type for f in found]
    statuses = [s for f in found for s in f.details["missing_rank_status"]]
    assert "call_skipped" not in [s["reason"] for s in statuses]
    assert blamed(found) <= {2}


def test_of_more_than_was_lost_nobody_knows_which_was_left_out() -> None:
    """Rank 2's record of its receive is lost, and it has not come to the next step."""
    job = Job()
    comms = job.world(4)
    for r, c in enumerate(comms):
        ops = [
            (c, SEND, {"peer": (r + 1) % 4, "count": BIG}),
            (c, RECV, {"peer": (r - 1) % 4, "count": BIG, "lost": r == 2}),
        ]
        c.proc.group(ops, 2.0)
    comms[1].proc.enter(comms[1], SEND, 3.0, peer=2, count=BIG)
    comms[3].proc.enter(comms[3], RECV, 3.0, peer=2, count=BIG)
    for r, c in enumerate(comms):
        c.proc.cover(0.5, 400, lost_kernel=int(r == 2))
    found = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert {f.details["reason"] for f in found} == {"rank_alive_but_not_entered"}
    assert blamed(found) == {2}


def test_a_call_that_is_only_supposed_leaves_nothing_behind() -> None:
    """Rank 2 lost a record, and may have made the collective; it waits for rank 3."""
    job = Job()
    comms = job.world(4)
    for c in comms:
        c.proc.call(c, AR, 1.0)
    messages.post(comms[0], SEND, 2, 2.0)
    comms[2].proc.call(comms[2], RECV, 2.0, peer=0, count=BIG, lost=True)
    messages.post(comms[2], SEND, 0, 2.1)
    messages.post(comms[0], RECV, 2, 2.1)
    comms[0].proc.call(comms[0], AR, 3.0)
    comms[2].proc.enter(comms[2], RECV, 4.0, peer=3, count=BIG)
    comms[1].proc.enter(comms[1], RECV, 5.0, peer=2, count=BIG)
    for r, c in enumerate(comms):
        c.proc.cover(0.5, 1.5)
        c.proc.cover(2.5, 400, lost_kernel=int(r == 2))
    found = analyze_job(job)
    assert "partner_gone_past" not in [f.details["reason"] for f in found]
    assert blamed(found) == {3}


def one_more(steps: str, end: bool) -> list[int]:
    """Rank 0 sends (``s``) and receives (``r``); the one in capitals has no other half.

    ``end``: both end the communicator; else rank 1 goes on to a collective.
    """
    job = Job()
    comms = job.world(2)
    for i, way in enumerate(steps):
        for r in (0,) if way.isupper() else (0, 1):
            api = SEND if (way in "sS") == (r == 0) else RECV
            messages.post(comms[r], api, 1 - r, 1.0 + i / 10, 64)
    if not end:
        comms[1].proc.call(comms[1], AR, 20.0)
    for c in comms if end else ():
        c.proc.comm_end(c, 20.0, "destroy")
    cover(job.procs, 400)
    (f,) = (f for f in analyze_job(job) if f.role == "root_cause")
    assert f.hang_type == "p2p_unmatched"
    return [who["rank"] for who in f.named]


def test_of_two_one_has_made_a_call_too_many_where_all_was_even_before() -> None:
    """Else it may have been due, and the other one has left its half out."""
    assert one_more("srsrrs" + "S", end=True) == [0]
    assert one_more("sr" + "S", end=True) == []  # no habit so far
    assert one_more("srsrrs" + "r" + "R" + "s", end=True) == []  # one way in the step before
    assert one_more("srsrrs" + "R", end=False) == []  # its step may go on


@pytest.mark.parametrize(("made", "named"), [((1, 2), set()), ((1,), {1})])
def test_a_whole_step_that_a_peer_lacks_may_come_after_a_call_that_most_made(
    made: tuple[int, ...], named: set[int]
) -> None:
    """Rank 1 has gone past both halves of a step, or rank 0 has left out the call before it."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 3)
    for r in made:
        comms[r].proc.call(comms[r], "ncclAllReduce", t)
    for r in {0, 2} - set(made):
        peer = 1 - r if r == 0 else 0
        half = {"peer": peer, "count": 1 << 24}
        ops = [(comms[r], f"nccl{x}", dict(half)) for x in ("Send", "Recv")]
        comms[r].proc.group(ops, t + 1, state="inside")
    cover(job.procs, t + 400)
    assert blamed(analyze_job(job)) == named


@pytest.mark.parametrize(
    ("sizes", "said"),
    [((BIG, 2 * BIG), ("rank_alive_but_not_entered", [1])), ((BIG, BIG), ("call_skipped", []))],
)
def test_a_half_that_does_not_fit_the_next_operation_is_of_no_later_step(
    sizes: tuple[int, ...], said: tuple[str, list[int]]
) -> None:
    """Rank 1 lacks the call before its receives, or rank 0 the first of the sends to it."""
    job = Job()
    comms = job.world(3)
    messages.exchange(comms, 1, 1.0, stream=0)
    for r in (0, 2):
        comms[r].proc.call(comms[r], AR, 2.0, stream=0)
    messages.exchange(comms, 2, 3.0, sizes, stream=0)
    cover(job.procs, 400)
    assert roots(analyze_job(job)) == [said]


def test_a_call_that_was_lost_is_not_left_out_by_who_made_it() -> None:
    """Rank 0's record of its AllReduce is lost: what it sends then is rank 1's first receive."""
    job = Job()
    zero, one = job.world(2)
    messages.post(one, SEND, 0, 1.0, count=8)
    messages.post(zero, RECV, 1, 1.0, count=8)
    for c in (zero, one):
        c.proc.call(c, AR, 1.1, lost=c is zero)
    messages.post(one, RECV, 0, 1.2)
    messages.post(one, RECV, 0, 1.3)
    messages.post(zero, SEND, 1, 1.3)
    for c in (zero, one):
        c.proc.cover(0.5, 0.9)
        c.proc.cover(2.0, 400, lost_kernel=int(c is zero))
    (f,) = analyze_job(job)
    assert (f.role, f.details["reason"]) == ("unknown", "probe_event_loss_possible")


def test_a_group_whose_end_was_lost_does_not_hold_what_is_not_in_it() -> None:
    """Rank 1 sends in two groups whose ends are lost; rank 0 waits for a receive of it."""
    job = Job()
    zero, one = job.world(2)
    for c in (zero, one):
        c.proc.call(c, AR, 1.0)
    to = {"peer": 1, "count": BIG}
    zero.proc.group([(zero, SEND, to), (zero, RECV, to)], 3.0, state="inside")
    for t in (2.0, 3.0):
        one.proc.group([(one, SEND, {"peer": 0, "count": BIG})], t, lost=True)
    for c in (zero, one):
        c.proc.cover(0.5, 1.5)
        c.proc.cover(4.0, 400, lost_kernel=2 * (c is one))
    assert roots(analyze_job(job)) == [("call_skipped", [1])]


def pair_and_split(made: float | None, inside: bool = True, main: str = "running") -> Job:
    """Rank 0 waits for a send of rank 1, on another stream than all else; both split later.

    ``made``: when the child was made; ``inside``: rank 1 waits in it for rank 0.
    """
    job = Job()
    comms = job.world(3)
    t = steps(comms, 3)
    comms[0].proc.call(comms[0], RECV, t, peer=1, count=BIG, stream=1)
    children = []
    for r, c in enumerate(comms[:2]):
        how = {"t": t + 2.0 if made is None else made, "learnt": "split", "parent": c.id}
        children.append(c.proc.comm("00000000000000bb", r, 2, **how))
    if inside:
        children[1].proc.enter(children[1], RECV, t + 3.0, peer=0, count=7, stream=2)
    comms[0].proc.cover(
        0.5, t + 400, main=main, **({"syscall": "read"} if main != "running" else {})
    )
    cover(job.procs[1:], t + 400)
    return job


def test_what_did_not_come_before_hosts_met_was_left_out() -> None:
    """They made a communicator together after the receive, and before the send."""
    assert roots(analyze_job(pair_and_split(None))) == [("partner_gone_past", [])]


@pytest.mark.parametrize(
    "twin", [{"made": 0.1}, {"made": None, "inside": False}, {"made": None, "main": "syscall"}]
)
def test_twin_they_met_before_or_who_waits_may_be_away(twin: dict[str, object]) -> None:
    found = roots(analyze_job(pair_and_split(**twin)))  # type: ignore[arg-type]
    assert "partner_gone_past" not in [reason for reason, _ in found]


def test_who_is_held_for_want_of_another_may_receive_after_the_meeting() -> None:
    """Rank 0 sends on another stream, and all split; rank 1 receives after the call on the child,
    to which rank 2 does not come."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 3)
    comms[0].proc.call(comms[0], SEND, t, peer=1, count=BIG, stream=1)
    how = {"t": t + 2.0, "learnt": "split"}
    child = [c.proc.comm("00000000000000bb", r, 3, parent=c.id, **how) for r, c in enumerate(comms)]
    for c in child[:2]:
        c.proc.enter(c, AR, t + 3.0, stream=2)
    cover(job.procs, t + 400)
    assert roots(analyze_job(job)) == [("rank_alive_but_not_entered", [2])]


def test_who_waits_elsewhere_before_a_call_has_not_left_it_out() -> None:
    """Rank 0 waits for a send of rank 1 on one communicator; on another one, rank 1 has made a
    collective and goes on to sends there: rank 0 has not come to any of that."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 3)
    pair = [c.proc.comm("00000000000000bb", r, 2) for r, c in enumerate(comms[:2])]
    steps(pair, 2)
    comms[0].proc.call(comms[0], RECV, t, peer=1, count=BIG)
    pair[1].proc.call(pair[1], AR, t + 0.1)
    ops = [(pair[1], SEND, {"peer": 0, "count": BIG}), (pair[1], RECV, {"peer": 0, "count": BIG})]
    pair[1].proc.group(ops, t + 0.2, state="open")
    cover(job.procs, t + 400)
    assert roots(analyze_job(job)) == [("partner_gone_past", [])]


def circle(*more: str, stream: int = 0) -> Job:
    """Rank 0 sends nothing to rank 1, which is to send to rank 2 after that; rank 2 has not come
    to what rank 0 makes on their communicator: a collective, and ``more``."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 3)
    pair = {r: comms[r].proc.comm("00000000000000bb", i, 2) for i, r in enumerate((0, 2))}
    steps(list(pair.values()), 2)
    comms[1].proc.call(comms[1], RECV, t, peer=0, count=BIG)
    comms[1].proc.call(comms[1], SEND, t + 0.1, peer=2, count=BIG)
    comms[2].proc.call(comms[2], RECV, t, peer=1, count=BIG)
    pair[0].proc.call(pair[0], AR, t)
    for i, api in enumerate(more):
        pair[0].proc.call(pair[0], api, t + 0.1 + i / 10, peer=1, count=BIG, stream=stream)
    cover(job.procs, t + 400)
    return job


def test_who_lacks_a_call_and_what_follows_it_has_not_left_out_both() -> None:
    assert roots(analyze_job(circle(SEND))) == [("partner_gone_past", [])]


@pytest.mark.parametrize("job", [circle(), circle(SEND, stream=1)], ids=["one", "stream"])
def test_twin_who_lacks_one_call_may_have_left_it_out(job: Job) -> None:
    assert "partner_gone_past" not in [reason for reason, _ in roots(analyze_job(job))]
