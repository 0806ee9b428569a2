"""Signatures are forgotten when nothing refers to them, and no verdict changes by that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.analysis import Run, cover
from support.tracegen import Comm, Job

from nccluprobe.match import signature
from nccluprobe.match.matcher import Matcher
from nccluprobe.match.p2p_pair import Wires
from nccluprobe.match.pipeline import Analysis
from nccluprobe.match.signature import Signature, SignatureTable

HANG = 120.0


def _signature(i: int) -> Signature:
    return Signature("ncclAllReduce", 1000 + i, "float32", "sum")


def _broken_job() -> Job:
    """Counts that never come again, sends and receives, groups; rank 1 is late, rank 2 stops."""
    job = Job()
    comms = job.world(4)
    for i in range(300):
        t = 1.0 + i * 0.05
        for r, c in enumerate(comms):
            if i == 299 and r == 2:
                continue
            late = 7.0 if r == 1 and i > 150 else 0.0
            c.proc.call(c, "ncclAllReduce", t + late, count=1000 + i)
            send = (c, "ncclSend", {"peer": (r + 1) % 4, "count": 5 + i})
            c.proc.group([send, (c, "ncclRecv", {"peer": (r - 1) % 4, "count": 5 + i})], t + late)
    cover(job.procs, HANG)
    return job


def _verdict(job: Job, forget: bool) -> tuple[list[object], int]:
    run = Run(job)
    matcher = run.analysis.matcher
    for t in range(0, int(HANG), 8):
        run.until(float(t))
        matcher.settle()
        if forget:
            matcher.forget_signatures()
        if t % 16:
            run.scan()
    run.all()
    run.scan()
    found = [(f.id, f.hang_type, f.role, f.culprits, f.details) for f in matcher.book.all()]
    return found, len(run.analysis.table)


def test_an_id_that_is_held_stays_and_another_is_given_anew() -> None:
    table = SignatureTable()
    ids = [table.intern(_signature(i)) for i in range(10)]
    table.keep(np.array(ids[3:5]))
    assert [table[i] for i in ids[3:5]] == [_signature(3), _signature(4)]
    assert table.intern(_signature(3)) == ids[3]
    new = [table.intern(_signature(100 + i)) for i in range(8)]
    assert sorted(new) == sorted(set(ids) - set(ids[3:5]))
    assert [table[i] for i in new] == [_signature(100 + i) for i in range(8)]
    assert table.epoch == 1


def test_shapes_and_counters_go_with_the_signature() -> None:
    table = SignatureTable()
    a = table.intern(Signature("ncclAllReduce", 0, "float32", "sum"))
    b = table.intern(_signature(1))
    assert table.is_zero(a)
    table.keep(np.array([b]))
    new = table.intern(Signature("ncclSend", 7, "float32"))
    assert new == a
    assert not table.is_zero(new) and not table.any_zero
    other = table.intern(Signature("ncclAllReduce", 1001, "float32", "max"))
    shapes = table.shapes(np.array([b, other, new], np.int32)).tolist()
    assert shapes[0] == shapes[1] != shapes[2]


def test_sizes_of_an_id_that_is_given_anew() -> None:
    table = SignatureTable()
    wires = Wires(table)
    a = table.intern(Signature("ncclSend", 10, "float32"))
    b = table.intern(Signature("ncclSend", 20, "float32"))
    assert wires.size(np.array([a, b])).tolist() == [40, 80]
    table.keep(np.array([b]))
    assert wires.size(np.array([b])).tolist() == [80]
    c = table.intern(Signature("ncclRecv", 30, "int8"))
    assert c == a
    assert wires.size(np.array([c, b, 0])).tolist() == [30, 80, -1]


def test_the_table_stays_small_when_no_count_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signature, "MANY", 500)
    monkeypatch.setattr("nccluprobe.match.pipeline._SETTLE_LINES", 100)
    job = Job()
    comms = job.world(2)
    for i in range(5000):
        for c in comms:
            c.proc.call(c, "ncclAllReduce", 1.0 + i * 0.01, count=1000 + i)
    cover(job.procs, 60.0)
    analysis = Analysis()
    lines = [p.data().splitlines() for p in job.procs]
    analysis.open([(i, p.name) for i, p in enumerate(job.procs)])
    for at in range(0, max(map(len, lines)), 50):
        for i, mine in enumerate(lines):
            analysis.feed(i, "x", at + 1, mine[at : at + 50], at + 50 >= len(mine))
    assert analysis.scan() == []
    assert len(analysis.table) < 1000


def _then(comms: list[Comm], start: float, **more: int) -> None:
    """So many calls that the newest ones of a rank do not reach back to what was before."""
    for i in range(300):
        for c in comms:
            c.proc.call(c, "ncclAllReduce", start + i * 0.01, **more)
            if c.id == 0 and c.proc.rank in (0, 1):
                api = ("ncclSend", "ncclRecv")[c.proc.rank]
                c.proc.call(c, api, start + i * 0.01, peer=1 - c.proc.rank, **more)


def _zero_job() -> Job:
    """A call of count 0 explains, much later, that its rank lacks one."""
    job = Job()
    comms = job.world(4)
    for c in comms:
        c.proc.call(c, "ncclAllReduce", 1.0, count=0 if c is comms[3] else 1024)
    _then(comms, 2.0)
    return job


def _late_job() -> Job:
    """A rank was late at one call."""
    job = Job()
    comms = job.world(4)
    for c in comms:
        c.proc.call(c, "ncclAllReduce", 1.0)
        c.proc.call(c, "ncclAllReduce", 51.0 if c is comms[3] else 2.0, count=77)
    _then(comms, 52.0)
    return job


def _types_job() -> Job:
    """A send and its receive had different types."""
    job = Job()
    a, b = comms = job.world(2)
    a.proc.call(a, "ncclSend", 1.0, peer=1, count=31, datatype="int32")
    b.proc.call(b, "ncclRecv", 1.0, peer=0, count=31)
    _then(comms, 2.0)
    return job


def _open_group_job() -> Job:
    """Calls of a group that ends late differ from those of the other ranks."""
    job = Job()
    comms = job.world(3)
    for r, c in enumerate(comms):
        count = 31 if r == 0 else 32
        calls: list[tuple[Comm, str, dict[str, Any]]] = [(c, "ncclAllReduce", {"count": count})]
        if r < 2:
            api = ("ncclSend", "ncclRecv")[r]
            calls.append((c, api, {"peer": 1 - r, "count": count}))
        c.proc.group(calls, 1.0, state="open" if r == 0 else "ended")
    _then(comms, 2.0, thread=1)
    first = comms[0].proc
    first.call(None, "ncclGroupEnd", 60.0, group=first.groups, gpos=2)
    return job


@pytest.mark.parametrize("make", [_zero_job, _late_job, _types_job, _open_group_job])
def test_no_finding_says_something_else(make: Callable[[], Job]) -> None:
    job = make()
    cover(job.procs, HANG)
    kept, _ = _verdict(job, False)
    forgotten, _ = _verdict(job, True)
    assert kept and forgotten == kept


def test_no_verdict_changes() -> None:
    job = _broken_job()
    kept, many = _verdict(job, False)
    forgotten, few = _verdict(job, True)
    assert kept and forgotten == kept
    assert many > 600 and few < many - 100


def test_a_matcher_that_knows_nothing_forgets_all() -> None:
    matcher = Matcher()
    matcher.table.intern(_signature(1))
    matcher.forget_signatures()
    assert len(matcher.table) == 1  # a call that was lost
