"""A rank that crashed in a call that all have made."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import analyze_job, cover, steps
from support.tracegen import Job

from nccluprobe.match.finding import Finding

CRASH: dict[str, Any] = {"how": "signaled", "signal": 11}


def run(
    after: float = 0.01, until: float = 400.0, destroyed: bool = False, **end: Any
) -> list[Finding]:
    """Four ranks make the same calls, then rank 2 ends ``after`` its last one."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5, stream=0) - 0.1 + after
    if destroyed:
        comms[2].proc.comm_end(comms[2], t - after / 2)
    cover([c.proc for c in comms if c is not comms[2]], until)
    comms[2].proc.cover(0.5, t)
    comms[2].proc.end(t, **end)
    return [f for f in analyze_job(job) if f.state == "open"]


@pytest.mark.parametrize("end", [CRASH, {"code": 1}])
def test_who_crashed_in_a_call_that_all_made_is_named(end: dict[str, Any]) -> None:
    (f,) = run(**end)
    assert (f.hang_type, f.role, f.severity) == ("comm_ended_under_waiters", "root_cause", "error")
    assert [d["rank"] for d in f.named] == [2]
    assert f.details["left_comm_ranks"] == [2]
    assert f.details["reason"] == "rank_exit_or_crash_suspected"
    assert f.details["confidence"] == "inferred"
    assert "crashed or was killed" in f.details["summary"]


def test_it_is_no_error_before_it_has_lasted() -> None:
    (f,) = run(until=100, **CRASH)
    assert f.severity == "notice"
    assert run(until=30, **CRASH) == []


@pytest.mark.parametrize(
    "more",
    [
        {"code": 0},
        {"how": "signaled", "signal": 15},
        {"destroyed": True, **CRASH},
        {"after": 5.0, **CRASH},
    ],
    ids=["in order", "told to", "after its communicator", "long after the call"],
)
def test_no_call_can_be_open_under_who_ended_otherwise(more: dict[str, Any]) -> None:
    assert run(**more) == []


def test_with_events_lost_it_is_less_sure() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5, stream=0) - 0.09
    for c in comms:
        c.proc.cover(0.5, t if c is comms[2] else 400, lost_kernel=int(c is comms[0]))
    comms[2].proc.end(t, **CRASH)
    (f,) = analyze_job(job)
    assert [d["rank"] for d in f.named] == [2]
    assert f.details["confidence"] == "reduced"
    assert f.details["trace_event_loss_possible"]


def test_the_first_of_several_is_named() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5, stream=0)
    for c in comms[:2]:
        c.proc.cover(0.5, 400)
    for at, c in ((t - 0.08, comms[2]), (t - 0.05, comms[3])):
        c.proc.cover(0.5, at)
        c.proc.end(at, **CRASH)
    (f,) = analyze_job(job)
    assert [d["rank"] for d in f.named] == [2]


@pytest.mark.parametrize(("end", "named"), [(CRASH, [2]), ({"code": 0}, [])])
def test_only_a_crash_tells_that_it_did_not_go_in_order(
    end: dict[str, Any], named: list[int]
) -> None:
    """It made its last call and went; another one came to it much later."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5, stream=0)
    for c in comms:
        c.proc.call(c, "ncclAllReduce", t + (20 if c is comms[0] else 0), stream=0)
        if c is not comms[2]:
            c.proc.cover(0.5, 400)
    comms[2].proc.cover(0.5, t + 1)
    comms[2].proc.end(t + 1, **end)
    found = [f for f in analyze_job(job) if f.state == "open"]
    assert [d["rank"] for f in found for d in f.named] == named


def test_others_that_went_as_well_do_not_wait() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5, stream=0)
    for c in comms:
        at = t - 0.08 if c is comms[2] else t + 100
        c.proc.cover(0.5, at)
        c.proc.end(at, **(CRASH if c is comms[2] else {}))
    assert analyze_job(job) == []


def test_who_crashed_is_named_beside_an_init_that_lacks_a_rank() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5, stream=0) - 0.09
    init = {"nranks": 4, "uid_hash": "00000000000000cc"}
    for r, c in enumerate(comms):
        if r != 2:
            c.proc.enter(None, "ncclCommInitRankConfig", t - 0.005, rank=r, **init)
            c.proc.cover(0.5, 400)
    comms[2].proc.cover(0.5, t)
    comms[2].proc.end(t, **CRASH)
    found = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert {d["rank"] for f in found for d in f.named} == {2}
    assert "comm_ended_under_waiters" in {f.hang_type for f in found}


@pytest.mark.parametrize("how", ["abort", "revoke"])
@pytest.mark.parametrize("waits", [False, True])
def test_who_aborted_in_a_call_that_all_made_is_named_where_somebody_waits(
    waits: bool, how: str
) -> None:
    """Rank 1's device is held up by the call, so that it does not come to rank 0 elsewhere."""
    job = Job()
    comms = job.world(4)
    pair = [c.proc.comm("00000000000000bb", i, 2) for i, c in enumerate(comms[:2])]
    t = steps(comms, 5, stream=0, start=steps(pair, 3, stream=0))
    for c in comms:
        c.proc.call(c, "ncclAllReduce", t if c is comms[2] else t + 0.5, stream=0)
    comms[2].proc.comm_end(comms[2], t + 0.1, how)
    if waits:
        pair[0].proc.call(pair[0], "ncclAllReduce", t + 1, stream=1)
    for c in comms:
        c.proc.cover(0.5, 400, main="syscall", syscall="read" if c is comms[2] else "poll")
    found = [f for f in analyze_job(job) if f.state == "open"]
    named = [(f.hang_type, [d["rank"] for d in f.named]) for f in found if f.role == "root_cause"]
    assert named == ([("comm_ended_under_waiters", [2])] if waits else [])
    assert all("aborted it when" in f.details["summary"] for f in found if f.role == "root_cause")
    assert [f.role for f in found if f.hang_type == "collective_missing_enter"] == (
        ["downstream"] if waits else []
    )


@pytest.mark.parametrize("how", ["abort", "revoke"])
@pytest.mark.parametrize(("after", "named"), [(0.1, {2}), (5.0, set())])
def test_who_aborted_before_a_call_can_have_ended_explains_who_stay_silent_after_it(
    after: float, named: set[int], how: str
) -> None:
    """Ranks 0 and 1 call nothing more; ranks 2 and 3 have made the next call already."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5, stream=0)
    for c in comms[2:]:
        c.proc.call(c, "ncclAllReduce", t - 0.05, stream=0)
    comms[2].proc.comm_end(comms[2], t - 0.1 + after, how)
    for c in comms:
        c.proc.cover(0.5, 400, main="syscall", syscall="poll")
    causes = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert {d["rank"] for f in causes for d in f.named} == named
    assert len(causes) == 1


@pytest.mark.parametrize(("at", "confidence"), [(0.5, "inferred"), (30.0, "observed")])
def test_who_is_missed_beside_a_crash_at_that_time_is_not_seen_to_be_the_cause(
    at: float, confidence: str
) -> None:
    """Rank 1 is alive, and may wait on its device for the one that crashed."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    comms[0].proc.enter(comms[0], "ncclSend", t, peer=1, count=1 << 24)
    comms[2].proc.cover(0.5, t + at)
    comms[2].proc.end(t + at, how="signaled", signal=11)
    cover(job.procs[:2], t + 400)
    (f,) = [f for f in analyze_job(job) if f.hang_type == "p2p_unmatched"]
    assert ([w["rank"] for w in f.named], f.details["confidence"]) == ([1], confidence)


def sent_to_who_crashed(went_on: float = 0.0, lost: int = 0, **end: Any) -> list[Finding]:
    """Rank 0 makes small sends, of which rank 1 receives the first two, and ends."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5, stream=0)
    for i in range(4):
        comms[0].proc.call(comms[0], "ncclSend", t + i, peer=1, count=64)
        if i < 2:
            comms[1].proc.call(comms[1], "ncclRecv", t + i, peer=0, count=64)
    t += 4
    if went_on:
        pair = [comms[r].proc.comm("00000000000000bb", i, 2) for i, r in enumerate((0, 2))]
        steps(pair, 1, start=t + went_on, stream=0)
    for p in (job.procs[0], job.procs[2]):
        p.cover(0.5, t + 400)
    job.procs[1].cover(0.5, t - 2)
    job.procs[1].cover(t - 1, t, lost_kernel=lost)
    job.procs[1].end(t, **end)
    return [f for f in analyze_job(job) if f.state == "open" and f.role == "root_cause"]


@pytest.mark.parametrize("end", [CRASH, {"code": 1}])
def test_who_crashed_before_it_received_a_small_send_is_named(end: dict[str, Any]) -> None:
    """It is buffered, and its sender may be done: but nobody else would crash either."""
    (f,) = sent_to_who_crashed(**end)
    assert (f.hang_type, f.severity) == ("comm_ended_under_waiters", "error")
    assert [d["rank"] for d in f.named] == [1]
    assert f.details["confidence"] == "inferred"
    assert "ncclSend #2 from rank 0" in f.details["summary"]


@pytest.mark.parametrize(
    "more",
    [{"code": 0}, {"lost": 2, **CRASH}, {"went_on": 20, **CRASH}],
    ids=["in order", "may have received", "its sender went on"],
)
def test_a_small_send_that_is_not_received_is_no_fault_else(more: dict[str, Any]) -> None:
    assert sent_to_who_crashed(**more) == []


def beside_devices_that_stand(
    ended: float = 0.05, called: float = 0.0, later: int = 0, **end: Any
) -> tuple[set[tuple[str, int]], list[Finding]]:
    """Rank 0 misses rank 1, that is silent as rank 2 is; rank 3 ends, in calls of its own.

    ``later``: so many steps the others still make, a second each, before they stand.
    """
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5, stream=0)
    pair = [comms[r].proc.comm("00000000000000bb", i, 2) for i, r in enumerate((0, 1))]
    t = steps(pair, 3, start=t + 3, stream=0)
    three = [comms[r].proc.comm("00000000000000dd", r, 3) for r in range(3)]
    for i in range(later):
        for c in (*three, *pair):
            c.proc.call(c, "ncclAllReduce", t + 1 + i, stream=0)
    pair[0].proc.call(pair[0], "ncclAllReduce", t + later + bool(later), stream=0)
    own = comms[3].proc.comm("00000000000000cc", 0, 1)
    own.proc.call(own, "ncclAllReduce", t + called, stream=1)
    cover(job.procs[:3], t + later + 400)
    job.procs[3].cover(0.5, t + ended)
    job.procs[3].end(t + ended, **end)
    found = [f for f in analyze_job(job) if f.state == "open"]
    roots = [f for f in found if f.role == "root_cause"]
    return {(f.hang_type, d["rank"]) for f in roots for d in f.named}, found


@pytest.mark.parametrize("end", [CRASH, {"code": 1}])
def test_who_crashed_beside_devices_that_stand_is_named(end: dict[str, Any]) -> None:
    named, found = beside_devices_that_stand(**end)
    assert named == {("comm_ended_under_waiters", 3)}
    (cause,) = [f for f in found if f.role == "root_cause"]
    (stands,) = [f for f in found if f.hang_type == "collective_all_ranks_stuck"]
    assert (stands.role, stands.downstream_of) == ("downstream", cause.id)
    assert (cause.severity, cause.details["confidence"]) == ("error", "inferred")


@pytest.mark.parametrize(
    "more",
    [{"code": 0}, {"ended": 20.0, "called": 19.0, **CRASH}, {"later": 60, **CRASH}],
    ids=["in order", "long after the others stood", "long before they stood"],
)
def test_who_ended_otherwise_is_not_named_beside_them(more: dict[str, Any]) -> None:
    named, found = beside_devices_that_stand(**more)
    assert not named
    assert [f.hang_type for f in found if f.role == "root_cause"] == ["collective_all_ranks_stuck"]


def left_before_others_came(came: float, lost: int = 0) -> tuple[list[Finding], set[int]]:
    """Rank 2 ends after a call that others make ``came`` s later; one waits behind it.

    ``lost``: events of rank 2.
    """
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5, stream=0)
    pair = [comms[r].proc.comm("00000000000000bb", i, 2) for i, r in enumerate((0, 1))]
    steps([comms[2]], 1, start=t, stream=0)
    t = steps([comms[0], comms[1], comms[3]], 1, start=t + came, stream=0)
    pair[0].proc.enter(pair[0], "ncclAllReduce", t, stream=0)
    cover([c.proc for c in comms if c is not comms[2]], t + 400)
    job.procs[2].cover(0.5, t - came + 0.5, lost_kernel=lost)
    job.procs[2].end(t - came + 0.5)
    roots = [f for f in analyze_job(job) if f.state == "open" and f.role == "root_cause"]
    return roots, {d["rank"] for f in roots for d in f.named}


def test_who_ended_in_order_before_the_others_came_is_named_where_one_waits() -> None:
    """The call cannot end on their devices, and it is what keeps one from coming."""
    (f,), named = left_before_others_came(3.0)
    assert (f.hang_type, named) == ("comm_ended_under_waiters", {2})
    assert "ended when call #5" in f.details["summary"]


def test_who_ended_in_order_is_not_where_its_last_calls_may_have_been_lost() -> None:
    assert 2 not in left_before_others_came(3.0, lost=3)[1]


def test_who_ended_in_order_after_they_came_is_not() -> None:
    assert 2 not in left_before_others_came(0.0)[1]


@pytest.mark.parametrize(
    ("others", "named"),
    [(9, set()), (15, {3}), (None, {3})],
    ids=["killed together", "the launcher ended the others", "the others are there"],
)
@pytest.mark.parametrize("transfer", [False, True])
def test_who_was_killed_a_moment_before_the_others_did_not_leave_them(
    others: int | None, named: set[int], transfer: bool
) -> None:
    """Of a healthy job that is killed as a whole one rank is reached first, and others wait."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 20)
    for c in comms[:3]:
        more = {"peer": 3, "count": 1 << 20} if transfer else {}
        api = "ncclRecv" if transfer else "ncclAllReduce"
        c.proc.call(c, api, t, state="inside", **more)
    end = t + 20
    cover(job.procs, end - 0.2 if others else end + 400)
    job.procs[3].end(end, "signaled", signal=9)
    for p in job.procs[:3] if others else ():
        p.end(end + 0.01, "signaled", signal=others)
    found = [f for f in analyze_job(job) if f.state == "open"]
    assert {d["rank"] for f in found if f.role == "root_cause" for d in f.named} == named
    assert bool(found) == bool(named)
