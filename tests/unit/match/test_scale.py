"""A large job in partial view: memory stays flat, a stall is one finding."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from support.tracegen import MONO, UNIX, Job, S

from nccluprobe.match import model as m
from nccluprobe.match.matcher import Matcher
from nccluprobe.match.pipeline import Analysis
from nccluprobe.match.signature import Signature

NRANKS, TRACED, CALLS = 512, 64, 1_000_000
HASH = "00000000000000aa"
PER_RANK = CALLS // TRACED
STEP = 4_000_000  # ns between calls
BLOCK = 125  # calls per chunk

_CALL = (
    b'{"kind":"call","api":"ncclAllReduce","t":%d,"thread":%d,"dur":8000,"rc":0,"comm":0,'
    b'"idx":%d,"ord":%d,"count":%d,"datatype":"float32","op":"sum","stream":0}'
)
_COVERAGE = (
    b'{"kind":"coverage","t":%d,"through":%d,"captured":%d,"lost_kernel":0,"lost_queue":0,'
    b'"overwritten":0,"skipped_disk":0,"blind":0,"in_flight":0,"alive":true,"main":"running",'
    b'"last_call_age":1}'
)


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def calls(rank: int, start: int, n: int) -> list[bytes]:
    out = [
        _CALL % (MONO + S + i * STEP + rank * 100, 1000 + rank, i, i, 1024 + i % 7)
        for i in range(start, start + n)
    ]
    t = MONO + S + (start + n) * STEP
    out.append(_COVERAGE % (t, t, start + n))
    return out


@pytest.mark.slow
def test_512_ranks_64_traced_a_million_calls() -> None:
    job = Job()
    job.world(TRACED, comm_hash=HASH, nranks=NRANKS)
    analysis = Analysis()
    analysis.open([(i, p.name) for i, p in enumerate(job.procs)])
    for i, p in enumerate(job.procs):
        analysis.feed(i, p.name, 1, p.data().splitlines(), False)
    early = 0
    spent = 0.0
    for start in range(0, PER_RANK, BLOCK):
        chunks = [calls(r, start, BLOCK) for r in range(TRACED)]
        began = time.perf_counter()
        for r, chunk in enumerate(chunks):
            analysis.feed(r, job.procs[r].name, 1, chunk, True)
        if start % 1000 == 0:
            now = UNIX + S + (start + BLOCK) * STEP
            assert analysis.scan(now) == []
        spent += time.perf_counter() - began
        if start == PER_RANK // 5 // BLOCK * BLOCK:
            early = rss()
    grown = rss() - early
    print(
        f"\n{CALLS / spent:,.0f} lines/s from JSON to findings, {NRANKS} ranks, {TRACED} traced; "
        f"RSS grew by {grown / 1e6:.1f} MB over the last 80 %"
    )
    assert grown < 16_000_000
    assert analysis.matcher.calls == CALLS
    (comm,) = analysis.matcher.comms.values()
    assert comm.closed > PER_RANK - 2000  # all but the last seconds

    # Then one rank stalls.
    for r in range(TRACED):
        chunk = [] if r == 17 else calls(r, PER_RANK, 1)
        t = MONO + S + PER_RANK * STEP + 90 * S
        analysis.feed(r, job.procs[r].name, 1, [*chunk, _COVERAGE % (t, t, PER_RANK)], True)
    (finding,) = analysis.scan(UNIX + S + PER_RANK * STEP + 90 * S)
    assert finding.hang_type == "collective_missing_enter"
    assert finding.comm_seq == PER_RANK
    assert finding.details["missing_comm_ranks"] == [17]


@pytest.mark.slow
def test_rows_per_second_of_decoded_batches() -> None:
    ranks, block, blocks = 64, 1000, 40
    matcher = Matcher()
    sigs = np.array(
        [matcher.table.intern(Signature("ncclAllReduce", 1024 + i % 7)) for i in range(block)],
        np.int32,
    )
    for r in range(ranks):
        key = m.ProcessKey("b", r, 1)
        matcher.feed(
            [
                m.ProcessInfo(r, key, "run", "host", rank=r),
                m.CommInfo(r, 0, 0, HASH, 0, r, ranks, "init"),
            ]
        )
    zeros = np.zeros(block, np.int64)
    batches = []
    for b in range(blocks):
        order = np.arange(b * block, (b + 1) * block, dtype=np.int64)
        t = UNIX + order * STEP
        for r in range(ranks):
            batches.append(
                m.Batch(
                    r, 0, order, order, sigs, t + r, t + r + 8000, zeros.astype(np.int32), zeros,
                    zeros,
                )
            )  # fmt: skip
    began = time.perf_counter()
    for i, batch in enumerate(batches, 1):
        matcher.feed([m.Activity(batch.source, batch.t_enter, batch.t_exit), batch])
        if i % ranks == 0:
            matcher.settle()
    spent = time.perf_counter() - began
    rate = ranks * block * blocks / spent
    print(f"\n{rate:,.0f} rows/s of decoded healthy batches, {ranks} ranks")
    (comm,) = matcher.comms.values()
    assert comm.closed == block * blocks
    assert rate > 2_000_000
