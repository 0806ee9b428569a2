"""The same workload under both fronts gives the same trace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from bpf.fakelib import build
from support.daemon import Daemon
from support.e2e import Stage
from support.traces import Trace, read_traces, validate
from support.waiting import clean_env, wait_for

from preload.parity import differences

HERE = Path(__file__).resolve().parent
REAL = HERE.parent / "support" / "real_nccl.py"

pytestmark = pytest.mark.root


@pytest.fixture
def stage(tmp_path: Path, nccluprobe_command: list[str], simnccl: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path, nccluprobe_command, simnccl)
    try:
        yield stage
    finally:
        stage.close()


def under_ebpf(stage: Stage, command: Sequence[str | Path], library: Path, name: str) -> Trace:
    go, done, out = (stage.tmp / f"{name}.{x}" for x in ("go", "done", "out"))
    process = stage.popen(
        [sys.executable, *command, "--go", go, "--done", done],
        stdout=subprocess.PIPE,
        env=clean_env(),
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready")
    daemon: Daemon = stage.attach("--pid", str(process.pid), "--lib", library, out=out).ready()
    go.touch()
    for line in process.stdout:
        if line.startswith("called"):
            break
    done.touch()
    process.wait(60)
    wait_for(
        lambda: any(t.end for t in read_traces(out)),
        "the end in the trace",
        context=lambda: daemon.stderr.text,
    )
    daemon.stop()
    return one_trace(out)


def under_preload(
    stage: Stage,
    command: Sequence[str | Path],
    library: Path,
    nccluprobe: Sequence[str],
    name: str,
) -> Trace:
    out = stage.tmp / f"{name}.out"
    done = subprocess.run(
        [*nccluprobe, "preload", "--lib", library, "--out", out, "--", sys.executable, *command],
        env=clean_env(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "called" in done.stdout, done.stdout + done.stderr
    return one_trace(out)


def one_trace(out: Path) -> Trace:
    traces = read_traces(out)
    validate(traces)
    assert len(traces) == 1
    return traces[0]


def check(a: Trace, b: Trace, at_least: int) -> None:
    assert (a.process["front"], b.process["front"]) == ("ebpf", "preload")
    assert len(a.of("call")) >= at_least
    assert not any(a.coverage[k] or b.coverage[k] for k in ("lost_kernel", "overwritten", "blind"))
    found = differences(a, b)
    assert not found, "\n".join(found[:20])


def test_every_function_group_child_and_thread(stage: Stage, nccluprobe_command: list[str]) -> None:
    library = build(stage.tmp / f"{stage.token}_fake.so")
    script = [HERE / "workload.py", library, "--kind", "fake"]
    a = under_ebpf(stage, script, library, "a")
    b = under_preload(stage, script, library, nccluprobe_command, "b")
    check(a, b, 2000)


def test_on_simnccl(stage: Stage, nccluprobe_command: list[str]) -> None:
    script = [HERE / "workload.py", stage.lib, "--kind", "sim"]
    a = under_ebpf(stage, script, stage.lib, "a")
    b = under_preload(stage, script, stage.lib, nccluprobe_command, "b")
    check(a, b, 150)


@pytest.mark.nccl
@pytest.mark.parametrize("version", ["2.21.5", "2.28.9"])
def test_on_nvidias_own_library(
    version: str, stage: Stage, nccluprobe_command: list[str], real_nccl: object
) -> None:
    library: Path = real_nccl(version)  # type: ignore[operator]
    script = [REAL, library, version, "--calls", "211", "--fewer", "53"]
    a = under_ebpf(stage, script, library, "a")
    b = under_preload(stage, script, library, nccluprobe_command, "b")
    check(a, b, 1000)
