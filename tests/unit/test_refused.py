"""Folders of other users, and outputs that take not every character: one line, the right code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.analysis import cover, steps
from support.tracegen import Host, Job
from typer.testing import CliRunner

from nccluprobe.cli.main import build
from nccluprobe.errors import ExitCode

NOBODY = 65534


def hung(out: Path, host: str = "node0") -> Path:
    job = Job()
    comms = [
        job.proc(r, Host(host)).comm("00000000000000aa", r, 4, name="caf\u00e9") for r in range(4)
    ]
    t = steps(comms, 42)
    steps(comms[:3], 1, start=t)
    cover(job.procs, t + 61)
    return job.write(out)


@pytest.fixture
def here() -> Iterator[Path]:
    """A folder that everybody may enter, as those of pytest are not."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)
        os.seteuid(0)


def as_nobody(*words: object) -> tuple[int, list[str]]:
    """(exit code, lines of standard error)"""
    command = [*map(str, words)]
    app = build(command)
    os.seteuid(NOBODY)
    try:
        done = CliRunner().invoke(app, command)
    finally:
        os.seteuid(0)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stderr.splitlines()


@pytest.mark.parametrize("closed", [".", "tracing", "tracing/run"])
@pytest.mark.parametrize("command", ["analyze", "explain"])
def test_a_folder_that_may_not_be_read(here: Path, closed: str, command: str) -> None:
    run = hung(here / "out")
    (run / closed).chmod(0o700)
    code, said = as_nobody(command, run, *(["f"] if command == "explain" else []))
    assert code == ExitCode.NO_TRACE
    assert len(said) == 1 and "Permission denied" in said[0] and "others need sudo" in said[0]


@pytest.mark.parametrize("command", ["analyze", "explain"])
def test_traces_that_may_not_be_read(here: Path, command: str) -> None:
    run = hung(here / "out")
    for path in run.rglob("*.jsonl"):
        path.chmod(0o600)
    code, said = as_nobody(command, run, *(["f"] if command == "explain" else []))
    assert code == ExitCode.NO_TRACE and len(said) == 1 and "others need sudo" in said[0]


def test_a_folder_behind_one_that_may_not_be_entered(here: Path) -> None:
    run = hung(here / "behind" / "out")
    (here / "behind").chmod(0o700)
    code, said = as_nobody("analyze", run)
    assert code == ExitCode.NO_TRACE and len(said) == 1 and "Permission denied" in said[0]


@pytest.mark.parametrize("once", [True, False])
def test_records_that_may_not_be_read(here: Path, once: bool) -> None:
    """Not read for ever, either."""
    rings, out = here / "rings", here / "out"
    rings.mkdir(0o700)
    out.mkdir()
    os.chown(out, NOBODY, NOBODY)
    code, said = as_nobody("collect", *(["--once"] if once else []), rings, "--out", out)
    assert code == (ExitCode.NO_TRACE if once else ExitCode.NOT_PERMITTED)
    assert len(said) == 1


def test_native_parts_that_may_not_be_made(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nccluprobe.resources.checkout", lambda: here)
    (here / "native").mkdir()
    (here / "native" / "build.py").write_text("raise SystemExit(1)")
    code, said = as_nobody("build")
    assert code == ExitCode.OUTPUT and len(said) == 1 and "cannot be written to" in said[0]


@pytest.mark.parametrize("how", [(), ("--json",), ("--follow", "--duration", "0.1"), ("explain",)])
def test_names_that_the_terminal_cannot_show(tmp_path: Path, how: tuple[str, ...]) -> None:
    run = hung(tmp_path, "n\u00f6de\u20ac")
    words = ["explain", run, "f"] if how == ("explain",) else ["analyze", run, *how]
    done = subprocess.run(
        [sys.executable, "-m", "nccluprobe", *map(str, words)],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
    )
    assert done.returncode == (ExitCode.OK if how == ("explain",) else ExitCode.NOTICES)
    said = done.stderr.splitlines()  # of --follow the line that it begins with
    assert [b"watching" in line for line in said] == [True] * ("--follow" in how)
    if how == ("--json",):
        assert json.loads(done.stdout)["culprits"][0]["host"] == "n\u00f6de\u20ac"
    else:
        assert b"n\\xf6de\\u20ac" in done.stdout
