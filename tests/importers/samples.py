"""Writes docs/samples: a small made-up incident of each kind that is imported.

PYTHONPATH=.:tests python -m importers.samples
"""

from __future__ import annotations

import json
from pathlib import Path

from importers import test_inspector, test_nccl_log, test_ras
from importers.frgen import one_group

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "samples"
#: Folder -> the rank that is at fault.
CULPRITS = {"fr": 2, "ras": 2, "inspector": 3, "nccl-log": 2}


def write(top: Path) -> None:
    """All samples, a folder each."""
    folders = {name: top / name for name in CULPRITS}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    _dumps(folders["fr"])
    for t in (0, 120):  # two looks, two minutes apart
        content = test_ras.report(t, {0: 9, 1: 9, 2: 8, 3: 9})
        test_ras.write(folders["ras"] / f"{t}.json", content)
    records = {rank: mine[:6] for rank, mine in test_inspector.job().items()}
    records[3][4]["coll_perf"]["coll_msg_size_bytes"] = 8
    test_inspector.write(folders["inspector"], records)
    test_nccl_log.job(2, clock=True).merged(folders["nccl-log"] / "job.log")


def _dumps(folder: Path) -> None:
    """Rank 2 does not come to the fourth call of a data-parallel job."""
    job = one_group(4)
    for i in range(3):
        job.all("0", i * 0.1)
    job.all("0", 0.3, 2, done=False)
    for rank, r in job.ranks.items():
        text = json.dumps(r.dump(), indent=1)
        (folder / f"nccl_trace_rank_{rank}.json").write_text(text + "\n")


if __name__ == "__main__":
    write(FOLDER)
