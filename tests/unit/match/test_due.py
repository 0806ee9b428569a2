"""When a wait passes its next limit, for who follows a job."""

from __future__ import annotations

from support.analysis import Run, cover, steps
from support.tracegen import Job, S, unix

from nccluprobe.match.matcher import Due


def test_the_next_limit_of_an_open_wait() -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 42)
    steps(comms[:3], 1, start=t)
    cover(job.procs, t + 400)
    run = Run(job)
    run.all()
    first = unix(t)
    for after, due in ((10, 60), (59.9, 60), (60, 300), (299, 300), (300, None)):
        now = first + round(after * S)
        run.scan(now)
        expected = None if due is None else Due(first + due * S, frozenset({3}))
        assert run.analysis.due(now) == expected, after


def test_limits_close_together_are_one() -> None:
    job = Job()
    one = job.world(4)
    other, third = (
        [c.proc.comm(f"{n:016x}", r, 4) for r, c in enumerate(one)] for n in (0xAB, 0xCD)
    )
    t = 1.0
    for c in (*one, *other, *third):
        c.proc.call(c, "ncclAllReduce", t)
    for comms, at, absent in ((one, 2.0, 3), (other, 2.2, 2), (third, 2.4, 1)):
        for r, c in enumerate(comms):
            if r != absent:
                c.proc.call(c, "ncclAllReduce", at)
    cover(job.procs, 400)
    run = Run(job)
    run.all()
    run.scan(unix(10))
    assert run.analysis.due(unix(10)) == Due(unix(62.2), frozenset({2, 3}))
    run.scan(unix(62.3))
    assert run.analysis.due(unix(62.3)) == Due(unix(62.4), frozenset({1}))


def test_nobody_waits_and_nothing_is_due() -> None:
    job = Job()
    cover(job.procs, steps(job.world(4), 42) + 100)
    run = Run(job)
    run.all()
    run.scan(unix(50))
    assert run.analysis.due(unix(50)) is None
