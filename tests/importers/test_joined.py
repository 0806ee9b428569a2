"""Sources of one job that share a communicator's hash: what each alone cannot tell."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.analysis import cover, steps
from support.tracegen import UNIX, Job

from importers.test_ras import report, write
from nccluprobe.cli.judging import Session
from nccluprobe.importers.files import find
from nccluprobe.match.finding import Finding
from nccluprobe.match.options import Options

HASH = "00000000000000aa"
CALLS = 20


def traces(folder: Path) -> Path:
    """Ranks 0, 1 and 3 wait in call 20 for rank 2, whose node is not traced."""
    job = Job()
    comms = [job.proc(r).comm(HASH, r, 4) for r in (0, 1, 3)]
    steps(comms, CALLS + 1)
    cover(job.procs, 450)
    return job.write(folder)


def reports(folder: Path, count: int, comm_hash: str = HASH) -> list[Path]:
    """What RAS told twice of rank 2, whose node alone answered."""
    made = []
    for t in (30, 440):
        content = report(0, {2: count})
        content["timestamp"] = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(UNIX // 10**9 + t))
        (comm,) = content["communicators"]
        comm["hash"] = f"0x{comm_hash}"
        (rank,) = comm["ranks"]
        rank["host"], rank["pid"] = "node7", 1002
        for name in rank["collective_counts"]:
            rank["collective_counts"][name] = count if name == "AllReduce" else 0
        made.append(write(folder / f"ras{t}.json", content))
    return made


def judged(paths: Sequence[Path]) -> list[Finding]:
    session = Session(find(paths, None), Options(), None, as_json=True)
    session.load()
    session.analysis.scan(None)
    return session.analysis.matcher.book.all()


def blamed(found: list[Finding]) -> list[tuple[str, int, int | None]]:
    return [(n["host"], n["pid"], n["rank"]) for f in found for n in f.named]


def test_a_trace_and_a_report_of_ras_name_together_who_neither_names_alone(tmp_path: Path) -> None:
    run, ras = traces(tmp_path), reports(tmp_path, CALLS)
    assert blamed(judged([run])) == []
    assert judged(ras) == []
    found = judged([run, *ras])
    assert blamed(found) == [("node7", 1002, 2)]
    (f,) = [f for f in found if f.named]
    assert (f.hang_type, f.severity, f.role) == ("collective_missing_enter", "error", "root_cause")
    assert f.details["missing_rank_status"][0]["behind"] == {"ncclAllReduce": 1}
    assert f.details["entered_comm_ranks"] == [0, 1, 3]
    assert f.details["positions"]["0"]["source"] == "trace"


@pytest.mark.parametrize(("count", "comm_hash"), [(CALLS + 1, HASH), (CALLS, "00000000000000bb")])
def test_who_came_or_is_of_another_communicator_is_not_named(
    tmp_path: Path, count: int, comm_hash: str
) -> None:
    assert blamed(judged([traces(tmp_path), *reports(tmp_path, count, comm_hash)])) == []
