"""Lines: by the schema, for every api, on both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.collecting import T0, ZERO, Bench, init, rec, validator

from nccluprobe.collect import lines
from nccluprobe.nccl.api import BY_ID, TRACED, Api, Kind
from nccluprobe.record import (
    FLAG_BLIND,
    FLAG_COMM_LATE,
    FLAG_ENTER_ONLY,
    FLAG_NO_RETURN,
    FLAG_NONBLOCKING,
    FLAG_UNWOUND,
    KIND_CALL,
    UNKNOWN_SEQ,
    Record,
)


@pytest.mark.parametrize("api", TRACED, ids=lambda a: a.name)
@pytest.mark.parametrize("comm", [0, None])
def test_every_api_by_the_schema(api: Api, comm: int | None) -> None:
    record = rec(api.name, group_id=3, group_depth=2, nccl_seq=4, callsite_id=5, op=99, datatype=77)
    ids = lines.Ids(comm, 1, None)
    for line in (lines.call(record, ids), lines.enter(record, ids)):
        validator().validate(json.loads(lines.dump(line)))


@pytest.mark.parametrize(
    ("flags", "end", "has_dur"),
    [
        (FLAG_NO_RETURN, "no_return", True),
        (FLAG_UNWOUND, "unwound", True),
        (FLAG_ENTER_ONLY, "enter_only", False),
    ],
)
def test_why_there_is_no_return_code(flags: int, end: str, has_dur: bool) -> None:
    exit_at = {} if has_dur else {"t_exit": 0}
    line = lines.call(rec(flags=flags, **exit_at), lines.Ids(0, 0))
    assert line["end"] == end and line["rc"] is None
    assert (line["dur"] is not None) is has_dur


def test_blind_call_has_no_numbers() -> None:
    line = lines.call(rec(flags=FLAG_BLIND, call_idx=5), lines.Ids(None, 0))
    assert line["blind"] is True
    assert (line["comm"], line["idx"], line["ord"]) == (None, None, None)


def test_odd_flags_are_said() -> None:
    record = rec("ncclCommInitRankConfig", flags=FLAG_NONBLOCKING, uid_hash=0x1F)
    line = lines.call(record, lines.Ids(None, None, 4))
    assert line["nonblocking"] is True
    assert line["uid_hash"] == "000000000000001f"
    assert line["new_comm"] == 4


def test_a_group_start_has_no_place_in_the_group_it_opens() -> None:
    outer = lines.call(rec("ncclGroupStart", group_id=3), lines.Ids(None, None))
    assert outer["group"] == 3 and "gpos" not in outer
    inner = lines.call(rec("ncclGroupStart", group_id=3, group_depth=1), lines.Ids(None, None))
    assert inner["gpos"] == 0


def test_a_usual_line_is_short() -> None:
    record = rec(
        t_enter=10**14, count=1 << 20, datatype=9, call_idx=10**5, order_idx=10**5, tid=12345
    )
    assert len(lines.dump(lines.call(record, lines.Ids(0, 0)))) < 190


def test_text_from_the_target_is_escaped() -> None:
    line = lines.dump({"kind": "x", "name": 'a"b\\c\n\x1b[31m\udce9 ü'})
    assert line.count("\n") == 1 and line.endswith("\n")
    assert json.loads(line)["name"].startswith('a"b\\c\n\x1b[31m')


_NUMBER = st.integers(0, 2**53 - 1)
_HOT_APIS = [a.id for a in TRACED if a.kind is not Kind.LIFECYCLE]


@st.composite
def hot_records(draw: st.DrawFn) -> Record:
    group = draw(st.integers(0, 9))
    flags = draw(st.sampled_from([0, 0, FLAG_COMM_LATE, FLAG_ENTER_ONLY]))
    t = T0 + draw(st.integers(0, 2**40))
    return ZERO._replace(
        t_enter=t,
        t_exit=0 if flags & FLAG_ENTER_ONLY else t + draw(st.integers(0, 2**40)),
        count=draw(_NUMBER),
        stream=draw(st.sampled_from([0, 0x5000, 2**47])),
        call_idx=draw(_NUMBER),
        order_idx=draw(_NUMBER),
        nccl_seq=draw(st.sampled_from([UNKNOWN_SEQ, 0, 17])),
        callsite_id=draw(st.sampled_from([0, 0, 2**63 + 1])),
        pid=100,
        tid=draw(st.integers(100, 102)),
        epoch=1,
        comm_gen=draw(st.sampled_from([0, 1, 1, 1, 2])),
        group_id=group,
        group_pos=draw(st.integers(0, 65535)),
        group_depth=draw(st.integers(0, 3)) if group else 0,
        rc=draw(st.sampled_from([0, 0, 0, 4])),
        peer=draw(st.integers(0, 9)),
        op=draw(st.sampled_from([0, 3, 77])),
        datatype=draw(st.integers(0, 13)),
        api=draw(st.sampled_from(_HOT_APIS)),
        kind=KIND_CALL,
        flags=flags,
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(hot_records(), min_size=1, max_size=40), st.integers(2, 3))
def test_hot_path_writes_the_same_lines(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record], times: int
) -> None:
    """Each record several times: the first comes by the slow way, the others by templates."""
    bench = Bench(tmp_path_factory.mktemp("hot"))
    bench.step(init(1), init(2, uid_hash=0xDEF))
    bench.step(*[r for r in records for _ in range(times)])
    bench.step(*records)
    bench.close()
    path = bench.files()[0]
    data = [json.loads(line) for line in path.read_bytes().splitlines()]
    calls = [line for line in data if line["kind"] == "call" and "Init" not in line["api"]]
    streams: dict[int, int] = {}
    expected: list[dict[str, Any]] = []
    for record in [r for r in records for _ in range(times)] + records:
        stream = None
        if lines.has_stream(record.api):
            stream = streams.setdefault(record.stream, len(streams))
        comm = {0: None, 1: 0, 2: 1}[record.comm_gen]
        expected.append(lines.call(record, lines.Ids(comm, stream)))
    assert calls == expected


def test_odd_kinds_of_records_are_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(
        init(1), rec(kind=9), ZERO._replace(kind=KIND_CALL, api=999, pid=100, tid=100, epoch=1)
    )
    bench.steps(1.5)
    last = bench.of_kind("coverage")[-1]
    assert last["lost_queue"] == 2 and last["captured"] == 3
    assert max(BY_ID) < 999
