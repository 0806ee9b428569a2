"""Where ranks stand in groups of which their dumps show no call."""

from __future__ import annotations

import pickle
from pathlib import Path

from importers.frgen import Job
from importers.reading import Result

TENSOR = "TENSOR_MODEL_PARALLEL_GROUP"


def test_who_made_no_call_has_the_first_one_before_it(tmp_path: Path) -> None:
    """The first call has number 1, and PyTorch writes -1 of a group without calls."""
    job = Job({"0": ("default_pg", [0, 1, 2, 3]), "1": (TENSOR, [0, 1]), "2": (TENSOR, [2, 3])})
    job.ranks[0].call("1", 0.0, done=False)
    job.all("2", 0.0)
    job.all("0", 1.0, 0, 1, done=False)
    for rank, recorder in job.ranks.items():
        dump = recorder.dump()
        for status in dump["pg_status"].values():
            status.update({key: number or -1 for key, number in status.items()})
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, 2))
    result = Result(tmp_path)
    assert result.blamed == {1}
    assert {f.comm_seq for f in result.findings} == {1}
