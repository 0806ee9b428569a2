"""A stage of a pipeline that sends nothing: it hangs, or has nothing to pass on."""

from __future__ import annotations

import pytest
from support.analysis import analyze_job, blamed, cover, steps
from support.tracegen import Comm, Job


def stage(gets: int, passes: int, before: int = 3, size: int = 1 << 20) -> Job:
    """Rank 1 of a pipeline gets from rank 0 and sends to rank 2, which waits for one more."""
    job = Job()
    comms = job.world(3)
    t = 1.0
    for i in range(before):
        comms[0].proc.call(comms[0], "ncclSend", t + i, peer=1)
        comms[1].proc.call(comms[1], "ncclRecv", t + i, peer=0)
        comms[1].proc.call(comms[1], "ncclSend", t + i + 0.1, peer=2)
        comms[2].proc.call(comms[2], "ncclRecv", t + i, peer=1)
    t = steps(comms, 1, start=t + before)
    for i in range(gets):
        comms[0].proc.call(comms[0], "ncclSend", t + i, peer=1, count=size)
        comms[1].proc.call(comms[1], "ncclRecv", t + i, peer=0, count=size)
    for i in range(passes):
        comms[1].proc.call(comms[1], "ncclSend", t + gets + i, peer=2)
    for i in range(passes + 1):
        comms[2].proc.call(comms[2], "ncclRecv", t + i, peer=1)
    own = comms[0].proc.comm("00000000000000bb", 0, 1)
    for i in range(50):  # rank 0 has other work
        comms[0].proc.call(own, "ncclAllReduce", t + 10 + 10 * i)
    cover(job.procs, t + 500)
    return job


def test_who_got_more_than_it_passed_on_does_not_wait_for_work() -> None:
    assert blamed(analyze_job(stage(3, 2, size=1024))) == {1}


@pytest.mark.parametrize(
    "twin",
    [
        {"gets": 2, "passes": 2, "size": 1024},
        {"gets": 3, "passes": 2, "size": 1 << 20},
        {"gets": 3, "passes": 2, "size": 1024, "before": 2},
    ],
)
def test_twin_a_stage_that_may_have_passed_on_all(twin: dict[str, int]) -> None:
    assert blamed(analyze_job(stage(**twin))) == set()


def send(a: Comm, b: Comm, t: float, ranks: tuple[int, int]) -> None:
    """From a to b, who takes it at once."""
    a.proc.call(a, "ncclSend", t, peer=ranks[1])
    b.proc.call(b, "ncclRecv", t + 0.01, peer=ranks[0])


#: What rank 1 does in one round, as (sender, receiver).
ROUNDS: dict[str, list[list[tuple[int, int]]]] = {
    "hands out in turn": [[(0, 1), (1, 2)], [(0, 1), (1, 3)]],
    "puts two together": [[(0, 1), (3, 1), (1, 2)]],
    "passes on both ways": [[(0, 1), (1, 2), (2, 1), (1, 0)]],
}


@pytest.mark.parametrize("kind", ROUNDS)
@pytest.mark.parametrize("more", [0, 1])
def test_who_passed_on_all_that_it_got_may_wait_for_work(kind: str, more: int) -> None:
    """Rank 2 waits for one more of rank 1, which has passed on all; or all but one message."""
    job = Job()
    comms = job.world(4)
    t = 1.0
    for half in range(2):
        for i in range(6):
            for j, (a, b) in enumerate(ROUNDS[kind][i % len(ROUNDS[kind])]):
                send(comms[a], comms[b], t + i + j / 10, (a, b))
        t = steps(comms, 1, start=t + 6) if half == 0 else t + 6
    for i in range(more):
        send(comms[0], comms[1], t + i, (0, 1))
    comms[2].proc.call(comms[2], "ncclRecv", t, peer=1)
    for r in (0, 3):  # they have other work
        own = comms[r].proc.comm(f"00000000000000b{r}", 0, 1)
        for i in range(50):
            comms[r].proc.call(own, "ncclAllReduce", t + 10 + 10 * i)
    cover(job.procs, t + 500)
    # Who puts several together may lack some of them.
    assert blamed(analyze_job(job)) == ({1} if more and kind != "puts two together" else set())
