"""A device that does not go on is told from a rank that does not come."""

from __future__ import annotations

import pytest
from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Comm, Job

from nccluprobe.match.finding import Finding

AR = "ncclAllReduce"


def causes(found: list[Finding]) -> set[tuple[str, tuple[int, ...]]]:
    return {
        (f.hang_type, tuple(sorted(d["rank"] for d in f.named)))
        for f in found
        if f.role == "root_cause" and f.state == "open"
    }


def pair_of(job: Job, a: int, b: int, hash_: str) -> list[Comm]:
    return [job.procs[a].comm(hash_, 0, 2), job.procs[b].comm(hash_, 1, 2)]


def test_a_rank_that_another_one_waits_for_while_a_third_is_silent_too_is_not_blamed() -> None:
    job = Job()
    comms = job.world(3)
    first = pair_of(job, 0, 1, "00000000000000bb")
    t = steps(first, 3, start=steps(comms, 5))
    first[0].proc.call(first[0], AR, t)
    cover(job.procs, t + 400)
    found = analyze_job(job)
    assert causes(found) == {("collective_all_ranks_stuck", ())}
    (stuck,) = [f for f in found if f.role == "root_cause"]
    (absence,) = [f for f in found if f.hang_type == "collective_missing_enter"]
    assert (absence.role, absence.downstream_of) == ("downstream", stuck.id)
    assert stuck.details["confidence"] == "inferred" and stuck.severity == "error"
    assert stuck.details["expected_nranks"] == 3
    assert "a call that all entered, ncclAllReduce #4 or one before," in stuck.details["summary"]


@pytest.mark.parametrize("zero", [False, True])
def test_who_made_a_call_of_count_0_before_is_blamed_beside_one_that_is_silent(zero: bool) -> None:
    """That is why it has not come to the last one; who is done is silent as well."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    first = pair_of(job, 0, 1, "00000000000000bb")
    for i in range(4 if zero else 3):
        for r, c in enumerate(first):
            c.proc.call(c, AR, t + i, count=0 if zero and (r, i) == (1, 2) else 1024)
    if not zero:
        first[0].proc.call(first[0], AR, t + 3)
    cover(job.procs, t + 400)
    alive, stuck = ("collective_missing_enter", (1,)), ("collective_all_ranks_stuck", ())
    assert causes(analyze_job(job)) == {alive if zero else stuck}


@pytest.mark.parametrize("done", [5, 4, None])
def test_whose_device_has_done_all_is_no_sign_of_a_hang(done: int | None) -> None:
    """``done``: calls of rank 2 that are known to be complete."""
    job = Job()
    comms = job.world(3)
    first = pair_of(job, 0, 1, "00000000000000bb")
    t = steps(first, 3, start=steps(comms, 5))
    first[0].proc.call(first[0], AR, t)
    cover(job.procs, t + 400)
    run = Run(job)
    run.all()
    (e,) = [e for e in run.analysis.matcher.endpoints.values() if e.comm_rank == 2]
    e.completed = done
    run.scan()
    alive, stuck = ("collective_missing_enter", (1,)), ("collective_all_ranks_stuck", ())
    assert causes(run.analysis.matcher.book.all()) == {alive if done == 5 else stuck}


@pytest.mark.parametrize("placed", [False, True])
def test_a_rank_that_lost_a_call_between_others_is_silent_as_well(placed: bool) -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for c in comms:
        c.proc.call(c, AR, t, lost=placed and c.proc.rank == 2)
    first = pair_of(job, 0, 1, "00000000000000bb")
    t = steps(first, 3, start=steps(comms, 1, start=t + 1))
    first[0].proc.call(first[0], AR, t)
    cover(job.procs[:2], t + 400)
    job.procs[2].cover(0.5, t)
    job.procs[2].cover(t, t + 400, lost_kernel=1)
    stuck, alive = ("collective_all_ranks_stuck", ()), ("collective_missing_enter", (1,))
    assert causes(analyze_job(job)) == {stuck if placed else alive}


def test_the_one_rank_that_all_others_wait_for_is_blamed() -> None:
    job = Job()
    comms = job.world(3)
    first = pair_of(job, 0, 1, "00000000000000bb")
    second = pair_of(job, 1, 2, "00000000000000cc")
    t = steps(second, 3, start=steps(first, 3, start=steps(comms, 5)))
    first[0].proc.call(first[0], AR, t)
    second[1].proc.call(second[1], AR, t)
    cover(job.procs, t + 400)
    assert causes(analyze_job(job)) == {("collective_missing_enter", (1,))}


def test_who_is_away_is_blamed_whatever_others_do() -> None:
    job = Job()
    comms = job.world(3)
    first = pair_of(job, 0, 1, "00000000000000bb")
    t = steps(first, 3, start=steps(comms, 5))
    first[0].proc.call(first[0], AR, t)
    cover(job.procs, t + 400)
    job.procs[1].cover(t, t + 400.1, main="syscall", syscall="read")
    assert causes(analyze_job(job)) == {("collective_missing_enter", (1,))}


def _held_behind_rank_2(count: int) -> Job:
    """Rank 2 does not come back from a call that all made, and the others not from the next."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    for r, c in enumerate(comms):
        (c.proc.enter if r == 2 else c.proc.call)(c, AR, t)
    for r, c in enumerate(comms):
        if r != 2:
            c.proc.enter(c, AR, t + 0.1, count=count)
    cover(job.procs, t + 400)
    return job


def test_hosts_held_in_calls_that_hold_nobody_show_that_the_device_stands() -> None:
    found = analyze_job(_held_behind_rank_2(1024))
    assert causes(found) == {("collective_all_ranks_stuck", ())}


def test_hosts_in_a_call_that_may_connect_show_nothing() -> None:
    """The next call is the first of its size: it may wait for the absent rank's host."""
    found = analyze_job(_held_behind_rank_2(1 << 24))
    assert causes(found) == {("nccl_missing_exit", (2,))}


def test_ranks_that_are_silent_explain_one_that_may_have_come() -> None:
    """Rank 1 may have made the call that rank 0 waits in, as an event of it was lost."""
    job = Job()
    comms = job.world(5)
    first = pair_of(job, 0, 1, "00000000000000bb")
    t = steps(first, 3, start=steps(comms, 5))
    first[0].proc.call(first[0], AR, t)
    cover([p for p in job.procs if p.rank != 1], t + 400)
    job.procs[1].cover(0.5, t - 1)
    job.procs[1].cover(t + 1, t + 400, lost_kernel=1)
    found = analyze_job(job)
    assert causes(found) == {("collective_all_ranks_stuck", ())}
    (stuck,) = [f for f in found if f.role == "root_cause"]
    (absence,) = [f for f in found if f is not stuck]
    assert absence.details["reason"] == "probe_event_loss_possible"
    assert (absence.role, absence.downstream_of) == ("downstream", stuck.id)


def test_a_rank_that_is_not_observed_may_lack_for_its_own_reason() -> None:
    """The device stands for ranks 0 to 2; why rank 4 does not come to rank 3 nobody knows."""
    job = Job()
    comms = job.world(5)
    first = pair_of(job, 0, 1, "00000000000000bb")
    other = pair_of(job, 3, 4, "00000000000000cc")
    t = steps(first, 3, start=steps(other, 3, start=steps(comms, 5)))
    first[0].proc.call(first[0], AR, t)
    other[0].proc.call(other[0], AR, t)
    cover(job.procs[:4], t + 400)
    job.procs[4].cover(0.5, t)
    found = analyze_job(job)
    assert causes(found) == {("collective_all_ranks_stuck", ())}
    (unseen,) = [f for f in found if f.details["reason"] == "rank_not_observed"]
    assert (unseen.role, unseen.downstream_of) == ("unknown", None)


def test_two_silent_ranks_excuse_one_that_meets_others_in_sends_and_receives_only() -> None:
    """No communicator that all three are in has made a collective."""
    job = Job()
    comms = job.world(4)
    hung = pair_of(job, 2, 3, "00000000000000bb")
    steps(hung, 5)
    for send, recv in ((1, 0), (1, 2)):
        for c, api, peer in ((comms[send], "ncclSend", recv), (comms[recv], "ncclRecv", send)):
            c.proc.call(c, api, 2.0 + 0.1 * recv, peer=peer, count=8)
    comms[0].proc.call(comms[0], "ncclSend", 3.0, peer=1, count=1 << 20)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert causes(found) == {("collective_all_ranks_stuck", ())}
    (stuck,) = [f for f in found if f.role == "root_cause"]
    assert stuck.comm_uid_hash == "00000000000000bb"


def test_who_waits_only_for_one_that_has_come_unseen_is_silent_as_well() -> None:
    """Ranks 2 and 3 lack only a call that rank 1 must have made, as it waits for rank 0."""
    job = Job()
    comms = job.world(4)
    first = pair_of(job, 0, 1, "00000000000000bb")
    t = steps(first, 3, start=steps(comms, 5))
    for c in comms:
        c.proc.call(c, AR, t, lost=c is comms[1])
    first[1].proc.call(first[1], AR, t + 0.1)
    cover([p for p in job.procs if p.rank != 1], t + 400)
    job.procs[1].cover(0.5, t - 0.5)
    job.procs[1].cover(t + 1, t + 400, lost_kernel=1)
    assert causes(analyze_job(job)) == {("collective_all_ranks_stuck", ())}


@pytest.mark.parametrize(("ahead", "other"), [(0, False), (2, False), (0, True)])
def test_a_device_that_hangs_explains_more_than_one_that_lost_too_little_to_have_come(
    ahead: int, other: bool
) -> None:
    """Rank 1 lost one event, and is missed in a call and a send: with the call all are silent.

    ``ahead``: calls that rank 0 has made beyond it.  ``other``: rank 3 lacks a receive, too.
    """
    job = Job()
    comms = job.world(4)
    first = pair_of(job, 1, 2, "00000000000000bb")
    t = steps(first, 3, start=steps(comms, 5))
    for c in comms:
        if c is not comms[1]:
            c.proc.call(c, AR, t)
    first[1].proc.call(first[1], "ncclSend", t + 0.1, peer=0, count=1 << 20)
    if other:
        comms[0].proc.call(comms[0], "ncclSend", t + 0.1, peer=3, count=1 << 20)
    steps(comms[:1], ahead, start=t + 0.2)
    cover([p for p in job.procs if p.rank != 1], t + 400)
    job.procs[1].cover(0.5, t - 0.5)
    job.procs[1].cover(t + 1, t + 400, lost_kernel=1)
    assert causes(analyze_job(job)) == {("collective_all_ranks_stuck", ())}


def test_of_two_that_are_missed_apart_one_hang_before_explains_both() -> None:
    """Rank 0 waits for rank 1, and rank 2 for rank 3, which is held inside the call before."""
    job = Job()
    comms = job.world(4)
    pairs = pair_of(job, 0, 1, "00000000000000bb"), pair_of(job, 2, 3, "00000000000000cc")
    t = steps(comms, 5)
    for pair in pairs:
        t = steps(pair, 3, start=t)
    pairs[0][0].proc.call(pairs[0][0], AR, t)
    pairs[1][0].proc.call(pairs[1][0], AR, t)
    pairs[1][0].proc.call(pairs[1][0], AR, t + 1)
    pairs[1][1].proc.enter(pairs[1][1], AR, t)
    cover(job.procs, t + 400)
    assert causes(analyze_job(job)) == {("collective_all_ranks_stuck", ())}


def test_a_rank_is_no_sure_cause_beside_idle_ones_whom_it_meets_in_sends_only() -> None:
    """Rank 0 may stand behind a hung call of its pair; 1 and 3 have received, and are silent."""
    job = Job()
    comms = job.world(4)
    zero, two = pair_of(job, 0, 2, "00000000000000bb")
    t = steps([zero, two], 3)
    for peer in (1, 3):
        comms[0].proc.call(comms[0], "ncclSend", t, peer=peer, count=8)
        comms[peer].proc.call(comms[peer], "ncclRecv", t, peer=0, count=8)
    two.proc.call(two, AR, t)
    cover(job.procs, t + 400)
    (root,) = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert (root.hang_type, root.details["confidence"]) == ("collective_missing_enter", "inferred")


@pytest.mark.parametrize(("idle", "sure"), [(True, "inferred"), (False, "observed")])
def test_who_does_not_come_to_a_split_may_wait_for_its_device_as_the_idle_do(
    idle: bool, sure: str
) -> None:
    """Ranks 0 and 1 split their communicator; rank 2 is silent, or goes on."""
    job = Job()
    comms = job.world(3)
    pair = pair_of(job, 0, 1, "00000000000000bb")
    t = steps(pair, 3, start=steps(comms, 5))
    pair[0].proc.enter(pair[0], "ncclCommSplit", t, color=0, key=0, ord=1)
    for p in job.procs:
        more = {} if p.rank else {"main": "nccl", "in_flight": 1}
        p.cover(0.5, t + 400, **more)
    if not idle:
        job.procs[2].end(t + 1, code=0)
    (root,) = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert (root.hang_type, root.details["confidence"]) == ("comm_init_missing_enter", sure)
