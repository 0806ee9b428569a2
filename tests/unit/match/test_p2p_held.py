"""Hosts that are held inside sends, receives and groups for which all have come."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import analyze_job, cover, steps
from support.tracegen import Comm, Job

AR, SEND, RECV = "ncclAllReduce", "ncclSend", "ncclRecv"
Made = list[tuple[Comm, str, dict[str, Any]]]


def exchange(c: Comm, peer: int) -> Made:
    return [(c, SEND, {"peer": peer, "count": 8}), (c, RECV, {"peer": peer, "count": 8})]


def held(traced: int = 4, come: bool = True) -> tuple[Job, list[Comm], float]:
    """Rank 0 is inside its first exchange with rank 1, and rank 1, where it has come, too."""
    job = Job()
    comms = job.world(traced, nranks=4)
    t = steps(comms, 5)
    for c, peer in ((comms[0], 1), (comms[1], 0))[: 1 + come]:
        c.proc.group(exchange(c, peer), t, state="inside")
    return job, comms, t


def test_all_have_come_and_nobody_is_blamed() -> None:
    job, _, t = held()
    cover(job.procs, t + 100)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.role, f.severity) == ("nccl_missing_exit", "root_cause", "notice")
    cover(job.procs, t + 400)
    (f,) = analyze_job(job)
    assert (f.severity, f.named, f.details["confidence"]) == ("error", [], "inferred")
    assert f.comm_uid_hash == "00000000000000aa"
    assert f.details["summary"].startswith("Ranks 0-1 of the job are inside ncclGroupEnd for 400")


def test_who_has_no_known_rank_is_told_by_its_place() -> None:
    job = Job()
    comms = [job.proc(None).comm("00000000000000aa", r, 2) for r in range(2)]
    t = steps(comms, 5)
    for c, peer in zip(comms, (1, 0), strict=True):
        c.proc.group(exchange(c, peer), t, state="inside")
    cover(job.procs, t + 100)
    (f,) = analyze_job(job)
    text = f.details["summary"]
    assert "1500" in text and "1501" in text and "of the job" not in text
    assert " are inside ncclGroupEnd for 100" in text


def test_a_send_alone() -> None:
    job, comms, t = held(come=False)
    comms[2].proc.enter(comms[2], SEND, t, peer=3, count=8)
    comms[3].proc.enter(comms[3], RECV, t, peer=2, count=8)
    comms[1].proc.group(exchange(comms[1], 0), t, state="inside")
    cover(job.procs, t + 400)
    (f,) = analyze_job(job)
    assert f.details["summary"].startswith(
        "Ranks 0-3 of the job are inside ncclGroupEnd or ncclRecv or ncclSend for"
    )


def test_who_has_not_come_is_told_instead() -> None:
    job, _, t = held(come=False)
    cover(job.procs, t + 400)
    kinds = {f.hang_type for f in analyze_job(job)}
    assert "p2p_unmatched" in kinds and "nccl_missing_exit" not in kinds


def test_where_not_all_are_observed_somebody_may_be_missing() -> None:
    job, _, t = held(traced=3)
    cover(job.procs, t + 400)
    assert analyze_job(job) == []


def test_one_that_is_held_for_a_short_time_is_not_told() -> None:
    job, _, t = held()
    cover(job.procs, t + 50)
    assert analyze_job(job) == []


@pytest.mark.parametrize("waits", [False, True])
def test_where_something_else_is_wrong_that_explains_it(waits: bool) -> None:
    job, comms, t = held()
    if waits:
        comms[2].proc.call(comms[2], AR, t)
    cover(job.procs, t + 400)
    kinds = {f.hang_type for f in analyze_job(job)}
    assert ("nccl_missing_exit" in kinds) == (not waits)
