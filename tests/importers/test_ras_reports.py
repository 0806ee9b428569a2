"""Reports of RAS that contradict each other or themselves, and too large ones: it is said."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from importers.reading import Result
from importers.test_ras import AHEAD, BEHIND, report, text, write
from nccluprobe.importers import ras_reports

TESTS = os.getpid()


def for_ever(path: str) -> None:
    """Read a file that never ends, if by another process than that of the tests."""
    assert os.getpid() != TESTS
    while path:
        pass


def problems(result: Result) -> str:
    return "\n".join(result.imported.told.problems)


def test_files_whose_times_are_lost_are_taken_in_the_order_of_their_counts(tmp_path: Path) -> None:
    """The older one was copied last: its counts are below those of the newer one."""
    text(tmp_path / "new.txt", BEHIND.format(count=640), 0)
    older = BEHIND.format(count=640).replace("641", "600").replace("640", "599")
    text(tmp_path / "old.txt", older, 400)
    result = Result(tmp_path)
    assert "old.txt: its counts of rank 0 of communicator fa93daea854b060b are below" in problems(
        result
    )
    assert result.errors == []  # how long they have stood is not known
    assert [f.details["missing_comm_ranks"] for f in result.findings] == [[4, 5]]


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_of_one_second_the_report_with_more_counts_is_the_newer(tmp_path: Path, names: str) -> None:
    write(tmp_path / f"{names[0]}.json", report(0, {0: 9, 1: 9, 2: 8, 3: 9}))
    write(tmp_path / f"{names[1]}.json", report(0, {0: 9, 1: 9, 2: 9, 3: 9}))
    result = Result(tmp_path)
    assert (result.findings, problems(result)) == ([], "")


def test_reports_that_contradict_each_other(tmp_path: Path) -> None:
    """No order of the two has counts that only rise."""
    write(tmp_path / "a.json", report(0, {0: 9, 1: 9, 2: 8, 3: 9}))
    write(tmp_path / "b.json", report(400, {0: 9, 1: 8, 2: 9, 3: 9}))
    result = Result(tmp_path)
    assert result.findings == []
    assert "contradict each other: rank 1 of communicator a1349768e9517ed7" in problems(result)


def test_what_a_text_leaves_out_has_not_fallen(tmp_path: Path) -> None:
    """Functions in which all agree are in no text."""
    text(tmp_path / "a.txt", BEHIND.format(count=640), 0)
    text(tmp_path / "b.txt", BEHIND.format(count=640).replace("AllGather", "AllReduce"), 400)
    assert problems(Result(tmp_path)) == ""


@pytest.mark.parametrize(
    "change",
    [
        ("  Rank 5 -- GPU 5 managed by process 323033 on node 10.137.190.124\n", ""),  # cut
        ("Rank 5", "Rank 4"),
        ("6 ranks", "7 ranks"),
        ("Rank 5", "Rank 8"),
    ],
)
def test_a_text_that_is_cut_or_contradicts_itself(tmp_path: Path, change: tuple[str, str]) -> None:
    """One of the two that stand out is not there: it would be taken for one of the others."""
    path = text(tmp_path / "a.txt", AHEAD.replace(*change), 0)
    result = Result(path)
    assert result.findings == []
    assert "what it says of AllGather on communicator fa93daea854b060b is cut" in problems(result)


def test_a_communicator_of_no_group(tmp_path: Path) -> None:
    path = text(tmp_path / "a.txt", BEHIND.format(count=640).replace("#0-0", "#7-0"), 0)
    assert "fa93daea854b060b is in no group that the report describes" in problems(Result(path))


def test_a_rank_that_is_told_twice(tmp_path: Path) -> None:
    content = report(0, {0: 9, 1: 9, 2: 8, 3: 9})
    ranks = content["communicators"][0]["ranks"]
    ranks[3]["rank"] = 2
    result = Result(write(tmp_path / "ras.json", content))
    assert result.findings == []
    assert "a rank of communicator a1349768e9517ed7 is told twice" in problems(result)


def test_ranks_beyond_the_size_are_counted(tmp_path: Path) -> None:
    content = report(0, {0: 9, 1: 9, 2: 8, 3: 9, 7: 9})
    result = Result(write(tmp_path / "ras.json", content))
    assert "1 rank of communicator a1349768e9517ed7 is beyond its size of 4" in problems(result)


def test_a_million_ranks_are_one_line(tmp_path: Path) -> None:
    """A text of a few lines, and a file of many."""
    began = time.process_time()
    size = AHEAD.replace("6 ranks", f"{(1 << 20) - 2} ranks")
    path = text(tmp_path / "a.txt", size, 0)
    path.write_text(path.read_text().replace("         8   RUNNING", f"   {1 << 20}   RUNNING"))
    path.write_text(path.read_text().replace("1         8         8", f"1    8    {1 << 20}", 1))
    many = report(0, {0: 9, 1: 9})
    many["communicators"][0]["size"] = 250_000
    other = write(tmp_path / "b.json", many)
    result = Result(path, other)
    told = result.imported.told.problems
    assert [str(tmp_path) in t for t in told] == [True, True]
    assert "1,048,576 ranks: up to 200,000 are compared" in told[0]
    assert "250,000 ranks: up to 200,000 are compared" in told[1]
    assert time.process_time() - began < 20


def test_of_too_many_ranks_in_all_reports_the_newest_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ras_reports, "MOST_TOLD", 8)
    for t in (0, 100, 400):
        write(tmp_path / f"{t}.json", report(t, {0: 9, 1: 9, 2: 8, 3: 9}))
    result = Result(tmp_path)
    assert "0.json: not compared: newer reports" in problems(result)
    assert 290 < result.findings[0].details["waited_s"] < 310


def test_a_report_that_takes_all_time_dies_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read in a process of its own, as dumps are."""
    monkeypatch.setattr("nccluprobe.importers.ras.read_report", for_ever)
    monkeypatch.setattr("nccluprobe.importers.guard._CPU_LEAST", 1)
    monkeypatch.setattr("nccluprobe.importers.guard._CPU_AGAIN", 1)
    path = write(tmp_path / "ras.json", report(0, {0: 9}))
    assert "takes more memory or time" in problems(Result(path))
