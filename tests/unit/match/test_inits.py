"""The initialisation of communicators."""

from __future__ import annotations

import pytest
from support.analysis import analyze_job, cover, steps
from support.tracegen import Job, Proc

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


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_order_of_the_others_tells_whose_the_rank_is(ranks: int) -> None:
    """One in the middle, or none, would be the same where ranks are given from the last on."""
    job = Job()
    for r in range(ranks):
        init(job.proc(r), 0 if r == ranks - 1 else r, 1.0, nranks=ranks, inside=True)
    cover(job.procs, 10)
    (f,) = analyze_job(job)
    assert [d["rank"] for d in f.named] == ([3] if ranks == 4 else [])
    assert f.details["confidence"] == ("inferred" if ranks == 4 else "observed")


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
