"""A rank that leaves out a call, or makes one too many: all others stand where they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from importers.frgen import Job
from importers.reading import Result

TENSOR, DATA = "TENSOR_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP"
EVERYONE = range(4)


def _four() -> Job:
    """Two tensor-parallel groups, and two data-parallel ones across them."""
    groups = {"0": ("default_pg", [*EVERYONE])}
    groups |= {"1": (TENSOR, [0, 1]), "2": (TENSOR, [2, 3])}
    job = Job(groups | {"3": (DATA, [0, 2]), "4": (DATA, [1, 3])})
    for t, group in enumerate("012340"):
        job.all(group, t / 10)
    return job


@pytest.mark.parametrize("odd", [2, 5])
def test_a_call_of_a_group_is_left_out_before_all_meet(odd: int, tmp_path: Path) -> None:
    """All but one group of four ranks wait in the call of all for those three who wait for one."""
    everyone = list(range(8))
    groups = {
        "0": ("default_pg", everyone),
        "1": (DATA, everyone[::2]),
        "2": (DATA, everyone[1::2]),
    }
    job = Job(groups)
    for t, group in enumerate("0120"):
        job.all(group, t / 10)
    for group in "12":
        there = odd in job.groups[group][1]
        job.all(group, 1.0, *([odd] if there else []), done=not there)
    job.all("0", 1.1, done=False)
    assert Result(job.write(tmp_path)).blamed == {odd}


@pytest.mark.parametrize("odd", [0, 2, 3])
def test_the_call_of_all_is_left_out(odd: int, tmp_path: Path) -> None:
    """It has gone past, and waits for its peers; what it comes to next looks like that call."""
    job = _four()
    job.all("0", 1.0, odd, done=False)
    mine = [g for g in "1234" if odd in job.groups[g][1]]
    for n, group in enumerate((*mine, "0")):
        job.ranks[odd].call(group, 1.1 + n / 100, done=False)
    result = Result(job.write(tmp_path))
    assert result.blamed == {odd}


@pytest.mark.parametrize("odd", [1, 2])
def test_the_call_of_all_comes_too_early(odd: int, tmp_path: Path) -> None:
    """Its peers wait for it in calls of their groups, and all others for these."""
    job = _four()
    job.ranks[odd].call("0", 1.0, done=False)
    for t, group in enumerate("12340"):
        there = odd in job.groups[group][1]
        done = group in "12" and not there
        job.all(group, 1.1 + t / 100, *([odd] if there else []), done=done)
    assert Result(job.write(tmp_path)).blamed == {odd}


@pytest.mark.parametrize(("odd", "group", "other"), [(0, "2", 3), (0, "4", 1), (1, "3", 0)])
def test_nobody_is_named_where_a_second_rank_is_lacked_as_well(
    odd: int, group: str, other: int, tmp_path: Path
) -> None:
    """One has come too early to the call of all; another one left out a call of its group."""
    job = _four()
    job.ranks[odd].call("0", 1.0, done=False)
    for t, name in enumerate("12340"):
        absent = [r for r in (odd,) if r in job.groups[name][1]]
        absent += [other] if name == group else []
        job.all(name, 1.1 + t / 100, *absent, done=name in "12" and not absent)
    assert Result(job.write(tmp_path)).blamed == set()
