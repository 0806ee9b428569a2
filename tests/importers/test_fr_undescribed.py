"""Dumps that do not say who is in their groups, that hold nothing, or whose names lie."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from importers.frgen import Job, one_group
from importers.reading import Result
from importers.test_cli import analyze
from importers.test_fr import stalled
from nccluprobe.errors import ExitCode

Dump = dict[str, Any]


def write(folder: Path, job: Job, change: Callable[[Dump], object]) -> Path:
    """All dumps of a job, changed."""
    folder.mkdir(exist_ok=True)
    for rank, r in job.ranks.items():
        dump = r.dump()
        change(dump)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, 2))
    return folder


def version_1(dump: Dump) -> None:
    """No description of groups, one number for all, groups by id."""
    for e in dump["entries"]:
        e["seq_id"] = e.pop("collective_seq_id")
        for name in ("p2p_seq_id", "process_group", "op_id", "is_p2p"):
            del e[name]
    del dump["pg_config"], dump["pg_status"]


def lacking(dump: Dump) -> None:
    del dump["pg_config"]


def emptied(dump: Dump) -> None:
    dump["pg_config"] = {}


def negative(dump: Dump) -> None:
    dump["pg_config"]["0"]["ranks"] = "[-1, 0, 1, 2]"


@pytest.mark.parametrize("change", [version_1, lacking, emptied, negative])
class TestNoGroups:
    def test_the_default_group_has_all_ranks(
        self, tmp_path: Path, change: Callable[[Dump], object]
    ) -> None:
        result = Result(write(tmp_path, stalled(), change))
        assert result.blamed == {2}
        assert any("do not describe their groups" in n for n in result.imported.notes)
        (cause,) = (f for f in result.findings if f.role == "root_cause")
        assert cause.details["confidence"] == "reduced"
        assert "nobody told who is in" in cause.details["note"]

    @pytest.mark.parametrize("lost", [1, 2, 0])
    def test_a_rank_left_no_dump(
        self, tmp_path: Path, change: Callable[[Dump], object], lost: int
    ) -> None:
        folder = write(tmp_path / "d", stalled(), change)
        (folder / f"nccl_trace_rank_{lost}").unlink()
        code, _, err = analyze(folder, "--out", tmp_path)
        assert code == ExitCode.NO_TRACE
        assert "calls of groups that the dumps do not describe" in err

    def test_all_wait_perhaps_for_one_more(
        self, tmp_path: Path, change: Callable[[Dump], object]
    ) -> None:
        job = one_group()
        job.all("0", 1.0)
        job.all("0", 2.0, done=False)
        code, _, err = analyze(write(tmp_path / "d", job, change), "--out", tmp_path)
        assert (code, "8 calls of groups" in err) == (ExitCode.NO_TRACE, True)


@pytest.mark.parametrize("change", [version_1, lacking])
def test_two_groups_that_each_call_themselves_the_first(
    tmp_path: Path, change: Callable[[Dump], object]
) -> None:
    """Ranks 2 and 3 go on alone: they are no group with the others."""
    job = one_group()
    for i in range(3):
        job.all("0", float(i))
    for i in range(3, 9):
        job.all("0", float(i), 0, 1)
    job.all("0", 9.0, 1, 2, 3, done=False)
    assert Result(write(tmp_path, job, change)).findings == []


def test_who_may_wait_in_another_group_is_not_named(tmp_path: Path) -> None:
    """Rank 2 waits in a group that nobody describes."""
    job = Job({"0": ("default_pg", [0, 1, 2, 3]), "1": ("tp", [2, 3])})
    for i in range(3):
        job.all("0", float(i))
    job.ranks[2].call("1", 4.0, done=False)
    job.all("0", 5.0, 2, done=False)
    result = Result(write(tmp_path, job, lacking))
    assert result.findings == []
    assert any("16 calls of groups" in p for p in result.imported.told.problems)


def test_a_group_that_only_some_dumps_describe(tmp_path: Path) -> None:
    """What is described is compared, and the rest is counted."""
    job = Job({"0": ("default_pg", [0, 1, 2, 3]), "1": ("tp", [0, 1])})
    job.all("1", 0.5)
    for i in range(3):
        job.all("0", i + 1.0)
    job.all("0", 5.0, 2, done=False)
    result = Result(write(tmp_path, job, lambda d: d["pg_config"].pop("1", None)))
    assert result.blamed == {2}
    assert any(": 2 calls of groups" in p for p in result.imported.told.problems)


def test_groups_contradict_a_name(tmp_path: Path) -> None:
    def other(dump: Dump) -> None:
        dump["pg_config"] = {"7": {"name": "7", "desc": "", "ranks": "[0, 1]"}}

    problems = Result(write(tmp_path, stalled(), other)).imported.told.problems
    assert any("its name says rank 2, and its groups contradict it" in p for p in problems)
    assert not any("neither its name" in p for p in problems)


@pytest.mark.parametrize("kind", [(), ("--from", "fr")])
def test_all_dumps_are_empty(tmp_path: Path, kind: tuple[str, ...]) -> None:
    for folder in ("a", "b", "c"):
        (tmp_path / "d" / folder).mkdir(parents=True)
        (tmp_path / "d" / folder / "nccl_trace_rank_0").touch()
    code, _, err = analyze(tmp_path / "d", *kind, "--out", tmp_path)
    assert (code, "the 3 dumps are empty files" in err) == (ExitCode.NO_TRACE, True)
    assert len(err.splitlines()) == 1


def test_no_dump_holds_a_call(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", stalled(), lambda d: d.update(entries=[]))
    code, _, err = analyze(folder, "--out", tmp_path)
    assert (code, "its 4 dumps are empty" in err) == (ExitCode.NO_TRACE, True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
@pytest.mark.parametrize("every", [1, 3])
def test_times_that_are_no_numbers(tmp_path: Path, value: float | None, every: int) -> None:
    """They are not known, and what the rest says stands."""
    for rank, r in stalled().ranks.items():
        dump = r.dump()
        for e in dump["entries"][::every]:
            e["time_created_ns"] = value
        (tmp_path / f"nccl_trace_rank_{rank}").write_text(json.dumps(dump))
    result = Result(tmp_path)
    assert result.blamed == {2}
    assert result.imported.told.problems == []
