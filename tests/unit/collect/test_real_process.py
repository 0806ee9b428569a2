"""The collector with the real /proc, the real exit watcher and the real clocks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.collecting import FakeSource, init, rec, validator

from nccluprobe.collect.clock import Clock
from nccluprobe.collect.collector import Collector
from nccluprobe.collect.exits import ExitWatcher

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("how", ["signaled", "exited"])
def test_a_real_process(tmp_path: Path, how: str) -> None:
    environ = {**os.environ, "RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "job/1"}
    source = FakeSource()
    watcher = ExitWatcher()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=environ) as child:
        time.sleep(0.1)  # the kernel tells of its exec a moment after Popen returned
        collector = Collector(source, tmp_path, wanted=lambda pid: True, watcher=watcher)
        now = time.monotonic_ns()
        pid = {"pid": child.pid, "tid": child.pid}
        source.ring = [init(1, t_enter=now, **pid), rec(comm_gen=1, t_enter=now + 1, **pid)]
        for _ in range(150):
            collector.step(time.monotonic_ns())
            time.sleep(0.01)
        if how == "signaled":
            child.send_signal(signal.SIGKILL)
        else:
            assert child.stdin is not None
            child.stdin.close()
        child.wait()
        for _ in range(150):
            collector.step(time.monotonic_ns())
            if not collector.processes:
                break
            time.sleep(0.01)
        collector.close(time.monotonic_ns())
    watcher.close()
    path = tmp_path / "tracing" / "job_1" / f"rank_3_pid_{child.pid}.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        validator().validate(line)
    process = lines[0]
    assert (process["rank"], process["rank_source"], process["exe"]) == (3, "torchrun", "cat")
    coverage = [x for x in lines if x["kind"] == "coverage"]
    assert coverage[1]["alive"] is True and coverage[1]["main"] == "syscall"
    assert coverage[1]["syscall"] == "read"
    assert coverage[-1]["alive"] is False
    end = lines[-1]
    assert end["kind"] == "process_end" and end["how"] in (how, "gone")
    if end["how"] == "signaled":
        assert end["signal"] == 9
    assert source.forgotten == [(child.pid, 1)]


def test_clock_reads_both_clocks() -> None:
    clock = Clock()
    before, reading, after = time.monotonic_ns(), clock.reading(), time.monotonic_ns()
    assert before <= reading.mono <= after
    assert abs(reading.unix - time.time_ns()) < 10**9
    assert reading.synced in (True, False) and (reading.err or 0) >= 0


def test_clock_without_the_system_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(clock, "_libc", None)
    assert clock.reading().synced is None
