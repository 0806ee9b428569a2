"""Jobs that end, begin again, change their size, or are joined in mid-life."""

from __future__ import annotations

from typing import Any

from cases.kit import AR, READS, RUNS, all_make, make, rounds, started, watch, watch_all
from support.tracegen import Comm, Job, Proc, S

from lives.kit import HANGS, life

MISSING = "collective_missing_enter"
ENDED = "comm_ended_under_waiters"


def _leave(p: Proc, t: float, comm: Comm | None = None) -> None:
    """An orderly end, with or without destroy."""
    if comm is not None:
        p.comm_end(comm, t - 1, "destroy")
        p.call(comm, "ncclCommDestroy", t - 1, dur=0.2)
    watch(p, t, (0.0, RUNS))
    p.end(t + 0.2, how="exited", code=0)


def _end(hung: bool, destroy: bool, early: int) -> Job:
    """Ranks leave one by one; in the twin one of them leaves a step early."""
    job, comms, t = started(4, 50)
    if hung:
        stay = [c for r, c in enumerate(comms) if r != early]
        all_make(stay, AR, t + 1)
        _leave(job.procs[early], t + 3, comms[early] if destroy else None)
        watch_all([c.proc for c in stay], t + HANGS, (0.0, RUNS))
        return job
    for r, c in enumerate(comms):
        _leave(c.proc, t + 5 + 90 * r, c if destroy else None)
    return job


@life(MISSING, blamed=(1,))
def end_without_destroy(hung: bool) -> Job:
    return _end(hung, destroy=False, early=1)


@life(ENDED, MISSING, blamed=(2,))
def end_with_destroy(hung: bool) -> Job:
    return _end(hung, destroy=True, early=2)


@life("nccl_missing_exit", blamed=(2,), notices=True)
def destroy_waits_for_the_last(hung: bool) -> Job:
    """ncclCommDestroy waits for rank 2, which writes a last checkpoint, or never calls it."""
    job, comms, t = started(4, 50)
    for r, c in enumerate(comms):
        if r == 2:
            continue
        c.proc.comm_end(c, t, "destroy")
        line = c.proc.enter(c, "ncclCommDestroy", t)
        if not hung:
            c.proc.add(t + 200.5, {**line, "kind": "call", "dur": 200 * S, "rc": 0})
    if hung:
        watch_all([c.proc for r, c in enumerate(comms) if r != 2], t + HANGS, (0.0, RUNS))
        watch(job.procs[2], t + HANGS, (0.0, RUNS), (t, READS))
        return job
    _leave(job.procs[2], t + 201, comms[2])
    for p in (job.procs[0], job.procs[1], job.procs[3]):
        watch(p, t + 203, (0.0, RUNS))
        p.end(t + 203.2, how="exited", code=0)
    return job


@life("comm_init_missing_enter", blamed=(), notices=True)
def slow_to_init(hung: bool) -> Job:
    """Rank 3 loads its model for minutes before it calls NCCL: until then it has no trace."""
    job = Job()
    args: dict[str, Any] = {"uid_hash": "00000000000000aa", "nranks": 4}
    for r in range(3):
        job.proc(r).enter(None, "ncclCommInitRank", 1.0 + r, rank=r, **args)
    if hung:
        watch_all(job.procs, 1.0 + HANGS, (0.0, RUNS))
        return job
    p = job.proc(3)
    comms = [p.comm("00000000000000aa", r, 4, t=201.0) for r, p in enumerate(job.procs)]
    for r, c in enumerate(comms):
        t = 200.0 if r == 3 else 1.0 + r
        c.proc.call(None, "ncclCommInitRank", t, dur=201 - t, rank=r, new_comm=c.id, **args)
    t = rounds(comms, 50, 202.0, step=0.5)
    watch_all(job.procs[:3], t, (0.0, RUNS))
    watch(p, t, (0.0, RUNS), start=200.1)
    return job


@life("comm_init_missing_enter", blamed=(3,), notices=True)
def split_without_blocking(hung: bool) -> Job:
    """Ranks poll until all have come; rank 3 comes two minutes late, or never."""
    job = Job()
    args: dict[str, Any] = {"uid_hash": "00000000000000aa", "nranks": 4, "rc": 7}
    comms = [job.proc(r).comm("00000000000000aa", r, 4, t=1.0) for r in range(4)]
    for r, c in enumerate(comms):
        c.proc.call(None, "ncclCommInitRankConfig", 1.0, rank=r, new_comm=c.id, **args)
    t = rounds(comms, 50, 2.0)
    for r, c in enumerate(comms[: 3 if hung else 4]):
        late = 120 if r == 3 else 0
        c.proc.call(c, "ncclCommSplit", t + late, color=r % 2, key=r, ord=1, new_comm=None)
    if hung:
        watch_all(job.procs[:3], t + HANGS, (0.0, RUNS))
        watch(job.procs[3], t + HANGS, (0.0, RUNS), (t, READS))
        return job
    t += 121
    for r, c in enumerate(comms):
        half, place = f"00000000000000b{r % 2}", r // 2
        child = c.proc.comm(half, place, 2, t=t, learnt="split", parent=c.id, child=1)
        rounds([child], 10, t + 1)
    watch_all(job.procs, rounds(comms, 10, t + 3), (0.0, RUNS))
    return job


@life(MISSING, blamed=(1,))
def late_attach(hung: bool) -> Job:
    """Each rank is attached a few calls later than the one before, 500 calls after init."""
    job = Job()
    comms = []
    for r in range(4):
        first = 500 + 3 * r
        more: dict[str, Any] = {"seqs": [0, 0, 0, 0, first], "base_seq": first, "dev": r}
        comms.append(
            job.proc(r).comm("00000000000000aa", r, 4, 0.1 * first, learnt="struct", **more)
        )
    for i in range(500, 560):
        for r, c in enumerate(comms):
            if i >= 500 + 3 * r:
                make(c, AR, 0.1 * i + 0.001 * r, seq=i)
    t = 56.0
    if hung:
        for r in (0, 2, 3):
            make(comms[r], AR, t, seq=560)
    for r, c in enumerate(comms):
        away = [(t, READS)] if hung and r == 1 else []
        watch(c.proc, t + (HANGS if hung else 100), (0.0, RUNS), *away, start=50.0 + 0.3 * r)
    return job


@life(MISSING, blamed=(1,))
def restart_under_one_run_id(hung: bool) -> Job:
    """The launcher stops all workers in a step and starts new ones in the same folder."""
    job, old, t = started(4, 50)
    all_make(old[:2], AR, t)
    for r, c in enumerate(old):
        watch(c.proc, t + 1, (0.0, RUNS))
        c.proc.end(t + 1.2 + 0.2 * r, how="signaled", signal=15)
    t += 20
    new = [job.proc(r, pid=2000 + r).comm("00000000000000bb", r, 4, t=t) for r in range(4)]
    t = rounds(new, 100, t + 5)
    if hung:
        all_make([c for r, c in enumerate(new) if r != 1], AR, t)
    for r, c in enumerate(new):
        away = [(t, READS)] if hung and r == 1 else []
        watch(c.proc, t + (HANGS if hung else 100), (0.0, RUNS), *away, start=26.5)
    return job


@life(MISSING, blamed=(2,))
def elastic_scale_down(hung: bool) -> Job:
    """Rank 3 leaves on notice: all abort the old communicator, three make a new one."""
    job, old, t = started(4, 50)
    for r, c in enumerate(old):
        c.proc.comm_end(c, t + 0.1 * r, "abort")
        c.proc.call(c, "ncclCommAbort", t + 0.1 * r, dur=0.05)
    new = []
    for r in range(3):
        p = job.procs[r]
        new.append(p.comm("00000000000000bb", r, 3, t + 10))
        args: dict[str, Any] = {
            "uid_hash": "00000000000000bb",
            "nranks": 3,
            "rank": r,
            "new_comm": new[-1].id,
        }
        p.call(None, "ncclCommInitRank", t + 4 + r, dur=6.0 - r, **args)
    watch(job.procs[3], t + 2, (0.0, RUNS))
    job.procs[3].end(t + 2.5, how="exited", code=0)
    t = rounds(new, 100, t + 11)
    if hung:
        all_make(new[:2], AR, t)
    for r, c in enumerate(new):
        away = [(t, READS)] if hung and r == 2 else []
        watch(c.proc, t + (HANGS if hung else 100), (0.0, RUNS), *away)
    return job
