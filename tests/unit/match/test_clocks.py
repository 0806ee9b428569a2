"""Clocks of hosts that differ from the analyzer's, in a live analysis."""

from __future__ import annotations

import pytest
from support.analysis import Run, cover, kinds, steps
from support.tracegen import UNIX, Host, Job, S

from nccluprobe.match.clocks import AHEAD, Clocks
from nccluprobe.match.jobs import Jobs
from nccluprobe.match.options import Options
from nccluprobe.match.process import Process
from nccluprobe.match.status import is_silent

HOUR = 3600
BEHIND = 5 * S


def hung(end: float, *hosts: Host) -> Run:
    """Rank 0 of four does not come to the sixth call, at 1.5 s."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    for c in comms[1:]:
        c.proc.enter(c, "ncclAllReduce", t)
    cover(job.procs, end)
    return Run(job, Options())


def follow(run: Run, begin: float, end: float, skew: float) -> None:
    """Read as it is written, by an analyzer whose clock is ``skew`` s behind the traces'."""
    t = begin
    while t <= end:
        run.until(t)
        now = UNIX + round((t - skew) * S)
        for source in range(4):
            run.analysis.heard(source, now)
        run.scan(now)
        t += 1


@pytest.mark.parametrize("skew", [0, 3, HOUR, 1_000_000, -30, -HOUR, -1_000_000])
def test_a_hang_is_found_at_its_limit_whatever_the_clocks_are(skew: float) -> None:
    run = hung(70)
    follow(run, 10, 58, skew)
    assert kinds(run.analysis.matcher.book.all()) == []
    follow(run, 59, 66, skew)
    (found,) = run.analysis.matcher.book.open.values()
    assert [who["rank"] for who in found.named] == [0]
    assert found.role == "root_cause"
    assert found.details["confidence"] == "observed"
    told = [x / S for x in run.analysis.matcher.clocks.hosts.values()]
    assert told == pytest.approx([skew] if skew else [], abs=1)


def test_when_the_next_limit_passes_is_told_by_the_analyzers_clock() -> None:
    run = hung(70)
    follow(run, 10, 20, HOUR)
    now = UNIX + (20 - HOUR) * S
    due = run.analysis.due(now)
    assert due is not None
    assert (due.at - now) / S == pytest.approx(41.5, abs=1.5)


def clocks(arrivals: list[tuple[float, float]]) -> tuple[Clocks, Jobs, Process]:
    """One source: when it was read, and what it told then, s."""
    found, jobs, p = Clocks(), Jobs(), Process(1, "a trace")
    jobs.add(1, None, 0)
    for now, told in arrivals:
        p.newest = max(p.newest, round(told * S))
        found.heard(1, p.newest, round(now * S), BEHIND)
    return found, jobs, p


@pytest.mark.parametrize(
    ("arrivals", "offset"),
    [
        ([(9000, 100)], -8900),  # an old file, or a clock that is behind
        ([(9000, 100), (9004, 100)], -8904),
        ([(9000, 100), (9005, 100)], 0),  # that does not grow
        ([(9000, 100), (9001, 101), (9002, 102)], -8900),  # not for long enough
        ([(9000, 100), (9001, 101), (9002, 102), (9003, 103)], -8900),
        ([(9000, 100), (9001, 900), (9002, 1800), (9003, 2700)], -6303),  # is being copied
        ([(9000, 100), (9001, 900), (9002, 1800), (9003, 2700), (9008, 2700)], 0),
        ([(9000, 8900), (9001, 8901), (9002, 9001.5), (9003, 9002.8)], 0),  # caught up
        ([(9000, 8999.5), (9030, 9029.5), (9060, 9059.5)], 0),
        ([(100, 9000)], 8900),  # nothing is written later than it is read
        ([(100, 100.5)], 0),
        ([(100, 9000), (101, 9001), (102, 9002), (103, 9003), (112, 9003.5)], 8900),
    ],
)
def test_a_difference_is_told_by_a_file_that_grows(
    arrivals: list[tuple[float, float]], offset: float
) -> None:
    found, jobs, p = clocks(arrivals)
    now = round(arrivals[-1][0] * S)
    nows = found.judge([p], jobs, now, BEHIND)
    assert nows[jobs.same(1)] - now == pytest.approx(offset * S, abs=AHEAD)


def test_who_falls_silent_is_silent_by_its_own_clock() -> None:
    found, jobs, p = clocks([(9000 + i, 100 + i) for i in range(6)])
    nows = found.judge([p], jobs, 9065 * S, BEHIND)
    assert nows[jobs.same(1)] == 165 * S


@pytest.mark.parametrize(
    ("told", "shift"), [((3600, 0), 0), ((3600, -3600), 0), ((3600, 7200), 3600), ((90, 91), 90)]
)
def test_no_host_of_a_job_is_judged_later_than_its_own_clock(
    told: tuple[int, int], shift: int
) -> None:
    found, jobs = Clocks(), Jobs()
    both = [Process(i, f"trace {i}") for i in range(2)]
    for i in range(6):
        for p, offset in zip(both, told, strict=True):
            jobs.add(p.source, "one", 0)
            p.newest = (9000 + i + offset) * S
            found.heard(p.source, p.newest, (9000 + i) * S, BEHIND)
    nows = found.judge(both, jobs, 9005 * S, BEHIND)
    assert nows[jobs.same(0)] == (9005 + shift) * S
    assert set(found.hosts.values()) == {x * S for x in told if x}


@pytest.mark.parametrize("skew", [-30, -600, -HOUR])
def test_whose_clock_is_behind_is_not_silent_before_that_is_known(skew: float) -> None:
    """The first seconds of an analysis that follows a healthy job, or one that hangs."""
    run = hung(70)
    for t in (20.0, 20.25, 21.0, 22.0, 23.0, 24.0):
        run.until(t)
        now = UNIX + round((t - skew) * S)
        for source in range(4):
            run.analysis.heard(source, now)
        run.scan(now)
        matcher = run.analysis.matcher
        assert kinds(matcher.book.all()) == []
        silent = [
            p for p in matcher.processes.values() if is_silent(p, matcher.now_of(p.source), 5 * S)
        ]
        assert silent == []
