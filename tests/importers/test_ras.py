"""Reports of ncclras, text and JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.ras_report import ras_report

from importers.reading import Result

TEXT = """NCCL version 2.28.9 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          8            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         8         8         8   RUNNING  {status}

Errors
======
{errors}
Warnings
========
{warnings}
"""

BEHIND = """
#0-0 (fa93daea854b060b) MISMATCH
  Communicator ranks have different AllGather operation counts
  6 ranks have launched up to operation 641
  2 ranks have launched up to operation {count}
  Rank 4 -- GPU 4 managed by process 323032 on node 10.137.190.124
  Rank 5 -- GPU 5 managed by process 323033 on node 10.137.190.124
"""

AHEAD = """
#0-0 (fa93daea854b060b) MISMATCH
  Communicator ranks have different AllGather operation counts
  6 ranks have launched up to operation 640
  2 ranks have launched up to operation 641
  Rank 4 -- GPU 4 managed by process 323032 on node 10.137.190.124
  Rank 5 -- GPU 5 managed by process 323033 on node 10.137.190.124
"""


def text(path: Path, warnings: str, t: int, errors: str = "") -> Path:
    path.write_text(TEXT.format(status="MISMATCH", warnings=warnings, errors=errors))
    os.utime(path, (1_800_000_000 + t, 1_800_000_000 + t))
    return path


def report(t: int, counts: dict[int, int], **other: Any) -> dict[str, Any]:
    more = {"secondary_hash": "0x1:0x2", "size": 4} | other
    made = ras_report(f"06:{t // 60:02}:{t % 60:02}", counts, "10.0.77.184", 100, **more)
    return made | {"ras": {"collection_time_sec": 0.0, "timeouts_count": 0}}


def write(path: Path, content: dict[str, Any], broken: bool = False) -> Path:
    data = json.dumps(content, indent=2)
    if broken:  # as NCCL 2.28 writes it: a comma is missing
        data = data.replace('"nvml_dev": 1,', '"nvml_dev": 1')
    path.write_text(data)
    return path


def test_two_reports_in_which_a_rank_stands_behind(tmp_path: Path) -> None:
    for t in (0, 400):
        write(tmp_path / f"ras{t}.json", report(t, {0: 9, 1: 9, 2: 8, 3: 9}), broken=t == 0)
    result = Result(tmp_path)
    assert result.blamed == {2}
    assert result.errors == ["collective_missing_enter"]
    assert result.findings[0].comm_uid_hash == "a1349768e9517ed7"


def test_a_process_that_drives_several_gpus_has_no_one_rank_of_the_job(tmp_path: Path) -> None:
    for t in (0, 400):
        content = report(t, {0: 9, 1: 8})
        content["communicators"][0]["size"] = 2
        for r in content["communicators"][0]["ranks"]:
            r["pid"] = 7
        write(tmp_path / f"ras{t}.json", content)
    result = Result(tmp_path)
    (found,) = result.findings
    assert found.details["missing_comm_ranks"] == [1]
    assert [(n["pid"], n["rank"]) for n in found.named] == [(7, None)]


def test_one_report_is_a_look_only(tmp_path: Path) -> None:
    write(tmp_path / "ras.json", report(0, {0: 9, 1: 9, 2: 8, 3: 9}))
    result = Result(tmp_path)
    assert result.errors == []
    assert result.findings[0].details["missing_comm_ranks"] == [2]


def test_ranks_that_go_on(tmp_path: Path) -> None:
    write(tmp_path / "a.json", report(0, {0: 9, 1: 9, 2: 8, 3: 9}))
    write(tmp_path / "b.json", report(400, {0: 19, 1: 19, 2: 18, 3: 19}))
    assert Result(tmp_path).errors == []


def test_all_are_level(tmp_path: Path) -> None:
    for t in (0, 400):
        write(tmp_path / f"{t}.json", report(t, dict.fromkeys(range(4), 9)))
    assert Result(tmp_path).findings == []


def test_the_text_names_those_that_are_behind(tmp_path: Path) -> None:
    for t in (0, 400):
        text(tmp_path / f"{t}.txt", BEHIND.format(count=640), t)
    result = Result(tmp_path)
    assert [f.details["missing_comm_ranks"] for f in result.findings] == [[4, 5]]
    assert result.blamed == {4, 5}
    assert result.findings[0].details["missing_rank_status"][0]["pid"] == 323032


def test_the_text_names_those_that_are_ahead(tmp_path: Path) -> None:
    """The stragglers are all others."""
    for t in (0, 400):
        text(tmp_path / f"{t}.txt", AHEAD, t)
    result = Result(tmp_path)
    assert [f.details["missing_comm_ranks"] for f in result.findings] == [[0, 1, 2, 3, 6, 7]]


def test_a_healthy_text(tmp_path: Path) -> None:
    text(tmp_path / "a.txt", "", 0)
    assert Result(tmp_path).findings == []


def test_a_dead_process(tmp_path: Path) -> None:
    gone = {
        "rank": 3,
        "host": "10.0.77.184",
        "pid": 103,
        "cuda_dev": 3,
        "nvml_dev": 3,
        "status": {"unresponsive": True, "considered_dead": True},
    }
    content = report(0, dict.fromkeys(range(3), 9), missing_ranks=[gone])
    result = Result(write(tmp_path / "ras.json", content))
    assert result.blamed == {3}
    assert result.errors == ["comm_ended_under_waiters"]


def test_a_dead_process_in_a_text(tmp_path: Path) -> None:
    errors = """
DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 5
"""
    result = Result(text(tmp_path / "a.txt", "", 0, errors))
    assert result.blamed == {5}


def test_a_process_that_does_not_answer(tmp_path: Path) -> None:
    gone = {
        "rank": 3,
        "host": "10.0.77.184",
        "pid": 103,
        "status": {"unresponsive": True, "considered_dead": False},
    }
    content = report(0, dict.fromkeys(range(3), 9), missing_ranks=[gone])
    result = Result(write(tmp_path / "ras.json", content))
    assert result.errors == []
    assert result.blamed == set()


def test_contents_of_wrong_types(tmp_path: Path) -> None:
    for i, change in enumerate(
        ({"size": "x"}, {"size": 2**70}, {"ranks": [5]}, {"hash": None}, {"ranks": [{"rank": []}]})
    ):
        content = report(0, {0: 1})
        content["communicators"][0].update(change)
        result = Result(write(tmp_path / f"{i}.json", content))
        assert result.findings == []
        assert result.imported.told.problems


@pytest.mark.parametrize(
    "odd", ["", "zz", "0x", "-5", "1_0", " 5", "\u0663", "0x1" + "0" * 16, "9" * 5000, 5, None]
)
def test_a_hash_that_is_none_is_one_clear_complaint(tmp_path: Path, odd: object) -> None:
    content = report(0, {0: 1})
    content["communicators"][0]["hash"] = odd
    path = write(tmp_path / "ras.json", content)
    assert Result(path).imported.told.problems == [
        f"{path}: a communicator's hash is no hexadecimal number of 64 bits"
    ]


def test_a_text_with_numbers_that_cannot_be(tmp_path: Path) -> None:
    """Digits of another script and ranks that do not exist are passed over."""
    odd = (
        BEHIND.format(count="9" * 100)
        + BEHIND.format(count="\u0663")
        + f"""
#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 2 ranks
  The missing rank: 99
  Rank {"9" * 300}
"""
    )
    assert Result(text(tmp_path / "a.txt", odd, 0)).findings == []
