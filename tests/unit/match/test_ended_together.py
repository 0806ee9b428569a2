"""Who was there when another one ended, and who of several with one pid may only wait."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import Run, cover
from support.tracegen import Job

from nccluprobe.match import p2p_supposed
from nccluprobe.match.finding import Finding
from nccluprobe.match.model import ProcessKey

ALIVE = "rank_alive_but_not_entered"


@pytest.mark.parametrize(
    ("later", "outlived"), [(None, True), (0.02, False), (4.9, False), (6.0, True)]
)
def test_one_outlives_another_by_more_than_a_job_takes_to_be_killed(
    later: float | None, outlived: bool
) -> None:
    job = Job()
    job.world(2)
    cover(job.procs, 100)
    job.procs[0].end(100, "signaled", signal=15)
    if later is not None:
        job.procs[1].end(100 + later, "signaled", signal=15)
    run = Run(job)
    run.all()
    first, other = run.analysis.matcher.processes.values()
    assert other.outlived(first) == outlived
    assert not first.outlived(other)


def _finding(hang_type: str, reason: str, **more: Any) -> Finding:
    details = {"reason": reason, "confidence": "reduced", **more.pop("details", {})}
    return Finding((hang_type,), hang_type, "run", None, None, 1, details, "error", **more)


@pytest.mark.parametrize(("syscall", "blamed"), [("futex", False), ("read", True)])
def test_of_two_with_one_pid_both_must_be_free_to_wait(syscall: str, blamed: bool) -> None:
    """On two hosts: one of them is away for sure, and by the pid nobody can tell which."""
    ours, theirs = ProcessKey("here", 7, 1), ProcessKey("there", 7, 2)
    states = [
        {"pid": 7, "reason": ALIVE, "main_thread": "syscall", "syscall": s}
        for s in (syscall, "futex")
    ]
    absence = _finding(
        "collective_missing_enter",
        ALIVE,
        details={"missing_rank_status": states},
        role="root_cause",
        culprits=(ours, theirs),
        supposes=True,
    )
    message = _finding(
        "p2p_unmatched", "probe_event_loss_possible", role="unknown", waiters=(ours,)
    )
    p2p_supposed.settle([absence, message])
    assert (ours in absence.culprits) == blamed
    assert message.role == ("unknown" if blamed else "root_cause")
