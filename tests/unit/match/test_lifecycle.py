"""Initialisation, error returns, communicators that end."""

from __future__ import annotations

import pytest
from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Comm, Job, Proc, unix

UID = "00000000000000cc"


def init(
    p: Proc, rank: int, t: float, nranks: int = 4, inside: bool = False, **more: object
) -> None:
    args = {"uid_hash": UID, "nranks": nranks, "rank": rank, **more}
    if inside:
        p.enter(None, "ncclCommInitRankConfig", t, **args)
    else:
        p.call(None, "ncclCommInitRankConfig", t, dur=args.pop("dur", 1.0), new_comm=None, **args)  # type: ignore[arg-type]


def test_ranks_that_did_not_come_to_the_initialisation() -> None:
    job = Job()
    for r in (0, 1, 3):
        init(job.proc(r), r, 1.0, inside=True)
    cover(job.procs, 70)
    (f,) = analyze_job(job)
    assert f.hang_type == "comm_init_missing_enter"
    assert f.comm_uid_hash == UID
    assert f.comm_seq is None
    assert f.details["entered_comm_ranks"] == [0, 1, 3]
    assert f.details["missing_comm_ranks"] == [2]
    assert f.details["missing_rank_status"][0]["global_rank"] is None
    assert f.severity == "notice"
    cover(job.procs, 400)
    (f,) = analyze_job(job)
    assert f.severity == "error"


def test_initialisation_of_a_partial_view_that_ends_well() -> None:
    job = Job()
    for r in range(2):
        init(job.proc(r), r, 1.0, nranks=512)
    cover(job.procs, 400)
    assert analyze_job(job) == []


def test_all_in_the_initialisation() -> None:
    """Nobody is missing, and nobody is to blame."""
    job = Job()
    for r in range(4):
        init(job.proc(r), r, 1.0 + r, inside=True)
    cover(job.procs, 63)
    assert analyze_job(job) == []
    cover(job.procs, 70)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.severity, f.culprits) == ("comm_init_stuck", "notice", ())
    cover(job.procs, 400)
    (f,) = analyze_job(job)
    assert f.severity == "error"
    assert f.details["entered_comm_ranks"] == [0, 1, 2, 3]


def test_all_in_an_initialisation_that_ends_late() -> None:
    job = Job()
    for r in range(4):
        init(job.proc(r), r, 1.0, dur=200.0)
    cover(job.procs, 400)
    assert analyze_job(job) == []


def test_one_call_for_all_ranks_that_does_not_return() -> None:
    job = Job()
    p = job.proc(0)
    p.enter(None, "ncclCommInitAll", 1.0, nranks=4)
    cover(job.procs, 70)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.details["expected_nranks"]) == ("comm_init_stuck", 4)
    q = Job()
    q.proc(0).call(None, "ncclCommInitAll", 1.0, dur=65.0, nranks=4, new_comm=None)
    cover(q.procs, 400)
    assert analyze_job(q) == []


def test_an_initialisation_that_one_rank_does_not_leave() -> None:
    job = Job()
    for r in range(4):
        init(job.proc(r), r, 1.0, inside=r == 2)
    cover(job.procs, 400)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.severity) == ("nccl_missing_exit", "error")
    assert [d["rank"] for d in f.named] == [2]


def test_processes_that_may_be_the_missing_ranks_are_candidates_and_not_blamed() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    for r in (0, 2):
        init(job.procs[r], r // 2, t, nranks=3, inside=True)
    cover(job.procs, t + 400)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.culprits) == ("comm_init_missing_enter", ())
    assert f.details["missing_comm_ranks"] == [2]
    assert [c["rank"] for c in f.details["candidates"]] == [1, 3]


def test_an_initialisation_that_lacks_ranks_which_wait_for_one_that_left_is_a_consequence() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    steps(comms[1:], 1, start=t)
    comms[0].proc.comm_end(comms[0], t + 1, "abort")
    init(job.procs[0], 0, t + 2, nranks=3, inside=True)
    cover(job.procs, t + 400)
    found = {f.hang_type: f for f in analyze_job(job)}
    missing, ended = found["comm_init_missing_enter"], found["comm_ended_under_waiters"]
    assert (missing.role, missing.downstream_of) == ("downstream", ended.id)
    assert [d["rank"] for d in ended.named] == [0]


def test_ranks_that_pass_another_size_for_one_id() -> None:
    job = Job()
    for r in range(4):
        init(job.proc(r), r, 1.0, nranks=5 if r == 1 else 4, inside=True)
    cover(job.procs, 400)
    found = analyze_job(job)
    (f,) = [f for f in found if f.role == "root_cause"]
    assert (f.hang_type, f.details["differs_in"]) == ("collective_mismatch", ["nranks"])
    assert [d["rank"] for d in f.named] == [1]
    assert (f.severity, f.comm_seq) == ("error", None)
    assert all(g.downstream_of == f.id for g in found if g is not f)


def test_a_tie_of_sizes_names_nobody() -> None:
    job = Job()
    for r in range(2):
        init(job.proc(r), r, 1.0, nranks=2 + r, inside=True)
    cover(job.procs, 70)
    (f,) = [f for f in analyze_job(job) if f.hang_type == "collective_mismatch"]
    assert f.culprits == ()


def test_two_processes_claim_one_rank() -> None:
    job = Job()
    init(job.proc(0), 0, 1.0, inside=True)
    init(job.proc(1), 1, 1.0, inside=True)
    init(job.proc(None, pid=77), 1, 2.0, inside=True)
    cover(job.procs, 10)
    (f,) = analyze_job(job)
    assert f.hang_type == "comm_init_rank_conflict"
    assert f.details["comm_rank"] == 1
    assert {c["pid"] for c in f.details["claimed_by"]} == {1001, 77}
    assert f.severity == "error"
    assert [d["pid"] for d in f.named] == [77]


def test_a_rank_that_takes_the_rank_of_another() -> None:
    """The init of all waits for the rank that nobody claims: a consequence."""
    job = Job()
    for r in range(4):
        init(job.proc(r), 1 if r == 3 else r, 1.0, inside=True)
    cover(job.procs, 70)
    found = {f.hang_type: f for f in analyze_job(job)}
    f, waits = found["comm_init_rank_conflict"], found["comm_init_missing_enter"]
    assert [d["rank"] for d in f.named] == [3]
    assert (waits.role, waits.downstream_of) == ("downstream", f.id)


def test_two_claims_and_nothing_tells_whose_the_rank_is() -> None:
    job = Job()
    for rank, claim in ((5, 0), (6, 1), (7, 1)):
        init(job.proc(rank), claim, 1.0, nranks=2, inside=True)
    cover(job.procs, 10)
    (f,) = analyze_job(job)
    assert f.culprits == ()


def test_claims_that_ended_in_errors_are_a_conflict_too() -> None:
    job = Job()
    for r in range(4):
        init(job.proc(r), 1 if r == 3 else r, 1.0, dur=5.0, rc=3)
    cover(job.procs, 70)
    found = {f.hang_type: f for f in analyze_job(job)}
    f, error = found["comm_init_rank_conflict"], found["nccl_error_exit"]
    assert [d["rank"] for d in f.named] == [3]
    assert (error.role, error.downstream_of) == ("downstream", f.id)


def test_a_process_that_takes_over_after_the_first_gave_up_is_no_conflict() -> None:
    job = Job()
    p = job.proc(0)
    init(p, 0, 1.0, rc=2)
    p.end(5.0, code=1)
    init(job.proc(None, pid=77), 0, 6.0, inside=True)
    p.cover(0.5, 5.0)
    job.procs[1].cover(0.5, 20)
    assert [f.hang_type for f in analyze_job(job)] == ["nccl_error_exit"]


def test_an_error_return() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for _ in range(2):
        comms[1].proc.call(comms[1], "ncclAllReduce", t, rc=5)
    cover(job.procs, t + 10)
    (f,) = analyze_job(job)
    assert f.hang_type == "nccl_error_exit"
    assert (f.details["comm_rank"], f.details["result"]) == (1, "ncclInvalidUsage")
    assert (f.details["times"], f.details["call_idx"]) == (2, 5)
    assert (f.severity, f.role) == ("error", "root_cause")


def test_one_error_on_all_ranks_is_one_finding() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    steps(comms, 3, start=t, rc=1)
    cover(job.procs, t + 10)
    (f,) = analyze_job(job)
    assert (f.details["error_comm_ranks"], f.details["times"]) == ([0, 1, 2, 3], 12)
    assert "and 3 more" in f.details["summary"]


def test_a_group_that_fails_long_after_another_communicator_ended_is_an_error() -> None:
    job = Job()
    comms = job.world(2)
    t = steps(comms, 5)
    for c in comms:
        c.proc.comm_end(c, t, "destroy")
    comms[0].proc.group([], t + 5, rc=3)
    cover(job.procs, t + 10)
    assert [f.details["api"] for f in analyze_job(job)] == ["ncclGroupEnd"]


def test_the_absence_after_an_error_return_is_a_consequence() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    comms[1].proc.call(comms[1], "ncclAllReduce", t, rc=5)
    steps([comms[0], comms[2]], 1, start=t)
    cover(job.procs, t + 70)
    found = {f.hang_type: f for f in analyze_job(job)}
    absence, error = found["collective_missing_enter"], found["nccl_error_exit"]
    assert (absence.role, absence.downstream_of) == ("downstream", error.id)
    assert error.role == "root_cause"


def test_calls_in_flight_at_an_abort_are_no_errors() -> None:
    job = Job()
    comms = job.world(2)
    t = steps(comms, 5)
    for c in comms:
        c.proc.call(c, "ncclAllReduce", t, dur=10.0, rc=3)
        c.proc.comm_end(c, t + 9.9, "abort")
        c.proc.call(c, "ncclCommAbort", t + 9.9, dur=0.2)
    cover(job.procs, t + 20)
    assert analyze_job(job) == []


def test_an_error_of_a_registration_is_a_notice() -> None:
    job = Job()
    comms = job.world(2)
    steps(comms, 5)
    comms[0].proc.call(comms[0], "ncclCommRegister", 3.0, rc=5)
    cover(job.procs, 20)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.severity) == ("nccl_error_exit", "notice")


def test_a_communicator_ended_under_its_waiters() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    steps(comms[:3], 1, start=t)
    comms[3].proc.comm_end(comms[3], t + 1, "abort")
    cover(job.procs, t + 10)
    (f,) = analyze_job(job)
    assert f.hang_type == "comm_ended_under_waiters"
    assert f.details["missing_comm_ranks"] == [3]
    assert f.details["missing_rank_status"][0]["comm_end"] == "abort"
    assert (f.severity, f.role) == ("error", "root_cause")


def test_all_abort_within_seconds() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    steps(comms[:3], 1, start=t)
    for r, c in enumerate(comms):
        c.proc.comm_end(c, t + 1 + 0.5 * (3 - r), "abort")
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_the_waiters_gave_up_first() -> None:
    """The watchdogs of the others abort after ten minutes; the one absent is still named."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    steps(comms[:3], 1, start=t)
    for c in comms[:3]:
        c.proc.comm_end(c, t + 600, "abort")
    comms[3].proc.comm_end(comms[3], t + 630, "abort")
    cover(job.procs, t + 640)
    (f,) = analyze_job(job)
    assert f.hang_type == "collective_missing_enter"
    assert f.details["missing_comm_ranks"] == [3]
    assert f.details["waited_s"] == 600.0


def test_a_communicator_that_ended_is_forgotten() -> None:
    job = Job()
    p = job.proc(0), job.proc(1)
    for i in range(50):
        comms = [x.comm(f"{i:016x}", r, 2, t=1.0 + i) for r, x in enumerate(p)]
        steps(comms, 3, start=1.1 + i)
        for c in comms:
            c.proc.comm_end(c, 1.9 + i)
    cover(job.procs, 60)
    run = Run(job)
    run.all()
    assert run.scan(unix(60)) == []
    matcher = run.analysis.matcher
    assert matcher.comms_seen == 50
    assert not matcher.comms
    assert not matcher.endpoints


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
