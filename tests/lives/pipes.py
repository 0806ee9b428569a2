"""Jobs whose ranks send to each other: pipelines, experts, pairs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from cases.kit import (
    AR,
    LARGE,
    READS,
    RECV,
    RUNS,
    SEND,
    SMALL,
    make,
    started,
    watch,
    watch_all,
)
from support.tracegen import Comm, Job

from lives.kit import HANGS, life

MISSING = "collective_missing_enter"
UNMATCHED = "p2p_unmatched"
#: One thing posted: (api, peer) pairs, in a group if there are several.
Post = list[tuple[str, int]]


def post(c: Comm, ops: Post, t: float, count: int = LARGE, inside: bool = False) -> None:
    """Sends and receives of one call or one group."""
    if len(ops) > 1:
        state = {"state": "inside"} if inside else {}
        c.proc.group([(c, api, {"peer": p, "count": count}) for api, p in ops], t, **state)
    elif ops:
        make(c, ops[0][0], t, inside, peer=ops[0][1], count=count)


@life(UNMATCHED, blamed=(1,), notices=True)
def two_rank_all_reduce_as_send_and_receive(hung: bool) -> Job:
    """At two ranks the client exchanges and adds; rank 1 is slow at times."""
    job = Job()
    comms = job.world(2)
    t = 1.0
    for i in range(40):
        late = 25.0 if i % 20 == 19 else 0.01
        post(comms[0], [(SEND, 1), (RECV, 1)], t)
        post(comms[1], [(SEND, 0), (RECV, 0)], t + late)
        t += late + 0.5
    if hung:
        post(comms[0], [(SEND, 1), (RECV, 1)], t)
    watch(job.procs[0], t + (HANGS if hung else 100), (0.0, RUNS))
    watch(job.procs[1], t + (HANGS if hung else 100), (0.0, RUNS), (t, READS))
    return job


def one_f_one_b(stage: int, stages: int, batches: int) -> Iterator[Post]:
    """What a stage posts in one step of the 1F1B schedule."""
    first, last = stage == 0, stage == stages - 1
    before, after = stage - 1, stage + 1
    warm = min(stages - stage - 1, batches)
    for _ in range(warm):
        yield [] if first else [(RECV, before)]
        yield [] if last else [(SEND, after)]
    if batches > warm:
        yield [] if first else [(RECV, before)]
    for i in range(batches - warm):
        yield [] if last else [(SEND, after), (RECV, after)]
        if i == batches - warm - 1:
            yield [] if first else [(SEND, before)]
        else:
            yield [] if first else [(SEND, before), (RECV, before)]
    for _ in range(warm):
        yield [] if last else [(RECV, after)]
        yield [] if first else [(SEND, before)]


def interleaved(stage: int, stages: int, batches: int, chunks: int = 2) -> Iterator[Post]:
    """The forward passes of an interleaved schedule: stages in a ring, twice round."""
    items = [c * stages + stage for c in range(chunks) for _ in range(batches)]
    before, after = (stage - 1) % stages, (stage + 1) % stages
    yield [(RECV, before)] if items[0] > 0 else []
    for this, following in zip(items, [*items[1:], None], strict=True):
        ops: Post = [(SEND, after)] if this < chunks * stages - 1 else []
        if following is not None and following > 0:
            ops.append((RECV, before))
        yield ops


def _pipeline(hung: bool, schedule: str, norm: bool) -> Job:
    """The last stage compiles for minutes in the first step; stage 2 goes away in the twin.

    A host posts its whole step at once, ``norm``: with an all-reduce at its end.
    """
    job = Job()
    comms = job.world(4)
    t = 1.0
    for step in range(4):
        compiles = 150.0 if step == 0 else 0.0
        stuck = hung and step == 3
        for r, c in enumerate(comms):
            made = one_f_one_b(r, 4, 6) if schedule == "1f1b" else interleaved(r, 4, 6)
            posts = [p for p in made if p]
            at = t + (compiles if r == 3 else 0.0)
            for i, ops in enumerate(posts):
                if stuck and r == 2 and i == len(posts) // 2:
                    break
                post(c, ops, at + 0.01 * i)
            else:
                if norm:
                    make(c, AR, at + 0.01 * len(posts), count=1)
        t += compiles + 2
    end = t + (HANGS if hung else 20)
    for p in job.procs:
        away = [(t - 1.9, READS)] if hung and p.rank == 2 else []
        watch(p, end, (0.0, RUNS), *away)
    return job


@life(UNMATCHED, blamed=(2,), notices=True)
def pipeline_1f1b(hung: bool) -> Job:
    return _pipeline(hung, "1f1b", norm=False)


@life(UNMATCHED, MISSING, blamed=(2,), notices=True)
def pipeline_1f1b_with_a_gradient_norm(hung: bool) -> Job:
    return _pipeline(hung, "1f1b", norm=True)


@life(UNMATCHED, blamed=(2,), notices=True)
def pipeline_interleaved(hung: bool) -> Job:
    return _pipeline(hung, "interleaved", norm=False)


@life(UNMATCHED, MISSING, blamed=(1,))
def pipeline_attached_late(hung: bool) -> Job:
    """Ranks are attached seconds apart: what was sent before is seen on one side only."""
    job = Job()
    comms = []
    for r in range(3):
        first = 200 + 10 * r
        seqs = [0, 0, 0, 0, first]
        p = job.proc(r)
        comms.append(p.comm("00000000000000aa", r, 3, 10.0 * r + 0.4, learnt="struct", seqs=seqs))
    for step in range(200, 260):
        t = float(step - 200)
        for r, c in enumerate(comms):
            if step < 200 + 10 * r:
                continue
            size = 1000 + step  # messages of different sizes: pairing them wrongly shows
            if r > 0:
                make(c, RECV, t + 0.5, peer=r - 1, count=size)
            if r < 2:
                make(c, SEND, t + 0.5, peer=r + 1, count=size)
            make(c, AR, t + 0.6, seq=step, count=1)
    t = 60.0
    if hung:
        make(comms[0], SEND, t, peer=1, count=LARGE)
        make(comms[0], AR, t + 0.1, seq=260, count=1)
        make(comms[2], RECV, t, peer=1, count=LARGE)
        make(comms[2], AR, t + 0.1, seq=260, count=1)
    for r, c in enumerate(comms):
        away = [(t, READS)] if r == 1 else []
        end = t + (HANGS if hung else 100)
        watch(c.proc, end, (0.0, RUNS), *away, start=10.0 * r + 0.4)
    return job


@life(UNMATCHED, blamed=(1,))
def uneven_all_to_all(hung: bool) -> Job:
    """Experts: pairs without tokens are left out by both; in the twin by rank 1 alone."""
    job = Job()
    comms = job.world(4)
    rng = random.Random(7)
    t, steps = 1.0, 20
    for step in range(steps + 2):
        last = step >= steps
        tokens = [[rng.choice((0, 0, 64, 4096, 65536)) for _ in range(4)] for _ in range(4)]
        if last:
            tokens[1][2] = 4096 if step == steps else 0
        if last and not hung:
            break
        for r, c in enumerate(comms):
            if step > steps and r == 2:
                continue  # its host waits for the step before
            ops = [(SEND, p, tokens[r][p]) for p in range(4) if tokens[r][p]]
            ops += [(RECV, p, tokens[p][r]) for p in range(4) if tokens[p][r]]
            if last and r == 1:
                ops = [x for x in ops if x[:2] != (SEND, 2)]
            c.proc.group([(c, api, {"peer": p, "count": n}) for api, p, n in ops], t + 0.002 * r)
        t += 0.5
    watch_all(job.procs, t + (HANGS if hung else 100), (0.0, RUNS))
    return job


PAIR = "00000000000000bb"


@life("comm_init_missing_enter", blamed=(), notices=True)
def pair_communicator_made_lazily(hung: bool) -> Job:
    """Ranks 0 and 1 make a communicator for themselves, minutes apart."""
    job, _, t = started(4, 20)
    first, second = job.procs[0], job.procs[1]
    args: dict[str, Any] = {"uid_hash": PAIR, "nranks": 2}
    first.enter(None, "ncclCommInitRank", t, rank=0, **args)
    if hung:
        watch_all(job.procs, t + HANGS, (0.0, RUNS), (t, RUNS))
        return job
    pair = [p.comm(PAIR, r, 2, t + 200) for r, p in enumerate((first, second))]
    first.call(None, "ncclCommInitRank", t, dur=200.0, rank=0, new_comm=pair[0].id, **args)
    second.call(None, "ncclCommInitRank", t + 199, dur=1.0, rank=1, new_comm=pair[1].id, **args)
    for i in range(50):
        make(pair[0], SEND, t + 201 + i, peer=1, count=SMALL)
        make(pair[1], RECV, t + 201 + i, peer=0, count=SMALL)
    watch_all(job.procs, t + 300, (0.0, RUNS))
    return job


@life("p2p_order_inversion", blamed=())
def head_to_head_sends(hung: bool) -> Job:
    """Both send, then receive: small messages lie in buffers, a large one waits inside.

    All-reduces return in between: those who wait inside a send are in none of them.
    """
    job = Job()
    comms = job.world(2)
    t = 1.0
    for _ in range(50):
        for r, c in enumerate(comms):
            make(c, SEND, t, peer=1 - r, count=SMALL)
            make(c, RECV, t + 0.01, peer=1 - r, count=SMALL)
            make(c, AR, t + 0.02)
        t += 0.2
    if hung:
        for r, c in enumerate(comms):
            make(c, SEND, t, inside=True, peer=1 - r, count=LARGE)
    watch_all(job.procs, t + (HANGS if hung else 200), (0.0, RUNS))
    return job


@life(UNMATCHED, blamed=(1,), notices=True)
def small_sends_that_are_received_late(hung: bool) -> Job:
    """Rank 0 sends ahead into buffers for minutes and waits for nobody; then for an answer."""
    job = Job()
    comms = job.world(2)
    t = 1.0
    for i in range(10):
        make(comms[0], SEND, t + i, peer=1, count=SMALL)
        make(comms[1], RECV, t + i + (400.0 if i > 4 and not hung else 0.0), peer=0, count=SMALL)
    t += 12 if hung else 420
    if hung:
        make(comms[0], RECV, t, peer=1, count=SMALL)
    watch(job.procs[0], t + HANGS, (0.0, RUNS))
    watch(job.procs[1], t + HANGS, (0.0, RUNS), (7.0, READS), (400.0, READS if hung else RUNS))
    return job
