"""Orders that look odd and are right: groups of roots, two threads, graphs."""

from __future__ import annotations

import random

from cases.kit import AR, BC, LOCKED, READS, RUNS, make, rounds, started, watch, watch_all
from support.tracegen import Job

from lives.kit import HANGS, life


@life("collective_mismatch", "skipped_or_extra_call", blamed=(2,))
def broadcasts_by_several_roots(hung: bool) -> Job:
    """One group holds a broadcast by each rank; in the twin rank 2 swaps two of them."""
    job = Job()
    comms = job.world(4)
    t = 1.0
    for step in range(30):
        for r, c in enumerate(comms):
            order = [0, 1, 2, 3]
            if hung and step == 29 and r == 2:
                order = [1, 0, 2, 3]
            c.proc.group([(c, BC, {"root": root, "count": 4096}) for root in order], t + 0.001 * r)
        t += 0.3
    watch_all(job.procs, t + (HANGS if hung else 100), (0.0, RUNS))
    return job


@life("cross_comm_order_inversion", blamed=())
def two_threads_in_different_order(hung: bool) -> Job:
    """The main thread uses one communicator, autograd's another, in any order in time."""
    job = Job()
    x = job.world(2)
    y = [c.proc.comm("00000000000000bb", r, 2) for r, c in enumerate(x)]
    rng = random.Random(3)
    t = 1.0
    for _ in range(60):
        for r in (0, 1):
            main, auto = (t, t + 0.02) if rng.random() < 0.5 else (t + 0.02, t)
            make(x[r], AR, main)
            make(y[r], AR, auto, thread=job.procs[r].pid + 1, stream=1)
        t += 0.2
    if hung:
        # Each process holds a lock while it is inside, so its other thread does not come.
        make(x[0], AR, t, inside=True)
        make(y[1], AR, t, inside=True, thread=job.procs[1].pid + 1, stream=1)
    end = t + (HANGS if hung else 100)
    watch(job.procs[0], end, (0.0, RUNS))
    watch(job.procs[1], end, (0.0, RUNS), (t, LOCKED))
    return job


@life("collective_missing_enter", blamed=(2,))
def hosts_run_far_ahead(hung: bool) -> Job:
    """Rank 2's host makes a call each 0.25 s, the others are as far ahead as CUDA lets them."""
    job = Job()
    comms = job.world(3)
    ahead, calls = 1000, 1800
    slow = [1.0 + 0.25 * i for i in range(calls)]
    stop = calls - 100 if hung else calls
    for t in slow[:stop]:
        make(comms[2], AR, t)
    for i in range(min(calls, stop + ahead)):
        # Call i fits into the queue when call i - ahead has run.
        t = 1.0 + 0.001 * i if i < ahead else slow[i - ahead] + 0.001
        for c in comms[:2]:
            make(c, AR, t)
    end = slow[stop - 1] + (HANGS if hung else 1)
    watch_all(job.procs[:2], end, (0.0, RUNS))
    watch(job.procs[2], end, (0.0, RUNS), *([(slow[stop - 1] + 0.1, READS)] if hung else []))
    return job


@life("collective_missing_enter", blamed=(3,), notices=True)
def graph_capture(hung: bool) -> Job:
    """Ranks capture minutes apart, replay for long without a call, then go on eagerly."""
    job, comms, t = started(4, 10)
    for r, c in enumerate(comms):
        for i in range(30):
            make(c, AR, t + 30 * r + 0.001 * i, capture="yes")
    t += 500
    t = rounds(comms, 20, t)
    if hung:
        for c in comms[:3]:
            make(c, AR, t)
    end = t + (HANGS if hung else 100)
    for p in job.procs:
        p.cannot_see = ["graph_replay"]
        watch(p, end, (0.0, RUNS), *([(t, READS)] if p.rank == 3 else []))
    return job
