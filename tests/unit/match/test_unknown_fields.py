"""Fields of a later version are kept from harm and counted."""

from __future__ import annotations

from support.analysis import Run, cover, steps
from support.tracegen import Job


def _job() -> Job:
    job = Job()
    steps(job.world(2), 5)
    job.procs[0].phase(1.0, "eval", every=5, step=3)
    cover(job.procs, 10)
    return job


def _counted(job: Job) -> dict[str, int]:
    run = Run(job)
    run.all()
    assert run.scan() == []
    return dict(run.analysis.decoder.counts.unknown_fields)


def test_what_is_known_is_not_counted() -> None:
    assert _counted(_job()) == {}


def test_new_fields_are_counted_by_kind() -> None:
    job = _job()
    for _, _, line in job.procs[1].lines:
        if line["kind"] in ("coverage", "comm"):
            line["novel"] = [1, {"x": None}]
    calls = [line for _, _, line in job.procs[0].lines if line["kind"] == "call"]
    for line in calls[1::2]:
        line["newer"] = 1
    found = _counted(job)
    lines = [line["kind"] for _, _, line in job.procs[1].lines]
    assert found == {
        "coverage.novel": lines.count("coverage"),
        "comm.novel": 1,
        "call.newer": len(calls[1::2]),
    }
