"""Ranks that do something else for minutes, with and without a declared phase."""

from __future__ import annotations

from cases.kit import AR, READS, RUNS, WRITES, State, make, rounds, started, watch, watch_all
from support.tracegen import Job

from lives.kit import HANGS_IN_PHASE, PHASE_LIMIT, life

MISSING = "collective_missing_enter"


def _late(hung: bool, who: int, takes: float, state: State, api: str = AR) -> Job:
    """One rank comes late to a collective that the others wait in, or never."""
    job, comms, t = started(4, 20)
    for r, c in enumerate(comms):
        if r != who:
            make(c, api, t)
        elif not hung:
            make(c, api, t + takes)
    end = t + HANGS_IN_PHASE
    if not hung:
        end = rounds(comms, 40, t + takes + 0.5, step=1.0)
    for p in job.procs:
        away = [(t, state), (t + takes, state if hung else RUNS)] if p.rank == who else []
        watch(p, end, (0.0, RUNS), *away)
    return job


@life(MISSING, blamed=(0,), notices=True)
def checkpoint(hung: bool) -> Job:
    return _late(hung, 0, 200.0, WRITES)


@life(MISSING, blamed=(2,), notices=True)
def slow_data(hung: bool) -> Job:
    return _late(hung, 2, 150.0, READS)


@life(MISSING, blamed=(0,))
def checkpoint_declared(hung: bool) -> Job:
    """The hung one stays in its phase for longer than it said that it may take."""
    job = _late(hung, 0, 200.0, WRITES)
    p = job.procs[0]
    p.phase(20.5, "checkpoint", limit=PHASE_LIMIT)
    if not hung:
        p.phase(220.5, None)
    return job


@life(MISSING, blamed=(2,))
def slow_data_declared(hung: bool) -> Job:
    """It promises to tell every 10 s how far it is; the hung one does so no more."""
    job = _late(hung, 2, 350.0, READS)
    p = job.procs[2]
    for n in range(5 if hung else 35):
        p.phase(21.0 + 10 * n, "data", since=21.0, every=10, step=n)
    if not hung:
        p.phase(370.9, None)
    return job


@life(MISSING, blamed=(1,), notices=True)
def first_collective_waits_inside(hung: bool) -> Job:
    """The first call on a communicator connects: hosts are inside until the last has come."""
    job = Job()
    comms = job.world(4)
    t, takes = 1.0, 120.0
    for r, c in enumerate(comms):
        if r != 1:
            c.proc.enter(c, AR, t)
            if not hung:
                c.idx, c.ords = 0, 0
                c.proc.call(c, AR, t, dur=takes)
        elif not hung:
            make(c, AR, t + takes - 0.5, dur=0.5)
    end = t + HANGS_IN_PHASE if hung else rounds(comms, 40, t + takes + 0.5, step=1.0)
    for p in job.procs:
        watch(p, end, (0.0, RUNS), *([(t + 1, READS)] if p.rank == 1 and hung else []))
    return job


#: Seconds that each rank compiles for.
COMPILES = (40.0, 90.0, 120.0, 250.0)


def _compile(hung: bool, declared: bool) -> tuple[Job, float, float]:
    """All compile, each as long as it takes, then they meet; when they began, and the end."""
    job, comms, t = started(4, 20)
    for c, took in zip(comms, COMPILES, strict=True):
        if declared:
            c.proc.phase(t + 0.5, "compile")
        if not hung or took != COMPILES[-1]:
            make(c, AR, t + took)
            if declared:
                c.proc.phase(t + took + 0.1, None)
    if hung:
        return job, t, t + COMPILES[0] + HANGS_IN_PHASE
    return job, t, rounds(comms, 40, t + COMPILES[-1] + 0.5, step=1.0)


@life(MISSING, blamed=(3,), notices=True)
def compile_of_a_new_shape(hung: bool) -> Job:
    """The hung one never comes to the collective in which they meet."""
    job, _, end = _compile(hung, declared=False)
    watch_all(job.procs, end, (0.0, RUNS))
    return job


@life(MISSING, blamed=(3,))
def compile_declared(hung: bool) -> Job:
    """All declare it; the hung one is killed in the midst of it."""
    job, t, end = _compile(hung, declared=True)
    watch_all(job.procs[:3], end, (0.0, RUNS))
    last = job.procs[3]
    watch(last, t + 200 if hung else end, (0.0, RUNS))
    if hung:
        last.end(t + 200.5, how="signaled", signal=9)
    return job


@life(MISSING, blamed=(0,))
def checkpoint_declared_with_others_behind(hung: bool) -> Job:
    """Rank 2 waits for rank 1, which waits for rank 0, which writes."""
    job = Job()
    world = job.world(3)
    data = [job.procs[r].comm("00000000000000bb", r, 2) for r in (0, 1)]
    tensor = [job.procs[r].comm("00000000000000cc", r - 1, 2) for r in (1, 2)]
    t = rounds(world, 20, 1.0, step=1.0)
    t = rounds([*data], 3, t)
    t = rounds([*tensor], 3, t)
    job.procs[0].phase(t, "checkpoint", limit=PHASE_LIMIT)
    make(tensor[1], AR, t + 0.1, inside=hung, dur=390.5)
    make(data[1], AR, t + 0.2, inside=hung, dur=390.0)
    if not hung:
        make(data[0], AR, t + 390.1)
        job.procs[0].phase(t + 390, None)
        make(tensor[0], AR, t + 390.5)
    end = t + HANGS_IN_PHASE if hung else rounds(world, 40, t + 392, step=1.0)
    for p in job.procs:
        watch(p, end, (0.0, RUNS), *([(t, WRITES)] if p.rank == 0 and hung else []))
    return job
