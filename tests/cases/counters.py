"""Reports of NCCL RAS, which read counters where a trace of the API sees nothing."""

from __future__ import annotations

from pathlib import Path

import orjson
from support.ras_report import ras_report
from support.tracegen import Job

from cases.kit import case


class Reports(Job):
    """What ``ncclras -f json`` answered at several times: one file each, and no trace."""

    def __init__(self, by_time: dict[str, dict[int, int]]) -> None:
        super().__init__()
        self.by_time = by_time

    def write(self, out: Path) -> Path:
        folder = out / "ras"
        folder.mkdir(parents=True)
        for time, counts in self.by_time.items():
            data = orjson.dumps(ras_report(time, counts), option=orjson.OPT_INDENT_2)
            (folder / f"{time.replace(':', '')}.json").write_bytes(data + b"\n")
        return folder


@case(
    "The counts of a tensor-parallel communicator are frozen apart, at 27911, 27890, 27872 and "
    "27860: only rank 3, the least, lacks the first call that is open; ranks 1 and 2 have come to "
    "it and wait for rank 3, as rank 0 does.",
    hang_type=("collective_missing_enter",),
    blamed=(3,),
    words=("Rank 3 (pid 1003 on node0) is 51 ncclAllReduce behind", "ranks 1-2 are behind, too"),
    reason=("rank_alive_but_not_entered",),
    confidence=("inferred",),
    report=("look at the stack of pid 1003 on node0",),
)
def counts_apart_inside_a_cuda_graph() -> Job:
    counts = {0: 27911, 1: 27890, 2: 27872, 3: 27860}
    return Reports({"06:00:00": counts, "06:06:40": counts})
