"""Traces of several jobs whose communicators have one hash, in one folder."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from support.analysis import steps
from support.tracegen import Host, Job
from typer.testing import CliRunner

from nccluprobe.cli.main import build
from nccluprobe.errors import ExitCode


def write(
    out: Path,
    run: str,
    first_pid: int,
    hangs: bool,
    *,
    at: float = 1.0,
    host: str = "n0",
    ranks: tuple[int, ...] = (0, 1, 2, 3),
) -> None:
    """A job of four ranks, or some of them, on a communicator that others have, too."""
    job = Job()
    comms = [
        job.proc(r, Host(host), pid=first_pid + r, run_id=run).comm("00000000000000aa", r, 4, at)
        for r in ranks
    ]
    t = steps(comms, 20, start=at)
    if hangs:
        steps(comms[:-1], 1, start=t)
    for p in job.procs:
        p.cover(at, t + 100)
    job.write(out)


def command(*arguments: object) -> tuple[int, str, str]:
    """(exit code, standard output with single spaces, standard error)."""
    words = [*map(str, arguments)]
    done = CliRunner().invoke(build(words), words)
    return done.exit_code, " ".join(done.stdout.split()), done.stderr


@pytest.mark.parametrize("at", [1.0, 500.0])
@pytest.mark.parametrize("host", ["n0", "n1"])
def test_each_run_is_judged_by_itself(tmp_path: Path, at: float, host: str) -> None:
    write(tmp_path, "a", 100, False)
    write(tmp_path, "b", 200, True, at=at, host=host)
    code, text, said = command("analyze", tmp_path)
    assert code == ExitCode.NOTICES
    of_a, of_b = text.split("Run b:")
    assert of_a.startswith("Run a: No finding.")
    assert f"Rank 3 (pid 203 on {host}) did not enter ncclAllReduce #20" in of_b
    assert "several runs have the same hash and ranks: each of the 2 runs" in said
    assert "--run-id" in said
    (line,) = (tmp_path / "tracing" / "findings.jsonl").read_bytes().splitlines()
    assert orjson.loads(line)["run_id"] == "b"
    found = orjson.loads(line)["id"]
    assert command("explain", tmp_path, found, "--run-id", "b")[0] == ExitCode.OK
    code, _, said = command("explain", tmp_path, found)
    assert code == ExitCode.USAGE and "give --run-id, one of: a, b" in said


def test_the_same_finding_of_two_runs_is_written_twice(tmp_path: Path) -> None:
    write(tmp_path, "a", 100, True)
    write(tmp_path, "b", 200, True)
    _, text, _ = command("analyze", tmp_path, "--json")
    assert [orjson.loads(x)["run_id"] for x in text.replace("} {", "}\n{").splitlines()] == [
        "a",
        "b",
    ]
    lines = (tmp_path / "tracing" / "findings.jsonl").read_bytes().splitlines()
    assert [orjson.loads(x)["run_id"] for x in lines] == ["a", "b"]


def test_what_cannot_be_told_apart_is_said_with_whose_it_is(tmp_path: Path) -> None:
    write(tmp_path, "a", 100, True)
    write(tmp_path, "a", 200, True, at=500.0)
    code, text, said = command("analyze", tmp_path)
    assert code == ExitCode.OK and not said
    assert text.startswith("No finding, but not all could be judged: see below.")
    assert "several processes have one rank in communicator 00000000000000aa" in text
    assert "run a (8 processes on n0, ranks 0-3, started" in text
    assert "files of one job only" in text


def test_nodes_of_one_job_are_not_judged_apart(tmp_path: Path) -> None:
    """Each node has a run id of its own; only both together are a job."""
    for run, pid, ranks in (("a", 100, (0, 1)), ("b", 200, (2, 3))):
        write(tmp_path, run, pid, False, ranks=ranks, host=run)
        write(tmp_path, f"{run}2", pid + 1000, False, at=500.0, ranks=ranks, host=run)
    _, text, _ = command("analyze", tmp_path)
    assert "Run a:" not in text and "--run-id RUN" in text


def test_runs_of_one_job_are_judged_together(tmp_path: Path) -> None:
    write(tmp_path, "a", 100, False, ranks=(0, 1))
    write(tmp_path, "b", 200, True, ranks=(2, 3), host="n1")
    _, text, said = command("analyze", tmp_path)
    assert "1 job, 4 processes, 1 communicator" in text and "Run a:" not in text and not said
