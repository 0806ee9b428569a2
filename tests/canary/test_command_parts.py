"""Parts of the command without processes: fault texts, verdicts, data, clocks, tables."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from nccluprobe.canary import NcclBackend, arrival
from nccluprobe.canary.cases import bus_factor
from nccluprobe.canary.checks import compare_bytes, compare_values, given, moved, result
from nccluprobe.canary.datatypes import PRECISION, decode, encode, is_float
from nccluprobe.canary.errors import ArgumentError
from nccluprobe.canary.faults import KINDS, parse
from nccluprobe.canary.settings import sizes_of
from nccluprobe.canary.truth import HANG_TYPES, compare, truth_of, truths
from nccluprobe.errors import ExitCode
from nccluprobe.match.finding import HANG_TYPES as FOUND
from nccluprobe.match.finding import RESERVED_HANG_TYPES
from nccluprobe.nccl.enums import DATATYPE_BYTES, REDUCTION_OPS

from .ranks import options, run

# ---- texts of faults -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("reconnect", "wrong_rank")])
def test_every_kind_can_be_given(kind: str) -> None:
    fault = parse(f"{kind}:rank=2,at=7", 3)
    assert (fault.kind, fault.rank, fault.at) == (kind, 2, 7)
    assert set(fault.values) == set(KINDS[kind].values)
    assert fault.hits(2, 7) and not fault.hits(1, 7) and not fault.hits(2, 8)


def test_further_values_and_their_defaults() -> None:
    assert parse("late:rank=0,at=1,s=0.5", 2).values == {"s": 0.5}
    assert parse("late:rank=0", 2).values == {"s": 2.0}
    assert parse("exit:rank=0,code=9", 2).values == {"code": 9}
    assert parse("wrong_rank:rank=2", 3).values == {"as": 0}
    assert parse("unmatched_send:rank=2,peer=1", 3).values == {"peer": 1}
    assert parse("reconnect:at=3", 1).rank == 0


@pytest.mark.parametrize(
    "text",
    [
        "", "none:rank=1", "never", "never:rank=", "never:rank=x", "never:rank=3", "never:rank=-1",
        "never:rank=1,at=1.5", "never:rank=1,at=-2", "never:rank=1,rank=2", "never:rank=1,s=2",
        "late:rank=1,s=nan", "late:rank=1,s=inf", "wrong_rank:rank=1,at=2",
        "wrong_rank:rank=1,as=1", "wrong_rank:rank=1,as=3", "unmatched_send:rank=0,peer=0",
        "never:rank=1,at=99999999999", "never:1", "exit:rank=1,code=256",
        "never:rank=\u0661", "never:rank=1,at=1_0", "late:rank=1,s=\uff11", "late:rank=1,s=1_0",
    ],
)  # fmt: skip
def test_a_text_that_makes_no_sense_is_one_clear_line(text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse(text, 3)
    assert caught.value.code == ExitCode.USAGE
    assert "--inject" in str(caught.value) and "\n" not in str(caught.value)


@hypothesis_given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(ArgumentError):
        assert parse(text, 4).kind in KINDS


def test_two_ranks_are_needed_for_a_peer() -> None:
    with pytest.raises(ArgumentError, match="needs 2 ranks"):
        parse("order:rank=0", 1)


# ---- verdicts ------------------------------------------------------------------------------


def finding(hang_type: str, *ranks: int | None, **changes: Any) -> dict[str, Any]:
    return {
        "id": f"{hang_type}{ranks}",
        "hang_type": hang_type,
        "run_id": "r",
        "comm_uid_hash": "c0",
        "state": "open",
        "severity": "error",
        "role": "root_cause",
        "details": {"reason": "x"},
        "culprits": [{"host": "h", "pid": 100 if r is None else 200 + r, "rank": r} for r in ranks],
        **changes,
    }


@pytest.fixture(autouse=True)
def run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r")


def planted(text: str = "never:rank=2", world: int = 3, comm: str | None = "c0") -> dict[str, Any]:
    return truth_of(parse(text, world), world, comm, None)


def test_kinds_of_findings_exist() -> None:
    assert set(HANG_TYPES) == set(KINDS)
    for kinds in HANG_TYPES.values():
        assert set(kinds) <= {*FOUND, *RESERVED_HANG_TYPES}


def test_right_only_when_exactly_the_planted_rank_is_blamed() -> None:
    truth = planted()
    assert truth["pid"] == os.getpid()
    missing = "collective_missing_enter"
    assert compare(truth, [finding(missing, 2)]).right
    wrong = [
        [],
        [finding(missing)],
        [finding(missing, 1)],
        [finding(missing, 1, 2)],
        [finding(missing, 2), finding(missing, 0)],
        [finding("collective_mismatch", 2)],
        [finding(missing, 2, role="unknown")],
        [finding(missing, 2, role="downstream")],
        [finding(missing, 2, state="resolved")],
        [finding(missing, 2, comm_uid_hash="c1")],
        [finding(missing, 2, run_id="other")],
    ]
    for findings in wrong:
        verdict = compare(truth, findings)
        assert not verdict.right and verdict.text.startswith("wrong"), findings


@pytest.mark.parametrize("kind", ["never", "stop", "busy", "kill"])
def test_who_does_not_come_to_a_send_and_a_receive(kind: str) -> None:
    fault = parse(f"{kind}:rank=1", 2)
    truth = truth_of(fault, 2, "c0", None, paired=True)
    assert compare(truth, [finding("p2p_unmatched", 1)]).right
    assert not compare(truth, [finding("collective_missing_enter", 1)]).right
    assert not compare(truth_of(fault, 2, "c0", None), [finding("p2p_unmatched", 1)]).right


def test_what_does_not_count() -> None:
    missing = "collective_missing_enter"
    assert compare(
        planted(),
        [
            finding(missing, 2),
            finding(missing, 1, run_id="other"),
            finding(missing, 1, role="downstream"),
            finding(missing, 0, state="resolved"),
        ],
    ).right
    # A line with the same id replaces the one before.
    before = finding(missing, 1)
    assert not compare(planted(), [before, finding(missing, 2)]).right
    after = finding(missing, 1, state="resolved")
    assert compare(planted(), [before, after, finding(missing, 2)]).right


def test_a_culprit_whose_rank_nobody_told_is_known_by_its_pid() -> None:
    truth = {**planted(), "pid": 100}
    assert compare(truth, [finding("collective_missing_enter", None)]).right
    assert not compare({**truth, "pid": 7}, [finding("collective_missing_enter", None)]).right


def test_two_ranks_that_disagree_may_name_nobody_but_nobody_else() -> None:
    truth = planted("count:rank=1", world=2)
    for ranks, right in (((), True), ((1,), True), ((0,), False), ((0, 1), False)):
        assert compare(truth, [finding("collective_mismatch", *ranks)]).right is right
    assert not compare(planted("count:rank=1"), [finding("collective_mismatch")]).right


def test_who_was_late_may_have_come() -> None:
    truth = planted("late:rank=1")
    late = finding("delayed_collective_enter", 1, state="resolved", severity="notice")
    assert compare(truth, [late]).right
    assert not compare(truth, [{**late, "hang_type": "collective_missing_enter"}]).right


def test_no_fault_means_no_error_and_nobody_blamed() -> None:
    for truth in (None, planted("reconnect:at=1")):
        assert compare(truth, []).right
        notice = finding("collective_missing_enter", severity="notice", role="unknown")
        assert compare(truth, [notice]).right
        assert not compare(truth, [finding("collective_missing_enter", 1)]).right
        assert not compare(truth, [finding("collective_missing_enter", role="unknown")]).right


def test_truths_are_found_among_other_lines() -> None:
    lines = ["nccl: x", '{"truth": 1}', '{"truth" ', '{"truth": "never", "hang_types": []}', "[]"]
    assert [t["truth"] for t in truths(lines)] == ["never"]


# ---- data ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DATATYPE_BYTES)
def test_small_whole_numbers_survive(dtype: str) -> None:
    top = int(min(2 ** PRECISION.get(dtype, 7), 1 << 20)) if is_float(dtype) else 127
    values = np.arange(min(top, 200) + 1)
    data = encode(values, dtype)
    assert len(data) == len(values) * DATATYPE_BYTES[dtype]
    assert np.array_equal(decode(data, dtype), values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8e4m3", "float8e5m2"])
def test_all_numbers_of_a_narrow_type_survive(dtype: str) -> None:
    width = DATATYPE_BYTES[dtype]
    data = np.arange(1 << 8 * width, dtype=f"<u{width}").tobytes()
    values = decode(data, dtype)
    finite = np.isfinite(values)
    again = decode(encode(values[finite], dtype), dtype)
    assert np.array_equal(again, values[finite])
    assert (~finite).sum() == {"bfloat16": 256, "float8e4m3": 2, "float8e5m2": 8}[dtype]


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20])
    assert decode(encode(values, "bfloat16"), "bfloat16").tolist() == [1, 1 + 2**-6, 1 + 2**-7]


@pytest.mark.parametrize("op", REDUCTION_OPS.values())
@pytest.mark.parametrize("dtype", DATATYPE_BYTES)
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_a_reduction_on_the_host_is_right_and_a_change_is_seen(
    op: str, dtype: str, world: int
) -> None:
    count, size = 45, DATATYPE_BYTES[dtype]
    parts = [decode(given(r, world, count, dtype, op, 5), dtype) for r in range(world)]
    stacked = np.stack([p.astype(object) for p in parts])
    total = {
        "sum": stacked.sum(axis=0), "prod": stacked.prod(axis=0), "max": stacked.max(axis=0),
        "min": stacked.min(axis=0), "avg": stacked.sum(axis=0) / world,
    }[op]  # fmt: skip
    data = encode(np.array(total, dtype=np.float64), dtype)
    want = result(world, count, dtype, op, 5)
    assert compare_values(data, want, world, dtype, op) is None
    assert result(world, 20, dtype, op, 5, 25) == want[25 * size :]
    spoilt = bytearray(data)
    spoilt[7 * size : 8 * size] = encode(np.array([float(total[7]) * 2 + 5]), dtype)
    wrong = compare_values(bytes(spoilt), want, world, dtype, op)
    assert wrong is not None and (wrong.count, wrong.of) == (1, count)
    assert wrong.first.startswith("element 7 is")
    if is_float(dtype):
        spoilt[0:size] = np.full(size, 0xFF, np.uint8).tobytes()  # a NaN
        assert (found := compare_values(bytes(spoilt), want, world, dtype, op)) is not None
        assert found.count == 2


def test_moved_data_tells_its_source_its_seed_and_its_place() -> None:
    base = moved(0, 1000, 0)
    for other in (moved(1, 1000, 0), moved(0, 1000, 1), moved(0, 1000, 0, 1)):
        assert compare_bytes(other, base) is not None
    assert compare_bytes(base[1:] + base[:1], base) is not None
    assert [len(moved(2, n, 3)) for n in (0, 1, 256, 257)] == [0, 1, 256, 257]
    assert moved(2, 700, 3)[256:512] == moved(2, 256, 3)
    assert compare_bytes(base, base) is None


def test_bus_bandwidth_factors() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    for op in ("all_gather", "reduce_scatter", "all_to_all"):
        assert bus_factor(op, 4) == 0.75
    for op in ("broadcast", "reduce", "sendrecv"):
        assert bus_factor(op, 4) == 1


def test_sizes() -> None:
    assert sizes_of("8, 64K,16M,1g,8") == (8, 65536, 16 << 20, 1 << 30)
    for text in ("8\u212a", "\u0663", "1_0", "\uff18K"):
        with pytest.raises(ArgumentError, match="give bytes like"):
            sizes_of(text)


# ---- clocks --------------------------------------------------------------------------------


def _two_nodes(rank: int, world: int, port: int) -> tuple[list[int], list[int]]:
    with NcclBackend(rank, world, **options(port)) as backend:
        found = arrival.estimate(backend, node="a" if rank == 0 else "b")
        return found.add.tolist(), found.bound.tolist()


def test_offsets_between_nodes_are_within_their_bound() -> None:
    """Ranks 1 and 2 say that they are on another node; the true offset is 0."""
    answers = run(3, _two_nodes)
    assert answers[0] == answers[1] == answers[2]
    add, bound = answers[0]
    assert add[0] == bound[0] == 0
    assert 0 < bound[1] < 1e9 and 0 < bound[2] < 1e9
    assert abs(add[1]) <= bound[1] and abs(add[2]) <= bound[2]


def test_summary_of_arrivals() -> None:
    offsets = arrival.Offsets(np.array([0, -5000]), np.array([0, 700]))
    found = arrival.summary(np.array([[0, 10_000, 0], [5000, 17_000, 6000]]), offsets)
    assert found["calls"] == 3 and found["clock"] == "estimated" and found["bound_us"] == 0.7
    assert found["spread_us"]["max"] == 2.0
    assert [r["last"] for r in found["ranks"]] == [1, 2]
    assert found["ranks"][1]["behind_first_us"]["p50"] == 1.0
    nothing = arrival.summary(np.zeros((2, 0), np.int64), offsets)
    assert nothing["ranks"] == [] and nothing["spread_us"] is None


def test_every_kind_is_documented() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "canary.md").read_text()
    for kind in KINDS:
        assert f"| `{kind}:" in text
