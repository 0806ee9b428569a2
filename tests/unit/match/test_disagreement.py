"""Several calls in one slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.analysis import Run, analyze_job, cover, steps
from support.tracegen import Job, unix

from nccluprobe.match.disagree import Shift, decide
from nccluprobe.match.finding import Finding
from nccluprobe.match.model import SIG_LOST
from nccluprobe.match.signature import Signature, SignatureTable

Program = Sequence[tuple[str, dict[str, Any]]]
AR: tuple[str, dict[str, Any]] = ("ncclAllReduce", {})


def run_programs(programs: Sequence[Program], end: float = 50.0) -> list[Finding]:
    job = Job()
    comms = job.world(len(programs))
    for c, program in zip(comms, programs, strict=True):
        for i, (api, args) in enumerate(program):
            c.proc.call(c, api, 1.0 + 0.1 * i, **args)
    cover(job.procs, end)
    return analyze_job(job)


def sized(*counts: int) -> list[tuple[str, dict[str, Any]]]:
    return [("ncclAllReduce", {"count": n}) for n in counts]


def test_can_the_aggregation_be_wrong_without_the_api_in_the_key() -> None:
    """The reviewer's question on the published design; the answer is yes.

    Ranks 0-2 are in AllReduce #42, rank 3 is in Broadcast #42.
    """
    history: list[tuple[str, dict[str, Any]]] = [AR] * 42
    programs = [[*history, AR]] * 3 + [[*history, ("ncclBroadcast", {})]]

    def complete(key_has_api: bool) -> bool:
        """A naive aggregation of entries by key: do all four ranks meet in one?"""
        entered: dict[tuple[object, ...], set[int]] = {}
        for rank, program in enumerate(programs):
            api = program[42][0]
            key = ("00000000000000aa", 42, api) if key_has_api else ("00000000000000aa", 42)
            entered.setdefault(key, set()).add(rank)
        return all(ranks == {0, 1, 2, 3} for ranks in entered.values())

    # By communicator and sequence alone the collective looks complete: missed.
    assert complete(key_has_api=False)
    # With the api it does not; read naively these are two "missing" findings.
    assert not complete(key_has_api=True)

    (f,) = run_programs(programs, end=400.0)
    assert f.hang_type == "collective_mismatch"
    assert f.comm_seq == 42
    assert f.details["differs_in"] == ["api"]
    assert f.details["majority_comm_ranks"] == [0, 1, 2]
    assert f.details["minority_comm_ranks"] == [3]
    assert f.details["missing_comm_ranks"] == []
    assert (f.severity, f.role) == ("error", "root_cause")


@pytest.mark.parametrize(
    ("api", "args", "part"),
    [
        ("ncclAllReduce", {"count": 5}, "count"),
        ("ncclAllReduce", {"datatype": "float16"}, "datatype"),
        ("ncclAllReduce", {"op": "max"}, "op"),
        ("ncclBroadcast", {"root": 1}, "root"),
    ],
)
def test_arguments_that_differ(api: str, args: dict[str, Any], part: str) -> None:
    good: list[tuple[str, dict[str, Any]]] = [AR, (api, {}), AR, AR, AR]
    bad: list[tuple[str, dict[str, Any]]] = [AR, (api, args), AR, AR, AR]
    (f,) = run_programs([good, good, bad, good])
    assert f.hang_type == "collective_mismatch"
    assert (f.comm_seq, f.details["differs_in"]) == (1, [part])
    assert f.details["minority_comm_ranks"] == [2]


def test_user_made_reductions_are_not_compared() -> None:
    custom = [AR, ("ncclAllReduce", {"op": "custom"}), AR]
    assert run_programs([[AR] * 3, custom, [AR] * 3, custom]) == []


def test_spellings_of_one_collective_agree() -> None:
    program = [("ncclBroadcast", {})] * 3
    assert run_programs([program, [("ncclBcast", {})] * 3, program]) == []
    assert run_programs([[AR] * 3, [("ncclAllReduceConfig", {})] * 3]) == []


def test_two_ranks_name_no_culprit() -> None:
    (f,) = run_programs([sized(1, 2), sized(1, 3)])
    assert f.hang_type == "collective_mismatch"
    assert f.details["minority_comm_ranks"] == [] == f.details["majority_comm_ranks"]
    assert f.culprits == ()


def test_a_tie_names_no_culprit() -> None:
    (f,) = run_programs([sized(1, 2)] * 2 + [sized(1, 3)] * 2)
    assert f.details["minority_comm_ranks"] == []


def test_same_bytes_other_type_is_said() -> None:
    good = [("ncclAllReduce", {"count": 8, "datatype": "float32"})]
    bad = [("ncclAllReduce", {"count": 16, "datatype": "float16"})]
    (f,) = run_programs([good, good, bad])
    assert f.details["explanation"] == "same bytes, other type"


def test_a_zero_count_among_others_is_the_explanation() -> None:
    (f,) = run_programs([sized(1, 7, 2), sized(1, 7, 2), sized(1, 0, 2)])
    assert f.hang_type == "collective_mismatch"
    assert f.details["differs_in"] == ["count"]
    assert "count 0" in f.details["explanation"]


def test_slots_that_all_pass_zero_do_not_count_in_comm_seq() -> None:
    job = Job()
    comms = job.world(3)
    steps(comms, 4, count=0)
    t = steps(comms, 6, start=3.0)
    steps(comms[:2], 1, start=t)
    cover(job.procs, t + 61)
    (f,) = analyze_job(job)
    assert f.comm_seq == 6
    assert f.details["entered_call_idx"]["0"] == 10


def test_a_skipped_call() -> None:
    good = sized(*range(1, 30))
    bad = sized(*(n for n in range(1, 30) if n != 11))
    (f,) = run_programs([good, good, bad, good], end=400.0)
    assert f.hang_type == "skipped_or_extra_call"
    assert f.details["reason"] == "call_skipped"
    assert f.comm_seq == 10
    assert "count 11" in f.details["call"]
    assert f.details["minority_comm_ranks"] == [2]


def test_an_extra_call() -> None:
    good = sized(*range(1, 30))
    bad = [*good[:10], ("ncclBroadcast", {}), *good[10:]]
    (f,) = run_programs([good, bad, good, good], end=400.0)
    assert f.hang_type == "skipped_or_extra_call"
    assert f.details["reason"] == "call_extra"
    assert "ncclBroadcast" in f.details["call"]
    assert f.details["minority_comm_ranks"] == [1]


def test_two_faults_in_one_scan_do_not_hide_each_other() -> None:
    good = sized(*range(1, 40))
    wrong = sized(*(99 if n == 5 else n for n in range(1, 40)))
    short = sized(*(n for n in range(1, 40) if n != 25))
    found = run_programs([good, wrong, short, good, good])
    assert {(f.hang_type, f.comm_seq) for f in found} == {
        ("collective_mismatch", 4),
        ("skipped_or_extra_call", 24),
    }


def test_two_faults_in_one_slot() -> None:
    good = sized(*range(1, 20))
    wrong = sized(*(99 if n == 5 else n for n in range(1, 20)))
    short = sized(*(n for n in range(1, 20) if n != 5))
    found = run_programs([good, wrong, short, good, good])
    assert {(f.hang_type, tuple(f.details["minority_comm_ranks"])) for f in found} == {
        ("collective_mismatch", (1,)),
        ("skipped_or_extra_call", (2,)),
    }


def test_an_absent_rank_does_not_hide_a_mismatch_of_the_others() -> None:
    good = sized(1, 2, 3)
    found = run_programs([good, good, sized(1, 2, 9), sized(1, 2), good], end=400.0)
    assert {(f.hang_type, f.comm_seq) for f in found} == {
        ("collective_mismatch", 2),
        ("collective_missing_enter", 2),
    }
    mismatch = next(f for f in found if f.hang_type == "collective_mismatch")
    assert mismatch.details["minority_comm_ranks"] == [2]
    assert mismatch.severity == "error"


def test_the_same_fault_in_every_step_is_one_finding() -> None:
    good = sized(*([1, 2, 3] * 10))
    bad = sized(*([1, 2, 4] * 10))
    (f,) = run_programs([good, bad, good, good])
    assert f.comm_seq == 2
    assert f.details["repeated"] == 9


def test_provisional_at_once_then_decided() -> None:
    job = Job()
    comms = job.world(3)
    for c, api in zip(comms, ["ncclAllReduce"] * 2 + ["ncclBroadcast"], strict=True):
        c.proc.call(c, api, 1.0)
    cover(job.procs, 20)
    run = Run(job)
    run.until(2.0)
    (f,) = run.scan(unix(2.0))
    assert (f.hang_type, f.severity, f.details["provisional"]) == (
        "collective_mismatch",
        "notice",
        True,
    )
    run.until(4.0)
    assert run.scan(unix(4.0)) == []
    run.until(7.0)
    (g,) = run.scan(unix(7.0))
    assert (g.id, g.severity, g.details["provisional"]) == (f.id, "error", False)
    assert g.detected_at == f.detected_at
    run.until(20.0)
    assert run.scan(unix(20.0)) == []


def test_a_provisional_mismatch_can_turn_out_to_be_a_shift() -> None:
    job = Job()
    comms = job.world(3)
    for c in comms[:2]:
        c.proc.call(c, "ncclAllReduce", 1.0)
    comms[2].proc.call(comms[2], "ncclBroadcast", 1.0)
    for c in comms[:2]:
        c.proc.call(c, "ncclBroadcast", 3.0)
    cover(job.procs, 20)
    run = Run(job)
    run.until(2.0)
    (f,) = run.scan(unix(2.0))
    assert f.hang_type == "collective_mismatch"
    run.until(9.0)
    (g,) = run.scan(unix(9.0))
    assert (g.id, g.hang_type, g.details["reason"]) == (
        f.id,
        "skipped_or_extra_call",
        "call_skipped",
    )


def _table(names: Sequence[str]) -> tuple[SignatureTable, dict[str, int]]:
    table = SignatureTable()
    return table, {n: table.intern(Signature(f"nccl{n}", count=1)) for n in names}


@pytest.mark.parametrize(
    ("mine", "shift", "several"),
    [
        ("BCDEFGHIJ", Shift(True, 1), False),  # left out A
        ("XABCDEFGH", Shift(False, 1), False),  # an extra X
        ("CDEFGHIJK", Shift(True, 2), False),
        ("XBCDEFGHI", None, False),  # X in place of A
    ],
)
def test_shifts(mine: str, shift: Shift | None, several: bool) -> None:
    table, ids = _table("ABCDEFGHIJKLX")
    model = [ids[c] for c in "ABCDEFGHIJKL"]
    decision = decide({0: model, 1: model, 2: [ids[c] for c in mine]}, table, 8)
    (verdict,) = decision.verdicts
    assert (verdict.ranks, verdict.shift, verdict.several_fit) == ((2,), shift, several)


@pytest.mark.parametrize(
    ("mine", "model", "shift"),
    [
        ("XAAAAA", "AA", None),
        ("XAAA", "AAA", Shift(False, 1)),  # they stand at one place then
        ("XBBB", "B", None),
        ("AA", "XAAAAA", None),
    ],
)
def test_one_that_has_gone_on_further_has_not_made_more_calls(
    mine: str, model: str, shift: Shift | None
) -> None:
    """Equal calls follow one with another argument: all of them agree as they stand."""
    table = SignatureTable()
    ids = {c: table.intern(Signature("ncclAllReduce", count=n)) for n, c in enumerate("ABX")}
    reference = [ids[c] for c in model]
    streams = {0: reference, 1: reference, 2: [ids[c] for c in mine]}
    (verdict,) = decide(streams, table, 8).verdicts
    assert (verdict.ranks, verdict.shift) == ((2,), shift)


@pytest.mark.parametrize(
    ("mine", "named", "wrong"),
    [
        ("?BCDE", True, (1,)),  # goes on as rank 0
        ("?ABCD", True, (0,)),  # goes on as rank 1
        ("?CDEF", False, (1,)),
        ("?", False, (1,)),
        ("?BCDE?", True, (1,)),
    ],
)
def test_who_goes_on_as_one_of_two_made_its_lost_call_as_well(
    mine: str, named: bool, wrong: tuple[int, ...]
) -> None:
    table, ids = _table("ABCDEFX")
    ids["?"] = SIG_LOST
    streams = {r: [ids[c] for c in s] for r, s in enumerate(("ABCDE", "XABCD", mine))}
    decision = decide(streams, table, 8)
    assert decision.named is decision.inferred is named
    assert tuple(r for v in decision.verdicts for r in v.ranks) == wrong


def test_in_calls_that_are_alike_nobody_goes_on_as_one_of_two() -> None:
    table, ids = _table("AX")
    ids["?"] = SIG_LOST
    streams = {r: [ids[c] for c in s] for r, s in enumerate(("AAA", "XAAAAA", "?AAAAA"))}
    assert not decide(streams, table, 8).named


def test_a_periodic_stream_says_that_several_shifts_fit() -> None:
    table, ids = _table("AB")
    model = [ids[c] for c in "AB" * 9]
    decision = decide({0: model, 1: model, 2: model[1:]}, table, 8)
    (verdict,) = decision.verdicts
    assert verdict.shift == Shift(True, 1)
    assert verdict.several_fit


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=12, max_size=40),
    st.integers(0, 10),
    st.integers(3, 8),
    st.data(),
)
def test_random_wrong_counts_name_exactly_the_minority(
    counts: list[int], at: int, n: int, data: st.DataObject
) -> None:
    culprit = data.draw(st.integers(0, n - 1))
    good = sized(*counts)
    bad = sized(*(99 if i == at else c for i, c in enumerate(counts)))
    (f,) = run_programs([bad if r == culprit else good for r in range(n)])
    assert f.comm_seq == at
    assert f.details["minority_comm_ranks"] == [culprit]


def test_a_rank_that_did_not_come_is_no_consequence_of_a_mismatch_in_the_same_slot() -> None:
    """It had done all before: what the others disagree on cannot have stopped it."""
    job = Job()
    comms = job.world(4)
    end = steps(comms, 20)
    for c in comms[:3]:
        c.proc.call(c, "ncclAllReduce", end, count=2048 if c.proc.rank == 1 else 1024)
    cover(job.procs, end + 400)
    found = {f.hang_type: f for f in analyze_job(job)}
    assert set(found) == {"collective_mismatch", "collective_missing_enter"}
    assert {f.role for f in found.values()} == {"root_cause"}
    assert found["collective_missing_enter"].details["missing_comm_ranks"] == [3]
