"""Ranks that a launcher or a person starts."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator

import pytest
from support.waiting import clean_env

from nccluprobe.errors import ExitCode

from .command import COMMAND, SMALL, one_line, run

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def port() -> int:
    return 33000 + os.getpid() % 9000


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("how", ["options", "torchrun", "slurm"])
def test_ranks_of_a_launcher(how: str, port: int, started: list[subprocess.Popen[str]]) -> None:
    for rank in (1, 0):
        arguments: list[str] = []
        env: dict[str, str] = {}
        if how == "options":
            arguments = ["--rank", str(rank), "--world", "2", "--address", f"127.0.0.1:{port}"]
        elif how == "torchrun":
            env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
            env |= {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1"}
            env |= {"MASTER_PORT": str(port + 40)}
        else:
            env = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank)}
            env |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": str(rank)}
            arguments = ["--address", f"127.0.0.1:{port + 80}"]
        started.append(
            subprocess.Popen(
                [*COMMAND, *SMALL, "--ops", "all_reduce,broadcast", "--json", *arguments],
                stdout=subprocess.PIPE,
                text=True,
                env={**clean_env(), **env},
            )
        )
    outputs = [p.communicate(timeout=40)[0] for p in started]
    assert [p.returncode for p in started] == [0, 0]
    assert outputs[0] == ""  # rank 1
    assert json.loads(outputs[1])["world"] == 2


def test_a_rank_whose_rank_0_never_comes_ends_at_its_deadline(port: int) -> None:
    where = f"127.0.0.1:{port + 120}"
    began = time.monotonic()
    done = run("--sim", "--rank", "1", "--world", "2", "--address", where, "--deadline", "2")
    assert done.returncode == ExitCode.CANARY_FAILED
    assert f"rank 1 did not reach rank 0 at {where} within 2 s" in one_line(done)
    assert time.monotonic() - began < 20
