"""A job that is killed as a whole is judged as of the moment before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.analysis import Run, analyze_job, blamed, cover, hang, steps
from support.tracegen import Comm, Job, Proc

from nccluprobe.match.closing import How, how_ended
from nccluprobe.match.finding import Finding
from nccluprobe.match.model import ProcessEnd

TERM: dict[str, Any] = {"how": "signaled", "signal": 15}
KILL: dict[str, Any] = {"how": "signaled", "signal": 9}
ABRT: dict[str, Any] = {"how": "signaled", "signal": 6}
SEGV: dict[str, Any] = {"how": "signaled", "signal": 11}
FAIL: dict[str, Any] = {"code": 1}
#: rank -> when after the first end, s, and how
Ends = dict[int, tuple[float, dict[str, Any]]]


def verdict(found: list[Finding]) -> list[tuple[Any, ...]]:
    return [
        (f.id, f.hang_type, f.role, f.severity, f.details["reason"], f.details["confidence"])
        for f in found
        if f.state == "open"
    ]


def inside(missing: tuple[int, ...] = (3,), **more: Any) -> tuple[Job, list[Comm], float]:
    """Four ranks, of which all but the missing are inside a call."""
    job, comms, t = hang(missing=tuple(range(4)), covered=False, **more)
    for r, c in enumerate(comms):
        if r not in missing:
            c.proc.enter(c, "ncclAllReduce", t)
    return job, comms, t


def end_all(procs: list[Proc], at: float, ends: Ends) -> None:
    """End processes; their calls are told as cut off, as collectors do."""
    for r, (after, how) in ends.items():
        p = procs[r]
        for _, _, line in [x for x in p.lines if x[2]["kind"] == "enter"]:
            p.add(at + after, {**line, "kind": "call", "dur": None, "rc": None, "end": "no_return"})
        p.coverage(at + after, alive=False, main="dead")
        p.end(at + after, **how)


@pytest.mark.parametrize(
    "ends",
    [
        {r: (0.1 * r, TERM) for r in range(4)},
        {r: (0.1 * r, KILL) for r in range(4)},
        {0: (0, TERM), 1: (0.1, TERM), 2: (30.1, KILL), 3: (30, KILL)},
        {0: (0, ABRT), 1: (0.1, ABRT), 2: (0.3, ABRT), 3: (2, TERM)},
        {0: (0, ABRT), 1: (2, TERM), 2: (2, TERM), 3: (2.1, TERM)},
        {0: (0, ABRT), 1: (20, TERM), 2: (20, TERM), 3: (20.1, TERM)},
        {0: (0, FAIL), 1: (0.2, FAIL), 2: (0.3, TERM), 3: (33, KILL)},
        {0: (0, KILL), 1: (3, TERM), 2: (3, TERM), 3: (3.1, TERM)},
        {0: (0, TERM), 1: (0.1, SEGV), 2: (3, {"code": 143}), 3: (3.1, FAIL)},
        {0: (0, TERM), 1: (20, TERM), 2: (40, KILL), 3: (60, TERM)},
    ],
    ids=[
        "launcher",
        "killed",
        "the grace after SIGTERM",
        "watchdogs, then the launcher",
        "one watchdog, then the launcher",
        "one watchdog, and the launcher much later",
        "errors",
        "by hand, then the launcher",
        "one crashes as it ends",
        "one by one",
    ],
)
def test_who_is_killed_as_the_job_hangs_is_judged_as_before(ends: Ends) -> None:
    """Rank 3 does not come for 100 s, alive and in ``read``; then all are ended."""
    job, _, t = inside()
    cover(job.procs[:3], t + 100)
    cover(job.procs[3:], t + 100, main="syscall", syscall="read")
    live = analyze_job(job)
    end_all(job.procs, t + 100.5, ends)
    found = analyze_job(job)
    assert verdict(found) == verdict(live)
    assert blamed(found) == {3}
    (f,) = found
    (status,) = f.details["missing_rank_status"]
    assert (status["heartbeat"], status["main_thread"], status["syscall"]) == (
        "absent", "syscall", "read"
    )  # fmt: skip
    assert status["signal"] == ends[3][1].get("signal")


@pytest.mark.parametrize("crash", [SEGV, KILL, ABRT, FAIL])
@pytest.mark.parametrize("stood", [0.5, 20.0])
def test_who_crashed_first_is_named(crash: dict[str, Any], stood: float) -> None:
    """The others wait for it, and the launcher ends them for its end."""
    job, _, t = inside()
    cover(job.procs, t + stood)
    end_all(job.procs, t + stood + 0.1, {3: (0, crash)} | dict.fromkeys(range(3), (2, TERM)))
    found = analyze_job(job)
    assert blamed(found) == {3}
    assert [f.details["reason"] for f in found] == ["rank_exit_or_crash_suspected"]
    assert [f.severity for f in found] == ["error"]


def test_an_error_that_makes_errors_of_the_others_is_the_first_ones() -> None:
    job, _, t = inside()
    cover(job.procs, t + 20)
    end_all(job.procs, t + 20, {3: (0, FAIL)} | {r: (1 + r / 10, FAIL) for r in range(3)})
    assert blamed(analyze_job(job)) == {3}


@pytest.mark.parametrize("how", [KILL, ABRT])
def test_of_a_job_that_went_on_nobody_is_named(how: dict[str, Any]) -> None:
    """All are ended while the others wait for one for a moment."""
    job, _, t = inside()
    cover(job.procs, t + 0.5)
    end_all(job.procs, t + 0.6, {3: (0, how)} | {r: (1 + r / 10, how) for r in range(3)})
    assert analyze_job(job) == []


def test_who_ended_in_order_long_before_keeps_its_end() -> None:
    job, _, t = inside()
    cover(job.procs[:3], t + 100)
    end_all(job.procs, t, {3: (0.5, {"code": 0})} | dict.fromkeys(range(3), (100, TERM)))
    found = analyze_job(job)
    assert blamed(found) == {3}
    assert [f.details["reason"] for f in found] == ["rank_exited"]


def test_who_ended_in_order_a_moment_before_did_not_leave_them() -> None:
    job, _, t = inside()
    cover(job.procs[:3], t + 20)
    end_all(job.procs, t + 20, {3: (0, {"code": 0}), 0: (0.5, TERM), 1: (0.6, TERM), 2: (1, TERM)})
    assert analyze_job(job) == []


def test_who_ended_while_others_went_on_is_no_part_of_it() -> None:
    """Rank 3 is told to end; the others call on for 10 s, wait for it, and are killed."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 20)
    three = [c.proc.comm("00000000000000dd", r, 3, t) for r, c in enumerate(comms[:3])]
    for i in range(20):
        steps(three, 1, start=t + i / 2)
    for c in comms[:3]:
        c.proc.enter(c, "ncclAllReduce", t + 10)
    cover(job.procs[:3], t + 30)
    end_all(job.procs, t, {3: (0.1, TERM)} | {r: (30 + r / 10, KILL) for r in range(3)})
    assert blamed(analyze_job(job)) == {3}


def test_where_somebody_is_there_still_the_job_goes_on() -> None:
    job, _, t = inside(missing=(3,))
    cover(job.procs[:1], t + 120)
    cover(job.procs[1:], t + 100)
    end_all(job.procs, t + 100, {3: (0, TERM), 1: (1, TERM), 2: (1, TERM)})
    (f,) = analyze_job(job)
    assert (f.details["reason"], f.severity) == ("rank_exit_or_crash_suspected", "error")


def held_behind_a_queue(job: Job) -> float:
    """One rank stays inside a call from which the others have returned, on a device that stands.

    All have made it, and the one before: who is held has queued no more than the others.
    """
    comms = job.world(4)
    t = steps(comms, 5, stream=0)
    for c in comms[:3]:
        c.proc.call(c, "ncclAllReduce", t, stream=0)
    comms[3].proc.enter(comms[3], "ncclAllReduce", t)
    return t


@pytest.mark.parametrize("told", [True, False], ids=["seen inside", "its end is all that is told"])
def test_a_call_that_the_end_cut_off_did_not_return(told: bool) -> None:
    job = Job()
    t = held_behind_a_queue(job)
    cover(job.procs, t + 400)
    live = verdict(analyze_job(job))
    assert live
    end_all(job.procs, t + 400.5, {r: (r / 10, TERM) for r in range(4)})
    if not told:
        p = job.procs[3]
        p.lines = [x for x in p.lines if x[2]["kind"] != "enter"]
    assert verdict(analyze_job(job)) == live


def test_a_communicator_that_they_end_as_they_are_told_to_was_there() -> None:
    job, comms, t = inside()
    cover(job.procs, t + 100)
    live = verdict(analyze_job(job))
    for c in comms:
        c.proc.comm_end(c, t + 100.6 + c.proc.pid / 1e5, "abort")
    end_all(job.procs, t + 100.5, {0: (0, TERM)} | dict.fromkeys(range(1, 4), (2, TERM)))
    assert verdict(analyze_job(job)) == live


def _followed(end: Callable[[Job, float], None], after: float) -> list[list[tuple[Any, ...]]]:
    job, _, t = inside()
    cover(job.procs, t + 100)
    end(job, t + 100.5)
    run, said = Run(job), []
    start = (t + 1_700_000_000) * 1e9
    for at in (100, 101, 100 + after, 400):
        run.until(t + at)
        run.scan(int(start + at * 1e9))
        said.append(verdict(run.analysis.matcher.book.all()))
    return said


def test_live_the_verdict_stays() -> None:
    """The findings keep their names, scan after scan, and nothing of theirs is forgotten."""
    ends = {r: (0.1 * r, KILL) for r in range(4)}
    said = _followed(lambda job, at: end_all(job.procs, at, ends), 2)
    assert said[0] and all(x == said[0] for x in said)


def stalled() -> tuple[Job, float]:
    """Ranks 0 and 1 stand after a call of their group, and ranks 2 and 3 wait for them."""
    job = Job()
    comms = job.world(4)
    groups = [c.proc.comm(f"00000000000000b{r // 2}", r % 2, 2) for r, c in enumerate(comms)]
    t = steps(comms, 3)
    for c in groups:
        c.proc.call(c, "ncclAllReduce", t)
    for c in comms[2:]:
        c.proc.enter(c, "ncclAllReduce", t + 0.1)
    return job, t


def exits(job: Job, at: float, codes: tuple[int, ...] = (1, 1, 1, 1)) -> list[Finding]:
    """All exit, the first ranks first."""
    cover(job.procs, at)
    end_all(job.procs, at, {r: (0.5 * r, {"code": n}) for r, n in enumerate(codes)})
    return [f for f in analyze_job(job) if f.role == "root_cause" and f.severity == "error"]


def test_who_exits_first_as_all_give_up_waiting_in_one_way_is_no_cause() -> None:
    """A job whose devices stand for long: its ranks all exit with the same error."""
    job, t = stalled()
    (found,) = exits(job, t + 70)
    assert (found.hang_type, found.culprits) == ("collective_all_ranks_stuck", ())


def test_who_is_missed_and_exits_with_all_others_is_named_at_once() -> None:
    job, _, t = inside(missing=(0,))
    assert blamed(exits(job, t + 70)) == {0}


@pytest.mark.parametrize(("after", "codes"), [(20, (1, 1, 1, 1)), (70, (2, 1, 1, 1))])
def test_who_exits_soon_or_with_an_error_of_its_own_is_why_the_others_do(
    after: float, codes: tuple[int, ...]
) -> None:
    job, t = stalled()
    assert 0 in blamed(exits(job, t + after, codes))


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ({"code": 0}, How.ORDER),
        ({}, How.ORDER),
        ({"code": 1}, How.FAILED),
        ({"code": 143}, How.TOLD),
        ({"code": 137}, How.KILLED),
        ({"code": 134}, How.GAVE_UP),
        ({"code": 255}, How.FAILED),
        ({"how": "signaled", "signal": 2}, How.TOLD),
        ({"how": "signaled", "signal": 9}, How.KILLED),
        ({"how": "signaled", "signal": 6}, How.GAVE_UP),
        ({"how": "signaled", "signal": 11}, How.CRASHED),
        ({"how": "signaled"}, How.CRASHED),
        ({"how": "gone"}, How.KILLED),
    ],
)
def test_what_an_end_says_of_who_caused_it(end: dict[str, Any], how: How) -> None:
    one: dict[str, Any] = {"how": "exited", "code": None, "signal": None, **end}
    assert how_ended(ProcessEnd(0, 0, in_flight=0, **one)) is how
