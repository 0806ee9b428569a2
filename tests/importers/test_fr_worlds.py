"""Dumps of a job that lie beside what a larger one left in the same folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from importers.frgen import one_group
from importers.reading import Result


def incident(folder: Path, ranks: int, missing: int, t: float) -> None:
    job = one_group(ranks)
    for i in range(3):
        job.all("0", t + i)
    job.all("0", t + 3, missing, done=False)
    job.write(folder)


def named(folder: Path) -> list[list[int]]:
    """Whom each root cause names, the job that dumped last at the end."""
    causes = [f for f in Result(folder).findings if f.role == "root_cause" and f.state == "open"]
    return [[n["rank"] for n in f.named] for f in sorted(causes, key=lambda f: f.since)]


@pytest.mark.parametrize("older", [8, 16])
def test_each_job_is_judged_by_itself(older: int, tmp_path: Path) -> None:
    """Rank 5 of the first did not come, and rank 1 of the second, which wrote over 4 files."""
    incident(tmp_path, older, 5, 0)
    incident(tmp_path, 4, 1, 9000)
    assert named(tmp_path) == [[5], [1]]


def test_a_broken_file_is_of_the_newest_job_that_has_the_rank(tmp_path: Path) -> None:
    incident(tmp_path, 8, 5, 0)
    incident(tmp_path, 4, 1, 9000)
    for rank in (1, 5):  # of the second job and of the first
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(b"")
    assert named(tmp_path) == [[5], [1]]
