"""Rules that no other test would miss."""

from __future__ import annotations

import pytest
from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Host, Job

AR = "ncclAllReduce"


@pytest.mark.parametrize("how", ["abort", "revoke", "destroy"])
def test_an_abort_that_the_others_go_down_with_is_named(how: str) -> None:
    """Peers notice an abort at once: nobody waits for long, and yet it was no orderly end."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    steps(comms[:1] + comms[2:], 1, start=t)
    comms[1].proc.comm_end(comms[1], t + 0.5, how)
    for c in comms:
        c.proc.cover(0.0, t + 1.0)
        c.proc.end(t + 1.0, code=0 if c.proc.rank == 1 else 21)
    found = [f for f in analyze_job(job) if f.role == "root_cause"]
    named = [c["rank"] for f in found for c in f.named]
    assert named == ([] if how == "destroy" else [1])


def test_two_that_wait_for_each_other_outside_nccl_leave_both_possible() -> None:
    job = Job()
    xs = job.world(2)
    ys = [c.proc.comm("00000000000000bb", r, 2) for r, c in enumerate(xs)]
    t = steps(xs, 5)
    t = steps(ys, 5, start=t)
    xs[0].proc.call(xs[0], AR, t, stream=1)
    ys[1].proc.call(ys[1], AR, t, stream=2)
    cover(job.procs, t + 400)
    found = analyze_job(job)
    assert [c for f in found if f.role == "root_cause" for c in f.named] == []
    said = [h for f in found for h in f.details.get("hypotheses", ())]
    assert any("rank 0" in h and "went away" in h for h in said)
    assert any("rank 1" in h and "went away" in h for h in said)


def test_a_call_that_was_cut_off_by_the_end_was_inside_till_then() -> None:
    """As a collector writes it that saw no more of the call than its end."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for c in comms:
        if c.proc.rank == 1:
            c.proc.call(c, AR, t)
        else:
            cut = {"color": 0, "key": 0, "ord": 0, "end": "no_return", "new_comm": None}
            c.proc.call(c, "ncclCommSplit", t, dur=100.0, rc=None, **cut)
        c.proc.cover(0.0, t + 100)
        c.proc.end(t + 100, how="signaled", signal=15, in_flight=1)
    causes = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert [f.hang_type for f in causes] == ["comm_init_missing_enter"]
    assert [c["rank"] for c in causes[0].named] == [1]


def test_what_held_up_a_job_that_has_ended_stays_told() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 3)
    waits = comms[0].proc
    waits.enter(comms[0], "ncclRecv", t, peer=1)
    for c, end, code in zip(comms, (t + 100, t + 20, t + 100), (1, 1, 0), strict=True):
        c.proc.cover(0.5, end)
        c.proc.end(end, code=code, in_flight=int(c.proc is waits))
    run = Run(job)
    run.all()
    run.scan()
    run.scan()
    causes = [f for f in run.analysis.matcher.book.all() if f.role == "root_cause"]
    assert [(f.hang_type, f.state) for f in causes] == [("p2p_unmatched", "open")]
    assert [c["rank"] for c in causes[0].named] == [1]


def test_two_wrong_arguments_of_one_rank_are_one_fault_and_no_call_in_the_wrong_place() -> None:
    job = Job()
    xs = job.world(4)
    ys = [c.proc.comm("00000000000000bb", r, 4) for r, c in enumerate(xs)]
    t = steps(ys, 5, start=steps(xs, 5))
    for cs in (xs, ys):
        for c in cs:
            c.proc.call(c, AR, t + 0.001 * c.id, count=2048 if c.proc.rank == 1 else 1024)
        steps(cs, 20, start=t + 1)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert [f.hang_type for f in found] == ["collective_mismatch"] * 2
    assert sorted(f.role for f in found) == ["downstream", "root_cause"]
    assert [[c["rank"] for c in f.named] for f in found] == [[1], [1]]
    assert not any("other_communicator" in f.details for f in found)


def test_of_two_that_lost_events_the_one_that_lost_too_few_is_named() -> None:
    """Rank 1 is waited for in two calls and lost one event: it cannot have made both."""
    job = Job()
    procs = [job.proc(r) for r in range(5)]
    pairs = [(0, 1), (3, 1), (4, 2)]
    comms = []
    for k, ranks in enumerate(pairs):
        hash_ = f"{0xAA + k:016x}"
        comms.append([procs[r].comm(hash_, i, 2) for i, r in enumerate(ranks)])
    t = 1.0
    for cs in comms:
        t = steps(cs, 5, start=t)
    for cs in comms:
        cs[0].proc.call(cs[0], AR, t)
    for p in procs:
        p.cover(0.5, t + 1)
        p.cover(t + 2, 400, lost_kernel=1 if p.rank in (1, 2) else 0)
    causes = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert len(causes) == 2
    assert {c["rank"] for f in causes for c in f.named} == {1}


@pytest.mark.parametrize("known", [True, False])
def test_a_second_trace_of_a_rank_is_not_one_that_could_not_be_compared(known: bool) -> None:
    job = Job()
    comms = job.world(2)
    t = steps(comms, 5)
    again = job.proc(1)
    c = again.comm("00000000000000aa", 1 if known else None, 2, 1.0, learnt="struct")
    again.call(c, AR, t - 0.1)
    cover(job.procs, t + 5)
    run = Run(job)
    run.all()
    run.scan()
    said = run.analysis.matcher.not_judged()
    assert said == ({} if known else {"its rank in it is not known": 1})


def test_a_phase_that_is_over_holds_no_initialisation_back() -> None:
    job = Job()
    steps(job.world(3), 3)
    for p in job.procs[:2]:
        p.enter(None, "ncclCommInitRank", 5.0, uid_hash="00000000000000ee", nranks=3, rank=p.rank)
    job.procs[2].phase(4.0, "compile")
    job.procs[2].phase(4.5, None)
    cover(job.procs, 400)
    assert [f.hang_type for f in analyze_job(job)] == ["comm_init_missing_enter"]


def test_who_is_in_a_phase_is_not_pointed_at_beside_one_that_waits_elsewhere() -> None:
    """Rank 1 waits for a rank that is not observed: nobody is a cause that is known."""
    job = Job()
    comms = job.world(4)
    silent = job.proc(4)
    pair = [comms[1].proc.comm("00000000000000bb", 0, 2), silent.comm("00000000000000bb", 1, 2)]
    t = steps(pair, 5, start=steps(comms, 5))
    pair[0].proc.call(pair[0], AR, t)
    for c in comms[2:]:
        c.proc.call(c, AR, t)
    comms[0].proc.phase(t, "checkpoint")
    silent.cover(0.5, t + 1)
    cover([c.proc for c in comms], 400)
    (f,) = (f for f in analyze_job(job) if f.comm_uid_hash == "00000000000000aa")
    assert f.details["missing_comm_ranks"] == [0, 1]
    assert [c["rank"] for c in f.named] == [1]


@pytest.mark.parametrize("error_s", [0, 30])
def test_a_collector_is_silent_only_beyond_the_error_of_its_clock(error_s: int) -> None:
    job = Job()
    host = Host("node1", err=error_s * 1_000_000_000)
    comms = job.world(3)
    far = job.proc(3, host)
    comms = [c.proc.comm("00000000000000bb", r, 4) for r, c in enumerate(comms)]
    comms.append(far.comm("00000000000000bb", 3, 4))
    t = steps(comms, 5)
    for c in comms[:3]:
        c.proc.call(c, AR, t)
    cover([c.proc for c in comms[:3]], 400)
    far.cover(0.5, 380)
    (f,) = analyze_job(job)
    assert f.details["reason"] == ("rank_alive_but_not_entered" if error_s else "rank_not_observed")


def test_a_trace_that_says_nothing_of_its_process_is_known_by_its_name() -> None:
    run = Run(Job())
    run.analysis.open([(0, "rank_7_pid_9")])
    assert run.analysis.matcher.processes[0].place() == "rank_7_pid_9"
