"""Followers of an inference job that wait for the next request."""

from __future__ import annotations

from cases.kit import AR, BC, READS, RUNS, SERVES, all_make, make, rounds, started, watch, watch_all
from support.tracegen import Comm, Job

from lives.kit import HANGS, life

MISSING = "collective_missing_enter"
ENDED = "comm_ended_under_waiters"


def _request(comms: list[Comm], t: float) -> float:
    """The root broadcasts a request that all followers wait for; all work on it."""
    make(comms[0], BC, t, root=0)
    return rounds(comms, 5, t + 0.1)


def _serve(waits: list[float]) -> tuple[Job, list[Comm], float]:
    """Requests with quiet spells between them; ends with followers that wait."""
    job, comms, t = started(4, 3)
    for wait in waits:
        all_make(comms[1:], BC, t, root=0)
        t = _request(comms, t + wait)
    all_make(comms[1:], BC, t, root=0)
    return job, comms, t


def _lacks_a_follower(comms: list[Comm], t: float, who: int) -> None:
    """A request comes; one of the followers does not come to the next broadcast."""
    t = _request(comms, t)
    all_make([c for r, c in enumerate(comms) if r not in (0, who)], BC, t, root=0)
    make(comms[0], BC, t + 2, root=0)


@life(MISSING, blamed=(3,), idle_ok=("*aa",))
def idle_declared(hung: bool) -> Job:
    job, comms, t = _serve([2.0])
    if hung:
        _lacks_a_follower(comms, t + 100, 3)
    else:
        t = _request(comms, t + 500)
        all_make(comms[1:], BC, t, root=0)
    end = t + (102 + HANGS if hung else 400)
    watch(job.procs[0], end, (0.0, RUNS), (t, SERVES))
    watch_all(job.procs[1:3], end, (0.0, RUNS))
    watch(job.procs[3], end, (0.0, RUNS), (t + 102, READS if hung else RUNS))
    return job


@life(ENDED, blamed=(0,), idle_ok=("*aa",))
def idle_declared_until_the_root_aborts(hung: bool) -> Job:
    job, comms, t = _serve([2.0, 400.0])
    if hung:
        comms[0].proc.comm_end(comms[0], t + 50, "abort")
        comms[0].proc.call(comms[0], "ncclCommAbort", t + 50, dur=0.1)
    watch(job.procs[0], t + 400, (0.0, RUNS), (3.0, SERVES))
    watch_all(job.procs[1:], t + 400, (0.0, RUNS))
    return job


@life(MISSING, blamed=(4,), idle_ok=("*aa",))
def idle_declared_but_the_root_is_blocked(hung: bool) -> Job:
    """The root shares another communicator with rank 4."""
    job, _, t = _serve([2.0])
    other = [
        job.procs[0].comm("00000000000000dd", 0, 2),
        job.proc(4).comm("00000000000000dd", 1, 2),
    ]
    t = rounds(other, 5, t + 1)
    if hung:
        make(other[0], AR, t)
    end = t + HANGS
    watch_all(job.procs[:4], end, (0.0, RUNS), (t, RUNS if hung else SERVES))
    watch(job.procs[4], end, (0.0, RUNS), (t, READS))
    return job


@life(MISSING, blamed=(0,), notices=True)
def idle_learned(hung: bool) -> Job:
    job, comms, t = _serve([100.0, 110.0, 120.0])
    if hung:
        watch(job.procs[0], t + 50, (0.0, RUNS), (1.3, SERVES))
        job.procs[0].end(t + 50.5, how="exited", code=0)
    else:
        t = _request(comms, t + 500)
        watch(job.procs[0], t + 30, (0.0, RUNS), (1.3, SERVES))
    watch_all(job.procs[1:], t + (HANGS if hung else 30), (0.0, RUNS))
    return job


@life(MISSING, blamed=(2,), notices=True)
def idle_learned_then_a_follower_is_gone(hung: bool) -> Job:
    job, comms, t = _serve([100.0, 110.0, 120.0])
    if hung:
        _lacks_a_follower(comms, t + 100, 2)
    else:
        _request(comms, t + 400)
    end = t + (102 + HANGS if hung else 430)
    watch(job.procs[0], end, (0.0, RUNS), (1.3, SERVES))
    watch_all([job.procs[1], job.procs[3]], end, (0.0, RUNS))
    watch(job.procs[2], end, (0.0, RUNS), (t + 101, READS if hung else RUNS))
    return job


@life(MISSING, blamed=(0,), notices=True)
def idle_for_the_first_time(hung: bool) -> Job:
    """Nothing was declared or learned: not decidable while the root lives outside NCCL."""
    job, comms, t = _serve([2.0])
    if hung:
        watch(job.procs[0], t + 50, (0.0, RUNS), (3.0, SERVES))
        job.procs[0].end(t + 50.5, how="signaled", signal=9)
    else:
        t = _request(comms, t + 500)
        watch(job.procs[0], t + 30, (0.0, RUNS), (3.0, SERVES))
    watch_all(job.procs[1:], t + (HANGS if hung else 30), (0.0, RUNS))
    return job
