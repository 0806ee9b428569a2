"""Files: folders, tails, parts, torn lines, other files under the same name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
from support.analysis import analyze_job, cover
from support.reading import EXPECTED, analyze_dir, hung_job, read_all, verdict
from support.tracegen import Job, Proc

from nccluprobe.match.pipeline import Analysis
from nccluprobe.trace.reader import TraceReader
from nccluprobe.trace.schema import json_schema


def test_made_up_traces_are_valid() -> None:
    job = hung_job()
    p = job.procs[0]
    c = p.comms[0]
    p.group([(c, "ncclBroadcast", {}), (c, "ncclSend", {"peer": 1})], 70.0, state="inside")
    p.enter(c, "ncclReduceScatter", 71.0)
    p.call(c, "ncclAllReduce", 72.0, rc=None)
    p.comm_end(c, 73.0)
    p.end(74.0, how="signaled", signal=9)
    validator = jsonschema.Draft202012Validator(json_schema())
    for proc in job.procs:
        for line in proc.output():
            validator.validate(line)


@pytest.mark.parametrize("depth", ["run", "tracing", "out"])
def test_a_run_folder_or_any_folder_above(tmp_path: Path, depth: str) -> None:
    hung_job().write(tmp_path)
    folder = {"run": tmp_path / "tracing/run", "tracing": tmp_path / "tracing", "out": tmp_path}
    analysis, reader = analyze_dir(folder[depth])
    assert verdict(analysis) == EXPECTED
    assert reader.counts.files == 4


def test_several_folders_with_one_trace_each(tmp_path: Path) -> None:
    job = hung_job()
    folders = []
    for i, p in enumerate(job.procs):
        folders.append(Job(procs=[p]).write(tmp_path / str(i)))
    analysis, _ = analyze_dir(*folders)
    assert verdict(analysis) == EXPECTED


def test_only_one_run(tmp_path: Path) -> None:
    hung_job().write(tmp_path)
    assert verdict(analyze_dir(tmp_path, run_id="run")[0]) == EXPECTED
    analysis, _ = analyze_dir(tmp_path, run_id="other")
    assert not analysis.matcher.processes


def test_files_grow_and_appear_while_reading(tmp_path: Path) -> None:
    job = hung_job()
    data = [p.data() for p in job.procs]
    reader, analysis = TraceReader([tmp_path]), Analysis()
    at = [0] * 4
    for step in range(40):
        for i, d in enumerate(data):
            if step < 5 * i:
                continue
            end = len(d) if step == 39 else min(len(d), at[i] + 777)
            with (tmp_path / f"{i}.jsonl").open("ab") as f:
                f.write(d[at[i] : end])
            at[i] = end
        read_all(reader, analysis)
    analysis.scan()
    assert verdict(analysis) == EXPECTED
    assert analysis.decoder.counts.bad_lines == 0
    assert analysis.decoder.counts.lines == sum(d.count(b"\n") for d in data)


def test_parts_are_read_in_order(tmp_path: Path) -> None:
    job = hung_job()
    for p in job.procs:
        lines = p.output()
        comm = next(line for line in lines if line["kind"] == "comm")
        clock = next(line for line in lines if line["kind"] == "clock")
        third = len(lines) // 3
        pieces = [lines[:third], lines[third : 2 * third], lines[2 * third :]]
        # Made in the wrong order, on purpose.
        for n in (2, 0, 1):
            head = [] if n == 0 else [p.header(part=n), clock, comm]
            name = p.name + (f".part{n}" if n else "")
            body = b"".join(orjson.dumps(x) + b"\n" for x in [*head, *pieces[n]])
            (tmp_path / f"{name}.jsonl").write_bytes(body)
    analysis, reader = analyze_dir(tmp_path)
    assert verdict(analysis) == EXPECTED
    assert len(reader.names()) == 4
    assert all(e.lost == 0 for e in analysis.matcher.endpoints.values())


def test_a_part_that_was_deleted_before_it_was_read(tmp_path: Path) -> None:
    hung_job().write(tmp_path)
    reader, analysis = TraceReader([tmp_path]), Analysis()
    reader.discover(force=True)
    (tmp_path / "tracing/run/rank_0_pid_1000.jsonl").unlink()
    read_all(reader, analysis)
    assert reader.counts.vanished_files == 1
    assert len([p for p in analysis.matcher.processes.values() if p.info]) == 3


def test_a_torn_last_line_is_counted_and_harmless(tmp_path: Path) -> None:
    hung_job().write(tmp_path)
    with (tmp_path / "tracing/run/rank_1_pid_1001.jsonl").open("ab") as f:
        f.write(b'{"kind":"call","api":"ncclAllRed')
    analysis, reader = analyze_dir(tmp_path)
    assert verdict(analysis) == EXPECTED
    assert reader.torn_lines() == [str(tmp_path / "tracing/run/rank_1_pid_1001.jsonl")]
    with (tmp_path / "tracing/run/rank_1_pid_1001.jsonl").open("ab") as f:
        f.write(b'uce"}\n')
    read_all(reader, analysis)
    assert reader.torn_lines() == []


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    hung_job().write(tmp_path)
    reader, analysis = TraceReader([tmp_path]), Analysis()
    read_all(reader, analysis)
    (tmp_path / "tracing/run/rank_0_pid_1000.jsonl").write_bytes(b"")
    read_all(reader, analysis)
    analysis.scan()
    assert verdict(analysis) == EXPECTED
    assert reader.counts.vanished_files == 1


RANK_0 = "tracing/run/rank_0_pid_1000.jsonl"


def put(path: Path, data: bytes, moved: bool) -> None:
    """Other contents under this name: in a file that takes its place, or in the same one."""
    if moved:
        path.with_suffix(".new").write_bytes(data)
        path.with_suffix(".new").rename(path)
    else:
        with path.open("r+b") as f:
            f.write(data)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("read", [0, 7])
def test_a_file_that_is_replaced_by_another_one_is_read_as_that(
    tmp_path: Path, moved: bool, read: int
) -> None:
    hung_job().write(tmp_path)
    path = tmp_path / RANK_0
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: read or 5]))
    reader, analysis = TraceReader([tmp_path]), Analysis()
    reader.discover(force=True)
    if read:
        read_all(reader, analysis)
    job = Job()
    cover([job.proc(9, pid=4242, run_id="other")], 100)
    put(path, job.procs[0].data(), moved)
    read_all(reader, analysis)
    read_all(reader, analysis)
    assert reader.counts.replaced == [str(path)]
    assert reader.counts.vanished_files == 0
    assert analysis.decoder.counts.bad_lines == 0
    pids = {p.info.pid for p in analysis.matcher.processes.values() if p.info}
    assert 4242 in pids
    assert (1000 in pids) == (read > 0)


def test_a_shorter_file_in_its_place(tmp_path: Path) -> None:
    hung_job().write(tmp_path)
    reader, analysis = TraceReader([tmp_path]), Analysis()
    read_all(reader, analysis)
    path = tmp_path / RANK_0
    put(path, path.read_bytes()[:2000], moved=True)  # of the same process: not read twice
    for _ in range(3):
        read_all(reader, analysis)
    analysis.scan()
    assert verdict(analysis) == EXPECTED
    assert reader.counts.replaced == [str(path)]


def test_a_copy_that_is_put_in_its_place_again_and_again_goes_on(tmp_path: Path) -> None:
    job = hung_job()
    job.write(tmp_path)
    path = tmp_path / RANK_0
    data = path.read_bytes()
    reader, analysis = TraceReader([tmp_path]), Analysis()
    for end in (2000, 2000, 2001, 5000, len(data)):
        put(path, data[:end], moved=True)
        read_all(reader, analysis)
    analysis.scan()
    assert verdict(analysis) == EXPECTED
    assert reader.counts.replaced == []
    assert analysis.decoder.counts.lines == sum(p.data().count(b"\n") for p in job.procs)


def test_folders_that_do_not_change_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung_job().write(tmp_path)
    for folder in (tmp_path, tmp_path / "tracing", tmp_path / "tracing/run"):
        os.utime(folder, (1, 1))
    reader = TraceReader([tmp_path])
    reader.discover(force=True)

    def scandir(path: object) -> Any:
        raise AssertionError(f"{path} is read again")

    monkeypatch.setattr(os, "scandir", scandir)
    reader.discover(force=True)


def test_two_tracers_of_one_process_are_two_sources(tmp_path: Path) -> None:
    job = hung_job()
    job.write(tmp_path)
    p: Proc = job.procs[0]
    (tmp_path / "tracing/run/rank_0_pid_1000_node0_5.jsonl").write_bytes(p.data())
    analysis, reader = analyze_dir(tmp_path)
    assert len(reader.names()) == 5
    assert verdict(analysis) == EXPECTED


def test_the_same_findings_from_files_and_from_memory(tmp_path: Path) -> None:
    job = hung_job()
    job.write(tmp_path)
    analysis, _ = analyze_dir(tmp_path)
    assert [f.to_json() for f in analysis.matcher.book.all()] == [
        f.to_json() for f in analyze_job(job)
    ]
