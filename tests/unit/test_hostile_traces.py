"""Traces whose texts are made to do harm, shown by ``analyze`` and ``explain``."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.analysis import analyze_job, cover, steps
from support.looks import comm, look
from support.tracegen import Job
from typer.testing import CliRunner

from nccluprobe.cli.main import build
from nccluprobe.errors import ExitCode
from nccluprobe.report.writer import FindingWriter

CODE = "\x1b[2Jx"


def hung(how: str) -> Job:
    """Rank 3 of 4 does not come to the call after 5 others."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    for c in comms[:3]:
        c.proc.enter(c, "ncclAllReduce", t)
    if how == "ended":
        cover(job.procs[:3], 400)
        job.procs[3].comm_end(comms[3], t, "abort")
        job.procs[3].end(3, how="signaled", signal=9)
    elif how == "inside":
        comms[3].proc.enter(comms[3], "ncclCommDestroy", t)
        cover(job.procs, 400)
    else:
        cover(job.procs, 400, main="syscall", syscall="futex")
    return job


def shown(folder: Path) -> str:
    """What ``analyze`` and ``explain`` print of a folder's traces."""
    runner = CliRunner()
    arguments = ["analyze", str(folder)]
    text = runner.invoke(build(arguments), arguments, catch_exceptions=False).output
    written = folder / "tracing" / "run" / "findings.jsonl"
    for finding in map(json.loads, written.read_text().splitlines()):
        arguments = ["explain", str(folder), finding["id"]]
        text += runner.invoke(build(arguments), arguments, catch_exceptions=False).output
    return text


@pytest.mark.parametrize(
    ("how", "kind", "field"),
    [
        ("outside", "comm", "hash"),
        ("outside", "coverage", "syscall"),
        ("outside", "enter", "datatype"),
        ("outside", "enter", "op"),
        ("outside", "call", "rc"),
        ("outside", "call", "t"),
        ("outside", "enter", "t"),
        ("inside", "enter", "api"),
        ("ended", "comm_end", "how"),
        ("ended", "process_end", "how"),
        ("ended", "process", "host"),
    ],
)
def test_no_text_of_a_trace_gets_at_the_terminal(
    tmp_path: Path, how: str, kind: str, field: str
) -> None:
    folder = tmp_path / "tracing" / "run"
    folder.mkdir(parents=True)
    for p in hung(how).procs:
        lines: list[dict[str, Any]] = [
            line | {field: CODE} if line["kind"] == kind else line for line in p.output()
        ]
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        (folder / f"{p.name}.jsonl").write_text(text)
    text = shown(tmp_path)
    assert "Coverage:" in text
    assert "\x1b" not in text


def test_traces_of_somebody_else_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    (tmp_path / "tracing").mkdir()
    arguments = ["analyze", str(tmp_path)]
    app = build(arguments)
    monkeypatch.setattr(Path, "iterdir", refused)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == ExitCode.NO_TRACE
    (line,) = result.stderr.splitlines()
    assert "cannot be read: Permission denied" in line


def test_a_disk_that_takes_a_part_of_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, room = os.write, [100]

    def nearly_full(fd: int, data: bytes) -> int:
        part = bytes(data[: room[0]])
        if not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= len(part)
        return write(fd, part)

    findings = analyze_job(hung("outside"))
    with FindingWriter(tmp_path) as writer:
        monkeypatch.setattr(os, "write", nearly_full)
        writer.write(findings)
        monkeypatch.undo()
    assert (tmp_path / "findings.jsonl").stat().st_size == 100
    assert "No space left" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["rank", "syscall", "main", "hash"])
def test_no_text_of_a_look_gets_at_the_terminal(tmp_path: Path, field: str) -> None:
    lines = []
    for r in range(3):
        line = look(r, 10, [comm("00000000000000ff", r, 3, AllReduce=9 - (r == 2))])
        (line["comms"][0] if field == "hash" else line)[field] = CODE
        lines.append(json.dumps(line, separators=(",", ":")))
    (tmp_path / "1.jsonl").write_text("\n".join(lines) + "\n")
    arguments = ["inspect", "--from", str(tmp_path)]
    text = CliRunner().invoke(build(arguments), arguments, catch_exceptions=False).output
    assert "is 1 ncclAllReduce behind" in text
    assert "\x1b" not in text
