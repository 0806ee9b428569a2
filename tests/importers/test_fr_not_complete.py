"""Calls that all have made and that do not end, by what stands before what on each rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from importers.frgen import Job
from importers.reading import Result

TENSOR, PIPE = "TENSOR_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP"


def test_times_follow_the_order_in_which_calls_were_recorded(tmp_path: Path) -> None:
    """Two calls that threads of one rank made at once may have their times the other way."""
    job = Job({"0": ("default_pg", [0, 1, 2]), "1": (TENSOR, [0, 1]), "2": (PIPE, [1, 2])})
    job.all("0", 0.0)
    job.ranks[1].call("1", 1.0, done=False)
    job.ranks[1].call("2", 1.0 - 1e-6, done=False)
    job.ranks[2].call("2", 1.0, done=False)
    result = Result(job.write(tmp_path))
    assert result.blamed == {0}
    assert [f.role for f in result.findings] == ["root_cause"]


def _posted(folder: Path, *, behind: bool) -> Result:
    """A send and its receive that are both there, and do not end."""
    job = Job({"0": ("default_pg", [0, 1, 2]), "1": (PIPE, [0, 1]), "2": (TENSOR, [1, 2])})
    job.all("0", 0.0)
    for rank, peer in ((0, 1), (1, 0)):
        job.ranks[rank].transfer("1", 1.0, rank == 0, peer, done=False)
    job.all("2", 1.1, done=False)
    if behind:
        job.all("0", 1.2, 0, done=False)
    return Result(job.write(folder))


@pytest.mark.parametrize("behind", [False, True])
def test_a_send_and_its_receive_do_not_end(behind: bool, tmp_path: Path) -> None:
    """Nobody is missing, whether all that is behind them has been made or not."""
    result = _posted(tmp_path, behind=behind)
    told = [f for f in result.findings if f.role == "root_cause"]
    assert [f.hang_type for f in told] == ["collective_all_ranks_stuck"]
    assert (told[0].severity, told[0].named, told[0].details["api"]) == ("error", [], "ncclSend")
    assert "both posted ncclSend #0 from rank 0 to rank 1" in told[0].details["summary"]
