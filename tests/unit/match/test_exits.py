"""Calls that do not return, and errors that are the echo of another's end."""

from __future__ import annotations

import pytest
from support.analysis import analyze_job, cover, steps
from support.tracegen import Comm, Job

from nccluprobe.match.finding import Finding


def blamed(found: list[Finding]) -> set[int]:
    named = [d for f in found if f.role == "root_cause" and f.state == "open" for d in f.named]
    return {d["rank"] for d in named}


def last_call(comms: list[Comm], t: float, inside: tuple[int, ...], **args: int) -> None:
    for r, c in enumerate(comms):
        make = c.proc.enter if r in inside else c.proc.call
        make(c, "ncclAllReduce", t, **args)  # type: ignore[operator]


# -- a collective that returns on some -------------------------------------


def test_a_collective_that_returns_on_all_but_one() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    last_call(comms, t, inside=(2,))
    cover(job.procs, t + 50)
    assert analyze_job(job) == []
    cover(job.procs, t + 70)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.severity, f.comm_seq) == ("collective_missing_exit", "notice", 5)
    assert (f.details["inside_comm_ranks"], f.details["returned_comm_ranks"]) == ([2], [0, 1, 3])
    assert blamed([f]) == {2}
    cover(job.procs, t + 400)
    (f,) = analyze_job(job)
    assert f.severity == "error"


def test_half_of_the_ranks_inside_name_nobody() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    last_call(comms, t, inside=(1, 2))
    cover(job.procs, t + 70)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.role, f.culprits) == ("collective_missing_exit", "unknown", ())


def test_a_call_that_returns_late_is_over() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    for r, c in enumerate(comms):
        c.proc.call(c, "ncclAllReduce", t, dur=200.0 if r == 2 else 0.1)
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_a_rank_that_is_held_up_elsewhere_is_not_blamed_for_its_exit() -> None:
    """Rank 2's host is inside on one communicator; on another it waits for rank 4."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    pair = [
        job.procs[2].comm("00000000000000bb", 0, 2),
        job.proc(4).comm("00000000000000bb", 1, 2),
    ]
    t = steps(pair, 5, start=t)
    pair[0].proc.call(pair[0], "ncclAllReduce", t)
    last_call(comms, t + 0.1, inside=(2,))
    cover(job.procs, t + 400)
    found = analyze_job(job)
    assert "collective_missing_exit" not in {f.hang_type for f in found}
    assert blamed(found) == {4}


def test_the_others_have_gone_on_from_a_call_that_one_does_not_leave() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    last_call(comms, t, inside=(2,))
    last_call([c for r, c in enumerate(comms) if r != 2], t + 0.1, inside=())
    cover(job.procs, t + 400)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.details["reason"]) == ("nccl_missing_exit", "call_not_returned")
    assert blamed([f]) == {2}
    assert f.details["confidence"] == "inferred"


@pytest.mark.parametrize(
    ("on", "more", "streams"),
    [(False, 20, 1), (False, 20, 4), (False, 4, 1), (False, 0, 1), (True, 20, 1)],
)
def test_who_has_queued_most_may_stand_before_a_full_queue(
    on: bool, more: int, streams: int
) -> None:
    """Rank 2 has made ``more`` calls than others, in so many streams, when it is held."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5, stream=7)
    pair = [
        job.procs[2].comm("00000000000000bb", 0, 2),
        job.proc(4).comm("00000000000000bb", 1, 2),
    ]
    for i in range(more):
        stream = 7 if i % streams == 0 else 9
        steps(pair, 1, start=t + i * 0.01, stream=stream)
    steps(comms, 3, start=t + 1, step=0.01, stream=7)
    last_call(comms, t + 2, inside=(2,), stream=7)
    if on:
        last_call([c for r, c in enumerate(comms) if r != 2], t + 2.1, inside=(), stream=7)
    cover(job.procs, t + 400)
    (f,) = (f for f in analyze_job(job) if f.details["reason"] == "call_not_returned")
    assert f.role == "root_cause"
    assert blamed([f]) == (set() if more // streams > 9 else {2})


@pytest.mark.parametrize("other", ["held", "not held", "group"])
def test_only_what_has_returned_stands_in_a_queue_and_a_group_as_one(other: str) -> None:
    """Rank 2 is held in the last of 20 calls more; rank 3 has made as many, or a great group."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    pairs = [
        [job.procs[r].comm(hash_, 0, 2), job.proc(r + 2).comm(hash_, 1, 2)]
        for r, hash_ in ((2, "00000000000000bb"), (3, "00000000000000cc"))
    ]
    steps(pairs[0], 20, start=t, step=0.01)
    if other == "group":
        for c in pairs[1]:
            c.proc.group([(c, "ncclAllReduce", {})] * 30, t + 0.15)
    else:
        steps(pairs[1], 19, start=t, step=0.01)
    last_call(comms, t + 2, inside=(2,))
    if other != "group":
        last_call(pairs[1], t + 2.1, inside=(0,) if other == "held" else ())
    cover(job.procs, t + 400)
    found = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert [f.details["reason"] for f in found] == ["call_not_returned"]
    assert blamed(found) == ({2} if other == "not held" else set())


@pytest.mark.parametrize("lost", [0, 2, 5])
@pytest.mark.parametrize("placed", [True, False])
def test_what_was_lost_may_have_filled_a_queue(lost: int, placed: bool) -> None:
    """Rank 2 is held, and has made three calls less than rank 3 that are seen.

    ``placed``: later calls on that communicator tell of those that were lost.
    """
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    pairs = [
        [job.procs[r].comm(hash_, 0, 2), job.proc(r + 2).comm(hash_, 1, 2)]
        for r, hash_ in ((2, "00000000000000bb"), (3, "00000000000000cc"))
    ]
    for c, n in zip(pairs, (20, 23), strict=True):
        steps(c, n, start=t, step=0.01)
    other = [
        job.procs[2].comm("00000000000000dd", 0, 2),
        job.procs[4].comm("00000000000000dd", 1, 2),
    ]
    for c in other:
        for i in range(lost + placed):
            c.proc.call(c, "ncclAllReduce", t + 0.3 + 0.01 * i, lost=c is other[0] and i < lost)
    last_call(comms, t + 2, inside=(2,))
    for p in job.procs:
        p.cover(0.5, t + 0.25)
        p.cover(t + 2.5, t + 400, lost_kernel=lost if p is job.procs[2] else 0)
    (f,) = (f for f in analyze_job(job) if f.details["reason"] == "call_not_returned")
    assert blamed([f]) == (set() if lost == 5 else {2})


@pytest.mark.parametrize("more", [0, 20])
def test_of_several_that_are_held_one_full_queue_explains_all(more: int) -> None:
    job = Job()
    comms = job.world(6)
    t = steps(comms, 5)
    hash_ = "00000000000000bb"
    pair = [job.procs[2].comm(hash_, 0, 2), job.proc(6).comm(hash_, 1, 2)]
    steps(pair, more, start=t, step=0.01)
    last_call(comms, t + 1, inside=(2, 3))
    cover(job.procs, t + 400)
    (f,) = (f for f in analyze_job(job) if f.details["reason"] == "call_not_returned")
    assert blamed([f]) == (set() if more else {2, 3})
    assert ("The queue of rank 2 may be full" in f.details["summary"]) == bool(more)


def test_a_rank_inside_and_waiting_elsewhere_keeps_its_absence() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    pair = [
        job.procs[2].comm("00000000000000bb", 0, 2),
        job.proc(3).comm("00000000000000bb", 1, 2),
    ]
    pair[0].proc.call(pair[0], "ncclAllReduce", t)
    last_call(comms, t + 0.1, inside=(2,))
    last_call(comms[:2], t + 0.2, inside=())
    cover(job.procs, t + 400)
    found = analyze_job(job)
    assert "nccl_missing_exit" not in {f.hang_type for f in found}
    assert blamed(found) == {3}


# -- other calls -----------------------------------------------------------


@pytest.mark.parametrize("api", ["ncclCommAbort", "ncclMemFree", "ncclCommDeregister"])
def test_a_call_that_waits_for_nobody_and_does_not_return(api: str) -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    comms[1].proc.enter(comms[1], api, t)
    cover(job.procs, t + 400)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.severity, f.details["api"]) == ("nccl_missing_exit", "error", api)
    assert blamed([f]) == {1}


def test_absences_follow_from_a_call_that_does_not_return() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    comms[1].proc.enter(comms[1], "ncclCommDeregister", t)
    steps([comms[0], comms[2]], 1, start=t)
    cover(job.procs, t + 400)
    found = {f.hang_type: f for f in analyze_job(job)}
    absence, call = found["collective_missing_enter"], found["nccl_missing_exit"]
    assert (absence.role, absence.downstream_of) == ("downstream", call.id)
    assert blamed(list(found.values())) == {1}


def test_a_call_that_returns() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    comms[1].proc.call(comms[1], "ncclCommDeregister", t, dur=100.0)
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def destroy(comms: list[Comm], t: float, inside: tuple[int, ...], out: tuple[int, ...]) -> None:
    for r in (*inside, *out):
        c = comms[r]
        c.proc.comm_end(c, t, "destroy")
        if r in inside:
            c.proc.enter(c, "ncclCommDestroy", t)
        else:
            c.proc.call(c, "ncclCommDestroy", t, dur=1.0)


def test_a_destroy_that_returns_on_all_but_one() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    destroy(comms, t, inside=(1,), out=(0, 2))
    cover(job.procs, t + 400)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.severity) == ("nccl_missing_exit", "error")
    assert blamed([f]) == {1}


def test_a_destroy_that_may_wait_for_the_others_is_a_notice_that_names_nobody() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    destroy(comms, t, inside=(1,), out=(0,))
    cover(job.procs, t + 1000)
    (f,) = analyze_job(job)
    assert (f.severity, f.role, f.culprits) == ("notice", "unknown", ())


def test_a_process_that_ended_is_inside_no_more() -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    destroy(comms, t, inside=(1,), out=(0, 2))
    for p in job.procs:
        p.cover(0.5, t + 5)
        p.end(t + 6)
    assert analyze_job(job) == []


# -- errors ----------------------------------------------------------------


def fail(c: Comm, t: float, rc: int, dur: float = 0.01) -> None:
    c.proc.call(c, "ncclAllReduce", t, dur=dur, rc=rc)


def test_in_progress_is_no_error() -> None:
    job = Job()
    comms = job.world(3)
    steps(comms, 5, rc=7)
    cover(job.procs, 400)
    assert analyze_job(job) == []


def test_errors_that_follow_from_another_ranks_error() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    fail(comms[2], t, 1)
    for r in (0, 1):
        fail(comms[r], t, 6, dur=5.0)
    fail(comms[3], t, 2, dur=8.0)
    cover(job.procs, t + 20)
    found = analyze_job(job)
    assert {f.hang_type for f in found} == {"nccl_error_exit"}
    assert blamed(found) == {2}
    assert [f.role for f in found].count("downstream") == 2


def test_one_code_on_all_began_where_it_came_first() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    for r, c in enumerate(comms):
        fail(c, t, 2, dur=0.1 if r == 1 else 6.0)
    cover(job.procs, t + 20)
    (f,) = analyze_job(job)
    assert f.details["error_comm_ranks"] == [0, 1, 2, 3]
    assert blamed([f]) == {1}


def test_wrong_arguments_do_not_spread() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    for r, c in enumerate(comms):
        fail(c, t + 2 * r, 4)
    cover(job.procs, t + 20)
    (f,) = analyze_job(job)
    assert blamed([f]) == {0, 1, 2, 3}


@pytest.mark.parametrize("rc", [2, 6])
def test_errors_after_a_crash_name_who_crashed(rc: int) -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    for c in comms[:3]:
        fail(c, t, rc, dur=3.0)
    comms[3].proc.cover(0.5, t + 1)
    comms[3].proc.end(t + 1.5, how="signaled", signal=9)
    cover(job.procs[:3], t + 20)
    found = analyze_job(job)
    assert blamed(found) == {3}
    (f,) = [f for f in found if f.hang_type == "nccl_error_exit"]
    assert f.details["after_end_of"]["comm_rank"] == 3
    assert "signal 9" in f.details["summary"]


def test_a_crash_after_its_own_error_is_its_own() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    fail(comms[3], t, 2)
    comms[3].proc.cover(0.5, t + 1)
    comms[3].proc.end(t + 1.5, code=1)
    for c in comms[:3]:
        fail(c, t, 6, dur=3.0)
    cover(job.procs[:3], t + 20)
    assert blamed(analyze_job(job)) == {3}


def test_a_call_that_all_are_inside_of_explains_who_waits_for_them_elsewhere() -> None:
    job = Job()
    comms = job.world(3)
    pair = [
        job.procs[0].comm("00000000000000bb", 0, 2),
        job.proc(3).comm("00000000000000bb", 1, 2),
    ]
    t = steps(pair, 5, start=steps(comms, 5))
    last_call(comms, t, inside=(0, 1, 2))
    pair[1].proc.call(pair[1], "ncclAllReduce", t)
    cover(job.procs, t + 400)
    found = {f.hang_type: f for f in analyze_job(job)}
    stuck, absence = found["collective_all_ranks_stuck"], found["collective_missing_enter"]
    assert (stuck.role, stuck.named) == ("root_cause", [])
    assert (absence.role, absence.downstream_of) == ("downstream", stuck.id)
    assert absence.details["reason"] == "rank_waiting_elsewhere"
