"""Heartbeat files become state lines of the process that they speak of."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from support.collecting import Bench, Info, Ranks, S, init, read, rec

from nccluprobe.collect.writer import Limits


def _bench(out: Path, **options: Any) -> Bench:
    bench = Bench(out, **options)
    bench.procs.infos[100] = Info(ranks=Ranks(rank=3, source="torchrun"))
    bench.step(init(1))
    bench.steps(1)
    (out / "tracing" / "run" / "heartbeat").mkdir()
    return bench


def _beat(bench: Bench, name: str = "rank_3.json", **fields: Any) -> None:
    now = bench.clock.reading().unix
    row = {"rank": 3, "host": "node1", "pid": 100, "phase": "checkpoint", "time": now / S, **fields}
    folder = bench.out / "tracing" / "run" / "heartbeat"
    (folder / "new").write_text(json.dumps(row))
    (folder / "new").replace(folder / name)


def _phases(bench: Bench) -> list[dict[str, Any]]:
    return [x for x in bench.of_kind("state") if x["state"] == "phase"]


def test_a_phase_begins_and_ends(tmp_path: Path) -> None:
    bench = _bench(tmp_path)
    _beat(bench, limit_s=900, step=41, progress="2 of 9")
    began = bench.clock.now
    bench.steps(4)
    (line,) = _phases(bench)  # once, as long as the file says the same
    assert (line["phase"], line["limit"], line["step"]) == ("checkpoint", 900 * S, 41)
    assert line["detail"] == "2 of 9"
    assert abs(line["since"] - began) < 10**6 and line["since"] == line["beat"]
    _beat(bench, phase=None)
    bench.steps(2)
    assert [x["phase"] for x in _phases(bench)] == ["checkpoint", None]


def test_since_is_kept_while_the_phase_goes_on(tmp_path: Path) -> None:
    bench = _bench(tmp_path)
    for step in range(3):
        _beat(bench, step=step, every_s=5)
        bench.steps(2)
    found = _phases(bench)
    assert [x["step"] for x in found] == [0, 1, 2]
    assert len({x["since"] // 10**6 for x in found}) == 1
    assert found[-1]["beat"] - found[0]["beat"] > 3 * S and found[-1]["every"] == 5 * S
    _beat(bench, phase="eval")
    bench.steps(2)
    assert _phases(bench)[-1]["since"] - found[0]["since"] > 5 * S


def test_a_file_that_goes_ends_the_phase(tmp_path: Path) -> None:
    bench = _bench(tmp_path)
    _beat(bench, name="pid_100.json", rank=None)
    bench.steps(2)
    (tmp_path / "tracing" / "run" / "heartbeat" / "pid_100.json").unlink()
    bench.steps(2)
    assert [x["phase"] for x in _phases(bench)] == ["checkpoint", None]


def test_every_part_begins_with_the_phase(tmp_path: Path) -> None:
    bench = _bench(tmp_path, limits=Limits(max_bytes=400_000))
    _beat(bench)
    bench.steps(2)
    for _ in range(60):
        bench.step(*(rec(comm_gen=1, t_enter=bench.clock.now + i) for i in range(20)))
    files = bench.files()
    assert len(files) > 2
    for file in files[1:]:
        assert "checkpoint" in [x.get("phase") for x in read(file)[:8]], file


def test_what_is_no_heartbeat_is_told_once_and_not_used(tmp_path: Path) -> None:
    bench = _bench(tmp_path)
    folder = tmp_path / "tracing" / "run" / "heartbeat"
    secret = tmp_path / "secret"
    secret.write_text('{"phase": "checkpoint"}')
    for content, why in (
        ("{", "not JSON"),
        ('{"pid": "x"}', "time is missing"),
        ("x" * 20_000, "larger"),
    ):
        (folder / "rank_3.json").write_text(content)
        bench.steps(3)
        assert [t for k, t in bench.messages if why in t and k == "problem"], why
    _beat(bench, pid=999)
    bench.steps(3)
    _beat(bench, time=bench.clock.reading().unix / S + 7200)
    bench.steps(3)
    (folder / "rank_3.json").unlink()
    (folder / "rank_3.json").symlink_to(secret)
    bench.steps(3)
    (folder / "rank_3.json").unlink()
    os.mkfifo(folder / "rank_3.json")
    bench.steps(3)
    told = [t for k, t in bench.messages if "heartbeat/" in t]
    assert len(told) == len(set(told)) == 7, told
    assert _phases(bench) == []


def test_a_linked_folder_is_not_followed(tmp_path: Path) -> None:
    bench = _bench(tmp_path)
    _beat(bench)
    folder = tmp_path / "tracing" / "run" / "heartbeat"
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    bench.steps(3)
    assert _phases(bench) == []
