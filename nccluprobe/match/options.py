"""Thresholds and declarations of the matcher."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

SECOND = 1_000_000_000


@dataclass(frozen=True)
class Options:
    """All limits in nanoseconds; the defaults are the published ones."""

    #: An absence is written (notice) when others have waited this long.
    missing_after: int = 60 * SECOND
    #: A rank is late when it is last by more than this.
    late_after: int = 30 * SECOND
    #: An absence becomes an error after this (the phase timeout).
    error_after: int = 300 * SECOND
    #: A collector that is this far behind is silent: its ranks are not observed.
    silent_after: int = 5 * SECOND
    #: A disagreement is decided after this many further calls ...
    decide_calls: int = 8
    #: ... or after this long.
    decide_after: int = 5 * SECOND
    #: Communicators (name or hash, shell patterns) on which waiting for the root is normal.
    idle_ok: tuple[str, ...] = ()
    #: So many long waits that ended well teach that a rooted wait is idle.
    idle_lessons: int = 3
    #: Declared phases -> their limits (name or pattern); the first that fits holds.
    phase_limits: tuple[tuple[str, int], ...] = ()
    #: Limit of a phase that neither this list nor the job itself limits.
    phase_default: int = 1800 * SECOND

    #: Report also what is risky but did not stop the job.
    lint: bool = False

    def in_seconds(self) -> dict[str, float]:
        """The limits that a finding depends on, as its line tells them."""
        return {
            "missing_after_s": self.missing_after / SECOND,
            "late_after_s": self.late_after / SECOND,
            "error_after_s": self.error_after / SECOND,
        }

    def phase_limit(self, name: str, declared: int | None) -> int:
        """How long a phase may last, ns; ``declared``: by the job's own word."""
        for pattern, limit in self.phase_limits:
            if fnmatch.fnmatchcase(name, pattern):
                return limit
        return self.phase_default if declared is None else declared

    def idle_declared(self, name: str | None, comm_hash: str) -> bool:
        """Whether ``--idle-ok`` was given for this communicator."""
        return any(
            fnmatch.fnmatchcase(comm_hash, p) or (name is not None and fnmatch.fnmatchcase(name, p))
            for p in self.idle_ok
        )
