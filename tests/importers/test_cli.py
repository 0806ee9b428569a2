"""``nccluprobe analyze`` on dumps, reports and logs: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.analysis import cover, steps
from support.tracegen import Job as TraceJob
from typer.testing import CliRunner

from importers.frgen import one_group
from importers.test_fr import stalled
from importers.test_nccl_log import job as log_job
from importers.test_ras import report, write
from nccluprobe.cli.main import build
from nccluprobe.errors import ExitCode


def analyze(*arguments: object) -> tuple[int, str, str]:
    command = ["analyze", *map(str, arguments)]
    result = CliRunner().invoke(build(command), command)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Findings of imports go to the current folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_dumps(tmp_path: Path, here: Path) -> None:
    folder = stalled().write(tmp_path / "dumps")
    before = sorted(folder.iterdir())
    code, out, err = analyze(folder)
    assert code == ExitCode.FINDINGS
    assert err == f"nccluprobe: findings.jsonl is in {here} (--out DIR: elsewhere)\n"
    assert "of the communicator" not in out  # it is the same number
    assert "nccl_trace_rank_2" in out or "Rank 2" in out
    assert "4 flight recorder dumps read" in out
    assert "pid 0" not in out
    assert sorted(folder.iterdir()) == before
    finding = json.loads((here / "findings.jsonl").read_text().splitlines()[0])
    assert [c["rank"] for c in finding["culprits"]] == [2]


def test_who_asks_for_a_folder_is_not_told(tmp_path: Path) -> None:
    folder = stalled().write(tmp_path / "dumps")
    assert analyze(folder, "--out", tmp_path / "out")[2] == ""
    assert (tmp_path / "out" / "findings.jsonl").exists()


def test_what_several_jobs_share_is_said_once(tmp_path: Path) -> None:
    for job in ("a", "b"):
        stalled().write(tmp_path / "dumps" / job)
    out = analyze(tmp_path / "dumps")[1]
    assert "8 flight recorder dumps read" in out
    assert out.count("a dump does not say when") == 1


def test_a_text_beside_dumps_is_none(tmp_path: Path) -> None:
    folder = stalled().write(tmp_path / "dumps")
    (folder / "fault_injection.log").write_text("Fault ranks: [2]\nFault delay: 180.0\n")
    out = " ".join(analyze("--from", "fr", folder)[1].split())
    assert "it is no flight recorder dump: neither a pickle nor JSON" in out
    assert "its pickle is broken" not in out


def test_kind_is_told(tmp_path: Path) -> None:
    path = log_job(2).merged(tmp_path / "all.log")
    assert analyze("--from", "nccl-log", path)[0] == ExitCode.NOTICES
    code, _, err = analyze("--from", "fr", path)
    assert code == ExitCode.NO_TRACE
    assert "all.log" in err
    assert len(err.strip().splitlines()) == 1


def test_a_kind_that_nobody_reads(tmp_path: Path) -> None:
    code, _, err = analyze("--from", "coredump", tmp_path)
    assert code == ExitCode.USAGE
    assert "fr, ras, inspector, nccl-log" in err


def test_a_file_that_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    code, _, err = analyze(path)
    assert code == ExitCode.NO_TRACE
    assert "neither a trace nor" in err
    assert len(err.strip().splitlines()) == 1


def test_nothing_is_wrong(tmp_path: Path) -> None:
    job = one_group()
    job.all("0", 1.0)
    code, out, _ = analyze(job.write(tmp_path / "dumps"))
    assert code == ExitCode.OK
    assert "No finding" in out


def test_several_kinds_and_a_run_folder_at_once(tmp_path: Path) -> None:
    job = TraceJob()
    comms = job.world(3)
    cover(job.procs, steps(comms, 20) + 400)
    run = job.write(tmp_path / "run")
    dumps = stalled().write(tmp_path / "dumps")
    log = log_job(1).merged(tmp_path / "all.log")
    ras = write(tmp_path / "ras.json", report(0, dict.fromkeys(range(4), 9)))
    code, out, _ = analyze(run, dumps, log, ras, "--json", "--out", tmp_path)
    assert code == ExitCode.FINDINGS
    named = {c["rank"] for line in out.splitlines() for c in json.loads(line)["culprits"]}
    assert named == {1, 2}


def test_a_run_folder_is_read_as_before(tmp_path: Path) -> None:
    """A log that lies in a run folder does not mix with its traces."""
    job = TraceJob()
    comms = job.world(3)
    cover(job.procs, steps(comms, 20) + 400)
    run = job.write(tmp_path / "run")
    log_job(1).merged(run / "stderr.log")
    code, out, _ = analyze(run)
    assert code == ExitCode.OK
    assert "NCCL log" not in out


@pytest.mark.parametrize("kind", [None, "ras", "fr", "nccl-log"])
def test_a_pipe_or_a_device_is_refused_and_not_waited_for(tmp_path: Path, kind: str | None) -> None:
    pipe = tmp_path / "nccl_trace_rank_0"
    os.mkfifo(pipe)
    chosen = () if kind is None else ("--from", kind)
    for path in (pipe, Path("/dev/zero")):
        code, _, err = analyze(path, *chosen)
        assert (code, "no regular file" in err) == (ExitCode.NO_TRACE, True)


def test_a_name_of_a_file_does_nothing_to_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "x\x1b[2Jy"
    path.write_text("nothing that is known")
    code, _, err = analyze(path)
    assert code == ExitCode.NO_TRACE
    assert "\x1b" not in err and "x\\x1b[2Jy" in err


@pytest.mark.parametrize("command", ["analyze", "explain"])
def test_several_kinds_are_refused(tmp_path: Path, command: str) -> None:
    """Not the last one is taken, and the rest forgotten."""
    words = [command, "--from", "fr", "--from", "ras", str(tmp_path), "f"]
    result = CliRunner().invoke(build(words), words[: 6 if command == "analyze" else 7])
    assert result.exit_code == ExitCode.USAGE
    assert "--from fr --from ras: give one kind" in result.stderr


def test_one_kind_twice_is_one(tmp_path: Path) -> None:
    path = log_job(2).merged(tmp_path / "all.log")
    assert analyze("--from", "nccl-log", "--from", "nccl-log", path)[0] == ExitCode.NOTICES
