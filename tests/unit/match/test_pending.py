"""Communicators that are made without blocking (ncclInProgress)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Comm, Job, Proc

from nccluprobe.match.finding import Finding

UID = "00000000000000cc"
IN_PROGRESS = 7
MISSING = "comm_init_missing_enter"


def init(p: Proc, rank: int, t: float, nranks: int = 4, **more: object) -> Comm:
    """An init that returns at once; the communicator that it begins."""
    comm = p.comm(UID, rank, nranks, t=t)
    args = {"uid_hash": UID, "nranks": nranks, "rank": rank, "rc": IN_PROGRESS} | more
    p.call(None, "ncclCommInitRankConfig", t, dur=1e-3, new_comm=comm.id, **args)  # type: ignore[arg-type]
    return comm


def beside(came: Iterable[int], n: int = 4, **more: object) -> tuple[Job, list[Comm], float]:
    """Some of ``n`` ranks begin another communicator after they have used the first."""
    job = Job()
    comms = job.world(n)
    t = steps(comms, 5)
    made = [init(job.procs[r], i, t, nranks=n, **more) for i, r in enumerate(came)]
    return job, made, t


def split(c: Comm, t: float, rc: int = IN_PROGRESS, color: int = 0, **more: object) -> None:
    args = {"color": color, "key": 0, "ord": 1, "new_comm": None, "rc": rc} | more
    c.proc.call(c, "ncclCommSplit", t, dur=1e-3, **args)  # type: ignore[arg-type]


def told(found: list[Finding]) -> list[tuple[str, str]]:
    return [(f.hang_type, f.severity) for f in found]


@pytest.mark.parametrize("more", [{"nonblocking": True}, {}])
def test_an_initialisation_that_a_part_of_the_job_began(more: dict[str, bool]) -> None:
    """Named as if it blocked; who did not come is a candidate."""
    job, _, t = beside(range(3), **more)
    cover(job.procs, t + 70)
    assert told(analyze_job(job)) == [(MISSING, "notice")]
    cover(job.procs, t + 400)
    (f,) = analyze_job(job)
    assert (f.severity, f.role, f.comm_uid_hash) == ("error", "root_cause", UID)
    assert f.details["entered_comm_ranks"] == [0, 1, 2]
    assert f.details["missing_comm_ranks"] == [3]
    assert [c["rank"] for c in f.details["candidates"]] == [3]
    assert "without blocking" in f.details["summary"]


def test_who_begins_it_in_a_group_waits_for_the_others_too() -> None:
    job = Job()
    comms = job.world(2)
    t = steps(comms, 5)
    p = job.procs[0]
    p.groups += 1
    p.call(None, "ncclGroupStart", t)
    comm = p.comm(UID, 0, 2, t=t)
    args = {"uid_hash": UID, "nranks": 2, "rank": 0, "new_comm": comm.id}
    p.call(None, "ncclCommInitRankConfig", t + 1e-4, group=1, gpos=0, **args)
    p.call(None, "ncclGroupEnd", t + 2e-4, rc=IN_PROGRESS, group=1, gpos=1)
    cover(job.procs, t + 400)
    assert told(analyze_job(job)) == [(MISSING, "error")]


def test_all_have_begun_it_and_do_nothing_then() -> None:
    """It may be complete: nobody is seen to ask."""
    job, _, t = beside(range(4))
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_where_a_part_of_the_job_is_not_traced_they_may_have_come_there() -> None:
    job = Job()
    for r in range(3):
        init(job.proc(r), r, 1.0)
    cover(job.procs, 400)
    assert told(analyze_job(job)) == [(MISSING, "notice")]


def test_another_communicator_with_ranks_that_are_not_traced_says_so_too() -> None:
    job = Job()
    comms = [job.proc(r).comm("00000000000000aa", r, 5) for r in range(4)]
    t = steps(comms, 5)
    for i, c in enumerate(comms[:3]):
        init(c.proc, i, t)
    cover(job.procs, t + 400)
    assert (MISSING, "notice") in told(analyze_job(job))
    assert "error" not in {f.severity for f in analyze_job(job)}


@pytest.mark.parametrize(("how", "error"), [("together", True), ("earlier", False)])
def test_all_have_ended_since(how: str, error: bool) -> None:
    """Who went down with the others did not come before; who had left is no candidate."""
    job, _, t = beside(range(3))
    cover(job.procs[:3], t + 400)
    gone = t + 400 if how == "together" else t + 30
    job.procs[3].cover(0.5, gone)
    job.procs[3].end(gone + 0.1, how="signaled", signal=15)
    for p in job.procs[:3]:
        p.end(t + 400.2, how="signaled", signal=15)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.severity) == (MISSING, "error" if error else "notice")
    assert [c["rank"] for c in f.details["candidates"]] == ([3] if error else [])


def test_who_has_lost_events_may_have_begun_it() -> None:
    job, _, t = beside(range(3))
    cover(job.procs[:3], t + 400)
    job.procs[3].cover(0.5, t)
    job.procs[3].cover(t + 1, t + 400, lost_kernel=1)
    assert told(analyze_job(job)) == [(MISSING, "notice")]


@pytest.mark.parametrize("api", ["ncclAllReduce", "ncclSend", "ncclCommSplit"])
def test_a_communicator_that_is_used_is_there(api: str) -> None:
    """A partial view: the other rank of the pair is not traced."""
    job = Job()
    comms = [init(job.proc(r), r, 1.0) for r in range(2)]
    for c in comms:
        if api == "ncclCommSplit":
            split(c, 5.0)
        else:
            c.proc.call(c, api, 5.0, **({"peer": 2} if api == "ncclSend" else {}))
    cover(job.procs, 400)
    assert MISSING not in [f.hang_type for f in analyze_job(job)]


def test_a_call_that_was_refused_is_no_use() -> None:
    job, made, t = beside(range(3))
    made[0].proc.call(made[0], "ncclAllReduce", t + 1, rc=4)
    cover(job.procs, t + 400)
    assert (MISSING, "error") in told(analyze_job(job))


@pytest.mark.parametrize("how", ["abort", "destroy", "finalize"])
def test_who_gave_up_waits_no_more(how: str) -> None:
    job, made, t = beside(range(3))
    for c in made:
        c.proc.comm_end(c, t + 20, how)
    cover(job.procs, t + 400)
    run = Run(job)
    run.all()
    for _ in range(3):  # it is forgotten after the first
        run.scan()
    assert run.analysis.matcher.book.all() == []


def test_a_rank_that_goes_on_elsewhere_is_not_held() -> None:
    job, _, t = beside(range(3))
    steps(job.procs[0].comms[:1] + [p.comms[0] for p in job.procs[1:]], 350, start=t + 1, step=1.0)
    cover(job.procs, t + 360)
    assert analyze_job(job) == []


def test_a_rank_that_is_late_by_two_minutes() -> None:
    job, made, t = beside(range(3))
    made.append(init(job.procs[3], 3, t + 120))
    steps(made, 3, start=t + 121)
    cover(job.procs, t + 400)
    run = Run(job)
    run.until(t + 100)
    assert told(run.scan()) == [(MISSING, "notice")]
    run.all()
    assert [f.state for f in run.scan()] == ["resolved"]


def test_a_rank_that_two_processes_have_begun_to_claim() -> None:
    job = Job()
    init(job.proc(0), 0, 1.0)
    init(job.proc(1), 1, 1.0)
    init(job.proc(None, pid=77), 1, 2.0)
    cover(job.procs, 10)
    found = analyze_job(job)
    assert [f.hang_type for f in found] == ["comm_init_rank_conflict"]


# -- splits --------------------------------------------------------------------


def parents(n: int = 4, nonblocking: bool = True) -> tuple[Job, list[Comm], float]:
    """A communicator that was made, and used."""
    job = Job()
    comms = [init(job.proc(r), r, 1.0, nranks=n) for r in range(n)] if nonblocking else job.world(n)
    return job, comms, steps(comms, 5, start=3.0)


@pytest.mark.parametrize("rc", [0, IN_PROGRESS])
def test_a_split_that_a_part_of_the_parent_began(rc: int) -> None:
    """A split that does not block returns 0: that of such a parent, or by its own config."""
    job, comms, t = parents()
    for r, c in enumerate(comms[:3]):
        split(c, t, rc, color=-1 if r == 1 else 0)
    cover(job.procs, t + 400)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.severity, f.role) == (MISSING, "error", "root_cause")
    assert [d["rank"] for d in f.named] == [3]
    assert (f.details["entered_comm_ranks"], f.details["confidence"]) == ([0, 1, 2], "inferred")


@pytest.mark.parametrize("more", [{"nonblocking": True, "rc": 0}, {"rc": IN_PROGRESS}])
def test_a_split_that_does_not_block_of_a_parent_that_does(more: dict[str, int]) -> None:
    job, comms, t = parents(nonblocking=False)
    for c in comms[:3]:
        split(c, t, **more)
    cover(job.procs, t + 400)
    assert [d["rank"] for f in analyze_job(job) for d in f.named] == [3]


def test_a_split_of_a_split() -> None:
    """It does not block when the first of them does not."""
    job, comms, t = parents()
    made = []
    for r, c in enumerate(comms):
        split(c, t)
        made.append(c.proc.comm("00000000000000dd", r, 4, t=t + 1, learnt="split",
                                parent=c.id, child=1))  # fmt: skip
    t = steps(made, 3, start=t + 2)
    for c in made[:3]:
        split(c, t, rc=0)
    cover(job.procs, t + 400)
    (f,) = analyze_job(job)
    assert (f.comm_uid_hash, [d["rank"] for d in f.named]) == ("00000000000000dd", [3])


@pytest.mark.parametrize(("left", "reason"), [
    (0.1, "rank_alive_but_not_entered"), (300, "rank_exit_or_crash_suspected"),
])  # fmt: skip
def test_a_split_of_a_job_that_has_ended_since(left: float, reason: str) -> None:
    job, comms, t = parents()
    for c in comms[:3]:
        split(c, t)
    cover(job.procs[:3], t + 400)
    comms[3].proc.cover(0.5, t + 400 - left)
    for p in job.procs:
        p.end(t + 400 + 0.1 - (left if p is comms[3].proc else 0), how="signaled", signal=15)
    (f,) = analyze_job(job)
    assert ([d["rank"] for d in f.named], f.severity) == ([3], "error")
    assert f.details["reason"] == reason


def test_splits_that_all_began() -> None:
    job, comms, t = parents()
    for c in comms:
        split(c, t)
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_a_parent_that_is_used_after_its_split_has_a_child() -> None:
    """The call of rank 3 was lost."""
    job, comms, t = parents()
    for c in comms[:3]:
        split(c, t)
    t = steps(comms, 3, start=t + 1)
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_a_child_that_is_seen_is_complete() -> None:
    job, comms, t = parents()
    for r, c in enumerate(comms[:3]):
        split(c, t)
        c.proc.comm("00000000000000dd", r, 4, t=t + 1, learnt="split", parent=c.id, child=1)
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_a_split_whose_callers_have_given_up() -> None:
    job, comms, t = parents()
    for c in comms[:3]:
        split(c, t)
    for c in comms:
        c.proc.comm_end(c, t + 20, "abort")
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_splits_of_one_group_lack_the_first() -> None:
    job, comms, t = parents()
    for c in comms[:3]:
        p = c.proc
        p.groups += 1
        p.call(None, "ncclGroupStart", t)
        split(c, t + 0.01, 0, group=p.groups, gpos=0)
        split(c, t + 0.02, 0, ord=2, group=p.groups, gpos=1)
        p.call(None, "ncclGroupEnd", t + 0.03, rc=IN_PROGRESS, group=p.groups, gpos=2)
    cover(job.procs, t + 400)
    (f,) = analyze_job(job)
    assert (f.details["child"], [d["rank"] for d in f.named]) == (1, [3])


def test_a_rank_attached_late_numbers_its_children_otherwise() -> None:
    job, comms, t = parents(nonblocking=False)
    late = job.proc(4).comm("00000000000000ab", 0, 2, learnt="struct")
    first = comms[0].proc.comm("00000000000000ab", 1, 2)
    split(first, t, ord=2)
    split(late, t, ord=1)
    cover(job.procs, t + 400)
    assert MISSING not in [f.hang_type for f in analyze_job(job)]


def test_ranks_that_a_shrink_leaves_out_are_not_missed() -> None:
    job, comms, t = parents()
    for c in comms[:3]:
        args = {"nranks": 1, "ord": 1, "new_comm": None, "rc": IN_PROGRESS}
        c.proc.call(c, "ncclCommShrink", t, **args)  # type: ignore[arg-type]
    cover(job.procs, t + 400)
    assert analyze_job(job) == []
