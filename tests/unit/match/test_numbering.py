"""Slot numbers: calls that NCCL did not run, groups, holes, calls that are inside."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Comm, Job, unix

AR = "ncclAllReduce"


def _job(n: int = 3) -> tuple[Job, list[Comm]]:
    job = Job()
    comms = job.world(n)
    steps(comms, 5)
    return job, comms


def _grouped(c: Comm, n: int, **args: Any) -> list[tuple[Comm, str, dict[str, Any]]]:
    return [(c, AR, args) for _ in range(n)]


def _absences(job: Job) -> list[tuple[int | None, list[int]]]:
    return [
        (f.comm_seq, f.details["missing_comm_ranks"])
        for f in analyze_job(job)
        if f.hang_type == "collective_missing_enter"
    ]


def test_grouped_calls_are_calls() -> None:
    job, comms = _job()
    for c in comms:
        c.proc.group(_grouped(c, 4), 2.0)
    t = steps(comms, 3, start=3.0)
    steps(comms[:2], 1, start=t)
    cover(job.procs, t + 61)
    assert _absences(job) == [(12, [2])]


def test_calls_in_an_open_group_are_queued_not_entered() -> None:
    job, comms = _job()
    for c in comms[:2]:
        c.proc.group(_grouped(c, 2), 2.0)
    comms[2].proc.group(_grouped(comms[2], 2), 2.0, state="open")
    cover(job.procs, 70)
    (f,) = analyze_job(job)
    assert (f.comm_seq, f.details["missing_comm_ranks"]) == (5, [2])
    assert f.details["missing_rank_status"][0]["queued_in_open_group"] is True


def test_calls_of_a_group_whose_end_is_in_flight_have_entered() -> None:
    job, comms = _job()
    for c in comms[:2]:
        c.proc.group(_grouped(c, 2), 2.0, state="inside")
    cover(job.procs, 70)
    (f,) = analyze_job(job)
    assert (f.comm_seq, f.details["missing_comm_ranks"]) == (5, [2])


def test_a_failed_group_did_not_run() -> None:
    job, comms = _job()
    comms[1].proc.group(_grouped(comms[1], 2), 2.0, rc=4)
    t = steps(comms, 5, start=3.0)
    cover(job.procs, t + 400)
    (f,) = analyze_job(job)
    assert f.hang_type == "nccl_error_exit"


def test_a_group_that_fails_after_it_was_seen_in_flight_did_not_run() -> None:
    job, comms = _job()
    c = comms[1]
    p = c.proc
    p.group(_grouped(c, 2), 2.0, state="inside")
    entered = p.lines[-1][2]
    end = {**entered, "kind": "call", "dur": 10_000_000_000, "rc": 1}
    p.add(12.1, end)
    t = steps(comms, 5, start=13.0)
    cover(job.procs, t + 400)
    found = analyze_job(job)
    assert [f.hang_type for f in found] == ["nccl_error_exit"]


def test_a_simulated_group_did_not_run() -> None:
    job, comms = _job()
    p = comms[1].proc
    p.group(_grouped(comms[1], 2), 2.0, state="open")
    p.call(None, "ncclGroupSimulateEnd", 2.1, group=p.groups, gpos=2)
    t = steps(comms, 5, start=3.0)
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_an_inner_group_end_ends_nothing() -> None:
    job, comms = _job()
    for c in comms:
        p = c.proc
        p.groups += 1
        p.call(c, AR, 2.0, group=p.groups, gpos=0, gdepth=2)
        p.call(None, "ncclGroupEnd", 2.1, group=p.groups, gpos=1, gdepth=2)
        if c is not comms[2]:
            p.call(None, "ncclGroupEnd", 2.2, group=p.groups, gpos=1)
    cover(job.procs, 70)
    assert _absences(job) == [(5, [2])]


def test_a_lost_group_end_does_not_stop_the_numbering() -> None:
    job, comms = _job()
    for c in comms[:2]:
        c.proc.group(_grouped(c, 2), 2.0)
    p = comms[2].proc
    p.group(_grouped(comms[2], 2), 2.0, state="open")
    t = steps(comms, 3, start=3.0)
    cover(job.procs[:2], t + 400)
    p.cover(0.5, t + 400, lost_kernel=1)
    assert analyze_job(job) == []


def test_an_error_return_does_not_take_a_slot() -> None:
    job, comms = _job()
    comms[0].proc.call(comms[0], AR, 2.0, rc=4)
    t = steps(comms, 3, start=3.0)
    steps(comms[:2], 1, start=t)
    cover(job.procs, t + 61)
    assert _absences(job) == [(8, [2])]


def test_in_progress_is_no_error_and_takes_a_slot() -> None:
    job, comms = _job()
    steps(comms, 4, start=2.0, rc=7)
    cover(job.procs, 400)
    assert analyze_job(job) == []


def test_a_call_that_was_inside_and_then_failed_gives_its_slot_back() -> None:
    job, comms = _job()
    p = comms[1].proc
    line = p.enter(comms[1], AR, 2.0)
    p.add(5.0, {**line, "kind": "call", "dur": 3_000_000_000, "rc": 1})
    t = steps(comms, 3, start=6.0)
    cover(job.procs, t + 400)
    assert [f.hang_type for f in analyze_job(job)] == ["nccl_error_exit"]


def test_a_call_that_was_inside_and_returned_is_one_call() -> None:
    job, comms = _job()
    for c in comms:
        line = c.proc.enter(c, AR, 2.0)
        c.proc.add(5.0, {**line, "kind": "call", "dur": 3_000_000_000, "rc": 0})
    t = steps(comms, 3, start=6.0)
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_one_rank_communicators_are_never_waited_for() -> None:
    job = Job()
    c = job.proc(0).comm("00000000000000aa", 0, 1)
    for i in range(5):
        c.proc.call(c, AR, 1.0 + i)
    c.proc.enter(c, AR, 10.0)
    cover(job.procs, 400)
    assert analyze_job(job) == []


def test_threads_that_return_in_another_order() -> None:
    job, comms = _job()
    for c in comms:
        c.proc.call(c, AR, 2.0, dur=5.0, thread=1)
        c.proc.call(c, AR, 2.1, dur=0.1, thread=2)
    t = steps(comms, 3, start=8.0)
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_a_hole_is_not_an_absence_before_coverage_speaks() -> None:
    job, comms = _job()
    p = comms[2].proc
    p.call(comms[2], AR, 2.0, lost=True)
    p.call(comms[2], AR, 2.5)
    for c in comms[:2]:
        c.proc.call(c, AR, 2.0)
        c.proc.call(c, AR, 2.5)
    cover(job.procs, 400, lost_kernel=0)
    assert analyze_job(job) == []


def test_a_hole_does_not_hide_a_later_absence() -> None:
    job, comms = _job()
    comms[1].proc.call(comms[1], AR, 2.0, lost=True)
    steps([comms[0], comms[2]], 1, start=2.0)
    t = steps(comms, 5, start=3.0)
    steps(comms[:2], 1, start=t)
    cover(job.procs, t + 61)
    (f,) = analyze_job(job)
    assert (f.comm_seq, f.details["missing_comm_ranks"]) == (11, [2])
    assert f.details["confidence"] == "reduced"


@pytest.mark.parametrize("start", [0, 5_000])
def test_a_trace_whose_oldest_parts_were_dropped(start: int) -> None:
    job = Job()
    comms = job.world(3)
    steps(comms[:2], start + 20, step=0.001)
    c = comms[2]
    c.ords = c.idx = start
    for i in range(20):
        c.proc.call(c, AR, 1.0 + 0.001 * (start + i))
    cover(job.procs, 400)
    assert analyze_job(job) == []


def test_absurd_ordinals_do_not_fill_the_memory() -> None:
    job, comms = _job()
    comms[2].ords = 2**60
    comms[2].proc.call(comms[2], AR, 2.0)
    steps(comms[:2], 1, start=2.0)
    cover(job.procs, 400)
    run = Run(job)
    run.all()
    run.scan()


def test_a_communicator_whose_hash_is_learnt_late() -> None:
    job = Job()
    comms = [job.proc(r).comm(None, None, None) for r in range(3)]
    t = steps(comms, 5)
    for r, c in enumerate(comms):
        line = next(x for _, _, x in c.proc.lines if x["kind"] == "comm")
        c.proc.add(t, {**line, "hash": "00000000000000aa", "comm_rank": r, "nranks": 3})
    t = steps(comms, 5, start=t + 1)
    steps(comms[:2], 1, start=t)
    cover(job.procs, t + 61)
    assert _absences(job) == [(10, [2])]


def test_a_group_that_spans_scans() -> None:
    job, comms = _job()
    for c in comms:
        c.proc.group(_grouped(c, 3), 2.0)
    cover(job.procs, 30)
    run = Run(job)
    for i, c in enumerate(comms):
        for _ in range(len(run.lines[i])):
            run.feed(i, 1)
        del c
    assert run.scan(unix(30)) == []
    (comm,) = run.analysis.matcher.comms.values()
    assert comm.closed == 8
