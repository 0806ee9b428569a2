"""Published reports of hung jobs: what happened, and the diagnosis that is right.

Scaled down where many ranks or hours add nothing; thresholds are scaled with
them (``options``).
"""

from __future__ import annotations

from support.tracegen import Comm, Job

from cases.kit import (
    AG,
    AR,
    BC,
    FAST,
    JOINS,
    PAST,
    READS,
    RECV,
    RUNS,
    SEND,
    SERVES,
    WRITES,
    all_make,
    case,
    make,
    rounds,
    started,
    watch,
    watch_all,
)

WORLD = "00000000000000aa"


@case(
    "Barrier #12 has the same api and size on all ranks, but rank 0 came to it from "
    "save_checkpoint, which it calls alone: rank 0 made one call more, and waits in the next one "
    "for ranks that have made all of theirs.",
    hang_type=("skipped_or_extra_call", "collective_mismatch"),
    blamed=(0,),
    words=("ank 0", "site"),
    options=FAST,
)
def checkpoint_barrier_on_one_rank() -> Job:
    job = Job()
    comms = job.world(4)
    train, save, epoch = "a1" * 8, "b2" * 8, "c3" * 8
    t = rounds(comms, 12, 1.0, site=train)
    make(comms[0], AR, t, count=1, site=save)
    all_make(comms[1:], AR, t + 0.2, count=1, site=epoch)
    make(comms[0], AR, t + 0.5, count=1, site=epoch)
    watch(job.procs[0], t + PAST, (0.0, RUNS))
    watch_all(job.procs[1:], t + PAST, (0.0, RUNS), (t + 1, JOINS))
    return job


@case(
    "Rank 0 is inside an all-gather of the tensor-parallel communicator that rank 1 has not come "
    "to; rank 1 waits for rank 0 in the broadcast of the next request. Each lacks the other: two "
    "findings, and no rank is named alone.",
    hang_type=("collective_missing_enter", "cross_comm_order_inversion"),
    role=("unknown", "root_cause"),
    options=FAST,
)
def idle_peer_and_blocked_all_gather() -> Job:
    job = Job()
    world = job.world(2)
    tp = [c.proc.comm("0000000000000010", r, 2) for r, c in enumerate(world)]
    t = rounds(world, 3, 1.0, api=BC)
    t = rounds(tp, 20, t, api=AG, stream=1)
    make(tp[0], AG, t, inside=True, stream=1)
    make(world[1], BC, t + 0.1, inside=True)
    watch_all(job.procs, t + PAST, (0.0, RUNS))
    return job


@case(
    "The ranks stand apart inside a CUDA graph, whose replays never enter the API: at the API all "
    "are level, so nobody can be named, and the report must say what it cannot see.",
    report=("graph",),
    options=FAST,
)
def blind_in_a_cuda_graph() -> Job:
    job, comms, t = started(4, 4)
    t = rounds(comms, 24, t, step=0.01, capture="yes")
    watch_all(job.procs, t + PAST, (0.0, RUNS))
    for p in job.procs:
        p.cannot_see = ["graph_replay"]
    return job


@case(
    "All ranks are inside the same call and none gets out: nobody is missing, the device or the "
    "fabric stands still.",
    hang_type=("collective_all_ranks_stuck",),
    role=("unknown", "root_cause"),
    confidence=("inferred",),
    words=("8", AR),
    options=FAST,
)
def all_entered_and_frozen() -> Job:
    job, comms, t = started(8, 10)
    all_make(comms, AR, t, inside=True)
    watch_all(job.procs, t + PAST, (0.0, RUNS))
    return job


@case(
    "All ranks have launched the same count and their hosts are free: seen from the API this is "
    "also how a job looks that idles between requests, so nothing may be claimed.",
    options=FAST,
)
def all_level_and_idle() -> Job:
    job, _, t = started(8, 10)
    watch_all(job.procs, t + PAST, (0.0, RUNS), (t, SERVES))
    return job


@case(
    "One broadcast, three ranks with 64 floats and rank 2 with 24,084,544: the minority is wrong.",
    hang_type=("collective_mismatch",),
    blamed=(2,),
    words=("ank 2", "24084544", "64"),
    options=FAST,
)
def broadcast_of_another_size() -> Job:
    job, comms, t = started(4, 10)
    for r, c in enumerate(comms):
        make(c, BC, t, count=24_084_544 if r == 2 else 64)
    watch_all(job.procs, t + PAST, (0.0, RUNS))
    return job


@case(
    "Rank 1 reduces another size and the job goes on with wrong numbers:"
    " said though nothing hangs.",
    hang_type=("collective_mismatch",),
    blamed=(1,),
    words=("ank 1", "1000", "1024"),
    options=FAST,
)
def wrong_size_that_does_not_hang() -> Job:
    job, comms, t = started(4, 10)
    for r, c in enumerate(comms):
        make(c, AR, t, count=1000 if r == 1 else 1024)
    t = rounds(comms, 40, t + 0.1)
    watch_all(job.procs, t + 1, (0.0, RUNS))
    return job


@case(
    "One all-reduce of 1,025 elements among those of 262,144: the rank in the minority is wrong, "
    "and its call site differs from that of the others.",
    hang_type=("collective_mismatch",),
    blamed=(11,),
    words=("ank 11", "1025", "262144"),
    report=(
        f"call site: rank 11 from {'b2' * 8}",
        f"call site: ranks 0-10,12-15 from {'a1' * 8}",
    ),
    options=FAST,
)
def one_small_all_reduce_among_many() -> Job:
    job, comms, t = started(16, 4, count=262_144)
    for r, c in enumerate(comms):
        odd = r == 11
        make(c, AR, t, count=1025 if odd else 262_144, site=("b2" if odd else "a1") * 8)
    watch_all(job.procs, t + 8, (0.0, RUNS))
    return job


@case(
    "Ranks 0 and 2 exchange with rank 1 and are blocked in ncclGroupEnd; rank 1 left its side out "
    "and has gone past, to a collective: its peers wait for it, not for each other.",
    hang_type=("p2p_unmatched",),
    blamed=(1,),
    words=("1",),
    options=FAST,
)
def unpaired_send_and_receive() -> Job:
    job, comms, t = started(4, 5)
    for r in (0, 2):
        swap = [(comms[r], SEND, {"peer": 1}), (comms[r], RECV, {"peer": 1})]
        comms[r].proc.group(swap, t, state="inside")
    for r in (1, 3):
        make(comms[r], AR, t + 0.2, inside=r == 1)
    watch_all(job.procs, t + PAST, (0.0, RUNS))
    return job


@case(
    "ncclCommSplit is collective over the parent: ranks 0 and 1 are inside, 2 and 3 never call it.",
    hang_type=("comm_init_missing_enter",),
    blamed=(2, 3),
    words=("split", "2-3"),
    options=FAST,
)
def split_entered_by_a_subset() -> Job:
    job, comms, t = started(4, 5)
    for r in (0, 1):
        make(comms[r], "ncclCommSplit", t, inside=True, color=0, key=r, ord=1)
    watch_all(job.procs[:2], t + PAST, (0.0, RUNS))
    watch_all(job.procs[2:], t + PAST, (0.0, RUNS), (t, READS))
    return job


@case(
    "The process lives, is observed up to now and never enters: said so, whatever the framework.",
    hang_type=("collective_missing_enter",),
    blamed=(2,),
    reason=("rank_alive_but_not_entered",),
    confidence=("observed",),
    words=("ank 2", AR),
    options=FAST,
)
def alive_and_never_enters() -> Job:
    job, comms, t = started(4, 20)
    all_make([c for r, c in enumerate(comms) if r != 2], AR, t)
    watch_all(job.procs[:2] + job.procs[3:], t + PAST, (0.0, RUNS))
    watch(job.procs[2], t + PAST, (0.0, RUNS), (t, SERVES))
    return job


def _saving(waited: float) -> tuple[Job, list[Comm], float]:
    job, comms, t = started(4, 10)
    all_make(comms[1:], AR, t, count=1)
    return job, comms, t + waited


@case(
    "Rank 0 writes a checkpoint and the others wait in a barrier: worth a notice, no error before "
    "the limit.",
    hang_type=("collective_missing_enter",),
    blamed=(0,),
    severity="notice",
    words=("ank 0", AR),
    options=FAST,
)
def slow_checkpoint() -> Job:
    job, _, end = _saving(9.0)
    watch(job.procs[0], end, (0.0, RUNS), (2.0, WRITES))
    watch_all(job.procs[1:], end, (0.0, RUNS))
    return job


@case(
    "The watchdogs of the others gave up on rank 0, which was writing a checkpoint, and aborted; "
    "it comes to a communicator that is gone. They ended it because it was late: it is the cause.",
    hang_type=(
        "collective_missing_enter",
        "delayed_collective_enter",
        "comm_ended_under_waiters",
    ),
    blamed=(0,),
    words=("ank 0", "ranks 1-3 waited, and have given up"),
    options=FAST,
)
def checkpoint_past_the_timeout() -> Job:
    job, comms, t = _saving(PAST)
    for i, c in enumerate(comms[1:]):
        c.proc.comm_end(c, t + 0.1 * i, "abort")
        c.proc.call(c, "ncclCommAbort", t + 0.1 * i, dur=0.05)
        watch(c.proc, t + 1, (0.0, RUNS))
        c.proc.end(t + 1.5, how="signaled", signal=6)
    make(comms[0], AR, t + 4, count=1)
    watch(job.procs[0], t + 12, (0.0, RUNS), (2.0, WRITES), (t + 4, RUNS))
    return job


@case(
    "Three communicators in a ring, each used in one order by its members, but the order between "
    "them differs by host thread: every rank sits in the one that the next lacks.",
    hang_type=("cross_comm_order_inversion",),
    role=("root_cause", "unknown"),
    options=FAST,
)
def communicators_in_different_order() -> Job:
    job, world, t = started(3, 5)
    for i in range(3):
        members = (i, (i + 1) % 3)
        pair = [world[r].proc.comm(f"00000000000000b{i}", n, 2) for n, r in enumerate(members)]
        # Rank i goes first to the one that it shares with rank i + 1.
        make(pair[0], AR, t, inside=True)
    watch_all(job.procs, t + PAST, (0.0, RUNS))
    return job


@case(
    "15 ranks on two nodes are all inside ncclCommInitRank and none gets out: not the user's bug.",
    hang_type=("comm_init_stuck",),
    role=("root_cause", "unknown"),
    words=("ncclCommInitRank", "15"),
    options=FAST,
)
def init_that_never_completes() -> Job:
    job = Job()
    for r in range(15):
        p = job.proc(r)
        p.enter(None, "ncclCommInitRank", 1.0 + 0.01 * r, uid_hash=WORLD, nranks=15, rank=r)
        watch(p, 1.0 + PAST, (0.0, RUNS))
    return job
