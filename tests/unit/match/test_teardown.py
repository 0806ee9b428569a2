"""Members that wait inside ncclCommDestroy or ncclCommFinalize for one that does not call it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Comm, Host, Job, S

from nccluprobe.match.finding import Finding

DESTROY, FINALIZE, AR = "ncclCommDestroy", "ncclCommFinalize", "ncclAllReduce"
HOW = {DESTROY: "destroy", FINALIZE: "finalize", "ncclCommAbort": "abort"}


def end(comms: Iterable[Comm], t: float, api: str = DESTROY, dur: float | None = None) -> None:
    """They end the communicator; without ``dur`` the call does not return."""
    for c in comms:
        c.proc.comm_end(c, t, HOW[api])
        line = c.proc.enter(c, api, t)
        if dur is not None:
            c.proc.add(t + dur, {**line, "kind": "call", "dur": round(dur * S), "rc": 0})


def world(n: int = 4, hosts: int = 1) -> tuple[Job, list[Comm], float]:
    job = Job()
    made = [Host(f"node{i}") for i in range(hosts)]
    comms = [
        job.proc(r, made[r * hosts // n]).comm("00000000000000aa", r, n) for r in range(n)
    ]  # fmt: skip
    return job, comms, steps(comms, 5)


def told(found: list[Finding]) -> list[tuple[str, str, str, list[int]]]:
    return [
        (f.hang_type, f.severity, f.role, [who["rank"] for who in f.named])
        for f in found
        if f.state == "open"
    ]


@pytest.mark.parametrize("api", [DESTROY, FINALIZE])
def test_who_does_not_call_it_is_named(api: str) -> None:
    job, comms, t = world()
    end(comms[:3], t, api)
    cover(job.procs, t + 100)
    assert told(analyze_job(job)) == [("nccl_missing_exit", "notice", "root_cause", [3])]
    cover(job.procs[:3], t + 400)
    job.procs[3].cover(t + 100, t + 400, main="syscall", syscall="read")
    (f,) = analyze_job(job)
    assert told([f]) == [("nccl_missing_exit", "error", "root_cause", [3])]
    d = f.details
    assert (d["api"], d["confidence"], d["reason"]) == (
        api, "inferred", "rank_alive_but_not_entered",
    )  # fmt: skip
    assert (d["entered_comm_ranks"], d["missing_comm_ranks"]) == ([0, 1, 2], [3])
    assert f"Ranks 0-2 of communicator 00000000000000aa wait in {api} for" in d["summary"]
    assert d["summary"].endswith("rank 3 has not called it: it is in the system call read.")


def test_it_is_named_while_it_uses_another_communicator() -> None:
    job, comms, t = world()
    pair = [job.procs[3].comm("00000000000000bb", 0, 2), job.proc(4).comm("00000000000000bb", 1, 2)]
    end(comms[:3], t)
    steps(pair, 399, start=t, step=1.0)
    cover(job.procs, t + 400)
    assert told(analyze_job(job)) == [("nccl_missing_exit", "error", "root_cause", [3])]


def test_it_is_a_consequence_when_that_rank_waits_elsewhere() -> None:
    """Rank 3 is inside a call that rank 4 does not come to."""
    job, comms, t = world()
    pair = [job.procs[3].comm("00000000000000bb", 0, 2), job.proc(4).comm("00000000000000bb", 1, 2)]
    end(comms[:3], t)
    pair[0].proc.enter(pair[0], AR, t)
    cover(job.procs, t + 400)
    found = {f.hang_type: f for f in analyze_job(job)}
    cause, f = found["collective_missing_enter"], found["nccl_missing_exit"]
    assert [who["rank"] for who in cause.named] == [4]
    assert (f.role, f.downstream_of) == ("downstream", cause.id)


def test_who_waits_for_those_inside_follows_from_it() -> None:
    """Rank 4 waits on another communicator for rank 0, that is inside."""
    job, comms, t = world()
    pair = [job.procs[0].comm("00000000000000bb", 0, 2), job.proc(4).comm("00000000000000bb", 1, 2)]
    end(comms[:3], t)
    pair[1].proc.enter(pair[1], AR, t)
    cover(job.procs, t + 400)
    found = {f.hang_type: f for f in analyze_job(job)}
    cause, f = found["nccl_missing_exit"], found["collective_missing_enter"]
    assert [who["rank"] for who in cause.named] == [3]
    assert (f.role, f.downstream_of) == ("downstream", cause.id)


def test_the_last_collective_that_one_lacks_is_told_and_not_the_end() -> None:
    job, comms, t = world()
    steps(comms[:3], 1, start=t)
    end(comms[:3], t + 1)
    cover(job.procs, t + 400)
    assert told(analyze_job(job)) == [("collective_missing_enter", "error", "root_cause", [3])]


def test_one_that_ended_without_it() -> None:
    job, comms, t = world()
    end(comms[:3], t)
    comms[3].proc.cover(0.5, t + 5)
    comms[3].proc.end(t + 5, how="exited", code=0)
    cover(job.procs[:3], t + 400)
    (f,) = analyze_job(job)
    assert told([f]) == [("nccl_missing_exit", "error", "root_cause", [3])]
    assert (f.details["reason"], f.details["summary"][-13:]) == ("rank_exited", "it has ended.")


def test_all_were_killed_in_the_end() -> None:
    job, comms, t = world()
    end(comms[:3], t)
    cover(job.procs, t + 400)
    for c in comms:
        inside = None if c is comms[3] else c
        if inside is not None:
            at = next(x for _, _, x in c.proc.lines if x["kind"] == "enter")
            line = {**at, "kind": "call", "dur": None, "rc": None, "end": "no_return"}
            c.proc.add(t + 400.1, line)
        c.proc.end(t + 400.2, how="signaled", signal=9)
    (f,) = analyze_job(job)
    assert told([f]) == [("nccl_missing_exit", "error", "root_cause", [3])]
    assert f.details["reason"] == "rank_alive_but_not_entered"


def test_lost_events_name_nobody() -> None:
    job, comms, t = world()
    end(comms[:3], t)
    cover(job.procs[:3], t + 400)
    job.procs[3].cover(0.5, t)
    job.procs[3].cover(t + 1, t + 400, lost_kernel=1)
    (f,) = analyze_job(job)
    assert (f.severity, f.role) == ("notice", "unknown")
    assert f.details["reason"] == "probe_event_loss_possible"


def test_who_is_not_observed_is_not_named() -> None:
    """Rank 3's collector has stopped; and of a partial view the rest may lack as well."""
    job, comms, t = world()
    end(comms[:3], t)
    cover(job.procs[:3], t + 400)
    job.procs[3].cover(0.5, t)
    found = analyze_job(job)
    assert found and all(not f.named and f.severity == "notice" for f in found)


def test_a_partial_view_lowers_the_confidence() -> None:
    job = Job()
    comms = [job.proc(r).comm("00000000000000aa", r, 8) for r in range(4)]
    t = steps(comms, 5)
    end(comms[:3], t)
    cover(job.procs, t + 400)
    (f,) = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert (f.named[0]["rank"], f.details["confidence"]) == (3, "reduced")


# -- no hang -------------------------------------------------------------------


def test_a_job_that_goes_down_rank_by_rank() -> None:
    """Each returns at once, with minutes between them; the last never calls it."""
    job, comms, t = world()
    for r, c in enumerate(comms[:3]):
        end([c], t + 100 * r, dur=0.5)
    cover(job.procs, t + 700)
    assert analyze_job(job) == []


def test_the_last_comes_late() -> None:
    job, comms, t = world()
    for c in comms:
        at = t + 250 if c is comms[3] else t
        end([c], at, dur=t + 251 - at)
    cover(job.procs, t + 400)
    run = Run(job)
    run.until(t + 240)
    assert [f.severity for f in run.scan()] == ["notice"]
    run.all()
    assert [f.state for f in run.scan()] == ["resolved"]


def test_nobody_waits_in_an_abort() -> None:
    job, comms, t = world()
    end(comms[:3], t, "ncclCommAbort")
    cover(job.procs, t + 400)
    assert 3 not in {who["rank"] for f in analyze_job(job) for who in f.named}


@pytest.mark.parametrize("api", [DESTROY, FINALIZE])
def test_a_call_that_has_returned_to_another_does_not_need_who_lacks(api: str) -> None:
    job, comms, t = world()
    end(comms[:2], t, api)
    end(comms[2:3], t, api, dur=1.0)
    cover(job.procs, t + 400)
    assert {f.severity for f in analyze_job(job)} == {"notice"}


def test_a_destroy_needs_the_ranks_of_its_node() -> None:
    """Ranks 0-3 of the other node have returned; so rank 7 is what 4-6 wait for."""
    job, comms, t = world(8, hosts=2)
    end(comms[:4], t, dur=1.0)
    end(comms[4:7], t)
    cover(job.procs, t + 400)
    assert told(analyze_job(job)) == [("nccl_missing_exit", "error", "root_cause", [7])]


def test_and_not_those_of_another() -> None:
    job, comms, t = world(8, hosts=2)
    end(comms[:3], t, dur=1.0)
    end(comms[4:], t)
    cover(job.procs, t + 400)
    assert {f.severity for f in analyze_job(job)} == {"notice"}


def test_a_finalize_needs_all() -> None:
    job, comms, t = world(8, hosts=2)
    end(comms[:4], t, FINALIZE, dur=1.0)
    end(comms[4:7], t, FINALIZE)
    cover(job.procs, t + 400)
    assert {f.severity for f in analyze_job(job)} == {"notice"}


@pytest.mark.parametrize("api", [DESTROY, FINALIZE])
def test_all_are_inside_and_nobody_is_missing(api: str) -> None:
    job, comms, t = world()
    end(comms, t, api)
    cover(job.procs, t + 100)
    assert told(analyze_job(job)) == [("collective_all_ranks_stuck", "notice", "root_cause", [])]
    cover(job.procs, t + 400)
    (f,) = analyze_job(job)
    assert told([f]) == [("collective_all_ranks_stuck", "error", "root_cause", [])]
    assert (f.details["api"], f.details["reason"]) == (api, "all_inside")
    assert (
        f"All 4 members of communicator 00000000000000aa are inside {api} for 400"
        in (f.details["summary"])
    )
    assert "nobody is missing" in f.details["summary"]


def test_they_wait_from_the_last_one_on() -> None:
    job, comms, t = world()
    end(comms[:3], t)
    end(comms[3:], t + 350)
    cover(job.procs, t + 400)
    assert told(analyze_job(job)) == []


def test_all_who_are_observed_are_inside() -> None:
    job = Job()
    comms = job.world(3, nranks=4)
    t = steps(comms, 5)
    end(comms, t)
    cover(job.procs, t + 400)
    (f,) = analyze_job(job)
    assert told([f]) == [("waiting_for_unobserved", "notice", "unknown", [])]
    assert f.details["summary"].endswith("1 of 4 ranks is not observed.")


def test_who_waits_for_all_who_are_inside_follows_from_it() -> None:
    job, comms, t = world()
    other = [
        job.procs[3].comm("00000000000000bb", 0, 2),
        job.proc(4).comm("00000000000000bb", 1, 2),
    ]
    t = steps(other, 5, start=t)
    other[1].proc.call(other[1], AR, t)
    end(comms, t)
    cover(job.procs, t + 400)
    assert sorted(told(analyze_job(job))) == [
        ("collective_all_ranks_stuck", "error", "root_cause", []),
        ("collective_missing_enter", "error", "downstream", [3]),
    ]
