"""Files: tails, parts, torn and hostile lines, links."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.analysis import analyze_job, cover, steps
from support.tracegen import Job, Proc

from nccluprobe.match.decode import Decoder
from nccluprobe.match.options import Options
from nccluprobe.match.pipeline import Analysis
from nccluprobe.match.signature import SignatureTable
from nccluprobe.trace.reader import TraceReader
from nccluprobe.trace.schema import json_schema


def hung_job() -> Job:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 42)
    steps(comms[:3], 1, start=t)
    cover(job.procs, t + 61)
    return job


def read_all(reader: TraceReader, analysis: Analysis) -> None:
    reader.discover(force=True)
    analysis.open(reader.names())
    for c in reader.poll():
        through = analysis.feed(c.source, c.path, c.first_line, c.data, c.caught_up)
        reader.at_time(c.source, through)


def analyze_dir(*folders: Path, run_id: str | None = None) -> tuple[Analysis, TraceReader]:
    reader, analysis = TraceReader(folders, run_id), Analysis(Options())
    read_all(reader, analysis)
    analysis.scan()
    return analysis, reader


def verdict(analysis: Analysis) -> list[tuple[str, int | None, list[int]]]:
    return [
        (f.hang_type, f.comm_seq, f.details["missing_comm_ranks"])
        for f in analysis.matcher.book.all()
    ]


EXPECTED = [("collective_missing_enter", 42, [3])]


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


HOSTILE = [
    b"",
    b"not json",
    b"\xff\xfe\x00",
    b"[]",
    b"null",
    b"17",
    b'"call"',
    b"{}",
    b'{"kind":null}',
    b'{"kind":"call"}',
    b'{"kind":"call","api":"ncclAllReduce","t":"x"}',
    b'{"kind":"call","api":["a"],"t":1,"dur":1,"rc":0,"thread":1,"comm":0,"ord":1,"idx":1}',
    b'{"kind":"call","api":"ncclAllReduce","t":1.5,"dur":1,"rc":0,"thread":1,"comm":0,"ord":1,"idx":1}',
    b'{"kind":"call","api":"ncclAllReduce","t":1e400,"dur":1,"rc":0,"thread":1}',
    b'{"kind":"call","api":"ncclAllReduce","t":99999999999999999999,"dur":1,"rc":0,"thread":1}',
    b'{"kind":"call","api":"ncclAllReduce","t":-5,"dur":1,"rc":0,"thread":1,"comm":0,"ord":1,'
    b'"idx":1,"count":1,"datatype":"a","op":"sum"}',
    b'{"kind":"call","api":"ncclAllReduce","t":5,"dur":1,"rc":0,"thread":1,"comm":"0","ord":1,'
    b'"idx":1,"count":1,"datatype":"a","op":"sum"}',
    b'{"kind":"call","api":"ncclAllReduce","t":5,"dur":1,"rc":0,"thread":1,"comm":0,"ord":1,'
    b'"idx":1,"count":[1],"datatype":"a","op":"sum"}',
    b'{"kind":"call","api":"ncclNew","t":5,"dur":1,"rc":0,"thread":1}',
    b'{"kind":"comm","id":"x"}',
    b'{"kind":"comm","id":5,"t":1,"hash":5,"instance":0,"learnt":"init"}',
    b'{"kind":"coverage","t":1,"through":1}',
    b'{"kind":"process_end"}',
    b'{"kind":"clock","mono":"a","unix":[]}',
    b'{"kind":"enter","api":{},"t":1,"thread":1}',
    b'{"kind":"span","anything":1}',
    b'{"kind":"from_the_future","x":1}',
    b'{"kind":"process","boot_id":5}',
    b'{"a":1}',
    b'"t":5}',
    b'{"kind":"state"',
    b"{" * 5000,
    b'{"kind":"enter","api":"ncclAllReduce","t":1,"thread":1,"comm":0,"idx":1,"ord":-7,'
    b'"count":1,"datatype":"a","op":"sum"}',
]


def test_hostile_lines_cost_only_themselves(tmp_path: Path) -> None:
    job = hung_job()
    for i, p in enumerate(job.procs):
        lines = p.data().splitlines()
        mixed: list[bytes] = [lines[0]]
        for n, line in enumerate(lines[1:]):
            mixed += [HOSTILE[(n + i) % len(HOSTILE)], line]
        (tmp_path / f"{i}.jsonl").write_bytes(b"\n".join(mixed) + b"\n")
    analysis, _ = analyze_dir(tmp_path)
    assert verdict(analysis) == EXPECTED
    counts = analysis.decoder.counts
    assert counts.bad_lines > 100
    assert counts.unknown_kinds["from_the_future"] > 0
    assert counts.unknown_apis["ncclNew"] > 0
    assert len(counts.examples) == 20
    assert ".jsonl:" in counts.examples[0]


@pytest.mark.parametrize("line", HOSTILE)
def test_each_hostile_line_alone(line: bytes) -> None:
    decoder = Decoder(SignatureTable())
    decoder.decode(0, "x", 1, [line], True)


def test_a_file_of_nothing_but_rubbish(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(bytes(range(256)) * 1000)
    (tmp_path / "b.jsonl").write_bytes(b"")
    (tmp_path / "c.jsonl").write_bytes(b"x" * (9 << 20))
    analysis, _ = analyze_dir(tmp_path)
    assert verdict(analysis) == []


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


def test_absurd_sizes_cost_nothing(tmp_path: Path) -> None:
    job = Job()
    p = job.proc(0)
    c = p.comm("00000000000000aa", 0, 2**61)
    steps([c], 3)
    p.enter(None, "ncclCommInitRank", 2.0, uid_hash="00000000000000bb", nranks=2**61, rank=0)
    cover(job.procs, 100)
    assert analyze_job(job) == []


_VALID = [line for p in hung_job().procs[:1] for line in p.data().splitlines()]
_VALID.append(
    b'{"kind":"enter","api":"ncclAllReduce","t":9,"thread":1,"comm":0,"idx":90,"ord":90,'
    b'"count":1,"datatype":"float32","op":"sum","stream":0}'
)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_mutated_lines_never_raise(seed: int) -> None:
    rng = random.Random(seed)
    lines = []
    for line in rng.choices(_VALID, k=30):
        data = bytearray(line)
        kind = rng.randrange(5)
        if kind == 0:
            del data[rng.randrange(len(data)) :]
        elif kind == 1:
            data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind == 2:
            row = orjson.loads(line)
            key = rng.choice(list(row))
            row[key] = rng.choice(
                [
                    None,
                    -1,
                    2**62,
                    2**63 - 1,
                    1.5,
                    "x",
                    [],
                    {},
                    True,
                    0,
                    [row[key]],
                    {"a": dict(row)},
                ]
            )
            data = bytearray(orjson.dumps(row))
        elif kind == 3:
            row = orjson.loads(line)
            del row[rng.choice(list(row))]
            data = bytearray(orjson.dumps(row))
        lines.append(bytes(data))
    analysis = Analysis()
    analysis.feed(0, "x", 1, _VALID[:3], False)
    analysis.feed(0, "x", 4, lines, True)
    analysis.scan()
    analysis.scan(2**62)


def test_links_are_not_followed_and_loops_end(tmp_path: Path) -> None:
    hung_job().write(tmp_path)
    (tmp_path / "tracing" / "loop").symlink_to(tmp_path)
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "fifo.jsonl")
    analysis, reader = analyze_dir(tmp_path)
    assert verdict(analysis) == EXPECTED
    assert reader.counts.passed_over == {
        str(tmp_path / "tracing" / "loop"): "links in folders are not followed",
        str(tmp_path / "zero.jsonl"): "links in folders are not followed",
        str(tmp_path / "fifo.jsonl"): "no regular file",
    }
    assert reader.counts.files == 4


@pytest.mark.parametrize(("last", "after"), [(b"\n", True), (b"", False)])
def test_a_line_that_is_too_long_is_one_line(tmp_path: Path, last: bytes, after: bool) -> None:
    hung_job().write(tmp_path)
    path = tmp_path / "tracing/run/rank_0_pid_1000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    at = len(lines) // 2 if after else len(lines)
    long = b'{"kind":"call","api":"' + b"A" * (20 << 20) + b'"}' + last
    path.write_bytes(b"".join([*lines[:at], long, *lines[at:]]))
    analysis, reader = analyze_dir(tmp_path)
    assert verdict(analysis) == EXPECTED
    assert (reader.counts.oversize_lines, reader.counts.oversize) == (1, f"{path}:{at + 1}")
    assert analysis.decoder.counts.bad_lines == 0
    with path.open("ab") as f:
        f.write((b"" if after else b"\n") + b"no JSON\n")
    read_all(reader, analysis)
    assert reader.counts.oversize_lines == 1
    assert analysis.decoder.counts.examples == [f"{path}:{len(lines) + 2}: no JSON"]


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


def test_our_own_output_is_not_read_as_a_trace(tmp_path: Path) -> None:
    hung_job().write(tmp_path)
    (tmp_path / "tracing/run/findings.jsonl").write_text('{"kind":"call"}\n')
    _, reader = analyze_dir(tmp_path)
    assert reader.counts.files == 4


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
