"""Heartbeat files: what is one, and what is refused and why."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccluprobe.trace.heartbeat import LARGEST, NotAHeartbeat, names_of, parse, read

S = 1_000_000_000
NOW = 1_700_000_000 * S


def beat(**fields: Any) -> bytes:
    row = {"rank": 3, "host": "n1", "pid": 42, "phase": "checkpoint", "time": NOW // S, **fields}
    return json.dumps({k: v for k, v in row.items() if v is not ...}).encode()


def test_all_fields() -> None:
    found = parse(
        beat(since=NOW / S - 2.5, limit_s=900, every_s=10, step=7, progress="shard 3 of 9"), NOW
    )
    assert (found.rank, found.host, found.pid, found.phase) == (3, "n1", 42, "checkpoint")
    assert (found.time, found.since) == (NOW, NOW - 5 * S // 2)
    assert (found.limit, found.every, found.step) == (900 * S, 10 * S, 7)
    assert found.progress == "shard 3 of 9"


@pytest.mark.parametrize("phase", [None, "", "train", "step", "none"])
def test_training_is_no_phase(phase: str | None) -> None:
    assert parse(beat(phase=phase), NOW).phase is None


def test_no_phase_is_without_end() -> None:
    assert parse(beat(limit_s=1e12), NOW).limit == 86_400 * S


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "not a JSON object"),
        (beat(time=...), "time is missing"),
        (beat(time=NOW // S + 3600), "future"),
        (beat(time="now"), "time is not a number"),
        (beat(time=-1), "time is not a time"),
        (beat(time=1e300), "time is not a time"),
        (beat(host=...), "host or pid is missing"),
        (beat(pid=0), "host or pid is missing"),
        (beat(pid=True), "pid is not a whole number"),
        (beat(rank=2**60), "rank is not a whole number"),
        (beat(rank="3"), "rank is not a whole number"),
        (beat(phase=5), "phase is not a text"),
        (beat(phase="x" * 65), "phase is longer"),
        (beat(limit_s=-5), "limit_s is negative"),
        (beat(limit_s=[]), "limit_s is not a number"),
    ],
)
def test_what_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(NotAHeartbeat, match=why):
        parse(data, NOW)


@given(st.binary(max_size=300) | st.text(max_size=50).map(str.encode))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        parse(data, NOW)
    except NotAHeartbeat as error:
        assert str(error)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just([])
            for name in ("host", "pid", "phase", "time", "rank", "since", "limit_s", "every_s")
        },
    )
)
def test_any_values_are_read_or_refused(row: dict[str, Any]) -> None:
    try:
        found = parse(json.dumps(row).encode("utf-8", "replace"), NOW)
    except NotAHeartbeat:
        return
    assert found.limit is None or 0 <= found.limit <= 86_400 * S


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"pid": 7}, None),  # as its container counts
        ({"pid": 43}, "pid 43"),
        ({"rank": 4}, "rank 4"),
        ({"host": "container"}, None),
        ({"host": "container", "rank": None}, "host container"),
        ({"time": NOW // S - 5000}, "older than its process"),
    ],
)
def test_whose_it_is(change: dict[str, Any], why: str | None) -> None:
    told = parse(beat(**change), NOW).mismatch("n1", (42, 7), 3, NOW - 1000 * S)
    assert told is None if why is None else why in str(told)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "rank_0.json").write_bytes(beat())
    (tmp_path / "rank_1.json").symlink_to("rank_0.json")
    os.mkfifo(tmp_path / "rank_2.json")
    (tmp_path / "rank_3.json").write_bytes(b" " * (LARGEST + 1))
    (tmp_path / "rank_4.json").mkdir()
    with (tmp_path / "rank_5.json").open("wb") as f:
        f.truncate(1 << 40)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        found = read(folder, "rank_0.json", NOW)
        assert found is not None and found.phase == "checkpoint"
        assert read(folder, "rank_9.json", NOW) is None
        for n, why in ((1, "link"), (2, "regular"), (3, "larger"), (4, "regular"), (5, "larger")):
            with pytest.raises(NotAHeartbeat, match=why):
                read(folder, f"rank_{n}.json", NOW)
    finally:
        os.close(folder)


def test_names() -> None:
    assert names_of(3, (42, 42)) == ["rank_3.json", "pid_42.json"]
    assert names_of(None, (42, 7)) == ["pid_42.json", "pid_7.json"]
