"""Rules of what completion tells (flight recorder dumps) that no other test would miss."""

from __future__ import annotations

from pathlib import Path

import pytest
from importers.frgen import Job
from importers.reading import Result


def two_groups() -> Job:
    """All ranks, and all but the last one, after some calls that are complete."""
    job = Job({"0": ("all", [0, 1, 2, 3]), "1": ("three", [0, 1, 2])})
    for i in range(5):
        job.all("0", i * 0.1)
        job.all("1", i * 0.1 + 0.05)
    return job


@pytest.mark.parametrize("order", ["here_first", "there_first"])
def test_who_does_not_follow_its_peers_is_held_by_nothing(tmp_path: Path, order: str) -> None:
    """Ranks 0 and 1 went on from the call that rank 2 sits in: it does not keep it from coming.

    Had they made the two calls in the other order, it might.
    """
    job = two_groups()
    here, there = (2.0, 3.0) if order == "here_first" else (3.0, 2.0)
    job.all("0", here, 3, done=False)
    job.all("1", there, 2, done=False)
    assert Result(job.write(tmp_path)).blamed == ({2, 3} if order == "here_first" else {3})


def test_a_transfer_that_both_have_posted_and_that_does_not_end_holds_both(tmp_path: Path) -> None:
    job = two_groups()
    job.ranks[0].transfer("1", 2.0, True, 1, done=False)
    job.ranks[1].transfer("1", 2.0, False, 0, done=False)
    job.all("0", 3.0, 0, 1, done=False)
    result = Result(job.write(tmp_path))
    assert result.blamed == set()
    assert "collective_all_ranks_stuck" in result.types
