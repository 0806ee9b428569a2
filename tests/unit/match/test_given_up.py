"""Communicators that were aborted and made anew: what was waited for there is over."""

from __future__ import annotations

import pytest
from support.analysis import analyze_job, blamed, cover, steps
from support.tracegen import Comm, Job

FIRST, SECOND, THIRD = "00000000000000aa", "00000000000000bb", "00000000000000cc"
Told = dict[str, tuple[str, list[int], str]]


def told(job: Job) -> Told:
    """hash -> kind, who is named, and the hash of the finding that it comes from."""
    found = analyze_job(job)
    of_id = {f.id: f.comm_uid_hash for f in found}
    return {
        f.comm_uid_hash: (
            f.hang_type,
            sorted(c["rank"] for c in f.named),
            of_id.get(f.downstream_of or "", ""),
        )
        for f in found
    }


def given_up(job: Job, comms: list[Comm], t: float, by: list[int]) -> None:
    """The job stands from ``t`` on; 400 s later these abort the communicator."""
    cover(job.procs, t + 400)
    for r in by:
        comms[r].proc.comm_end(comms[r], t + 400, "abort")


def without_rank_1(by: list[int]) -> tuple[Job, list[Comm], float]:
    """Rank 1 does not come; these abort, and all make a communicator of four anew.

    The last: when their first calls there are over.
    """
    job = Job()
    comms = job.world(4, comm_hash=FIRST)
    t = steps(comms, 20)
    steps([c for r, c in enumerate(comms) if r != 1], 1, start=t)
    given_up(job, comms, t, by)
    anew = [c.proc.comm(SECOND, r, 4, t=t + 402) for r, c in enumerate(comms)]
    t = steps(anew, 10, start=t + 406)
    return job, anew, t


@pytest.mark.parametrize("fault", ["missing", "count", "api"])
def test_a_fault_after_a_restart_is_a_cause_of_its_own(fault: str) -> None:
    """Rank 1 breaks the first communicator; on the one made after it rank 2 does not come."""
    job = Job()
    comms = job.world(4, comm_hash=FIRST)
    t = steps(comms, 20)
    for r, c in enumerate(comms):
        if r != 1:
            c.proc.call(c, "ncclAllReduce", t, count=16)
        elif fault != "missing":
            c.proc.call(c, "ncclBroadcast" if fault == "api" else "ncclAllReduce", t, count=8)
    given_up(job, comms, t, [0, 1, 2, 3] if fault != "missing" else [0, 2, 3])
    anew = [c.proc.comm(SECOND, r, 4, t=t + 402) for r, c in enumerate(comms)]
    t = steps(anew, 10, start=t + 406)
    steps([c for r, c in enumerate(anew) if r != 2], 1, start=t)
    for p in job.procs:
        p.cover(t - 1, t + 400)
    first = "collective_missing_enter" if fault == "missing" else "collective_mismatch"
    assert told(job) == {
        FIRST: (first, [1], ""),
        SECOND: ("collective_missing_enter", [2], ""),
    }


@pytest.mark.parametrize("by", [[0, 2, 3], [0, 1, 2, 3]])
def test_one_rank_breaks_the_communicator_made_anew_too(by: list[int]) -> None:
    """Rank 1 comes neither to a call of the first nor, later, to one of the second."""
    job, anew, t = without_rank_1(by)
    steps([c for r, c in enumerate(anew) if r != 1], 1, start=t)
    for p in job.procs:
        p.cover(t - 1, t + 400)
    assert told(job) == {
        FIRST: ("collective_missing_enter", [1], ""),
        SECOND: ("collective_missing_enter", [1], ""),
    }


@pytest.mark.parametrize("fault", ["count", "missing"])
def test_a_fault_before_a_restart_explains_no_silence_after_it(fault: str) -> None:
    """Rank 1 broke the first communicator; later rank 0 waits for rank 1, and rank 2 is idle."""
    job = Job()
    comms = job.world(3, comm_hash=FIRST)
    t = steps(comms, 20)
    for r, c in enumerate(comms):
        if r != 1 or fault != "missing":
            c.proc.call(c, "ncclAllReduce", t, count=8 if r == 1 else 16)
    given_up(job, comms, t, [0, 1, 2])
    anew = [c.proc.comm(SECOND, r, 3, t=t + 402) for r, c in enumerate(comms)]
    pair = [job.procs[r].comm(THIRD, r, 2, t=t + 402) for r in (0, 1)]
    t = steps(pair, 3, start=steps(anew, 5, start=t + 406))
    steps(pair[:1], 1, start=t)
    for p in job.procs:
        p.cover(t - 1, t + 400)
    first = "collective_missing_enter" if fault == "missing" else "collective_mismatch"
    assert told(job) == {
        FIRST: (first, [1], ""),
        SECOND: ("collective_all_ranks_stuck", [], ""),
        THIRD: ("collective_missing_enter", [1], SECOND),
    }


@pytest.mark.parametrize("by", [[0, 2, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("api", [False, True])
def test_a_fault_before_a_restart_does_not_come_from_one_after_it(by: list[int], api: bool) -> None:
    """Rank 1 does not come; on the communicator made anew rank 2 makes another call than all."""
    job, anew, t = without_rank_1(by)
    for r, c in enumerate(anew):
        name = "ncclBroadcast" if api and r == 2 else "ncclAllReduce"
        c.proc.call(c, name, t, count=8 if r == 2 else 16)
    for p in job.procs:
        p.cover(t - 1, t + 400)
    assert told(job) == {
        FIRST: ("collective_missing_enter", [1], ""),
        SECOND: ("collective_mismatch", [2], ""),
    }


def test_what_waits_since_before_is_a_consequence_all_the_same() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2, gives that up and goes on elsewhere."""
    job = Job()
    pair = job.world(2, comm_hash=FIRST)
    other = [pair[1].proc.comm(SECOND, 0, 2), job.proc(2).comm(SECOND, 1, 2)]
    t = steps([*pair, *other], 10)
    steps([other[0]], 1, start=t)
    steps([pair[0]], 1, start=t + 0.1)
    given_up(job, other, t, [0])
    alone = pair[1].proc.comm(THIRD, 0, 1, t=t + 402)
    t = steps([alone], 10, start=t + 403)
    for p in job.procs:
        p.cover(t - 1, t + 10)
    assert told(job) == {
        SECOND: ("collective_missing_enter", [2], ""),
        FIRST: ("collective_missing_enter", [1], SECOND),
    }


def remade() -> tuple[Job, list[Comm], list[Comm], float]:
    """Rank 3 broke the communicator of all; the others made one of three and one of two.

    The last: when their first calls there are over.
    """
    job = Job()
    comms = job.world(4, comm_hash=FIRST)
    t = steps(comms, 20)
    steps(comms[:3], 1, start=t)
    given_up(job, comms, t, [0, 1, 2])
    three = [comms[r].proc.comm(SECOND, r, 3, t=t + 402) for r in range(3)]
    two = [comms[r].proc.comm(THIRD, r - 1, 2, t=t + 402) for r in (1, 2)]
    t = steps([*three, *two], 10, start=t + 406)
    return job, three, two, t


def test_who_waits_anew_is_held_by_that() -> None:
    """Rank 3 broke the first; then rank 0 waits for rank 2, which waits for rank 1 elsewhere."""
    job, three, two, t = remade()
    steps([three[0]], 1, start=t)
    steps([two[1]], 1, start=t + 0.1)
    for p in job.procs:
        p.cover(t - 1, t + 400)
    assert told(job) == {
        FIRST: ("collective_missing_enter", [3], ""),
        SECOND: ("collective_missing_enter", [1], ""),
        THIRD: ("collective_missing_enter", [1], SECOND),
    }


def test_what_a_rank_came_to_after_the_others_had_given_up_did_not_hold_it() -> None:
    """Rank 0 waits for rank 1 and gives up; only then rank 1 comes where another waits longer."""
    job = Job()
    pair = [job.proc(0).comm(FIRST, 0, 2), job.proc(1).comm(FIRST, 1, 2)]
    three = [p.comm(SECOND, i, 3) for i, p in enumerate((pair[1].proc, job.proc(2), job.proc(3)))]
    alone = pair[0].proc.comm(THIRD, 0, 1)
    t = steps([*pair, *three, alone], 10)
    steps([pair[0]], 1, start=t)
    steps([three[2]], 1, start=t + 1)
    given_up(job, pair, t, [0])
    steps([three[0], alone], 1, start=t + 401)
    for p in job.procs:
        p.cover(t + 401, t + 800)
    assert told(job) == {
        FIRST: ("collective_missing_enter", [1], ""),
        SECOND: ("collective_missing_enter", [2], ""),
    }


@pytest.mark.parametrize("fault", ["left out", "killed"])
def test_what_all_had_given_up_comes_from_no_fault_after_that(fault: str) -> None:
    """Rank 1 breaks the first communicator; on the one made after it rank 2 is at fault."""
    job, anew, t = without_rank_1([0, 2, 3])
    for r, c in enumerate(anew):
        ring = [(c, "ncclRecv", {"peer": (r - 1) % 4, "count": 1 << 24})]
        if r != 2 or fault == "killed":
            ring.append((c, "ncclSend", {"peer": (r + 1) % 4, "count": 1 << 24}))
        c.proc.group(ring, t)
    if fault == "killed":
        steps([c for r, c in enumerate(anew) if r != 2], 1, start=t + 1)
        anew[2].proc.end(t + 2, "signaled", signal=11)
    for r, p in enumerate(job.procs):
        p.cover(t - 1, t + (1.5 if fault == "killed" and r == 2 else 400))
    found = told(job)
    assert found[FIRST] == ("collective_missing_enter", [1], "")
    assert found[SECOND][1:] == ([2], "")


def test_calls_of_an_aborted_communicator_are_no_longer_in_the_streams() -> None:
    """After it two ranks call on two communicators in opposite orders, on that stream."""
    job, three, two, t = remade()
    steps([three[0], three[1]], 1, start=t)
    steps([two[1]], 1, start=t + 0.1)
    for p in job.procs:
        p.cover(t - 1, t + 400)
    kinds = sorted(f.hang_type for f in analyze_job(job) if f.role == "root_cause")
    assert kinds == ["collective_missing_enter", "cross_comm_order_inversion"]


def test_calls_of_the_second_before_an_abort_were_complete() -> None:
    """A young job: rank 1 aborts, the others give up and end; it is killed long after that."""
    job = Job()
    comms = job.world(4, comm_hash=FIRST)
    t = steps(comms, 10, step=0.05)
    steps([c for r, c in enumerate(comms) if r != 1], 1, start=t)
    comms[1].proc.comm_end(comms[1], t + 0.001, "abort")
    for r in (0, 2, 3):
        comms[r].proc.comm_end(comms[r], t + 0.002, "abort")
        comms[r].proc.cover(0.5, t + 0.05)
        comms[r].proc.end(t + 0.05, code=21)
    comms[1].proc.cover(0.5, t + 100)
    comms[1].proc.end(t + 100, how="signaled", signal=15)
    assert told(job) == {FIRST: ("comm_ended_under_waiters", [1], "")}


@pytest.mark.parametrize("fault", ["error", "echo"])
def test_whose_call_failed_because_of_another_did_not_stay_away(fault: str) -> None:
    """Rank 1 waits in a call that rank 2 broke; that of rank 0 failed, and it gives up."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    steps([comms[1]], 2, start=t)
    comms[2].proc.call(comms[2], "ncclAllReduce", t + 0.1, dur=0.01, rc=2)
    comms[0].proc.call(comms[0], "ncclAllReduce", t + 2, dur=0.01, rc=2 if fault == "echo" else 6)
    comms[0].proc.comm_end(comms[0], t + 2.1, "abort")
    cover(job.procs, t + 400)
    found = analyze_job(job)
    assert blamed(found) == {2}
    (f,) = [f for f in found if f.hang_type != "nccl_error_exit"]
    assert f.role == "downstream"


@pytest.mark.parametrize("before", [True, False])
def test_an_absence_after_one_that_was_given_up_is_one_fault(before: bool) -> None:
    """Rank 3 does not come, all abort, and then it stays away from two new communicators."""
    job = Job()
    xs = job.world(4, comm_hash=FIRST)
    t = steps(xs, 10)
    if before:
        steps(xs[:3], 1, start=t)
        cover(job.procs, t + 100)
        for x in xs:
            x.proc.comm_end(x, t + 100, "abort")
    t += 101
    ys = [x.proc.comm(SECOND, r, 4, t=t) for r, x in enumerate(xs)]
    zs = [xs[r].proc.comm(THIRD, i, 2, t=t) for i, r in enumerate((0, 3))]
    t = steps(zs, 3, start=steps(ys, 10, start=t + 1)) + 1
    steps(ys[1:3], 1, start=t)
    steps(zs[:1], 1, start=t)
    cover(job.procs, t + 400)
    found = {f.comm_uid_hash: f for f in analyze_job(job)}
    roots = {h for h, f in found.items() if f.role == "root_cause"}
    assert roots == ({FIRST, SECOND} if before else {SECOND})
    assert found[THIRD].downstream_of == found[SECOND].id


def test_a_consequence_is_of_the_fault_that_is_not_over_when_it_begins() -> None:
    """Rank 3 does not come, all abort; then it stays away again, and holds up rank 0.

    Rank 2 has waited for that one from before it came to its own call.
    """
    job = Job()
    xs = job.world(4, comm_hash=FIRST)
    t = steps(xs, 10)
    steps(xs[:3], 1, start=t)
    cover(job.procs, t + 100)
    for x in xs:
        x.proc.comm_end(x, t + 100, "abort")
    t += 101
    ys = [xs[r].proc.comm(SECOND, i, 2, t=t) for i, r in enumerate((0, 3))]
    zs = [xs[r].proc.comm(THIRD, i, 2, t=t) for i, r in enumerate((0, 2))]
    t = steps([*ys, *zs], 10, start=t + 1) + 1
    steps(zs[1:], 1, start=t)
    ys[0].proc.enter(ys[0], "ncclAllReduce", t + 0.5)
    cover(job.procs, t + 400)
    found = {f.comm_uid_hash: f for f in analyze_job(job)}
    assert [found[h].role for h in (FIRST, SECOND)] == ["root_cause", "root_cause"]
    assert found[THIRD].downstream_of == found[SECOND].id
