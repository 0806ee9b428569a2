"""What a report says is lost, where the trace does not say all of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.analysis import cover, steps
from support.tracegen import UNIX, Host, Job, S
from typer.testing import CliRunner

from nccluprobe.cli.main import build


def coverage_text(out: Path) -> str:
    """The report from "Coverage" on, with single spaces."""
    words = ["analyze", str(out)]
    text = " ".join(CliRunner().invoke(build(words), words).stdout.split())
    return text[text.index("Coverage:") :]


def write(out: Path, closed: int, skipped: int = 0, ago: float = 3600) -> None:
    """Two ranks whose last line is so old, about, s; the first ``closed`` traces are closed."""
    job = Job()
    skew = (time.time_ns() - UNIX) / S - ago - 6
    comms = job.world(2, host=Host(skew=skew))
    t = steps(comms, 20)
    cover(job.procs, t + 2)
    job.procs[0].coverage(t + 3, skipped_disk=skipped)
    for p in job.procs[:closed]:
        p.end(t + 3, "detached")
    job.write(out)


def test_of_closed_traces_the_count_is_all(tmp_path: Path) -> None:
    write(tmp_path, 2, skipped=7)
    assert "40 calls; 7 events lost." in coverage_text(tmp_path)


@pytest.mark.parametrize("closed", [0, 1])
def test_of_a_trace_without_its_closing_line_nobody_knows_what_was_lost(
    tmp_path: Path, closed: int
) -> None:
    write(tmp_path, closed)
    text = coverage_text(tmp_path)
    assert "0 events lost as far as was written, and what was lost after that is not known" in text
    those = ("traces of 2 processes have", "trace of 1 process has")[closed]
    assert f"the {those} no closing line" in text


def test_a_trace_that_is_being_written_has_lost_what_it_says(tmp_path: Path) -> None:
    write(tmp_path, 0, skipped=3, ago=0.5)
    assert "40 calls; 3 events lost." in coverage_text(tmp_path)
