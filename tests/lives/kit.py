"""A life: a job that is healthy, and its twin that hangs.

A builder makes both from one program.  The healthy one is watched live, every
few seconds of the trace's time, as well as judged at its end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support.analysis import Run
from support.tracegen import Job, unix

from nccluprobe.match.finding import Finding
from nccluprobe.match.options import SECOND, Options

#: Seconds that a hung twin hangs: past the default limits, and past that of a phase.
HANGS = 320.0
HANGS_IN_PHASE = 620.0
PHASE_LIMIT = 400
_SCAN = 4.0

Build = Callable[[bool], Job]


@dataclass(frozen=True)
class Life:
    """``build(hung)`` makes the job.

    ``notices``: the healthy one may have notices, if they resolve themselves.
    The rest is true of the hung twin: the kinds that are right for its leading
    error, and exactly the global ranks that are to blame.
    """

    name: str
    build: Build
    hang_type: tuple[str, ...]
    blamed: tuple[int, ...]
    notices: bool
    options: dict[str, Any]

    @property
    def limits(self) -> Options:
        """Options of the analysis; seconds become nanoseconds."""
        limits: dict[str, Any] = {
            k: round(v * SECOND) if isinstance(v, float) else v for k, v in self.options.items()
        }
        return Options(**limits)


LIVES: dict[str, Life] = {}


def life(
    *hang_type: str,
    blamed: tuple[int, ...] = (),
    notices: bool = False,
    name: str | None = None,
    **options: Any,
) -> Callable[[Build], Build]:
    """Register a builder under its own name or another."""

    def note(build: Build) -> Build:
        key = name or build.__name__
        LIVES[key] = Life(key, build, hang_type, blamed, notices, options)
        return build

    return note


@dataclass
class Watched:
    """What an analysis said while it followed a job, and at the end."""

    written: list[Finding]
    last: list[Finding]


def follow(job: Job, options: Options, step: float = _SCAN) -> Watched:
    """Watch a job as it goes, as ``analyze --follow`` does."""
    run = Run(job, options)
    times = [sorted(when for when, _, _ in p.lines) for p in job.procs]
    end = max(t[-1] - p.host.mono for t, p in zip(times, job.procs, strict=True)) / SECOND
    written: list[Finding] = []
    now = 0.0
    while now < end:
        now = min(now + step, end)
        for i, p in enumerate(job.procs):
            n = 1 + bisect_right(times[i], p.host.at(now))
            if n > run.at[i]:
                run.feed(i, n - run.at[i])
        written += run.scan(unix(now))
    return Watched(written, run.analysis.matcher.book.all())


def blamed(findings: list[Finding]) -> set[int]:
    """Global ranks that are named as the cause now."""
    return {
        c["rank"] for f in findings if f.role == "root_cause" and f.state == "open" for c in f.named
    }


def told(findings: list[Finding]) -> list[tuple[Any, ...]]:
    """Findings in short, for a failed test."""
    return [
        (
            f.hang_type,
            f.state,
            f.severity,
            f.role,
            [c["rank"] for c in f.named],
            f.details["reason"],
            f.details.get("summary"),
        )
        for f in findings
    ]
