"""Sentences name a rank of the job where the communicator numbers it otherwise."""

from __future__ import annotations

import pytest
from support.analysis import analyze_job, cover, steps
from support.tracegen import Comm, Job

from nccluprobe.match.names import everyone, unobserved_text

HASH = "00000000000000aa"


def upper_half(n: int = 2, first: int = 4) -> tuple[Job, list[Comm]]:
    """Ranks ``first`` and up of a job are ranks 0 and up of a communicator."""
    job = Job()
    for rank in range(n):
        job.proc(first + rank)
    return job, [p.comm(HASH, rank, n) for rank, p in enumerate(job.procs)]


def summary(job: Job, end: float, kind: str) -> str:
    cover(job.procs, end)
    found = next(f for f in analyze_job(job) if f.hang_type == kind)
    return str(found.details["summary"])


def test_a_receive_that_waits() -> None:
    job, comms = upper_half()
    end = steps(comms, 20)
    comms[1].proc.enter(comms[1], "ncclRecv", end, peer=0)
    text = summary(job, end + 400, "p2p_unmatched")
    assert text.startswith(
        "Rank 4 of the job (rank 0 of the communicator) has not made a send: rank 5 of the job "
        "(rank 1 of the communicator) is inside ncclRecv #0 from rank 0 of communicator "
    )


def test_a_call_with_other_arguments() -> None:
    job, comms = upper_half(3)
    end = steps(comms, 20)
    for c in comms:
        c.proc.call(c, "ncclAllReduce", end, count=7 if c is comms[1] else 1024)
    text = summary(job, steps(comms, 20, start=end + 1) + 100, "collective_mismatch")
    assert text.startswith("Rank 5 of the job (rank 1 of the communicator) called ncclAllReduce(")
    assert " where ranks 4,6 of the job called " in text


def test_a_rank_that_comes_late() -> None:
    job, comms = upper_half()
    end = steps(comms, 20)
    comms[0].proc.call(comms[0], "ncclAllReduce", end)
    comms[1].proc.call(comms[1], "ncclAllReduce", end + 40)
    text = summary(job, steps(comms, 20, start=end + 41) + 100, "delayed_collective_enter")
    assert text.startswith(
        "Rank 5 of the job (rank 1 of the communicator), pid 1005 on node0, came 40.0 s late"
    )


def test_ranks_that_do_not_come_to_a_split() -> None:
    job, comms = upper_half(4)
    end = steps(comms, 20)
    for c in comms[:2]:
        c.proc.enter(c, "ncclCommSplit", end, color=0, key=0, ord=1)
    text = summary(job, end + 400, "comm_init_missing_enter")
    assert text.startswith("Ranks 6-7 of the job (ranks 2-3 of the communicator) did not enter")


def test_one_number_is_said_once() -> None:
    job = Job()
    comms = job.world(2)
    end = steps(comms, 20)
    comms[1].proc.enter(comms[1], "ncclRecv", end, peer=0)
    text = summary(job, end + 400, "p2p_unmatched")
    assert text.startswith("Rank 0 has not made a send: rank 1 is inside ncclRecv #0")
    assert "of the job" not in text


@pytest.mark.parametrize(("first", "ranks"), [(4, {0: 4, 1: 5}), (0, {})])
def test_a_finding_has_the_ranks_of_the_job_where_they_are_others(
    first: int, ranks: dict[int, int]
) -> None:
    job, comms = upper_half(first=first)
    end = steps(comms, 20)
    comms[1].proc.enter(comms[1], "ncclRecv", end, peer=0)
    cover(job.procs, end + 400)
    assert [f.job_ranks for f in analyze_job(job)] == [ranks]


def test_one_member_that_is_observed_is_not_all_of_them() -> None:
    assert everyone(4, "aa", complete=True) == "All 4 members of communicator aa"
    assert everyone(3, "aa", complete=False) == "All 3 observed members of communicator aa"
    assert everyone(1, "aa", complete=False) == "The one observed member of communicator aa"
    assert unobserved_text(1, 4) == "1 of 4 ranks is not observed"
    assert unobserved_text(2, 4) == "2 of 4 ranks are not observed"
