"""Every fault that the canary plants, traced by each front: the finding is the planted truth."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.canary import Canary
from support.e2e import Analyze, Report, Stage
from support.traces import validate
from support.waiting import wait_for

from nccluprobe.canary.faults import KINDS
from nccluprobe.canary.run import COMM_NAME

AT = 6

#: Job -> options beside the fault.
OPTIONS: dict[str, tuple[str, ...]] = {
    "late": ("--inject", f"late:rank=1,at={AT},s=4"),
    "reconnect": ("--inject", f"reconnect:at={AT}"),
    "wrong_rank": ("--inject", "wrong_rank:rank=2"),
    "healthy": (),
}
#: Kinds by the rank that plants them; rank 1 when not told.
RANKS = {"never": 2, "kill": 0, "count": 0, "root": 2, "stop": 2, "skip": 2}

#: So many jobs run at a time.
AT_ONCE = 7
JOBS = ("healthy", *KINDS)
BATCHES = [JOBS[i : i + AT_ONCE] for i in range(0, len(JOBS), AT_ONCE)]


def options(job: str) -> tuple[str, ...]:
    if job in OPTIONS:
        return OPTIONS[job]
    return ("--inject", f"{job}:rank={RANKS.get(job, 1)},at={AT}")


@pytest.fixture
def canary(stage: Stage) -> Canary:
    return Canary(stage)


def judged(canary: Canary, analyze: Analyze, jobs: Sequence[str], out: Path) -> Report:
    """Analyses until all jobs have the verdict that was planted."""
    last: list[Report] = []
    folders = [out / "tracing" / job for job in jobs]

    def all_right() -> bool:
        if not all(folder.exists() for folder in folders):
            return False
        last[:] = [analyze(*folders, error=3)]
        return all(canary.verdict(job, last[0])[0] for job in jobs)

    def context() -> str:
        if not last:
            return f"traces: {sorted(p.name for p in out.glob('tracing/*'))}"
        verdicts = [f"{job}: {canary.verdict(job, last[0])[1]}" for job in jobs]
        return "\n".join([*verdicts, f"exit code {last[0].rc}", last[0].text[-3000:]])

    wait_for(all_right, "the findings that were planted", timeout=60, context=context, poll=1)
    return last[0]


LONG = ("--steps", "2000", "--pause", "0.1", "--hold", "100")


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_planted_fault_is_found_by_attach(
    stage: Stage, canary: Canary, analyze: Analyze
) -> None:
    daemon = stage.attach_glob()
    for jobs in BATCHES:
        for job in jobs:
            canary.start(job, *options(job), *LONG)
        report = judged(canary, analyze, jobs, daemon.out)
        assert report.rc == 10
        canary.stop()
    daemon.stop()
    validate(daemon.traces())


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_planted_fault_is_found_by_preload(
    stage: Stage, canary: Canary, analyze: Analyze, nccluprobe_command: list[str]
) -> None:
    out = stage.tmp / "out"
    for jobs in BATCHES:
        for job in jobs:
            front = [*nccluprobe_command, "preload", "--out", out, "--"]
            canary.start(job, *options(job), *LONG, prefix=front)
        report = judged(canary, analyze, jobs, out)
        assert report.rc == 10
        canary.stop()


# --- an inference group -------------------------------------------------------

#: Longer than the threshold: a wait that teaches.
IDLE_S = 1.8


def serving(stage: Stage, canary: Canary, analyze: Analyze, front: Sequence[Any]) -> None:
    """Idle followers: no finding when declared or learnt; the root's end is found."""
    out = stage.tmp / "out"
    faults = {"serve": (), "serve_kill": ("kill",), "serve_abort": ("abort",)}
    for job, kinds in faults.items():
        planted = [x for kind in kinds for x in ("--inject", f"{kind}:rank=0,at=5")]
        canary.start(
            job, "--serve", "--hold", "100", *planted,
            env={"SIMNCCL_ABORT_LOCAL": "1"}, prefix=front, stdin=subprocess.PIPE,
        )  # fmt: skip

    def request(number: int, *, all_answer: bool = True) -> None:
        for job in faults:
            canary.tell(job, "run")
        for job in faults if all_answer else ("serve",):
            canary.wait_log(job, f"request {number}:")

    serve = out / "tracing" / "serve"
    for number in range(5):
        request(number)
        time.sleep(IDLE_S)
        if number == 0:
            # From the start, by declaration; without it the wait is told, and blames nobody.
            found = analyze(serve, more=("--idle-ok", COMM_NAME))
            assert found.open == [], found.text
            undecided = analyze(serve)
            assert [f["role"] for f in undecided.open] == ["unknown"], undecided.text
            assert "cause not decidable" in undecided.text
    request(5, all_answer=False)
    time.sleep(IDLE_S)
    learnt = analyze(serve)
    assert learnt.open == [], learnt.text
    judged(canary, analyze, ("serve_kill", "serve_abort"), out)
    canary.tell("serve", "quit")
    assert canary.jobs["serve"].wait(30) == 0, canary.log("serve")
    canary.stop()


@pytest.mark.root
@pytest.mark.slow
def test_idle_followers_and_their_root_under_attach(
    stage: Stage, canary: Canary, analyze: Analyze
) -> None:
    daemon = stage.attach_glob()
    serving(stage, canary, analyze, ())
    daemon.stop()
    validate(daemon.traces())


@pytest.mark.slow
def test_idle_followers_and_their_root_under_preload(
    stage: Stage, canary: Canary, analyze: Analyze, nccluprobe_command: list[str]
) -> None:
    out = stage.tmp / "out"
    serving(stage, canary, analyze, [*nccluprobe_command, "preload", "--out", out, "--"])
