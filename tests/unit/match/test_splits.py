"""Split, shrink and grow."""

from __future__ import annotations

import pytest
from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Comm, Job

UID = "00000000000000cc"


def test_ranks_of_a_split_follow_from_all_members() -> None:
    job = Job()
    comms = job.world(4)
    children = []
    for r, c in enumerate(comms):
        p = c.proc
        child = p.comm(
            f"00000000000000d{r % 2}",
            None,
            None,
            t=2.0,
            learnt="split",
            parent=c.id,
            child=1,
            color=r % 2,
        )
        p.call(c, "ncclCommSplit", 1.0, dur=0.5, color=r % 2, key=-r, ord=1, new_comm=child.id)
        children.append(child)
    t = steps(children, 5, start=3.0)
    steps(children[:3], 1, start=t)
    cover(job.procs, t + 61)
    (f,) = analyze_job(job)
    assert f.comm_uid_hash == "00000000000000d1"
    assert f.details["expected_nranks"] == 2
    # Keys are in descending order: rank 3 of the parent is rank 0 of the child.
    assert f.details["missing_comm_ranks"] == [0]
    assert f.details["missing_rank_status"][0]["global_rank"] == 3


def test_a_split_that_a_part_of_the_parent_entered() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    for r, c in enumerate(comms[:3]):
        # Rank 1 takes no part, but has to make the call.
        c.proc.enter(c, "ncclCommSplit", t, color=-1 if r == 1 else 0, key=0, ord=1)
    cover(job.procs, t + 70)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.details["api"]) == ("comm_init_missing_enter", "ncclCommSplit")
    assert f.comm_uid_hash == "00000000000000aa"
    assert f.details["entered_comm_ranks"] == [0, 1, 2]
    assert f.details["missing_comm_ranks"] == [3]
    assert f.details["missing_rank_status"][0]["heartbeat"] == "alive"
    assert (f.severity, f.role) == ("notice", "root_cause")


def test_a_split_that_all_entered() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for c in comms:
        c.proc.call(c, "ncclCommSplit", t, dur=3.0, color=0, key=0, ord=1, new_comm=None)
    steps(comms, 5, start=t + 4)
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_ranks_of_a_shrink_keep_the_parents_order() -> None:
    job = Job()
    comms = job.world(4)
    children = []
    for c in (comms[0], comms[2], comms[3]):
        children.append(
            c.proc.comm("00000000000000d0", None, 3, t=2.0, learnt="shrink", parent=c.id, child=1)
        )
    t = steps(children, 5, start=3.0)
    steps(children[:2], 1, start=t)
    cover(job.procs, t + 61)
    (f,) = analyze_job(job)
    assert f.details["missing_comm_ranks"] == [2]
    assert f.details["missing_rank_status"][0]["global_rank"] == 3


def test_split_children_of_a_partial_view_are_not_joinable_and_not_judged() -> None:
    job = Job()
    comms = job.world(2, nranks=8)
    children = []
    for c in comms:
        children.append(
            c.proc.comm("00000000000000d0", None, None, t=2.0, learnt="split", parent=c.id, child=1)
        )
    steps(children[:1], 20_000, start=3.0, step=0.001)
    cover(job.procs, 400)
    run = Run(job)
    run.all()
    assert run.scan() == []
    rows = [len(e.rows) for e in run.analysis.matcher.endpoints.values()]
    assert max(rows) <= 4096


def child_call(c: Comm, api: str, t: float, inside: bool = True, **args: object) -> None:
    make = c.proc.enter if inside else c.proc.call
    make(c, api, t, ord=1, **args)  # type: ignore[operator]


def test_a_split_in_which_all_are_stuck() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for c in comms:
        child_call(c, "ncclCommSplit", t, color=0, key=0)
    cover(job.procs, t + 70)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.culprits) == ("comm_init_stuck", ())


def test_ranks_that_a_shrink_leaves_out_do_not_call_it() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    for c in comms[:3]:
        child_call(c, "ncclCommShrink", t, inside=False, dur=90.0, nranks=1, new_comm=None)
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


@pytest.mark.parametrize("known", [True, False])
def test_a_shrink_that_lacks_more_than_it_leaves_out(known: bool) -> None:
    """Who is left out is known when it is gone; else it may be either of the two."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    for c in comms[:2]:
        child_call(c, "ncclCommShrink", t, nranks=1)
    cover(job.procs[:3], t + 400)
    job.procs[3].cover(0.5, t - 0.5 if known else t + 400)
    if known:
        job.procs[3].end(t - 0.4, code=1)
    (f,) = [f for f in analyze_job(job) if f.hang_type == "comm_init_missing_enter"]
    assert f.severity == "error"
    if known:
        assert [d["rank"] for d in f.named] == [2]
    else:
        assert f.culprits == ()
        assert [c["rank"] for c in f.details["candidates"]] == [2, 3]


def test_all_callers_of_a_shrink_are_stuck() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    for c in comms[:3]:
        child_call(c, "ncclCommShrink", t, nranks=1)
    cover(job.procs, t + 70)
    (f,) = analyze_job(job)
    assert f.hang_type == "comm_init_stuck"
    assert f.details["entered_comm_ranks"] == [0, 1, 2]


GROW = "ncclCommGrow"


@pytest.mark.parametrize("uid", [{}, {"uid_hash": UID}])
def test_a_grow_that_lacks_a_new_rank(uid: dict[str, str]) -> None:
    job = Job()
    comms = job.world(2)
    t = steps(comms, 5)
    for c in comms:
        child_call(c, GROW, t, nranks=4, rank=-1, **uid)
    p = job.proc(2)
    p.enter(None, GROW, t, nranks=4, rank=2, uid_hash=UID)
    cover(job.procs, t + 70)
    found = analyze_job(job)
    assert {f.hang_type for f in found} == {"comm_init_missing_enter"}
    assert all(f.culprits == () for f in found)
    of_parent = next(f for f in found if f.comm_uid_hash != UID)
    assert of_parent.details["missing_new_ranks"] == [3]
    assert [f.details["missing_comm_ranks"] for f in found if f.comm_uid_hash == UID] == [[3]]


def test_a_grow_that_lacks_an_old_rank() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for c in comms[:2]:
        child_call(c, GROW, t, nranks=4, rank=-1)
    job.proc(3).enter(None, GROW, t, nranks=4, rank=3, uid_hash=UID)
    cover(job.procs, t + 70)
    found = analyze_job(job)
    assert [d["rank"] for f in found if f.role == "root_cause" for d in f.named] == [2]


def test_a_grow_that_ends_well() -> None:
    job = Job()
    comms = job.world(2)
    t = steps(comms, 5)
    for c in comms:
        child_call(c, GROW, t, inside=False, dur=50.0, nranks=3, rank=-1, new_comm=None)
    job.proc(2).call(None, GROW, t + 40, dur=10.0, nranks=3, rank=2, uid_hash=UID, new_comm=None)
    cover(job.procs, t + 400)
    assert analyze_job(job) == []
