"""Records of the Inspector plug-in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from importers.reading import Result

T0 = 1_748_030_377_000_000  # us


def record(rank: int, function: str, number: int, t: float, **other: Any) -> dict[str, Any]:
    perf = {
        "coll": function,
        "coll_sn": number,
        "coll_msg_size_bytes": other.pop("size", 4096),
        "coll_exec_time_us": 100,
    }
    if other.pop("verbose", True):
        perf["event_trace_ts"] = {"coll_start_ts": int(T0 + t * 1e6)}
    return {
        "header": {"id": "0x7f8c496ae9f661", "rank": rank, "n_ranks": 4, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "dump_timestamp_us": int(T0 + t * 1e6) + 100 + other.pop("flushed", 0) * 1_000_000,
            "hostname": "node-1",
            "pid": 100 + rank,
        },
        "coll_perf": perf,
    }


def job(first: tuple[int, ...] = (0, 0, 0, 0)) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for rank in range(4):
        found[rank] = []
        for i in range(first[rank], 40):
            function = ("AllReduce", "AllGather")[i % 2]
            found[rank].append(record(rank, function, i // 2, i * 0.1))
    return found


def write(
    folder: Path, records: dict[int, list[dict[str, Any]]], indent: int | None = None
) -> Path:
    for rank, mine in records.items():
        lines = [json.dumps(r, indent=indent) for r in mine]
        (folder / f"node-1-pid{rank}.log").write_text("\n".join(lines) + "\n")
    return folder


def test_a_healthy_job(tmp_path: Path) -> None:
    result = Result(write(tmp_path, job()))
    assert result.findings == []
    assert result.imported.told.calls == 160
    (comm,) = result.analysis.matcher.comms.values()
    assert comm.key.hash == "007f8c496ae9f661"
    assert comm.closed == 40


def test_objects_over_several_lines(tmp_path: Path) -> None:
    assert Result(write(tmp_path, job(), indent=2)).imported.told.calls == 160


def test_files_that_begin_at_different_calls(tmp_path: Path) -> None:
    result = Result(write(tmp_path, job((0, 7, 20, 3))))
    assert result.findings == []
    (comm,) = result.analysis.matcher.comms.values()
    assert comm.closed == 40


def test_sizes_that_differ(tmp_path: Path) -> None:
    """Nothing hangs: results are wrong without a word."""
    records = job()
    records[3][20]["coll_perf"]["coll_msg_size_bytes"] = 8
    result = Result(write(tmp_path, records))
    assert "collective_mismatch" in result.types
    assert result.blamed == {3}


def test_records_that_were_dropped_are_no_absence(tmp_path: Path) -> None:
    records = job()
    del records[2][5:30]
    assert Result(write(tmp_path, records)).findings == []


def test_records_that_are_not_written_yet(tmp_path: Path) -> None:
    records = job()
    del records[2][5:]
    assert Result(write(tmp_path, records)).errors == []


def test_a_rank_that_is_late(tmp_path: Path) -> None:
    records = job()
    for rank in range(4):
        late = 45 if rank == 1 else 0
        records[rank].append(record(rank, "AllReduce", 20, 5 + late))
        records[rank].append(record(rank, "AllReduce", 21, 51))
    result = Result(write(tmp_path, records))
    assert result.types == {"delayed_collective_enter"}


def test_records_without_starts_are_no_delays(tmp_path: Path) -> None:
    """Without the verbose form there is only the time of writing."""
    records: dict[int, list[dict[str, Any]]] = {
        rank: [
            record(rank, "AllReduce", i, i * 0.1, verbose=False, flushed=40 * rank)
            for i in range(20)
        ]
        for rank in range(4)
    }
    assert Result(write(tmp_path, records)).errors == []
    assert "delayed_collective_enter" not in Result(tmp_path).types


def test_bad_records_are_counted(tmp_path: Path) -> None:
    folder = write(tmp_path, job())
    with (folder / "node-1-pid0.log").open("ab") as f:
        f.write(b'{"coll_perf": 5}\n{"header": {}, "coll_perf": {}}\n\xff\xfe{}\n{"cut": ')
    result = Result(folder)
    assert result.findings == []
    assert any("records could not be read" in p for p in result.imported.told.problems)
