"""Chains of waits that name an innocent rank when read naively, each with its twin."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.tracegen import Comm, Job

from cases.kit import (
    AR,
    BC,
    FAST,
    LARGE,
    PAST,
    POLLS,
    READS,
    RECV,
    RUNS,
    SEND,
    SMALL,
    all_make,
    case,
    make,
    rounds,
    started,
    watch,
    watch_all,
)


@dataclass
class Grid:
    """Four ranks: tensor-parallel pairs {0,1} and {2,3}, data-parallel {0,2} and {1,3}."""

    job: Job = field(default_factory=Job)
    tp: list[Comm] = field(default_factory=list)
    dp: list[Comm] = field(default_factory=list)

    def __post_init__(self) -> None:
        for r in range(4):
            p = self.job.proc(r)
            self.tp.append(p.comm(f"00000000000010{r // 2:02d}", r % 2, 2))
            self.dp.append(p.comm(f"00000000000020{r % 2:02d}", r // 2, 2))


@case(
    "Ranks 0 and 1 have both entered their last tensor-parallel call and their hosts are idle: it "
    "stalls on the device. That they do not come to the data-parallel calls of 2 and 3 follows.",
    hang_type=("collective_all_ranks_stuck",),
    role=("root_cause", "unknown"),
    severity="any",
    confidence=("inferred",),
    words=("0000000000001000",),
    options=FAST,
)
def device_stall_in_a_tensor_parallel_group() -> Job:
    g = Grid()
    t = rounds(g.dp, 5, rounds(g.tp, 5, 1.0), stream=1)
    all_make(g.tp, AR, t)
    all_make(g.dp[2:], AR, t + 0.1, stream=1)
    watch_all(g.job.procs[:2], t + PAST, (0.0, RUNS), (t, POLLS))
    watch_all(g.job.procs[2:], t + PAST, (0.0, RUNS))
    return g.job


@case(
    "The same with hosts that spin in their CUDA synchronisation: it looks like work.",
    hang_type=("collective_all_ranks_stuck",),
    role=("root_cause", "unknown"),
    severity="any",
    confidence=("inferred",),
    words=("0000000000001000",),
    options=FAST,
)
def device_stall_with_spinning_hosts() -> Job:
    g = Grid()
    t = rounds(g.dp, 5, rounds(g.tp, 5, 1.0), stream=1)
    all_make(g.tp, AR, t)
    all_make(g.dp[2:], AR, t + 0.1, stream=1)
    watch_all(g.job.procs, t + PAST, (0.0, RUNS))
    return g.job


@case(
    "The same, but rank 1 went on to its own data-parallel call: the tensor-parallel call is no "
    "obstacle, rank 0 alone went away.",
    hang_type=("collective_missing_enter",),
    blamed=(0,),
    words=("ank 0", "0000000000002000"),
    options=FAST,
)
def one_rank_away_from_a_tensor_parallel_group() -> Job:
    g = Grid()
    t = rounds(g.dp, 5, rounds(g.tp, 5, 1.0), stream=1)
    all_make(g.tp, AR, t)
    all_make(g.dp[1:], AR, t + 0.1, stream=1)
    watch(g.job.procs[0], t + PAST, (0.0, RUNS), (t, READS))
    watch_all(g.job.procs[1:], t + PAST, (0.0, RUNS))
    return g.job


def _two_communicators() -> tuple[Job, list[Comm], list[Comm], float]:
    job = Job()
    x = job.world(2, "00000000000000a0")
    y = [c.proc.comm("00000000000000b0", r, 2) for r, c in enumerate(x)]
    return job, x, y, rounds(y, 5, rounds(x, 5, 1.0), stream=1)


@case(
    "Rank 0 queued a call on X and stopped in its data loader; rank 1 waits for it on Y and has "
    "not come to X. Rank 0 is free to come and rank 1 is not: no deadlock.",
    hang_type=("collective_missing_enter",),
    blamed=(0,),
    words=("ank 0", "00000000000000b0"),
    options=FAST,
)
def queued_work_then_the_data_loader() -> Job:
    job, x, y, t = _two_communicators()
    make(x[0], AR, t)
    make(y[1], AR, t + 0.2, inside=True, stream=1)
    watch(job.procs[0], t + PAST, (0.0, RUNS), (t, READS))
    watch(job.procs[1], t + PAST, (0.0, RUNS))
    return job


@case(
    "Both hosts are inside NCCL, each in the communicator that the other has not come to: a "
    "deadlock of two orders, of which neither is wrong by itself.",
    hang_type=("cross_comm_order_inversion",),
    role=("root_cause", "unknown"),
    options=FAST,
)
def two_communicators_in_opposite_order() -> Job:
    job, x, y, t = _two_communicators()
    make(x[0], AR, t, inside=True)
    make(y[1], AR, t + 0.2, inside=True, stream=1)
    watch_all(job.procs, t + PAST, (0.0, RUNS))
    return job


def _ring() -> tuple[Job, list[Comm], float]:
    """Four ranks that have passed small messages round a few times."""
    job = Job()
    comms = job.world(4)
    t = 1.0
    while t < 2.0:
        all_pass(comms, t, SMALL)
        t += 0.2
    return job, comms, t


def all_pass(comms: list[Comm], t: float, count: int) -> None:
    """Each sends to the next rank, then receives from the one before."""
    for r, c in enumerate(comms):
        make(c, SEND, t, peer=(r + 1) % 4, count=count)
        make(c, RECV, t + 0.1, peer=(r - 1) % 4, count=count)


@case(
    "Small sends are buffered, so ranks run ahead until they lack a message: 1 waits for 0, 0 for "
    "3, 3 for 2. Rank 2 is in its data loader; that it has not received what 1 sent holds nobody.",
    hang_type=("p2p_unmatched",),
    blamed=(2,),
    words=("2",),
    options=FAST,
)
def chain_over_buffered_sends() -> Job:
    job, comms, t = _ring()
    # Rank r gets as many rounds done as it lies steps behind rank 2.
    for r, done in ((3, 0), (0, 1), (1, 2)):
        for i in range(done + 1):
            make(comms[r], SEND, t + 0.2 * i, peer=(r + 1) % 4, count=SMALL)
            make(comms[r], RECV, t + 0.2 * i + 0.1, peer=(r - 1) % 4, count=SMALL)
    watch_all([p for p in job.procs if p.rank != 2], t + PAST, (0.0, RUNS))
    watch(job.procs[2], t + PAST, (0.0, RUNS), (t, READS))
    return job


@case(
    "The same ring with messages too large for the buffers: all are inside their send, and each "
    "needs the receive that the next posts after its own send. A deadlock, nobody alone.",
    hang_type=("p2p_order_inversion",),
    role=("root_cause", "unknown"),
    options=FAST,
)
def ring_of_blocking_sends() -> Job:
    job, comms, t = _ring()
    for r, c in enumerate(comms):
        make(c, SEND, t, inside=True, peer=(r + 1) % 4, count=LARGE)
    watch_all(job.procs, t + PAST, (0.0, RUNS))
    return job


def _fan() -> tuple[Job, list[Comm], float]:
    """Rank 3 gets from 0; rank 0 sends to 1 and gets from 2."""
    job = Job()
    comms = job.world(4)
    t = 1.0
    for _ in range(4):
        make(comms[0], SEND, t, peer=1, count=SMALL)
        make(comms[1], RECV, t, peer=0, count=SMALL)
        make(comms[2], SEND, t, peer=0, count=SMALL)
        make(comms[0], RECV, t + 0.01, peer=2, count=SMALL)
        make(comms[0], SEND, t + 0.02, peer=3, count=SMALL)
        make(comms[3], RECV, t, peer=0, count=SMALL)
        t += 0.2
    return job, comms, t


@case(
    "Ranks 1 and 2 are both away. Rank 0's small send to 1 went into a buffer; it waits for the "
    "message of 2, and 3 waits for 0: rank 2 holds the job up, rank 1 nobody.",
    hang_type=("p2p_unmatched",),
    blamed=(2,),
    words=("2",),
    options=FAST,
)
def buffered_send_then_a_receive() -> Job:
    job, comms, t = _fan()
    make(comms[0], SEND, t, peer=1, count=SMALL)
    make(comms[0], RECV, t + 0.01, inside=True, peer=2, count=SMALL)
    make(comms[3], RECV, t, peer=0, count=SMALL)
    watch_all([job.procs[0], job.procs[3]], t + PAST, (0.0, RUNS))
    watch_all(job.procs[1:3], t + PAST, (0.0, RUNS), (t, READS))
    return job


@case(
    "The same with a send too large for the buffer: rank 0 is inside it and waits for rank 1; it "
    "has not come to the receive from 2, which may be late without harm.",
    hang_type=("p2p_unmatched",),
    blamed=(1,),
    words=("1",),
    options=FAST,
)
def blocking_send_before_a_receive() -> Job:
    job, comms, t = _fan()
    make(comms[0], SEND, t, inside=True, peer=1, count=LARGE)
    make(comms[3], RECV, t, peer=0, count=SMALL)
    watch_all([job.procs[0], job.procs[3]], t + PAST, (0.0, RUNS))
    watch_all(job.procs[1:3], t + PAST, (0.0, RUNS), (t, READS))
    return job


def _commands() -> tuple[Job, list[Comm], float]:
    job, comms, t = started(3, 5, api=BC, root=0)
    all_make(comms[1:], BC, t, root=0)
    return job, comms, t


NEW = "00000000000000bb"


@case(
    "Rank 0, the root of the broadcast that 1 and 2 wait in, timed out, aborted the communicator "
    "and waits in the init of a new one. 1 and 2 sit on the old one: rank 0 left them there.",
    hang_type=("comm_ended_under_waiters",),
    blamed=(0,),
    words=("ank 0", BC),
    options=FAST,
)
def root_reconnects_alone() -> Job:
    job, comms, t = _commands()
    comms[0].proc.comm_end(comms[0], t + 5, "abort")
    comms[0].proc.call(comms[0], "ncclCommAbort", t + 5, dur=0.05)
    comms[0].proc.enter(None, "ncclCommInitRank", t + 5.2, uid_hash=NEW, nranks=3, rank=0)
    watch(job.procs[0], t + 5 + PAST, (0.0, RUNS), (t, READS))
    watch_all(job.procs[1:], t + 5 + PAST, (0.0, RUNS))
    return job


@case(
    "All three abort and make the new communicator together: a client that reconnects. Nobody "
    "waits on the old one any more.",
    without=("not there",),
    options=FAST,
)
def all_reconnect() -> Job:
    job, comms, t = _commands()
    new = []
    for r, c in enumerate(comms):
        c.proc.comm_end(c, t + 5 + 0.1 * r, "abort")
        c.proc.call(c, "ncclCommAbort", t + 5 + 0.1 * r, dur=0.05)
        new.append(c.proc.comm(NEW, r, 3, t=t + 6))
        args: dict[str, Any] = {"uid_hash": NEW, "nranks": 3, "rank": r, "new_comm": new[-1].id}
        c.proc.call(None, "ncclCommInitRank", t + 5.4 + 0.1 * r, dur=0.6 - 0.1 * r, **args)
    rounds(new, 8, t + 6.5, step=1.0, api=BC, root=0)
    watch_all(job.procs, t + PAST, (0.0, RUNS))
    return job
