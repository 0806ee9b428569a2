"""Rules of calls inside and in groups that no other test would miss: read step by step."""

from __future__ import annotations

import pytest
from support.analysis import Run, steps
from support.tracegen import Comm, Job

AR = "ncclAllReduce"


def entered(run: Run) -> dict[int | None, int]:
    """Rank -> calls that count as entered."""
    (comm,) = run.analysis.matcher.comms.values()
    return {rank: e.entered for rank, e in comm.endpoints.items()}


def world(n: int = 2) -> tuple[Job, list[Comm], float]:
    job = Job()
    comms = job.world(n)
    return job, comms, steps(comms, 3)


@pytest.mark.parametrize("rc", [0, 3])
def test_a_call_that_failed_in_the_end_was_none(rc: int) -> None:
    """It counted while it was inside."""
    job, comms, t = world()
    one, other = comms
    line = one.proc.enter(one, AR, t)
    one.proc.cover(0.5, t + 20)
    done = {**line, "kind": "call", "dur": 21_000_000_000, "rc": rc}
    one.proc.add(t + 21, done)
    one.proc.cover(t + 22, t + 40)
    other.proc.cover(0.5, t + 40)
    run = Run(job)
    run.until(t + 10)
    run.scan()
    assert entered(run) == {0: 4, 1: 3}
    run.all()
    run.scan()
    assert entered(run) == {0: 4 if rc == 0 else 3, 1: 3}


@pytest.mark.parametrize("rc", [0, 3])
def test_calls_of_a_group_that_failed_in_the_end_were_none(rc: int) -> None:
    """They counted while their thread was inside the group's end."""
    job, comms, t = world()
    one, other = comms
    one.proc.group([(one, AR, {}), (one, AR, {})], t, state="inside")
    line = one.proc.lines[-1][2]
    one.proc.cover(0.5, t + 20)
    one.proc.add(t + 21, {**line, "kind": "call", "dur": 20_000_000_000, "rc": rc})
    one.proc.cover(t + 22, t + 40)
    other.proc.cover(0.5, t + 40)
    run = Run(job)
    run.until(t + 10)
    run.scan()
    assert entered(run) == {0: 5, 1: 3}
    run.all()
    run.scan()
    assert entered(run) == {0: 5 if rc == 0 else 3, 1: 3}


def test_groups_whose_calls_have_been_taken_are_forgotten() -> None:
    """However many there are, few are held."""
    job, comms, t = world()
    for i in range(300):
        for c in comms:
            c.proc.group([(c, AR, {})], t + i)
    for c in comms:
        c.proc.cover(0.5, t + 310)
    run = Run(job)
    held = []
    for n in range(1, 5):
        run.until(t + 75 * n)
        run.scan()
        held += [len(p.groups) for p in run.analysis.matcher.processes.values()]
    assert set(entered(run).values()) == {303}
    assert max(held) < 75
