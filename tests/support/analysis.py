"""Analyses made-up jobs, afterwards or step by step."""

from __future__ import annotations

from typing import Any

from nccluprobe.match.finding import Finding
from nccluprobe.match.options import Options
from nccluprobe.match.pipeline import Analysis
from support.tracegen import Comm, Job, Proc


class Run:
    """An analysis of a job's traces, afterwards or step by step."""

    def __init__(self, job: Job, options: Options | None = None) -> None:
        self.job = job
        self.analysis = Analysis(options)
        self.lines = [p.data().splitlines() for p in job.procs]
        self.at = [0] * len(self.lines)
        self.analysis.open([(i, p.name) for i, p in enumerate(job.procs)])

    def feed(self, i: int, n: int | None = None) -> None:
        """Feed the next ``n`` lines of process ``i``."""
        at, lines = self.at[i], self.lines[i]
        end = len(lines) if n is None else min(len(lines), at + n)
        self.at[i] = end
        self.analysis.feed(i, self.job.procs[i].name, at + 1, lines[at:end], end == len(lines))

    def until(self, t: float) -> None:
        """Feed what every process has written before ``t``."""
        for i, p in enumerate(self.job.procs):
            n = 1 + sum(1 for when, _, _ in p.lines if when <= p.host.at(t))
            if n > self.at[i]:
                self.feed(i, n - self.at[i])

    def all(self) -> None:
        for i in range(len(self.lines)):
            self.feed(i)

    def scan(self, now: int | None = None) -> list[Finding]:
        return self.analysis.scan(now)


def analyze_job(job: Job, **options: Any) -> list[Finding]:
    """Findings at the end of the traces, all of them in their newest state."""
    run = Run(job, Options(**options))
    run.all()
    run.scan()
    return sorted(run.analysis.matcher.book.all(), key=lambda f: (f.since, f.id))


def blamed(found: list[Finding]) -> set[int]:
    """Ranks of the job that root causes name."""
    return {
        who["rank"]
        for f in found
        if f.role == "root_cause" and f.state == "open"
        for who in f.named
    }


def kinds(found: list[Finding]) -> list[tuple[str, str]]:
    """Kind and severity of open findings."""
    return [(f.hang_type, f.severity) for f in found if f.state == "open"]


def steps(comms: list[Any], n: int, start: float = 1.0, step: float = 0.1, **args: Any) -> float:
    """All ranks make ``n`` AllReduce calls; returns the time after the last."""
    for i in range(n):
        for c in comms:
            c.proc.call(c, "ncclAllReduce", start + i * step, **args)
    return start + n * step


def cover(procs: list[Proc], end: float, **more: Any) -> None:
    for p in procs:
        p.cover(0.5, end, **more)


def hang(
    n: int = 4,
    missing: tuple[int, ...] = (3,),
    calls: int = 42,
    waited: float = 60.2,
    covered: bool = True,
    **more: Any,
) -> tuple[Job, list[Comm], float]:
    """Some calls by all, then one more by all but the missing."""
    job = Job()
    comms = job.world(n, **more)
    t = steps(comms, calls)
    for r, c in enumerate(comms):
        if r not in missing:
            c.proc.call(c, "ncclAllReduce", t)
    if covered:
        cover(job.procs, t + waited)
    return job, comms, t
