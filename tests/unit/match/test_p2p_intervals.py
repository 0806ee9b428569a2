"""A message left out before a call of all, told by what the two made in earlier intervals."""

from __future__ import annotations

import pytest
from support.analysis import analyze_job, cover
from support.messages import AR, RECV, SEND, post
from support.tracegen import Comm, Job

from nccluprobe.match.finding import Finding


def swap(comms: list[Comm], ranks: range, t: float) -> None:
    """Pairs exchange one message each way; in the last step one half may not come."""
    for r in ranks:
        for api in (SEND, RECV) if r % 2 == 0 else (RECV, SEND):
            post(comms[r], api, r ^ 1, t, stream=0)


def job(
    n: int = 4,
    rounds: int = 3,
    closed: bool = True,
    without: str = SEND,
    last: str = "message",
    first: int = 0,
) -> list[Finding]:
    """Each round: the last rank but one gives the last one a message, all reduce, pairs swap.

    ``closed``: all reduce again after the swap.  ``without``: what the last rank but one
    leaves out in a round after ``rounds`` of them (``last`` "message"), or the last rank
    leaves out the call of all (``last`` "call").
    """
    job = Job()
    comms = job.world(n)
    low, high = n - 2, n - 1
    theirs = RECV if without == SEND else SEND
    for i in range(rounds + 1):
        t, broken = 1.0 + i, i == rounds
        stuck = broken and last == "message"
        if not stuck:
            post(comms[low], without, high, t, stream=0)
        post(comms[high], theirs, low, t, stream=0)
        for c in comms[:high] if broken else comms:
            c.proc.call(c, AR, t + 0.2, stream=0)
        swap(comms, range(high) if stuck else range(n), t + 0.3)
        if closed and not broken:
            for c in comms:
                c.proc.call(c, AR, t + 0.5, stream=0)
    cover(job.procs, 400)
    return analyze_job(job)


def named(found: list[Finding]) -> list[tuple[str, list[int]]]:
    return [
        (f.hang_type, [who["rank"] for who in f.named]) for f in found if f.role == "root_cause"
    ]


@pytest.mark.parametrize("n", [4, 6])
@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("without", [SEND, RECV])
def test_who_left_out_a_message_before_a_call_of_all_is_named_by_earlier_rounds(
    n: int, closed: bool, without: str
) -> None:
    """Its next message takes the place of that one, and the other has not come to the call."""
    found = job(n, closed=closed, without=without)
    assert named(found) == [("p2p_unmatched", [n - 2])]
    assert found[0].details["confidence"] == "inferred"


@pytest.mark.parametrize("closed", [True, False])
def test_who_made_its_messages_is_not_named_where_another_left_out_the_call(closed: bool) -> None:
    assert named(job(closed=closed, last="call")) == [("p2p_unmatched", [])]


def test_one_round_before_says_that_something_was_left_out_and_not_by_whom() -> None:
    found = job(rounds=1)
    assert named(found) == [("p2p_unmatched", [])]
    (told,) = (f.details["summary"] for f in found if f.role == "root_cause")
    assert "one made a call too many, or the other one too few" in told
