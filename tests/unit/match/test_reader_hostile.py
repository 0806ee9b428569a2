"""Lines and files that nobody's tracer writes: they cost only themselves."""

from __future__ import annotations

import os
import random
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.analysis import analyze_job, cover, steps
from support.reading import EXPECTED, analyze_dir, hung_job, read_all, verdict
from support.tracegen import Job

from nccluprobe.match.decode import Decoder
from nccluprobe.match.pipeline import Analysis
from nccluprobe.match.signature import SignatureTable

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


def test_our_own_output_is_not_read_as_a_trace(tmp_path: Path) -> None:
    hung_job().write(tmp_path)
    (tmp_path / "tracing/run/findings.jsonl").write_text('{"kind":"call"}\n')
    _, reader = analyze_dir(tmp_path)
    assert reader.counts.files == 4
