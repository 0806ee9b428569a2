"""Ranks that waited and then aborted: judged as of the moment before the first of them did."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import analyze_job, blamed, cover, steps
from support.tracegen import Comm, Job, unix

AR, SEND, INIT, ABORT = "ncclAllReduce", "ncclSend", "ncclCommInitRankConfig", "ncclCommAbort"
BIG = 1 << 24


def missed(n: int) -> tuple[Job, list[Comm]]:
    """The last rank does not come to the second call of all, at 2 s."""
    job = Job()
    comms = job.world(n)
    steps(comms[:-1], 1, start=steps(comms, 1, step=1.0))
    return job, comms


def give_up(comms: list[Comm], t: float, ends: str = "", how: str = "abort") -> None:
    """The ranks' watchdogs abort, or revoke, half a second apart, and end their processes."""
    for i, c in enumerate(comms):
        at = t + 0.5 * i
        c.proc.comm_end(c, at, how)
        c.proc.call(c, ABORT if how == "abort" else "ncclCommRevoke", at, dur=0.01)
        if ends == "abort":
            c.proc.end(at + 0.1, "signaled", signal=6)
        elif ends == "exit":
            c.proc.end(at + 0.1, code=1)


@pytest.mark.parametrize("ends", ["", "abort", "exit"])
@pytest.mark.parametrize("who", [1, 4])
@pytest.mark.parametrize("how", ["abort", "revoke"])
def test_a_device_that_stood_until_ranks_gave_up_is_nobodys(how: str, who: int, ends: str) -> None:
    """All have entered; the first to give up left nobody."""
    job = Job()
    comms = job.world(4)
    for i, c in enumerate(comms):
        c.proc.call(c, AR, 1)
        if i >= who:
            c.proc.enter(c, AR, 2)
    cover(job.procs, 205, main="nccl", in_flight=1)
    give_up(comms[:who], 205, ends, how)
    for c in comms[:who]:
        c.proc.call(c, AR, 2, dur=205, rc=3)
    for c in comms[who:]:
        c.proc.cover(208, 400, main="nccl", in_flight=1)
    for c in comms[:who] if not ends else ():
        c.proc.cover(208, 400)
    found = analyze_job(job)
    assert blamed(found) == set()
    assert {f.hang_type for f in found} == {"collective_all_ranks_stuck"}


@pytest.mark.parametrize("ends", ["", "abort"])
@pytest.mark.parametrize("stood", [90.0, 250.0])
def test_who_was_missed_is_told_and_it_is_an_error_as_the_others_gave_up(
    stood: float, ends: str
) -> None:
    """An absence of this length is only a notice where nobody gives up."""
    job, comms = missed(4)
    cover(job.procs, 2 + stood)
    give_up(comms[:3], 2 + stood, ends)
    for c in comms if not ends else comms[3:]:
        c.proc.cover(4 + stood, 20 + stood)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.severity, f.role) == ("collective_missing_enter", "error", "root_cause")
    assert blamed([f]) == {3}


@pytest.mark.parametrize("how", ["abort", "revoke"])
def test_a_call_that_the_abort_broke_off_had_been_made(how: str) -> None:
    """Both send first; each is inside its send until it aborts."""
    job = Job()
    a, b = job.world(2)
    steps([a, b], 1)
    cover(job.procs, 202, main="nccl", in_flight=1)
    for c, peer in ((a, 1), (b, 0)):
        c.proc.comm_end(c, 202, how)
        c.proc.call(c, ABORT, 202, dur=0.01)
        c.proc.call(c, SEND, 2, dur=200.02, rc=3, peer=peer, count=BIG)
        c.proc.cover(203, 220)
    assert {f.hang_type for f in analyze_job(job)} == {"p2p_order_inversion"}


def test_a_job_that_went_on_after_it_had_given_up_is_judged_by_what_it_does_now() -> None:
    """All abort and make another communicator, in which rank 1 is missed."""
    job = Job()
    old = job.world(3)
    steps(old, 1)
    cover(job.procs, 100)
    give_up(old, 100)
    new = [c.proc.comm("b" * 16, r, 3) for r, c in enumerate(old)]
    for c in new:
        c.proc.call(c, AR, 110)
    for r in (0, 2):
        new[r].proc.call(new[r], AR, 111)
    for c in new:
        c.proc.cover(102, 600)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.severity) == ("collective_missing_enter", "error")
    assert blamed([f]) == {1}


@pytest.mark.parametrize(
    "told", [{"code": 143}, {"how": "signaled", "signal": 15}, {"code": 0}, None]
)
def test_who_aborts_as_it_was_told_to_end_has_not_given_up(told: dict[str, Any] | None) -> None:
    """Its handler of SIGTERM aborts first: the others had waited for a checkpoint."""
    job, comms = missed(4)
    cover(job.procs, 102)
    give_up(comms, 102)
    for c in comms:
        if told is not None:
            c.proc.end(104, **told)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.severity) == ("collective_missing_enter", "notice")
    assert blamed([f]) == {3}


def test_a_rank_that_was_detached_from_is_not_gone_when_the_others_give_up() -> None:
    job = Job()
    comms = job.world(4)
    steps(comms, 1)
    comms[3].proc.cover(0.5, 2)
    comms[3].proc.end(2, "detached")
    for c in comms[:3]:
        c.proc.call(c, AR, 3)
        c.proc.cover(0.5, 103)
    give_up(comms[:3], 103, "abort")
    (f,) = analyze_job(job)
    assert f.details["missing_rank_status"][0]["heartbeat"] == "stale"


@pytest.mark.parametrize(
    ("first", "ended", "told"),
    [
        (True, True, ("open", "error")),
        (True, False, ("resolved", "error")),
        (False, True, ("resolved", "notice")),
    ],
    ids=["the end of the job", "the late one lives on", "nobody gave up before"],
)
def test_a_delay_for_which_the_others_gave_up_stays_where_it_was_the_end(
    first: bool, ended: bool, told: tuple[str, str]
) -> None:
    """Rank 2 comes 100 s late; the others had ended 12 s before, or end when it has come."""
    job, comms = missed(3)
    comms[2].proc.call(comms[2], AR, 102)
    until = 90 if first else 103
    for c in comms[:2]:
        c.proc.cover(0.5, until)
        c.proc.comm_end(c, until, "abort")
        c.proc.end(until + 0.2, code=1)
    comms[2].proc.cover(0.5, 103)
    comms[2].proc.comm_end(comms[2], 103, "abort")
    if ended:
        comms[2].proc.end(103.2, code=1)
    else:
        comms[2].proc.cover(104, 140)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.state, f.severity) == ("delayed_collective_enter", *told)


def test_an_initialisation_that_the_abort_broke_off_had_waited() -> None:
    """Rank 2 does not come to a new communicator; the others abort the old one."""
    job = Job()
    comms = job.world(3)
    steps(comms, 1)
    cover(job.procs, 202)
    give_up(comms[:2], 202)
    for r, c in enumerate(comms[:2]):
        c.proc.call(None, INIT, 2, dur=201.5, rc=3, uid_hash="d" * 16, nranks=3, rank=r)
    for c in comms:
        c.proc.cover(204, 220)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.role) == ("comm_init_missing_enter", "root_cause")
    assert f.details["missing_comm_ranks"] == [2]


@pytest.mark.parametrize(("main", "named"), [("stopped", {3}), ("running", set())])
def test_what_a_rank_did_before_it_gave_up_counts_however_long_it_did_else_since(
    main: str, named: set[int]
) -> None:
    """Rank 3 has queued a call on a pair, and is missed by the others; then all abort, and live."""
    job, comms = missed(4)
    for r, c in enumerate(comms):
        c.proc.cover(0.5, 200, main=main if r == 3 else "nccl")
    pair = [comms[r].proc.comm("b" * 16, n, 2, t=1.5) for n, r in enumerate((2, 3))]
    pair[1].proc.call(pair[1], AR, 1.9, stream=0)
    give_up(comms, 200)
    for c in comms:
        for i in range(100):
            c.proc.coverage(203.0 + i, main=("running", "nccl")[i % 2])
    found = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert blamed(found) == named


@pytest.mark.parametrize("hung", [True, False])
def test_who_aborts_what_it_had_finalized_gave_up_then(hung: bool) -> None:
    """Three ranks wait in ncclCommFinalize for the last one, and abort 101 s later.

    Or that one has called it as well, and all free their communicators so.
    """
    job = Job()
    comms = job.world(4)
    t = steps(comms, 20)
    there = comms[:3] if hung else comms
    for c in there:
        c.proc.comm_end(c, t, "finalize")
        c.proc.call(c, "ncclCommFinalize", t, dur=101 if hung else 0.1, rc=3 if hung else 0)
    for p in (c.proc for c in there if hung):
        p.cover(0.5, t + 101, main="nccl", in_flight=1)
    give_up(there, t + 101)
    cover(job.procs, t + 400)
    found = analyze_job(job)
    kinds = {(f.hang_type, f.severity, f.since) for f in found}
    assert kinds == ({("nccl_missing_exit", "error", unix(t))} if hung else set())
    assert blamed(found) == ({3} if hung else set())
