"""Calls of count 0: discarded by NCCL 2.20.5 and later, real calls before."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import analyze_job, cover
from support.tracegen import Job, Proc

from nccluprobe.match.finding import Finding
from nccluprobe.match.signature import runs_zero_counts

OLD = "2.19.3"


def run(*programs: list[int], version: str | None = None, end: float = 400.0) -> list[Finding]:
    """Each number is the count of an AllReduce."""
    job = Job()
    comms = job.world(len(programs))
    for c, program in zip(comms, programs, strict=True):
        for i, count in enumerate(program):
            c.proc.call(c, "ncclAllReduce", 1.0 + 0.1 * i, count=count)
    cover(job.procs, end)
    if version is not None:
        for p in job.procs:
            _of_version(p, version)
    return analyze_job(job)


def _of_version(p: Proc, version: str) -> None:
    header = p.header

    def other(part: int = 0) -> dict[str, Any]:
        line = header(part)
        line["libs"][0]["nccl_version"] = version
        return line

    p.header = other  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("versions", "real"),
    [
        ((), False),
        (("2.20.5",), False),
        (("2.19.3",), True),
        (("2.20.3",), True),
        (("2.28.9",), False),
        (("2.18.1", "2.27.3"), False),
        (("unknown",), False),
    ],
)
def test_versions(versions: tuple[str, ...], real: bool) -> None:
    assert runs_zero_counts(versions) is real


@pytest.mark.parametrize("good", [[1, 2, 3, 4, 5, 6], [5, 5, 5, 5, 5, 5]])
@pytest.mark.parametrize("at", [0, 2, 5, 6])
def test_a_call_of_count_0_that_the_others_do_not_make_is_legal(good: list[int], at: int) -> None:
    other = [*good[:at], 0, 0, *good[at:]]
    assert run(good, good, other, good) == []
    assert run(other, other, good, other) == []


def test_of_an_old_library_it_is_one_call_too_many() -> None:
    good = [1, 2, 3, 4, 5, 6]
    other = [1, 2, 0, 3, 4, 5, 6]
    (f,) = run(good, good, other, good, version=OLD)
    assert (f.hang_type, f.details["reason"]) == ("skipped_or_extra_call", "call_extra")
    assert [d["rank"] for d in f.named] == [2]
    assert run(good, good, other, good, version="2.20.5") == []


def test_numbers_leave_them_out_only_where_they_are_discarded() -> None:
    programs = [[0, 0, 1, 2], [0, 0, 1, 2], [0, 0, 1]]
    (f,) = run(*programs)
    assert f.comm_seq == 1
    (f,) = run(*programs, version=OLD)
    assert f.comm_seq == 3


def test_a_count_0_in_place_of_a_call_explains_why_the_others_wait() -> None:
    (f,) = run([1, 2, 7], [1, 2, 7], [1, 2, 0])
    assert (f.hang_type, f.severity) == ("collective_missing_enter", "error")
    assert [d["rank"] for d in f.named] == [2]
    assert "count 0" in f.details["explanation"]
    (f,) = run([5] * 8, [5] * 8, [5, 5, 0, 5, 5, 5, 5, 5])
    assert [d["rank"] for d in f.named] == [2]
    assert "count 0" in f.details["explanation"]


def test_the_others_go_on_past_a_count_0() -> None:
    (f,) = run([1, 7, 2, 3], [1, 7, 2, 3], [1, 0, 2, 3])
    assert f.hang_type == "collective_mismatch"
    assert "count 0" in f.details["explanation"]


def test_a_rank_that_made_only_calls_of_count_0_is_absent_too() -> None:
    (f,) = run([1, 2], [1, 2], [1, 0], [1])
    assert f.details["missing_comm_ranks"] == [2, 3]


def test_nobody_waits_in_calls_of_count_0() -> None:
    assert run([1, 0, 0], [1], [1, 0]) == []
    found = run([1, 0, 0], [1], [1, 0], version=OLD)
    assert {f.hang_type for f in found} == {"collective_missing_enter"}
