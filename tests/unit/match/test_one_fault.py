"""What a rank that is named would have had to do: one fault explains all, or it is not named."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import pytest
from support import messages
from support.analysis import analyze_job, blamed, cover, steps
from support.messages import AR, BIG, RECV, SEND
from support.tracegen import Comm, Job

#: All in one stream.
post = partial(messages.post, stream=0)


def swap(comms: list[Comm], t: float, but: Collection[tuple[int, str]] = ()) -> None:
    """Pairs of ranks exchange messages; ``but``: what ranks leave out."""
    for r, c in enumerate(comms):
        for api in (SEND, RECV) if r % 2 == 0 else (RECV, SEND):
            if (r, api) not in but:
                post(c, api, r ^ 1, t)


def test_the_first_message_of_a_pair_is_no_part_of_the_step_of_all() -> None:
    """Rank 5 leaves out the small send that connects it to rank 4; others are connected."""
    job = Job()
    comms = job.world(6)
    swap(comms, 1.0, but={(5, SEND), (4, RECV)})
    steps(comms, 2, start=2.0, stream=0)
    post(comms[4], RECV, 5, 5.0, 64)
    swap(comms, 5.1)
    steps(comms, 3, start=6.0, stream=0)
    cover(job.procs, 400)
    found = analyze_job(job)
    (root,) = (f for f in found if f.role == "root_cause")
    assert (blamed(found), root.details["confidence"]) == ({5}, "inferred")


def test_who_alone_makes_more_between_two_calls_has_left_one_out() -> None:
    """Rank 3 left out the call between two exchanges, and is two exchanges ahead of all."""
    job = Job()
    comms = job.world(6)
    swap(comms, 1.0)
    post(comms[3], RECV, 2, 1.2)
    post(comms[3], SEND, 2, 1.3)
    for r, c in enumerate(comms):
        for i in range(3 if r == 3 else 1):
            c.proc.call(c, AR, 2.0 + 0.1 * i, stream=0)
    cover(job.procs, 400)
    assert blamed(analyze_job(job)) == {3}


@pytest.mark.parametrize(("n", "named"), [(6, 5), (4, 2)])
def test_who_stands_in_a_receive_where_all_others_made_a_call_has_left_it_out(
    n: int, named: int
) -> None:
    """Nobody has sent anything before; of few it is taken that the sender has not sent."""
    job = Job()
    comms = job.world(n)
    t = steps(comms, 3, stream=0)
    for c in comms[:-1]:
        c.proc.call(c, AR, t, stream=0)
    comms[-1].proc.enter(comms[-1], RECV, t, peer=n - 2, count=BIG, stream=0)
    cover(job.procs, 400)
    assert blamed(analyze_job(job)) == {named}


def test_who_receives_before_that_call_in_each_step_has_not_left_it_out() -> None:
    """Of all only rank 4 sends to rank 5, before a call of all; in the last step it does not."""
    job = Job()
    comms = job.world(6)
    for step in range(4):
        if step < 3:
            post(comms[4], SEND, 5, 1.0 + step)
        post(comms[5], RECV, 4, 1.0 + step)
        steps(comms if step < 3 else comms[:5], 1, start=1.5 + step, stream=0)
    cover(job.procs, 400)
    assert blamed(analyze_job(job)) == {4}


@pytest.mark.parametrize("grouped", [True, False])
def test_who_lacks_all_calls_of_a_group_has_left_out_none_of_them(grouped: bool) -> None:
    """Rank 1 stands in a receive; rank 0 has made its send behind calls that rank 1 lacks."""
    job = Job()
    comms = job.world(4)
    pair = [comms[r].proc.comm("00000000000000bb", r, 2) for r in (0, 1)]
    t = steps(pair, 2, start=steps(comms, 3, stream=0), stream=0)
    post(pair[0], SEND, 1, t)
    post(pair[1], RECV, 0, t)
    post(pair[1], RECV, 0, t + 0.1)
    for r in (0, 2, 3):
        calls = [(comms[r], AR, {"stream": 0})] * (2 if grouped else 1)
        if grouped:
            comms[r].proc.group(calls, t + 0.1)
        else:
            comms[r].proc.call(comms[r], AR, t + 0.1, stream=0)
    post(pair[0], SEND, 1, t + 0.2)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert blamed(found) == (set() if grouped else {1})
    assert [f.role for f in found if f.hang_type == "p2p_order_inversion"] == (
        ["root_cause"] if grouped else []
    )


@pytest.mark.parametrize("together", [True, False])
def test_who_stands_with_the_others_in_an_earlier_call_is_not_named_for_a_later_one(
    together: bool,
) -> None:
    """Rank 1 stands in a receive before that call; rank 2 lacks the call after it.

    Else rank 2 lacks it, too, and it is rank 2 that stands in the receive.
    """
    job = Job()
    comms = job.world(5)
    t = steps(comms, 3, stream=0)
    who = 1 if together else 2
    post(comms[who], RECV, 0, t)
    steps(comms, 1, start=t + 0.1, stream=0)
    post(comms[0], SEND, who, t + 0.2)
    for r in (0, 1, 3, 4):
        comms[r].proc.call(comms[r], AR, t + 0.3, stream=0)
    cover(job.procs, 400)
    assert blamed(analyze_job(job)) == (set() if together else {2})


@pytest.mark.parametrize("both", [True, False])
def test_a_call_of_count_0_that_both_make_puts_none_ahead(both: bool) -> None:
    """Rank 0 makes one call too many before it, and sends behind the call that rank 1 lacks."""
    job = Job()
    comms = job.world(2)
    t = steps(comms, 3, stream=0)
    counts = {0: [1024, 0, 1024] if both else [1024, 1024], 1: [0, 1024]}
    for r, c in enumerate(comms):
        for i, count in enumerate(counts[r]):
            c.proc.call(c, AR, t + 0.1 * i, count=count, stream=0)
    post(comms[0], SEND, 1, t + 1)
    post(comms[1], RECV, 0, t + 1)
    cover(job.procs, 400)
    assert blamed(analyze_job(job)) == (set() if both else {1})


def test_a_group_that_lacks_more_than_one_call_was_not_made_on_another_communicator() -> None:
    """Rank 0 leaves out a receive; what rank 1 sent for it looks like one of the next group."""
    job = Job()
    world = job.world(4)
    other = [c.proc.comm("00000000000000bb", r, 4) for r, c in enumerate(world)]
    for r, c in enumerate(world):
        calls = [(c, SEND, {"peer": r ^ 1, "count": BIG}), (c, RECV, {"peer": r ^ 1, "count": BIG})]
        c.proc.group(calls[: 1 if r == 0 else 2], 1.0, **({"state": "inside"} if r == 1 else {}))
        more = other[r]
        if r != 1:
            calls = [(more, api, {"peer": r ^ 1, "count": BIG}) for api in (SEND, RECV)]
            c.proc.group(calls, 2.0, **({"state": "inside"} if r == 0 else {}))
    cover(job.procs, 400)
    found = analyze_job(job)
    assert "wrong_communicator" not in {f.details["reason"] for f in found}
    assert blamed(found) == {0}


def test_who_made_a_call_to_which_its_peer_went_past_is_not_away() -> None:
    """Rank 0 made a call too many, or rank 1 left it out; rank 0 waits in it for the device."""
    job = Job()
    world = job.world(4)
    pair = [world[r].proc.comm("00000000000000bb", r, 2) for r in (0, 1)]
    t = steps(pair, 3, start=steps(world, 3, stream=0), stream=1)
    pair[0].proc.call(pair[0], AR, t, stream=1)
    calls = [(pair[1], api, {"peer": 0, "count": BIG, "stream": 1}) for api in (SEND, RECV)]
    pair[1].proc.group(calls, t)
    for r in (1, 2, 3):
        ops = [(world[r], api, {"peer": 0, "count": BIG, "stream": 0}) for api in (SEND, RECV)]
        world[r].proc.group(ops, t + 0.1, state="inside")
    cover(job.procs, 400)
    assert blamed(analyze_job(job)) == set()
