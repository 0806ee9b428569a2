"""The demo job's planted faults, all at once under one daemon: each gets its verdict."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.e2e import Analyze, Report, Stage, clean_env, validate, wait_for

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(150)]

DEMO = Path(__file__).resolve().parent.parent.parent / "tools" / "demo_job.py"
AT = 13

#: Options of the job, and what must be found: type, reason, the ranks named, severity.
FAULTS: dict[str, tuple[tuple[str, ...], tuple[str, str, list[int], str] | None]] = {
    "healthy": ((), None),
    "stall": (
        ("--stall-rank", "2"),
        ("collective_missing_enter", "rank_alive_but_not_entered", [2], "error"),
    ),
    "late": (
        ("--late-rank", "1", "--late-by", "5"),
        ("delayed_collective_enter", "rank_late", [1], "notice"),
    ),
    "exit": (
        ("--exit-rank", "0", "--exit-code", "3"),
        ("collective_missing_enter", "rank_exit_or_crash_suspected", [0], "error"),
    ),
    "kill": (
        ("--kill-rank", "2"),
        ("collective_missing_enter", "rank_exit_or_crash_suspected", [2], "error"),
    ),
    "skip": (
        ("--skip-rank", "1"),
        ("skipped_or_extra_call", "call_skipped", [1], "error"),
    ),
    "api": (
        ("--wrong-api-rank", "2"),
        ("collective_mismatch", "arguments_differ", [2], "error"),
    ),
    "count": (
        ("--wrong-count-rank", "0"),
        ("collective_mismatch", "arguments_differ", [0], "error"),
    ),
}


def verdicts(report: Report) -> dict[str, tuple[str, str, list[int], str]]:
    """By job; a provisional finding is none yet."""
    found: dict[str, tuple[str, str, list[int], str]] = {}
    for f in report.findings:
        d = f["details"]
        named = d["missing_comm_ranks"] or d.get("late_comm_ranks") or d.get("minority_comm_ranks")
        verdict = (f["hang_type"], d["reason"], named, f["severity"])
        if not d.get("provisional") and f["state"] == "open":
            assert found.setdefault(f["run_id"], verdict) == verdict, report.text
    return found


def test_every_planted_fault_has_its_verdict(stage: Stage, analyze: Analyze) -> None:
    demo = stage.tmp / f"{stage.token}_demo.py"
    shutil.copy(DEMO, demo)
    daemon = stage.attach_glob()
    jobs: dict[str, subprocess.Popen[str]] = {}
    for name, (options, _) in FAULTS.items():
        command: list[str | Path] = [
            sys.executable,
            "-u",
            demo,
            "--lib",
            stage.lib,
            "--ranks",
            "3",
            *options,
        ]
        command += ["--iters", "2000", "--period", "0.1", "--hold", "120"]
        if options:
            command += [options[0].replace("-rank", "-at"), str(AT)]
        jobs[name] = stage.popen(
            command, stdout=subprocess.PIPE, env={**clean_env(), "TORCHELASTIC_RUN_ID": name}
        )
    planted: dict[str, Any] = {}
    for name, process in jobs.items():
        assert process.stdout is not None
        assert "stand-in" in process.stdout.readline()  # it says what it is
        planted[name] = json.loads(process.stdout.readline())["planted"]
    expected = {name: want for name, (_, want) in FAULTS.items() if want is not None}
    last: list[Report] = []

    def judged() -> bool:
        last[:] = [analyze(daemon.out)]
        return verdicts(last[0]) == expected

    def context() -> str:
        return f"{verdicts(last[0])}\n{last[0].text}\n{daemon.stderr.text}"

    wait_for(judged, "the verdicts", timeout=60, context=context, poll=1)
    report = last[0]
    assert report.rc == 10
    for f in report.open:
        (fault,) = planted[f["run_id"]]
        assert f["role"] == "root_cause"
        if f["run_id"] != "skip":  # identical calls: seen where the next other call comes
            assert (f["comm_seq"], f["details"]["api"]) == (fault["comm_seq"], fault["api"])
    for process in jobs.values():
        process.terminate()
    daemon.stop()
    validate(daemon.traces())
