"""Ranks that do something else for minutes, with and without a declared phase."""

from __future__ import annotations

from cases.kit import AR, READS, RUNS, WRITES, State, make, rounds, watch
from support.tracegen import Job

from lives.kit import HANGS_IN_PHASE, PHASE, life

MISSING = "collective_missing_enter"


def _late(hung: bool, who: int, takes: float, state: State, api: str = AR) -> Job:
    """One rank comes late to a collective that the others wait in, or never."""
    job = Job()
    comms = job.world(4)
    t = rounds(comms, 20, 1.0)
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
@life(MISSING, blamed=(0,), name="checkpoint_declared", **PHASE)
def checkpoint(hung: bool) -> Job:
    return _late(hung, 0, 200.0, WRITES)


@life(MISSING, blamed=(2,), notices=True)
@life(MISSING, blamed=(2,), name="slow_data_declared", **PHASE)
def slow_data(hung: bool) -> Job:
    return _late(hung, 2, 150.0, READS)


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


@life(MISSING, blamed=(3,), notices=True)
@life(MISSING, blamed=(3,), name="compile_declared", **PHASE)
def compile_of_a_new_shape(hung: bool) -> Job:
    """All compile, each as long as it takes; then they meet in one collective."""
    job = Job()
    comms = job.world(4)
    t = rounds(comms, 20, 1.0)
    takes = (40.0, 90.0, 120.0, 250.0)
    for c, took in zip(comms, takes, strict=True):
        if not hung or took != takes[-1]:
            make(c, AR, t + took)
    end = t + 40 + HANGS_IN_PHASE
    if not hung:
        end = rounds(comms, 40, t + takes[-1] + 0.5, step=1.0)
    for p in job.procs:
        watch(p, end, (0.0, RUNS))
    return job
