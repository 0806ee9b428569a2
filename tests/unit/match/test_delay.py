"""Ranks that came late."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Comm, Host, Job, unix


def late(delay: float, ranks: tuple[int, ...] = (3,), n: int = 4) -> tuple[Job, list[Comm], float]:
    job = Job()
    comms = job.world(n)
    t = steps(comms, 10)
    for r, c in enumerate(comms):
        c.proc.call(c, "ncclAllReduce", t + (delay if r in ranks else 0))
    return job, comms, t + delay


def test_an_episode_is_one_finding_and_resolved_when_in_time_again() -> None:
    job, comms, t = late(40)
    t = steps(comms, 10, start=t + 1)
    cover(job.procs, t + 10)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.state, f.severity) == ("delayed_collective_enter", "resolved", "notice")
    assert f.comm_seq == 10
    assert f.details["late_comm_ranks"] == [3]
    assert f.details["entered_comm_ranks"] == [0, 1, 2]
    assert f.details["spread_s"] == 40.0


def test_it_is_open_while_it_lasts() -> None:
    job, _, t = late(40)
    cover(job.procs, t + 10)
    (f,) = analyze_job(job)
    assert f.state == "open"


def test_late_in_slot_after_slot_is_one_episode() -> None:
    job, comms, t = late(40)
    for i in range(3):
        for r, c in enumerate(comms):
            c.proc.call(c, "ncclAllReduce", t + 50 * i + (1 if r < 3 else 45))
    steps(comms, 3, start=t + 160)
    cover(job.procs, t + 170)
    (f,) = analyze_job(job)
    assert (f.details["late_slots"], f.state) == (4, "resolved")


def test_a_second_episode_is_a_second_finding() -> None:
    job, comms, t = late(40)
    t = steps(comms, 5, start=t + 1)
    for r, c in enumerate(comms):
        c.proc.call(c, "ncclAllReduce", t + (45 if r == 3 else 0))
    steps(comms, 5, start=t + 60)
    cover(job.procs, t + 70)
    found = analyze_job(job)
    assert [(f.comm_seq, f.state) for f in found] == [(10, "resolved"), (16, "resolved")]


def test_within_the_threshold() -> None:
    job, _, t = late(29)
    cover(job.procs, t + 10)
    assert analyze_job(job) == []


def test_a_rank_that_was_busy_elsewhere_is_not_late() -> None:
    job, comms, t = late(40)
    own = comms[3].proc.comm("00000000000000bb", 0, 2)
    for i in range(40):
        own.proc.call(own, "ncclAllReduce", t - 40 + i)
    cover(job.procs, t + 10)
    assert analyze_job(job) == []


def test_one_rank_far_ahead_is_not_the_fault_of_the_others() -> None:
    job, _, t = late(40, ranks=(1, 2, 3))
    cover(job.procs, t + 10)
    assert analyze_job(job) == []


def test_a_rank_that_waited_for_a_late_one_is_not_late() -> None:
    """Rank 1 waits for rank 2 on X, so it comes late to Y, where rank 0 waits."""
    job = Job()
    p0, p1, p2 = (job.proc(r) for r in range(3))
    y = [p0.comm("00000000000000b0", 0, 2), p1.comm("00000000000000b0", 1, 2)]
    x = [p1.comm("00000000000000a0", 0, 2), p2.comm("00000000000000a0", 1, 2)]
    t = steps(x + y, 5)
    x[0].proc.call(x[0], "ncclAllReduce", t)
    y[0].proc.call(y[0], "ncclAllReduce", t)
    x[1].proc.call(x[1], "ncclAllReduce", t + 50)
    y[1].proc.call(y[1], "ncclAllReduce", t + 50.1)
    cover(job.procs, t + 60)
    (f,) = analyze_job(job)
    assert f.comm_uid_hash == "00000000000000a0"
    assert f.details["late_comm_ranks"] == [1]


def test_a_clock_bound_over_half_the_spread_is_no_finding() -> None:
    def job(err: int | None, synced: bool | None = True) -> Job:
        made = Job()
        hosts = [Host("a", err=err, synced=synced), Host("b", err=err, synced=synced)]
        comms = [made.proc(r, hosts[r]).comm("00000000000000aa", r, 2) for r in range(2)]
        t = steps(comms, 5)
        comms[0].proc.call(comms[0], "ncclAllReduce", t)
        comms[1].proc.call(comms[1], "ncclAllReduce", t + 40)
        cover(made.procs, t + 50)
        return made

    (f,) = analyze_job(job(5_000_000))
    assert f.details["clock_bound_s"] == 0.01
    assert analyze_job(job(11_000_000_000)) == []
    assert analyze_job(job(None)) == []
    assert analyze_job(job(1000, synced=False)) == []


def test_what_was_an_absence_is_not_a_delay_as_well() -> None:
    job, comms, t = late(80)
    t = steps(comms, 5, start=t + 1)
    cover(job.procs, t + 30)
    run = Run(job)
    found: list[tuple[str, str]] = []
    for at in range(0, int(t) + 30):
        run.until(at)
        found += [(f.hang_type, f.state) for f in run.scan(unix(at))]
    assert found == [("collective_missing_enter", "open"), ("collective_missing_enter", "resolved")]


def test_live_an_episode_is_written_once_and_resolved() -> None:
    job, comms, t = late(40)
    t = steps(comms, 30, start=t + 1, step=1.0)
    cover(job.procs, t + 30)
    run = Run(job)
    found: list[tuple[str, str]] = []
    for at in range(0, int(t) + 30):
        run.until(at)
        found += [(f.hang_type, f.state) for f in run.scan(unix(at))]
    assert found == [("delayed_collective_enter", "open"), ("delayed_collective_enter", "resolved")]


def behind_a_late_one(before: int = 0, lost: bool = False, skew: float = 0.0) -> list[list[int]]:
    """Who is late: rank 1 waits in X for rank 2, and comes late to Y by that; ``skew``: by its
    clock before rank 2 came.  ``before``: other calls that all queue on X; ``lost``: rank 1's.
    """
    job = Job()
    xs = job.world(3, host=Host(err=100_000))
    y0, y1 = (xs[r].proc.comm("00000000000000bb", r, 2) for r in (0, 1))
    for c in (*xs, y0, y1):
        c.proc.call(c, "ncclAllReduce", 0.8)
    for i in range(1 + before):
        for r, x in enumerate(xs):
            at = (61.0 if r == 2 else 1.0) + 0.001 * i
            x.proc.call(x, "ncclAllReduce", at, lost=lost and r == 1)
    y0.proc.call(y0, "ncclAllReduce", 2.0)
    y1.proc.call(y1, "ncclAllReduce", 61.0 - skew)
    for x in xs:
        x.proc.call(x, "ncclAllReduce", max(62.0, 62.0 - skew))
        x.proc.cover(0.5, 140.0, lost_kernel=int(lost and x.proc.rank == 1))
    return [[c["rank"] for c in f.named] for f in analyze_job(job)]


@pytest.mark.parametrize(
    "how", [{}, {"before": 200}, {"skew": 1e-4}, {"lost": True}], ids=["", "far", "clocks", "lost"]
)
def test_who_waited_elsewhere_for_the_late_one_is_not_late(how: dict[str, Any]) -> None:
    assert behind_a_late_one(**how) == [[2]]


@pytest.mark.parametrize("how", [{"skew": 2.0}, {"skew": 2.0, "lost": True}])
def test_who_came_before_the_late_one_is_late_as_well(how: dict[str, Any]) -> None:
    assert sorted(behind_a_late_one(**how)) == [[1], [2]]


def test_a_call_that_was_lost_before_it_came_late_is_no_wait() -> None:
    """Its place is known, its time is not: it did not wait there until it came."""
    job = Job()
    comms = job.world(3)
    for c in comms:
        c.proc.call(c, "ncclAllReduce", 1.0)
        c.proc.call(c, "ncclAllReduce", 1.1 if c is comms[2] else 1.2, lost=c is comms[2])
        c.proc.call(c, "ncclAllReduce", 61.0 if c is comms[2] else 1.3)
        c.proc.call(c, "ncclAllReduce", 62.0)
        c.proc.cover(0.5, 70.0, lost_kernel=int(c is comms[2]))
    (f,) = analyze_job(job)
    assert [c["rank"] for c in f.named] == [2]


@pytest.mark.parametrize(("more", "named"), [(20.0, [[2]]), (50.0, [[1], [2]])])
def test_who_stays_away_long_after_the_late_one_came_is_late_as_well(
    more: float, named: list[list[int]]
) -> None:
    assert sorted(behind_a_late_one(skew=-more)) == named


@pytest.mark.parametrize(
    ("half", "count", "named"),
    [("Recv", 1, []), ("Send", 1 << 20, []), ("Send", 1, [[1]])],
    ids=["receives", "sends", "is buffered"],
)
def test_who_waited_for_a_message_of_the_late_one_is_not_late(
    half: str, count: int, named: list[list[int]]
) -> None:
    """Rank 1 has queued its half, and comes to Y when rank 2 has made the other."""
    job = Job()
    xs = job.world(3)
    y0, y1 = (xs[r].proc.comm("00000000000000bb", r, 2) for r in (0, 1))
    for c in (*xs, y0, y1):
        c.proc.call(c, "ncclAllReduce", 0.8)
    x1, x2 = xs[1], xs[2]
    x1.proc.call(x1, f"nccl{half}", 1.0, peer=2, count=count)
    y0.proc.call(y0, "ncclAllReduce", 2.0)
    other = "Send" if half == "Recv" else "Recv"
    x2.proc.call(x2, f"nccl{other}", 61.0, peer=1, count=count)
    y1.proc.call(y1, "ncclAllReduce", 61.1)
    for x in xs:
        x.proc.cover(0.5, 90.0)
    assert [[c["rank"] for c in f.named] for f in analyze_job(job)] == named


@pytest.mark.parametrize(
    ("after", "err", "named"),
    [(0.01, 1000, [[], [2]]), (1.5, 1000, [[1], [2]]), (0.01, 20_000_000, [[1], [2]])],
    ids=["just after", "later", "clocks do not tell"],
)
def test_who_comes_just_after_another_late_one_may_have_waited_for_it(
    after: float, err: int, named: list[list[int]]
) -> None:
    """Two communicators: rank 2 comes late to the one, then rank 1 to the other."""
    job = Job()
    x = [job.proc(r, Host(f"node{r}", err=err)).comm("00000000000000aa", r, 2) for r in (0, 1)]
    y = [job.proc(r, Host(f"node{r}", err=err)).comm("00000000000000bb", r - 2, 2) for r in (2, 3)]
    for c in (*x, *y):
        c.proc.call(c, "ncclAllReduce", 0.8)
    for c, at in ((x[0], 2.0), (x[1], 61.0 + after), (y[0], 61.0), (y[1], 2.0)):
        c.proc.call(c, "ncclAllReduce", at)
        c.proc.cover(0.5, 90.0)
    found = [f for f in analyze_job(job) if f.hang_type == "delayed_collective_enter"]
    assert sorted([c["rank"] for c in f.named] for f in found) == named
    assert all((f.role == "unknown") == (not f.named) for f in found)


def test_of_many_that_come_one_after_another_only_the_first_is_late() -> None:
    """More than are remembered from one scan to the next."""
    job = Job()
    host = Host("node", err=1000)
    for i in range(300):
        pair = [job.proc(2 * i + r, host).comm(f"{i + 1:016x}", r, 2) for r in (0, 1)]
        for c, at in zip(pair, (2.0, 61.0 + i * 0.002), strict=True):
            c.proc.call(c, "ncclAllReduce", 0.8)
            c.proc.call(c, "ncclAllReduce", at)
            c.proc.cover(0.5, 90.0)
    found = [f for f in analyze_job(job) if f.hang_type == "delayed_collective_enter"]
    assert (len(found), [c["rank"] for f in found for c in f.named]) == (300, [1])


def late_root() -> tuple[Job, list[Comm], float]:
    """Rank 0, the root, comes 100 s late to a Broadcast; when it does."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 10)
    for r, c in enumerate(comms):
        c.proc.call(c, "ncclBroadcast", t + 100 * (r == 0), root=0)
    return job, comms, t + 100


def root_findings(job: Job, comms: list[Comm], t: float) -> list[tuple[str, list[Any]]]:
    steps(comms, 5, start=t + 1)
    cover(job.procs, t + 10)
    return [(f.role, [d["rank"] for d in f.named]) for f in analyze_job(job)]


@pytest.mark.parametrize(
    ("main", "seconds", "right"),
    [
        ("uninterruptible", 90, ("root_cause", [0])),
        ("stopped", 90, ("root_cause", [0])),
        ("uninterruptible", 20, ("unknown", [])),
        ("running", 90, ("unknown", [])),
    ],
)
def test_a_root_that_was_held_up_for_long_did_not_wait_for_work(
    main: str, seconds: int, right: tuple[str, list[int]]
) -> None:
    job, comms, t = late_root()
    for i in range(-110, 1):
        state = main if -95 <= i < seconds - 95 else "running"
        comms[0].proc.coverage(t + i - 0.5, main=state)
    assert root_findings(job, comms, t) == [right]


def test_two_short_times_are_not_long() -> None:
    job, comms, t = late_root()
    for i in range(-110, 1):
        comms[0].proc.coverage(t + i - 0.5, main="uninterruptible" if i % 25 else "running")
    assert root_findings(job, comms, t) == [("unknown", [])]


@pytest.mark.parametrize(
    ("waits", "came", "right"),
    [
        ((1, 2, 3), 95, ("root_cause", [0])),
        ((1, 2, 3), 20, ("unknown", [])),
        ((1, 2), 95, ("unknown", [])),
        ((), 0, ("unknown", [])),
    ],
)
def test_a_root_for_which_all_others_wait_in_a_split_did_not_wait_for_work(
    waits: tuple[int, ...], came: float, right: tuple[str, list[int]]
) -> None:
    job, comms, t = late_root()
    for r, c in enumerate(comms):
        start = t - came if r in waits else t + 0.1
        child = c.proc.comm("00000000000000dd", r, 4, t=t + 0.3, learnt="split", parent=c.id)
        more = {"color": 0, "key": 0, "ord": 1, "new_comm": child.id}
        c.proc.call(c, "ncclCommSplit", start, dur=t + 0.2 - start, **more)
    assert root_findings(job, comms, t) == [right]
