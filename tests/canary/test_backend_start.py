"""What is told at the start: the submission log, settings, the place in the job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from nccluprobe.canary import (
    ArgumentError,
    NcclBackend,
)
from nccluprobe.canary.submission import VARIABLE, SubmissionLog

from .ranks import backend, free_port, options, run
from .watching import logged


def test_submission_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "calls.jsonl"
    monkeypatch.setenv(VARIABLE, str(path))

    def job(rank: int, world: int, port: int) -> None:
        with backend(rank, world, port) as b:
            buf = b.alloc(12)
            b.all_reduce(buf, 3, "int32")
            b.synchronize()

    run(2, job)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for rank in range(2):
        mine = [line for line in lines if line["rank"] == rank]
        reduce = [line for line in mine if line["call"] == "ncclAllReduce"]
        assert [line["event"] for line in reduce] == ["submit", "return"]
        assert reduce[0]["arguments"][2:5] == [3, 2, 0] and reduce[1]["result"] == 0
        assert reduce[0]["id"] == reduce[1]["id"] and reduce[0]["t"] <= reduce[1]["t"]
        calls = {line["call"] for line in mine}
        assert {"ncclCommInitRankConfig", "ncclCommRegister", "ncclCommDestroy"} <= calls


@pytest.mark.parametrize("value", ["2", "yes", "on", "calls.jsonl", "/no/such/folder/log"])
def test_an_invalid_switch_is_refused(value: str) -> None:
    with pytest.raises(ArgumentError, match=VARIABLE):
        SubmissionLog.from_environment(environ={VARIABLE: value})


@pytest.mark.parametrize(("value", "on"), [("", False), ("0", False), ("1", True)])
def test_the_switch(value: str, on: bool) -> None:
    assert SubmissionLog.from_environment(environ={VARIABLE: value}).on is on


def test_the_backend_refuses_an_invalid_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "maybe")

    def attempt(rank: int, world: int, port: int) -> None:
        with pytest.raises(ArgumentError, match="maybe"), backend(rank, world, port):
            pass

    run(1, attempt)


def test_start_is_logged_with_the_settings_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    monkeypatch.setenv("NCCL_NOT_OF_INTEREST", "1")

    def job(rank: int, world: int, port: int) -> list[str]:
        with logged() as lines, backend(rank, world, port):
            pass
        return lines

    lines = run(1, job)[0]
    assert any(line.startswith("rank 0 of 1: NCCL ") for line in lines)
    assert "rank 0: NCCL_PROTO=Simple" in lines


def test_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCLUPROBE_CANARY_ADDRESS", f"127.0.0.1:{free_port()}")

    def job(rank: int, world: int, port: int) -> Any:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank + 1))
        settings = options(port)
        del settings["address"]
        with NcclBackend.from_environment(**settings) as b:
            b.barrier()
            return b.rank, b.world, b.cuda.device

    assert run(2, job) == [(0, 2, 1), (1, 2, 2)]


def test_from_environment_without_a_launcher() -> None:
    def job(_rank: int, _world: int, _port: int) -> None:
        for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
            os.environ.pop(name, None)
        with pytest.raises(ArgumentError, match="launcher"):
            NcclBackend.from_environment()

    run(1, job)
