"""Reads traces of made-up jobs from files, as the analysis does."""

from __future__ import annotations

from pathlib import Path

from nccluprobe.match.options import Options
from nccluprobe.match.pipeline import Analysis
from nccluprobe.trace.reader import TraceReader
from support.analysis import cover, steps
from support.tracegen import Job


def hung_job() -> Job:
    """Four ranks, of which rank 3 does not come to call 42."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 42)
    steps(comms[:3], 1, start=t)
    cover(job.procs, t + 61)
    return job


def read_all(reader: TraceReader, analysis: Analysis) -> None:
    """Feed all that is there now."""
    reader.discover(force=True)
    analysis.open(reader.names())
    for c in reader.poll():
        through = analysis.feed(c.source, c.path, c.first_line, c.data, c.caught_up)
        reader.at_time(c.source, through)


def analyze_dir(*folders: Path, run_id: str | None = None) -> tuple[Analysis, TraceReader]:
    """Read folders once, and judge."""
    reader, analysis = TraceReader(folders, run_id), Analysis(Options())
    read_all(reader, analysis)
    analysis.scan()
    return analysis, reader


def verdict(analysis: Analysis) -> list[tuple[str, int | None, list[int]]]:
    """Kind, comm_seq and missing ranks of each finding."""
    return [
        (f.hang_type, f.comm_seq, f.details["missing_comm_ranks"])
        for f in analysis.matcher.book.all()
    ]


#: What ``verdict`` says of ``hung_job``.
EXPECTED = [("collective_missing_enter", 42, [3])]
