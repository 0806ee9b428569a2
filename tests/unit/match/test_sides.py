"""Disagreements: who is wrong, what is one fault, and where nobody can tell."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.analysis import analyze_job, cover
from support.tracegen import Comm, Job

from nccluprobe.match.disagree import period_of
from nccluprobe.match.finding import Finding

Word = str


def run(*programs: Word, end: float = 400.0) -> list[Finding]:
    """Each letter is an AllReduce of its own count, lower case a Broadcast."""
    job = Job()
    play(job.world(len(programs)), programs)
    cover(job.procs, end)
    return analyze_job(job)


def play(comms: Sequence[Comm], programs: Sequence[Word], start: float = 1.0) -> None:
    for c, program in zip(comms, programs, strict=True):
        for i, letter in enumerate(program):
            api = "ncclAllReduce" if letter.isupper() else "ncclBroadcast"
            c.proc.call(c, api, start + 0.1 * i, count=ord(letter))


def blamed(found: list[Finding]) -> list[int]:
    named = [d["rank"] for f in found if f.role == "root_cause" for d in f.named]
    return sorted(set(named))


# -- several sides ---------------------------------------------------------


def test_several_minorities_are_told_apart() -> None:
    found = run("ABC", "ABC", "AXC", "AYC")
    assert {tuple(f.details["minority_comm_ranks"]) for f in found} == {(2,), (3,)}
    assert {f.details["confidence"] for f in found} == {"inferred"}
    assert blamed(found) == [2, 3]


def test_a_real_majority_is_observed() -> None:
    found = run("ABC", "ABC", "ABC", "AXC", "AYC")
    assert {f.details["confidence"] for f in found} == {"observed"}


@pytest.mark.parametrize(
    "programs",
    [("AVB", "AXB", "AYB", "AZB"), ("AXB", "AXB", "AYB", "AYB", "AZB"), ("AXB", "AYB")],
)
def test_without_a_largest_side_it_is_one_finding_that_names_nobody(
    programs: tuple[Word, ...],
) -> None:
    (f,) = run(*programs)
    assert f.hang_type == "collective_mismatch"
    assert f.culprits == ()
    assert len(f.details["calls"]) == len(set(programs))


# -- order -----------------------------------------------------------------


@pytest.mark.parametrize("bad", ["ABDCEF", "ABCDFE", "BACDEF", "AECDBF"])
def test_two_calls_in_the_other_order_are_one_mismatch(bad: Word) -> None:
    (f,) = run("ABCDEF", "ABCDEF", bad, "ABCDEF")
    assert (f.hang_type, f.details["reason"]) == ("collective_mismatch", "calls_swapped")
    assert blamed([f]) == [2]
    assert "other order" in f.details["summary"]
    assert "repeated" not in f.details


def test_a_swap_does_not_hide_what_another_rank_does_next() -> None:
    found = run("ABCDEF", "ABDCEF", "ABCXEF", "ABCDEF")
    assert blamed(found) == [1, 2]


def test_a_call_left_out_at_the_end_is_no_swap() -> None:
    (f,) = run("ABCD", "ABCD", "ABD", "ABCD")
    assert f.hang_type == "skipped_or_extra_call"
    (f,) = run("ABABABABAB", "ABABABABAB", "ABABBABABA", "ABABABABAB")
    assert f.hang_type == "skipped_or_extra_call"


# -- history ---------------------------------------------------------------


def test_periods() -> None:
    assert period_of([1, 2, 3] * 4) == 3
    assert period_of([9, 8, 7] + [1, 2] * 6) == 2
    assert period_of([1] * 8) == 1
    assert period_of([1] * 7) == 0
    assert period_of([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0


@pytest.mark.parametrize(
    ("wrong", "hang_type"),
    [
        ("ABCABXABCABC", "collective_mismatch"),  # in place of a C
        ("ABCACABCABC", "skipped_or_extra_call"),  # left out a B
        ("ABCABBCABC", "skipped_or_extra_call"),  # one B more
    ],
)
def test_two_ranks_and_one_of_them_leaves_the_period(wrong: Word, hang_type: str) -> None:
    history, good = "ABC" * 5, "ABCABCABCABC"
    for n, programs in enumerate([(good, wrong), (wrong, good)]):
        found = run(*(history + p for p in programs))
        (f,) = [f for f in found if f.hang_type == hang_type]
        assert f.details["confidence"] == "inferred"
        assert [d["rank"] for d in f.named] == [1 - n]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("ABCABCABC", "DEFDEFDEF"),  # one has gone on to something else
        ("ABCABCABC", "XABCABCABC"),  # one call that is in no period: missing, or too much?
        ("ABC", "X"),  # nothing is known of what comes after
    ],
)
def test_two_ranks_and_nothing_tells_who_is_wrong(a: Word, b: Word) -> None:
    for programs in ((a, b), (b, a)):
        found = [f for f in run(*("ABC" * 5 + p for p in programs)) if "calls" in f.details]
        assert found
        assert all(f.culprits == () for f in found)


def test_a_uniform_stream_tells_nothing() -> None:
    (f,) = run("A" * 20 + "AAAA", "A" * 20 + "XAAA")
    assert f.culprits == ()


# -- two communicators -----------------------------------------------------


def test_a_call_on_the_wrong_communicator_is_one_cause() -> None:
    job = Job()
    xs = job.world(4)
    ys = [c.proc.comm("00000000000000bb", c.proc.rank, 4) for c in xs]
    play(xs, ["ABCDEFG", "ABCDEFG", "ABCDFG", "ABCDEFG"])
    ys[2].proc.call(ys[2], "ncclAllReduce", 1.4, count=ord("E"))
    play(ys, ["PQRSTU"] * 4, start=2.0)
    cover(job.procs, 400)
    found = analyze_job(job)
    assert {f.hang_type for f in found} == {"skipped_or_extra_call"}
    cause = next(f for f in found if f.role == "root_cause")
    other = next(f for f in found if f.role == "downstream")
    assert (len(found), other.downstream_of) == (2, cause.id)
    assert (cause.details["reason"], other.details["reason"]) == ("call_skipped", "call_extra")
    assert cause.details["other_communicator"] == "00000000000000bb"
    assert "00000000000000bb" in cause.details["summary"]
    assert blamed(found) == [2]


def test_a_larger_communicator_singles_out_one_of_two() -> None:
    job = Job()
    xs = job.world(4)
    ys = [c.proc.comm("00000000000000bb", r, 2) for r, c in enumerate(xs[:2])]
    play(xs, ["ABXD", "ABCD", "ABCD", "ABCD"])
    play(ys, ["PXR", "PQR"])
    cover(job.procs, 400)
    found = analyze_job(job)
    assert blamed(found) == [0]
    pair = next(f for f in found if f.comm_uid_hash == "00000000000000bb")
    assert pair.role == "downstream"
    assert pair.details["singled_out_by"] == pair.downstream_of


def test_faults_of_one_rank_that_lie_far_apart_are_two() -> None:
    job = Job()
    xs = job.world(4)
    ys = [c.proc.comm("00000000000000bb", c.proc.rank, 4) for c in xs]
    play(xs, ["ABC", "ABC", "AXC", "ABC"])
    play(ys, ["ABC", "ABC", "AXC", "ABC"], start=200.0)
    cover(job.procs, 400)
    assert [f.role for f in analyze_job(job)] == ["root_cause", "root_cause"]


# -- losses ----------------------------------------------------------------


def test_losses_on_any_side_lower_the_confidence_and_shift_nothing() -> None:
    job = Job()
    comms = job.world(4)
    for c in comms:
        for i, letter in enumerate("ABCDEFGHIJKLMNOP"):
            wrong = letter == "L" and c.proc.rank == 3
            lost = i == 3 + (c.proc.rank or 0) and c.proc.rank != 2
            c.proc.call(
                c,
                "ncclAllReduce",
                1.0 + 0.1 * i,
                count=7 if wrong else ord(letter),
                lost=lost,
            )
    cover(job.procs, 400, lost_kernel=1)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.comm_seq, f.details["confidence"]) == (
        "collective_mismatch",
        11,
        "reduced",
    )
    assert blamed([f]) == [3]
