"""A job that hangs, looked at only then: inspect names the rank, the call, the count."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped,unused-ignore]
import pytest
from support.e2e import Stage
from support.puppets import Ranks
from support.waiting import wait_for

from nccluprobe.trace.schema import json_schema

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

Cli = Callable[..., subprocess.CompletedProcess[str]]


def hang(stage: Stage, job: str | None = None) -> Ranks:
    """Three ranks: ten all-reduces, two broadcasts, then rank 2 stays away from the next."""
    ranks = stage.ranks(3, job=job).init()
    ranks.collective(n=10)
    ranks.collective("ncclBroadcast", n=2)
    for rank in (0, 1):
        ranks[rank].send("call", fn="ncclAllReduce", sync=True)
    return ranks


def behind(cli: Cli, pids: list[int]) -> subprocess.CompletedProcess[str]:
    return wait_for(
        lambda: (
            done if "is 1 ncclAllReduce behind" in (done := cli("inspect", *pids)).stdout else None
        ),
        "the others' calls",
    )


def test_the_rank_that_is_behind(stage: Stage, cli: Cli) -> None:
    ranks = hang(stage)
    done = behind(cli, ranks.pids)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert f"rank 2 (pid {ranks.pids[2]} on " in text
    assert "is 1 ncclAllReduce behind: 10 of 11" in text
    assert "3 ranks, 3 looked at: 1 rank is behind" in text
    assert text.count("communicator ") == 4


def test_by_glob_and_by_files_of_several_nodes(stage: Stage, cli: Cli, tmp_path: Path) -> None:
    ranks = hang(stage, job="job-x")
    behind(cli, ranks.pids)
    done = cli("inspect", "--pid-glob", stage.glob, "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["pid"]: line["rank"] for line in lines} == dict(
        zip(ranks.pids, range(3), strict=True)
    )
    for line in lines:
        jsonschema.validate(line, json_schema())
        assert line["job"] == "job-x" and len(line["comms"]) == 1
    folder = tmp_path / "nodes"
    folder.mkdir()
    for number, line in enumerate(lines):
        line["host"] = f"node{number}"
        (folder / f"{number}.jsonl").write_text(json.dumps(line, separators=(",", ":")) + "\n")
    (folder / "other.txt").write_text("nothing of ours\n{}\n")
    done = cli("inspect", "--from", folder)
    assert done.returncode == 0, done.stderr
    assert "on node2, is" not in done.stdout
    assert f"rank 2 (pid {ranks.pids[2]} on node2) is 1 ncclAllReduce behind" in done.stdout
    one = cli("inspect", ranks.pids[2], "--from", folder / "0.jsonl")
    assert "2 looked at: 1 rank is behind" in one.stdout
    assert "not looked at: rank 1; its process has ended, or" in one.stdout


def test_the_call_that_a_thread_is_inside(stage: Stage, cli: Cli) -> None:
    """The first collective of a communicator blocks on the host until all have come."""
    ranks = stage.ranks(2).init()
    ranks[0].send("call", fn="ncclAllReduce", sync=True)

    def inside() -> Any:
        (line,) = map(json.loads, cli("inspect", ranks.pids[0], "--json").stdout.splitlines())
        return [t["api"] for t in line["threads"] if "api" in t]

    assert wait_for(inside, "a thread inside NCCL") == ["ncclAllReduce"]
    # A thread that polls is now and then outside a system call, where its registers are not known.
    told = "likely inside ncclAllReduce"
    assert wait_for(lambda: told in cli("inspect", ranks.pids[0]).stdout, told)


def test_analyze_lets_inspect_lines_pass(stage: Stage, cli: Cli, tmp_path: Path) -> None:
    ranks = stage.ranks(2).init()
    folder = tmp_path / "tracing" / "run"
    folder.mkdir(parents=True)
    (folder / "inspect.jsonl").write_text(cli("inspect", *ranks.pids, "--json").stdout)
    done = cli("analyze", tmp_path)
    assert "Traceback" not in done.stderr and done.returncode in (0, 12)


def test_nothing_to_look_at(cli: Cli, tmp_path: Path) -> None:
    assert cli("inspect").returncode == 2
    assert cli("inspect", "--pid-glob", "no-such-program-*").returncode == 6
    assert cli("inspect", "--from", tmp_path).returncode == 12
    assert cli("inspect", "1").returncode in (0, 3)
    os.mkfifo(tmp_path / "pipe")
    for endless in (tmp_path / "pipe", "/dev/zero"):
        done = cli("inspect", "--from", endless)
        assert done.returncode == 12 and "regular file" in done.stderr


def test_doctor(stage: Stage, cli: Cli) -> None:
    ranks = stage.ranks(2).init()
    done = cli("doctor", *ranks.pids, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["host"]["can_attach"] is True
    assert [p["pid"] for p in report["processes"]] == ranks.pids
    (lib,) = report["processes"][0]["libraries"]
    assert lib["layout"]["method"] == "dwarf" and lib["counters"] and lib["inspect"]
    assert lib["nccl_version"] == "2.28.9"
    text = cli("doctor", "--pid-glob", stage.glob).stdout
    assert "attach works here: yes" in text
    assert text.count("struct ncclComm by dwarf, confirmed") == 2
    assert cli("doctor", "4194000").returncode == 6


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_doctor_finds_no_process(cli: Cli, more: tuple[str, ...]) -> None:
    done = cli("doctor", "--pid-glob", "no-such-program-*", *more)
    assert done.returncode == 6
    assert "no process that maps NCCL matches no-such-program-*" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "can_attach" in done.stdout or "attach works here" in done.stdout
    assert cli("doctor", "--pid-glob", "").returncode == 2
