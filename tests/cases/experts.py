"""Reports in which some ranks fire fewer backward hooks than the others."""

from __future__ import annotations

from support.tracegen import Comm, Job

from cases.kit import AG, AR, FAST, PAST, RS, RUNS, all_make, case, watch_all


@case(
    "ZeRO-3 with uneven samples: ranks 2 and 5 fire fewer backward hooks and come to the gradient "
    "norm while the others are at the next layer's all-gather.",
    hang_type=("skipped_or_extra_call", "collective_mismatch"),
    blamed=(2, 5),
    words=("2", "5"),
    options=FAST,
)
def fewer_backward_hooks() -> Job:
    job = Job()
    comms = job.world(8)

    def step(members: list[Comm], t: float, hooks: int) -> float:
        for i in range(hooks):
            all_make(members, AG, t + 0.02 * i, count=4096 + 512 * i)
            all_make(members, RS, t + 0.02 * i + 0.01, count=4096 + 512 * i)
        all_make(members, AR, t + 0.02 * hooks, count=1)  # gradient norm, then .item()
        return t + 0.02 * hooks

    t = 1.0
    for _ in range(2):
        t = step(comms, t, 5) + 0.2
    short = [comms[2], comms[5]]
    step([c for c in comms if c not in short], t, 5)
    step(short, t, 4)
    watch_all(job.procs, t + 8, (0.0, RUNS))
    return job


@case(
    "An expert that no token of rank 1 used: no gradient, so rank 1 leaves out its reduce-scatter "
    "and goes on to the gradient norm on another communicator, where all have come.",
    hang_type=("collective_missing_enter",),
    blamed=(1,),
    words=("ank 1", RS),
    options=FAST,
)
def unused_expert() -> Job:
    return _experts(stream=1)


@case(
    "The same where both communicators share a stream: the gradient norm of rank 1 also waits on "
    "the device, for ranks that are held by the reduce-scatter. Rank 1 is the cause all the same.",
    hang_type=("collective_missing_enter", "cross_comm_order_inversion"),
    blamed=(1,),
    words=("ank 1",),
    options=FAST,
)
def unused_expert_on_one_stream() -> Job:
    return _experts(stream=0)


def _experts(stream: int) -> Job:
    job = Job()
    world = job.world(4)
    experts = [c.proc.comm("00000000000000e0", r, 4) for r, c in enumerate(world)]
    t = 1.0
    for i in range(5):
        all_make(experts, RS, t, count=2048, stream=stream)
        all_make(world, AR, t + 0.1, count=1)
        t += 0.2 + 0.001 * i
    all_make([e for r, e in enumerate(experts) if r != 1], RS, t, count=2048, stream=stream)
    all_make(world, AR, t + 0.1, count=1)
    watch_all(job.procs, t + PAST, (0.0, RUNS))
    return job


@case(
    "The same with one communicator: rank 1 comes to the next operation where the others "
    "reduce-scatter.",
    hang_type=("skipped_or_extra_call", "collective_mismatch"),
    blamed=(1,),
    words=("ank 1", RS),
    options=FAST,
)
def unused_expert_on_one_communicator() -> Job:
    job = Job()
    comms = job.world(4)
    t = 1.0
    for _ in range(5):
        all_make(comms, RS, t, count=2048)
        all_make(comms, AR, t + 0.1, count=1)
        t += 0.2
    all_make([c for r, c in enumerate(comms) if r != 1], RS, t, count=2048)
    all_make(comms, AR, t + 0.1, count=1)
    watch_all(job.procs, t + PAST, (0.0, RUNS))
    return job
