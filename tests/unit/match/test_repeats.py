"""Lines that a trace holds twice, or in another order than they were written in."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import orjson
import pytest
from fuzz.corpus import traces
from support.analysis import cover, steps
from support.tracegen import Job

from nccluprobe.match.decode import DecodeCounts
from nccluprobe.match.finding import Finding
from nccluprobe.match.pipeline import Analysis
from nccluprobe.trace import scanner


@pytest.fixture(params=["native", "python"])
def native(request: pytest.FixtureRequest, native_dir: Any) -> ctypes.CDLL | None:
    found = scanner.load()
    assert found is not None
    return found if request.param == "native" else None


def judged(
    files: list[list[bytes]], native: ctypes.CDLL | None, size: int = 10_000
) -> tuple[list[Finding], DecodeCounts]:
    """Findings and counts of traces, each read in chunks of so many lines."""
    analysis = Analysis(native=native)
    analysis.open(enumerate(map(str, range(len(files)))))
    for source, lines in enumerate(files):
        for at in range(0, len(lines), size):
            last = at + size >= len(lines)
            data = b"".join(lines[at : at + size])
            analysis.feed(source, str(source), at + 1, data, last)
    analysis.scan()
    return analysis.matcher.book.all(), analysis.decoder.counts


def told(found: list[Finding]) -> list[tuple[Any, ...]]:
    return [(f.hang_type, f.severity, f.role, f.details["confidence"], f.named) for f in found]


def split(job: Job) -> list[list[bytes]]:
    return [p.data().splitlines(keepends=True) for p in job.procs]


def kinds(lines: list[bytes], *which: str) -> int:
    return sum(orjson.loads(line)["kind"] in which for line in lines)


@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_what_comes_twice_counts_once(native: ctypes.CDLL | None, size: int) -> None:
    """Collectives, groups, transfers, a split, initialisations and errors, each line twice."""
    files = [data.splitlines(keepends=True) for data in traces().values()]
    twice = [[x for line in lines for x in (line, line)] for lines in files]
    before, counts = judged(files, native, size)
    after, again = judged(twice, native, size)
    assert told(after) == told(before)
    assert (counts.repeated, counts.out_of_order) == (0, 0)
    assert again.repeated == sum(kinds(lines, "call", "coverage") for lines in files)
    assert (again.calls, again.out_of_order, again.first_repeated) == (counts.calls, 0, "0")


def hung() -> Job:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 40)
    for c in comms:
        if c.proc.rank != 1:
            c.proc.call(c, "ncclAllReduce", t)
    cover(job.procs, t + 400)
    return job


@pytest.mark.parametrize("seed", range(5))
def test_lines_out_of_order_take_nothing_from_a_finding(
    native: ctypes.CDLL | None, seed: int
) -> None:
    rng, files = random.Random(seed), split(hung())
    shuffled = [[lines[0], *rng.sample(lines[1:], len(lines) - 1)] for lines in files]
    before, counts = judged(files, native)
    after, mixed = judged(shuffled, native)
    assert told(after) == told(before)
    assert before[0].details["confidence"] == "observed"
    assert counts.out_of_order == 0
    assert mixed.out_of_order > 100
    assert mixed.repeated == 0


def test_old_coverage_is_no_silence_of_the_collector(native: ctypes.CDLL | None) -> None:
    """What was told long ago comes once more, in another piece of the file."""
    files = split(hung())
    covers = [line for line in files[1] if b'"kind":"coverage"' in line]
    late = [files[0], [*files[1], *covers[:20]], files[2]]
    before, _ = judged(files, native)
    after, counts = judged(late, native, len(files[1]))
    assert told(after) == told(before)
    assert (counts.out_of_order, counts.repeated) == (20, 0)


def test_threads_of_one_process_are_in_order(native: ctypes.CDLL | None) -> None:
    """A call that is long stands behind later ones of another thread."""
    job = Job()
    comms = job.world(2)
    for c in comms:
        for i in range(50):
            c.proc.call(c, "ncclAllReduce", 1 + i, dur=0.01, thread=7)
            c.proc.call(c, "ncclAllReduce", 1.1 + i, dur=1.0 + 0.5 * (i % 5), thread=8)
    cover(job.procs, 60)
    _, counts = judged(split(job), native, 10)
    assert (counts.repeated, counts.out_of_order) == (0, 0)
    assert counts.calls == 200


def test_calls_of_an_open_group_that_a_new_part_repeats_are_none_of_it(
    native: ctypes.CDLL | None,
) -> None:
    job = Job()
    (c,) = job.world(1)
    steps([c], 5)
    c.proc.call(c, "ncclSend", 3.0, peer=0, group=4, gpos=0)
    cover(job.procs, 20)
    (lines,) = split(job)
    call = next(line for line in lines if b'"ncclSend"' in line)
    again = orjson.dumps({**orjson.loads(call), "again": True}) + b"\n"
    at = lines.index(call) + 1
    _, counts = judged([[*lines[:at], lines[0], again, *lines[at:]]], native)
    assert (counts.repeated, counts.out_of_order) == (0, 0)


@pytest.mark.parametrize("field", ["t", "through"])
@pytest.mark.parametrize("by", [-(10**10), 10**10])
def test_a_damaged_coverage_line_silences_none_of_the_others(
    native: ctypes.CDLL | None, field: str, by: int
) -> None:
    files = split(hung())
    before, _ = judged(files, native)
    covers = [i for i, line in enumerate(files[1]) if b'"kind":"coverage"' in line]
    row = orjson.loads(files[1][covers[30]])
    files[1][covers[30]] = orjson.dumps({**row, field: row[field] + by}) + b"\n"
    for size in (1, 7, 10_000):
        after, counts = judged(files, native, size)
        assert told(after) == told(before)
        assert counts.out_of_order <= 1
