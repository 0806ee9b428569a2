"""``analyze`` and the phases that heartbeat files declare."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.analysis import cover, steps
from support.tracegen import UNIX, Job, S
from typer.testing import CliRunner

from nccluprobe.cli.main import build
from nccluprobe.errors import ExitCode

AWAY = 2


def run(out: Path) -> Path:
    """Three ranks, of which rank 2 does not come for 400 s; the folder of the heartbeats."""
    job = Job()
    comms = job.world(3)
    end = steps(comms, 20)
    for c in comms[:AWAY]:
        c.proc.call(c, "ncclAllReduce", end)
    cover(job.procs, end + 400)
    job.write(out)
    folder = out / "tracing" / "run" / "heartbeat"
    folder.mkdir()
    return folder


def beat(folder: Path, name: str = "rank_2.json", **fields: Any) -> None:
    row = {"rank": AWAY, "host": "node0", "pid": 1002, "phase": "checkpoint", "time": UNIX / S + 2}
    (folder / name).write_text(json.dumps(row | fields))


def command(*arguments: object) -> tuple[int, str]:
    words = [*map(str, arguments)]
    result = CliRunner().invoke(build(words), words)
    return result.exit_code, result.output


def analyze(out: Path, *more: object) -> tuple[int, str]:
    return command("analyze", out, *more)


def test_a_file_excuses_its_rank(tmp_path: Path) -> None:
    folder = run(tmp_path)
    assert analyze(tmp_path)[0] == ExitCode.FINDINGS
    beat(folder)
    code, text = analyze(tmp_path, "--out", tmp_path / "a")
    assert code == ExitCode.OK
    assert "No finding." in text
    assert "has declared the phase checkpoint" in " ".join(text.split())
    assert "not there: rank 2" in " ".join(text.split())


def test_limits(tmp_path: Path) -> None:
    folder = run(tmp_path)
    beat(folder)
    code, text = analyze(tmp_path, "--phase-limit", "checkpoint=100")
    assert code == ExitCode.FINDINGS
    assert "has declared the phase checkpoint 6.7 min ago" in " ".join(text.split())
    finding = json.loads((tmp_path / "tracing" / "run" / "findings.jsonl").read_text())
    assert finding["details"]["missing_rank_status"][0]["phase"] == "checkpoint"
    assert analyze(tmp_path, "--phase-limit", "*=900")[0] == ExitCode.OK
    beat(folder, limit_s=50)
    assert analyze(tmp_path)[0] == ExitCode.FINDINGS
    code, text = command("explain", tmp_path, "f", "--phase-limit", "*=0")
    assert code == ExitCode.OK and "checkpoint" in text
    assert command("explain", tmp_path, "f", "--phase-limit", "*=900")[0] == ExitCode.USAGE


def test_explain_takes_what_analyze_took(tmp_path: Path) -> None:
    """A second communicator on which rank 5 is rank 1: its rank in the job is told."""
    job = Job()
    job.proc(5)
    job.proc(4)
    comms = [p.comm("00000000000000aa", n, 2) for n, p in enumerate(job.procs)]
    end = steps(comms, 20)
    comms[1].proc.call(comms[1], "ncclBroadcast", end, root=0)
    cover(job.procs, end + 400)
    job.write(tmp_path)
    told = " ".join(analyze(tmp_path)[1].split())
    assert "rank 5 of the job (rank 0 of the communicator, pid 1005 on node0) did not enter" in told
    assert "rank 4 of the job waits in it" in told
    code, text = command("explain", tmp_path, "f", "--run-id", "run")
    assert code == ExitCode.OK
    assert "rank 5 of the job (rank 0 of the communicator): pid 1005" in text
    assert command("explain", tmp_path, "f", "--idle-ok", "*aa")[0] == ExitCode.USAGE
    assert command("explain", tmp_path, "f", "--run-id", "other")[0] != ExitCode.OK
    assert command("explain", tmp_path, "f", "--from", "nonsense")[0] == ExitCode.USAGE


def test_a_file_of_the_process_before_excuses_nobody(tmp_path: Path) -> None:
    """A restart with the same rank and pid: the file is older than the process."""
    folder = run(tmp_path)
    beat(folder, time=UNIX / S - 10_000, limit_s=86_400)
    code, text = analyze(tmp_path)
    assert code == ExitCode.FINDINGS
    assert "older than its process" in " ".join(text.split())


@pytest.mark.parametrize("name", ["none", "null", "None", "", None])
def test_what_is_no_phase_excuses_nothing(tmp_path: Path, name: str | None) -> None:
    folder = run(tmp_path)
    beat(folder, phase=name)
    assert analyze(tmp_path)[0] == ExitCode.FINDINGS


@pytest.mark.parametrize("value", ["checkpoint", "=5", "x=-1", "x=nan", "x=1e9", "x="])
def test_a_limit_that_is_none(tmp_path: Path, value: str) -> None:
    run(tmp_path)
    assert analyze(tmp_path, "--phase-limit", value)[0] == ExitCode.USAGE


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"pid": 1}, "pid 1 is not that of the rank"),
        ({"time": time.time() + 9999}, "future"),
        ({"phase": ["x"]}, "phase is not a text"),
        ({"progress": "x" * 20_000}, "larger"),
    ],
)
def test_what_is_no_heartbeat_is_counted_and_not_used(
    tmp_path: Path, fields: dict[str, Any], why: str
) -> None:
    folder = run(tmp_path)
    beat(folder, **fields)
    code, text = analyze(tmp_path)
    assert code == ExitCode.FINDINGS
    assert "1 heartbeat file is not used" in " ".join(text.split())
    assert why in " ".join(text.split())


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    folder = run(tmp_path)
    beat(folder, "real")
    (folder / "rank_2.json").symlink_to(folder / "real")
    code, text = analyze(tmp_path)
    assert code == ExitCode.FINDINGS and "a link" in text


def test_by_pid_and_as_traced(tmp_path: Path) -> None:
    """What a collector has written into the trace holds; else the file of the pid does."""
    folder = run(tmp_path)
    beat(folder, "pid_1002.json", rank=None)
    assert analyze(tmp_path)[0] == ExitCode.OK
    line = {"kind": "state", "state": "phase", "phase": None}
    trace = tmp_path / "tracing" / "run" / "rank_2_pid_1002.jsonl"
    rows = [json.loads(x) for x in trace.read_text().splitlines()]
    t = rows[2]["t"] + 3 * S
    began = line | {"t": t, "since": t, "phase": "data"}
    ended = line | {"t": t + S, "since": t + S}
    text = "".join(json.dumps(x) + "\n" for x in (*rows, began, ended))
    trace.write_text(text)
    assert analyze(tmp_path)[0] == ExitCode.FINDINGS


PAGES = ("README.md", "docs/heartbeat.md")


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("traced", [True, False])
def test_the_recipe_of_the_page_works_before_and_after_the_first_call(
    tmp_path: Path, page: str, traced: bool
) -> None:
    """Run by the job's user: the run's folder is there from the first NCCL call on."""
    out = run(tmp_path).parent if traced else tmp_path / "tracing" / "none"
    for path in out.glob("heartbeat"):
        path.rmdir()
    text = (Path(__file__).parents[2] / page).read_text()
    (function,) = re.findall(r"^phase\(\) \{.*?^\}$", text, re.DOTALL | re.MULTILINE)
    script = f"set -e\nH={out}/heartbeat\n{function}\nphase checkpoint\necho went on\n"
    done = subprocess.run(
        ["sh", "-c", script],
        env={"PATH": os.environ["PATH"], "RANK": "2", "PID": "1002"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")
    if traced:
        row = json.loads((out / "heartbeat" / "rank_2.json").read_text())
        assert (row["rank"], row["pid"], row["phase"]) == (2, 1002, "checkpoint")
    else:
        assert not out.exists()


@pytest.mark.parametrize("traced", [True, False])
def test_the_recipe_in_python(tmp_path: Path, traced: bool) -> None:
    out = run(tmp_path).parent if traced else tmp_path / "tracing" / "none"
    text = (Path(__file__).parents[2] / "docs/heartbeat.md").read_text()
    (function,) = re.findall(r"^def phase.*?\n\n\n", text, re.DOTALL | re.MULTILINE)
    script = f"import json, os, socket, time\n{function}phase('checkpoint')\n"
    subprocess.run(
        [sys.executable, "-c", script],
        env={"HEARTBEATS": f"{out}/heartbeat", "RANK": "2"},
        check=True,
    )
    assert (out / "heartbeat" / "rank_2.json").exists() is traced


def test_a_file_of_a_host_whose_clock_is_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the analyzer's clock it lies in the future, by that of its traces it does not."""
    monkeypatch.setattr(time, "time_ns", lambda: UNIX - 600 * S)
    folder = run(tmp_path)
    beat(folder)
    code, text = analyze(tmp_path)
    assert code == ExitCode.OK and "has declared the phase checkpoint" in " ".join(text.split())
    beat(folder, time=UNIX / S + 1000)
    code, text = analyze(tmp_path)
    assert code == ExitCode.FINDINGS and "time lies in the future" in " ".join(text.split())
