"""What a step tells of sends and receives that were lost in it, made too often, or left out."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import Run, analyze_job
from support.tracegen import Comm, Job, unix

from nccluprobe.match.p2p_fill import is_counted

SEND, RECV, AR = "ncclSend", "ncclRecv", "ncclAllReduce"
SMALL, BIG = 1 << 8, 1 << 24


def one_step(comms: list[Comm], wrong: str, how: str) -> None:
    """A ring, of one send and receive each, or two.

    ``wrong``: rank 0 makes a send that is ``extra``, or rank 1 ``skipped`` a receive.
    """
    for r, c in enumerate(comms):
        sends = 2 if wrong == "skipped" or r == 0 else 1
        recvs = 2 if wrong == "skipped" and r != 1 else 1
        to, source = (r + 1) % len(comms), (r - 1) % len(comms)
        calls: list[tuple[Comm, str, dict[str, Any]]] = [(c, SEND, {"peer": to})] * sends
        calls += [(c, RECV, {"peer": source})] * recvs
        if how != "between collectives":
            c.proc.group(calls, 1.1)
        else:
            for i, (_, api, more) in enumerate(calls):
                c.proc.call(c, api, 1.1 + 0.01 * i, **more)


def judged(job: Job) -> list[tuple[str, str, list[int]]]:
    """Kind, reason and named ranks of root causes, after all have left in order."""
    for p in job.procs:
        p.comm_end(p.comms[0], 12)
        p.cover(0.5, 30)
    found = [f for f in analyze_job(job) if f.role == "root_cause"]
    return [(f.hang_type, f.details["reason"], [w["rank"] for w in f.named]) for f in found]


@pytest.mark.parametrize("how", ["groups", "groups alone", "between collectives"])
@pytest.mark.parametrize(("wrong", "rank"), [("extra", 0), ("skipped", 1)])
def test_what_the_others_make_in_a_step_tells_who_made_more_or_less(
    how: str, wrong: str, rank: int
) -> None:
    """Of all steps they have not made as many: only those of one step can be compared."""
    job = Job()
    comms = job.world(4)
    around = [] if how == "groups alone" else comms
    for c in around:
        c.proc.call(c, AR, 1)
    one_step(comms, wrong, how)
    for c in around:
        c.proc.call(c, AR, 2)
    comms[2].proc.group([(comms[2], SEND, {"peer": 3})], 8)
    comms[3].proc.group([(comms[3], RECV, {"peer": 2})], 8)
    assert judged(job) == [("p2p_unmatched", f"call_{wrong}", [rank])]


@pytest.mark.parametrize(("wrong", "rank"), [("extra", 0), ("skipped", 1)])
def test_of_two_ranks_their_other_groups_tell_who_made_more_or_less(wrong: str, rank: int) -> None:
    """Sizes differ from step to step, and rank 0 sends more than rank 1."""
    job = Job()
    a, b = job.world(2)
    for i in range(5):
        args = {"count": 64 + 7 * i * i}
        sends, receives = 2 + (i == 4 and wrong == "extra"), 2 - (i == 4 and wrong == "skipped")
        calls = [(a, SEND, {"peer": 1, **args})] * sends
        a.proc.group([*calls, (a, RECV, {"peer": 1, **args})], 1 + i)
        calls = [(b, RECV, {"peer": 0, **args})] * receives
        b.proc.group([(b, SEND, {"peer": 0, **args}), *calls], 1 + i)
    assert judged(job) == [("p2p_unmatched", f"call_{wrong}", [rank])]


def a2a(comms: list[Comm], t: float, without: dict[tuple[int, str, int], str]) -> None:
    """All send to all in a group; ``without``: (rank, api, peer) -> lost, or left out."""
    for r, c in enumerate(comms):
        calls: list[tuple[Comm, str, dict[str, Any]]] = []
        for peer in range(len(comms)):
            for api in (SEND, RECV):
                how = without.get((r, api, peer))
                if how != "left out" and peer != r:
                    more = {"lost": True} if how else {}
                    calls.append((c, api, {"peer": peer, "count": BIG, **more}))
        c.proc.group(calls, t)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("left_out", "named"), [(1, [3]), (0, [])])
def test_of_more_than_was_lost_in_a_step_one_was_left_out(
    left_out: int, named: list[int], later: bool
) -> None:
    """Ranks 0 and 1 wait for receives of rank 3: of one the record was lost."""
    job = Job()
    comms = job.world(4)
    for c in comms:
        c.proc.call(c, AR, 1)
    a2a(comms, 1.1, {(3, RECV, 1): "lost", **({(3, RECV, 0): "left out"} if left_out else {})})
    for c in comms if later else ():
        c.proc.call(c, AR, 1.2)
    for p in job.procs:
        p.cover(0.5, 1.05)
        p.cover(1.55, 400, lost_kernel=int(p.rank == 3))
    found = [f for f in analyze_job(job) if f.role == "root_cause" and f.state == "open"]
    assert {w["rank"] for f in found for w in f.named} == set(named)
    assert {f.details["confidence"] for f in found} == ({"reduced"} if named else set())


def test_what_was_lost_in_a_step_was_not_what_is_awaited_in_the_next() -> None:
    """Rank 3 came to the step, and lost a receive in it; to the next one it did not come."""
    job = Job()
    comms = job.world(4)
    a2a(comms, 1.1, {(3, RECV, 1): "lost"})
    for r in range(3):
        c = comms[r]
        c.proc.group([(c, SEND, {"peer": 3, "count": BIG})], 2)
    for p in job.procs:
        p.cover(0.5, 1.05)
        p.cover(1.55, 400, lost_kernel=int(p.rank == 3))
    found = [f for f in analyze_job(job) if f.hang_type == "p2p_unmatched"]
    assert {f.details["reason"] for f in found} == {"rank_alive_but_not_entered"}
    assert {f.details["unmatched"][0]["ord"] for f in found} == {1}


@pytest.mark.parametrize(("lost", "reason"), [(False, "partner_gone_past"), (True, "")])
def test_who_went_past_more_than_it_lost_has_left_one_out(lost: bool, reason: str) -> None:
    """Of two receives before its second AllReduce rank 2 lost one.  Or its peers lost calls, too.

    Where ranks 0 and 1 lost their second AllReduce, they may wait for what comes after it.
    """
    job = Job()
    comms = job.world(3)
    for c in comms:
        c.proc.call(c, AR, 1)
    comms[2].proc.call(comms[2], RECV, 1.05, peer=0, count=SMALL)
    comms[0].proc.call(comms[0], SEND, 1.05, peer=2, count=SMALL)
    comms[2].proc.call(comms[2], RECV, 1.1, peer=0, count=BIG, lost=True)
    comms[2].proc.call(comms[2], AR, 1.2)
    for c in comms[:2]:
        if lost:
            c.proc.call(c, AR, 1.2, lost=True)
        c.proc.call(c, SEND, 1.3, peer=2, count=BIG)
    for p in job.procs:
        p.cover(0.5, 1.05)
        p.cover(1.55, 400, lost_kernel=int(lost or p.rank == 2))
    found = [f for f in analyze_job(job) if f.hang_type == "p2p_unmatched"]
    gone = {f.details["reason"] for f in found} & {"partner_gone_past"}
    assert gone == ({reason} if reason else set())


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_how_many_collectives_are_before_a_send_a_later_one_tells(lost: bool, later: bool) -> None:
    job = Job()
    c, other = job.world(2)
    c.proc.call(c, AR, 1.0)
    c.proc.call(c, AR, 1.1, lost=lost)
    c.proc.call(c, SEND, 1.2, peer=1, count=BIG)
    if later:
        c.proc.call(c, AR, 1.3)
    for x in (c, other):
        x.proc.cover(0.5, 2, lost_kernel=int(lost and x is c))
    run = Run(job)
    run.all()
    run.scan(unix(2))
    (e,) = (e for e in run.analysis.matcher.endpoints.values() if e.comm_rank == 0)
    assert is_counted(e, 2) == (later or not lost)


def test_who_lacks_a_call_is_told_where_a_receive_of_it_was_lost_before() -> None:
    """Rank 0's receive is put in for the send that nothing else of it matches."""
    job = Job()
    zero, one = job.world(2)
    for c in (zero, one):
        c.proc.call(c, AR, 1)
    one.proc.call(one, SEND, 1.1, peer=0, count=SMALL)
    zero.proc.call(zero, RECV, 1.1, peer=1, count=SMALL, lost=True)
    zero.proc.call(zero, SEND, 1.2, peer=1, count=SMALL)
    one.proc.call(one, RECV, 1.2, peer=0, count=SMALL)
    one.proc.call(one, AR, 1.3)
    for c in (zero, one):
        c.proc.cover(0.5, 1.1)
        c.proc.cover(1.8, 400, lost_kernel=int(c is zero))
    (f,) = analyze_job(job)
    assert (f.role, f.hang_type) == ("root_cause", "collective_missing_enter")
    assert [w["rank"] for w in f.named] == [0]
