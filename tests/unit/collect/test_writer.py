"""Writing the trace: parts, bounds, whole lines also after a sudden death."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.collecting import Bench, calls, init, read, rec

from nccluprobe.collect.writer import Limits

pytestmark = pytest.mark.alone


def _fill(bench: Bench, rounds: int, each: int = 50) -> None:
    for i in range(rounds):
        bench.step(*calls(bench, each, i * each))


def test_parts_are_self_contained(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limits=Limits(part_bytes=40_000))
    bench.step(init(1), init(2, uid_hash=2), init(3, uid_hash=3))
    bench.step(rec("ncclCommFinalize", comm_gen=2), rec("ncclCommDestroy", comm_gen=3))
    bench.step(rec("ncclGroupStart", tid=101, group_id=7), rec("ncclGroupStart", tid=102))
    bench.step(rec("ncclGroupEnd", tid=102, group_depth=1))
    bench.source.inside = [rec(comm_gen=1, tid=105, t_enter=bench.clock.now, t_exit=0)]
    bench.steps(1)
    _fill(bench, 40)
    bench.step(rec("ncclGroupEnd", tid=101, group_id=7, group_depth=1))
    bench.close()
    names = [f.name for f in bench.files()]
    count = len(names)
    assert count > 3
    stem = "rank_unknown_pid_100"
    assert set(names) == {f"{stem}.jsonl", *(f"{stem}.part{n}.jsonl" for n in range(1, count))}
    indices: list[int] = []
    for number in range(count):
        name = f"{stem}.jsonl" if number == 0 else f"{stem}.part{number}.jsonl"
        lines = bench.lines(name)
        assert [x["kind"] for x in lines[:2]] == ["process", "clock"]
        assert lines[0]["part"] == number
        if number:
            head = lines[: next(i for i, x in enumerate(lines) if x["kind"] == "coverage") + 1]
            assert [x["id"] for x in head if x["kind"] == "comm"][:2] == [0, 1]
            assert {"finalize"} <= {x["how"] for x in head if x["kind"] == "comm_end"}
            groups = [x for x in head if x["kind"] == "call"]
            assert [(g["api"], g["thread"], g["again"]) for g in groups] == [
                ("ncclGroupStart", 101, True)
            ]
            assert [x["thread"] for x in head if x["kind"] == "enter"] == [105]
            assert head[-1]["captured"] > 0
        known = {x["id"] for x in lines if x["kind"] == "comm"}
        used = {x["comm"] for x in lines if x.get("comm") is not None}
        assert used <= known
        indices += [x["idx"] for x in lines if x["kind"] == "call" and x["api"] == "ncclAllReduce"]
    assert indices == list(range(2000))
    assert read(bench.files()[-1])  # all valid


def test_total_is_bounded_oldest_part_first(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limits=Limits(max_bytes=400_000))
    bench.step(init(1))
    for i in range(200):
        bench.step(*calls(bench, 50, i * 50))
        assert sum(f.stat().st_size for f in bench.files()) <= 400_000
    bench.steps(2)
    bench.close()
    files = sorted(bench.files(), key=lambda f: int(f.stem.rpartition("part")[2]))
    assert not (bench.files()[0].parent / "rank_unknown_pid_100.jsonl").exists()
    lines = [x for f in files for x in read(f, check=False)]
    notes = [x for x in lines if x.get("state") == "dropped_part"]
    assert notes and "lines" in notes[-1]["detail"]
    dropped = lines[-2]["dropped"]
    indices = [x["idx"] for x in lines if x.get("api") == "ncclAllReduce"]
    assert indices == list(range(indices[0], 10_000))
    assert dropped >= indices[0]


def test_a_burst_larger_than_the_bound_keeps_its_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limits=Limits(max_bytes=200_000))
    bench.step(init(1))
    bench.step(*calls(bench, 3000))
    assert sum(f.stat().st_size for f in bench.files()) <= 200_000
    bench.close()
    files = sorted(bench.files(), key=lambda f: int(f.stem.rpartition("part")[2]))
    indices = [
        x["idx"] for f in files for x in read(f, check=False) if x.get("api") == "ncclAllReduce"
    ]
    assert len(indices) > 500
    assert indices == list(range(indices[0], 3000))


_VICTIM = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from support.collecting import Bench, init, rec
bench = Bench(Path({out!r}))
bench.step(init(1))
i = 0
while True:
    bench.step(*[rec(comm_gen=1, t_enter=bench.clock.now + k, call_idx=i + k) for k in range(500)])
    i += 500
"""


def test_after_sigkill_all_lines_but_the_last_are_whole(tmp_path: Path) -> None:
    code = _VICTIM.format(path=[str(Path(__file__).parents[2]), *sys.path], out=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code]) as victim:
        deadline = time.monotonic() + 30
        folder = tmp_path / "tracing" / "run"
        while time.monotonic() < deadline:
            if sum(f.stat().st_size for f in folder.glob("*.jsonl")) > 2_000_000:
                break
            time.sleep(0.02)
        victim.send_signal(signal.SIGKILL)
    (path,) = folder.glob("*.jsonl")
    whole = path.read_bytes().split(b"\n")[:-1]
    indices = [x["idx"] for x in map(json.loads, whole) if x.get("api") == "ncclAllReduce"]
    assert indices == list(range(len(indices))) and len(indices) > 5000
