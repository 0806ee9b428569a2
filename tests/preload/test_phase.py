"""A job that says what it does while it does not come: from the file to the verdict."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.canary import Canary
from support.e2e import Analyze, Stage
from support.traces import read_traces, validate
from support.waiting import clean_env

from nccluprobe.errors import ExitCode

HEARTBEATS = Path("tracing/r/heartbeat")


@pytest.fixture
def stage(tmp_path: Path, nccluprobe_command: list[str], simnccl: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path, nccluprobe_command, simnccl)
    try:
        yield stage
    finally:
        stage.close()


def declare(out: Path, rank: int) -> None:
    """As a launcher does for one of its ranks, once its trace is there."""
    deadline = time.monotonic() + 60
    while not (found := [*out.glob(f"tracing/r/rank_{rank}_pid_*.jsonl")]):
        assert time.monotonic() < deadline, "no trace"
        time.sleep(0.05)
    pid = json.loads(found[0].open().readline())["pid"]
    folder = out / HEARTBEATS
    folder.mkdir()
    row = {"rank": rank, "host": platform.node(), "pid": pid, "phase": "checkpoint"}
    (folder / "new").write_text(json.dumps(row | {"time": time.time()}))
    os.replace(folder / "new", folder / f"rank_{rank}.json")  # noqa: PTH105 - as users do


def test_a_declared_phase_reaches_the_verdict(
    stage: Stage, nccluprobe_command: list[str], cli: Any, tmp_path: Path
) -> None:
    """Rank 3 never enters the AllReduce of step 42; the others wait for 9 s."""
    out = tmp_path / "out"
    job = Canary(stage).command(
        "--pause", "0.01", "--inject", "never:rank=3,at=42", "--hold", "9",
        world=4, ops="all_reduce",
    )  # fmt: skip
    command = [*nccluprobe_command, "preload", "--out", out, "--run-id", "r", "--", *job]
    with subprocess.Popen(
        [*map(str, command)], env=clean_env(), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as running:  # fmt: skip
        declare(out, 3)
        assert running.wait(timeout=120) == ExitCode.CANARY_HELD
    traces = read_traces(out)
    validate(traces)
    told = {t.rank: [x for x in t.lines if x.get("phase") == "checkpoint"] for t in traces}
    assert [len(told[r]) for r in range(4)] == [0, 0, 0, 1]
    analyze = Analyze(cli, tmp_path)
    excused = analyze(out)
    assert excused.rc == ExitCode.OK, excused.text
    for path in (out / HEARTBEATS).iterdir():
        path.unlink()  # the trace alone says it
    assert analyze(out).rc == ExitCode.OK
    report = analyze(out, more=("--phase-limit", "check*=2"))
    assert [f["details"]["missing_comm_ranks"] for f in report.errors] == [[3]]
