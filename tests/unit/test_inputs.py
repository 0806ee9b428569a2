"""Input that is wrong: one line that says what, and the documented exit code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.analysis import cover, steps
from support.tracegen import Job
from typer.testing import CliRunner

from nccluprobe.capture import bpf
from nccluprobe.capture.discover import Discovery, ProcessMatcher
from nccluprobe.cli.main import build
from nccluprobe.errors import ExitCode, NccluprobeError


def traces(tmp: Path) -> Path:
    job = Job()
    comms = job.world(3)
    end = steps(comms, 20)
    comms[0].proc.call(comms[0], "ncclAllReduce", end)
    cover(job.procs, end + 400)
    return job.write(tmp)


def analyze(*arguments: object) -> int:
    command = ["analyze", *map(str, arguments)]
    return CliRunner().invoke(build(command), command).exit_code


def test_a_fifo_in_place_of_findings_is_refused_at_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    os.mkfifo(out / "findings.jsonl")
    command = ["analyze", str(traces(tmp_path)), "--out", str(out)]
    result = CliRunner().invoke(build(command), command)
    assert "findings.jsonl is not written" in result.output
    assert result.exit_code == ExitCode.FINDINGS  # the verdict holds an error, written or not


def test_a_full_disk_does_not_hide_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = traces(tmp_path)
    real = os.write

    def write(fd: int, data: bytes) -> int:
        if b"hang_type" in data:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    assert analyze(folder, "--out", tmp_path / "out") == ExitCode.FINDINGS
    few = ("--error-after", "500", "--out", tmp_path / "out")
    assert analyze(folder, *few) == ExitCode.OUTPUT


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e300", "-1"])
@pytest.mark.parametrize("option", ["--missing-after", "--late-after", "--error-after"])
def test_times_without_sense_are_wrong_usage(tmp_path: Path, option: str, seconds: str) -> None:
    assert analyze(traces(tmp_path), option, seconds) == ExitCode.USAGE


def test_a_library_of_another_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simnccl: Path
) -> None:
    monkeypatch.setattr("nccluprobe.capture.discover.platform.machine", lambda: "riscv64")
    with pytest.raises(NccluprobeError, match="this machine is riscv64") as caught:
        Discovery(ProcessMatcher([], []), [str(simnccl)], events=False)
    assert caught.value.code == ExitCode.NOT_NCCL


def test_bcc_that_cannot_be_loaded_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *rest: object) -> object:
        if name == "bcc":
            raise OSError("libLLVM-14.so.1: failed to map segment")
        return real(name, *rest)

    import builtins

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(NccluprobeError, match="libLLVM") as caught:
        bpf._import_bcc()
    assert caught.value.code == ExitCode.NO_BCC


def test_what_analyze_wrote_is_no_trace(tmp_path: Path) -> None:
    folder = traces(tmp_path)
    assert analyze(folder) == ExitCode.FINDINGS
    written = [p for p in folder.rglob("*") if p.name in ("findings.jsonl", "analyzer.log")]
    assert len(written) == 2
    assert analyze(*written, "--out", tmp_path / "out") == ExitCode.NO_TRACE


def test_follow_prints_findings_as_they_come(tmp_path: Path) -> None:
    command = ["analyze", str(traces(tmp_path)), "--follow", "--duration", "1"]
    done = CliRunner().invoke(build(command), command)
    head, _, rest = done.stdout.partition("\n")
    # Old traces, or a clock that is behind: for some seconds they are judged as of their end.
    assert head[8:].startswith("  CONSEQUENCE  collective_missing_enter"), done.stdout
    assert "1 consequence:" in rest  # and the report at the end
    assert "silent" not in done.stdout


@pytest.mark.parametrize(("made", "said"), [(False, "no such folder"), (True, "no process has")])
def test_collect_once_of_a_wrong_folder_says_so(tmp_path: Path, made: bool, said: str) -> None:
    folder = tmp_path / "rings"
    if made:
        folder.mkdir()
        (folder / "notes.txt").touch()
    command = ["collect", "--once", str(folder), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(build(command), command)
    assert done.exit_code == ExitCode.NO_TRACE
    assert said in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
