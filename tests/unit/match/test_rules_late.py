"""Rules of places among calls and of numbers that no other test would miss."""

from __future__ import annotations

import numpy as np
import pytest
from support.analysis import Run, cover, steps
from support.tracegen import Job

from nccluprobe.match import model as m
from nccluprobe.match.align import ALIGNED, AMBIGUOUS, align
from nccluprobe.match.counters import FUNCTIONS, Stream
from nccluprobe.match.signature import UNCOUNTED

HASH = "00000000000000aa"


def stream(functions: list[int], before: int) -> Stream:
    """Calls of one rank; ``before``: the first counter at the first of them."""
    n = len(functions)
    return Stream(
        shape=np.arange(1, n + 1, dtype=np.int32),
        function=np.array(functions, np.int32),
        seq=np.full(n, m.NO_SEQ, np.int64),
        t=np.arange(n, dtype=np.int64),
        before=(before,) + (0,) * (FUNCTIONS - 1),
        before_sure=True,
    )


@pytest.mark.parametrize("odd", [None, 0, 1])
def test_counters_do_not_place_beyond_calls_that_are_not_counted(odd: int | None) -> None:
    """The streams do not overlap: how many uncounted calls lie between is not known."""
    calls = [[0, 0, 0, 0], [0, 0, 0, 0]]
    if odd is not None:
        calls[odd][2] = UNCOUNTED
    found = align(stream(calls[0], 0), stream(calls[1], 10))
    assert (found.shift, found.base) == ((10, ALIGNED) if odd is None else (0, AMBIGUOUS))


@pytest.mark.parametrize("grouped", [True, False])
def test_counters_are_sure_where_a_group_was_seen_from_its_start(grouped: bool) -> None:
    """Else a group that was open may hold calls that the counters miss."""
    job = Job()
    first, late = job.proc(0), job.proc(1)
    a = first.comm(HASH, 0, 2)
    steps([a], 20)
    seqs = [0] * (FUNCTIONS - 1) + [12]
    b = late.comm(HASH, 1, 2, t=2.1, learnt="struct", seqs=seqs, base_seq=12)
    if grouped:
        late.group([(b, "ncclAllReduce", {})] * 8, 2.2)
    else:
        steps([b], 8, start=2.2, step=0.05)
    steps([a], 1, start=4)
    cover(job.procs, 400)
    run = Run(job)
    run.all()
    run.scan()
    (comm,) = run.analysis.matcher.comms.values()
    assert comm.endpoints[1].base == ("aligned" if grouped else "ambiguous")
    causes = [f for f in run.analysis.matcher.book.all() if f.role == "root_cause"]
    assert [who["rank"] for f in causes for who in f.named] == ([1] if grouped else [])


@pytest.mark.parametrize("counters", [True, False])
def test_slots_are_closed_as_soon_as_a_late_member_has_its_place(counters: bool) -> None:
    """With counters at once; by the calls alone, when enough of them fit in one way only."""
    job = Job()
    early, late = job.proc(0), job.proc(1)
    a = early.comm(HASH, 0, 2)
    seqs = [0] * (FUNCTIONS - 1) + [100]
    told = {"seqs": seqs, "base_seq": 100} if counters else {}
    b = late.comm(HASH, 1, 2, t=1.995, learnt="struct", **told)
    for i in range(200):
        for c in (a, b) if i >= 100 else (a,):
            seq = {"seq": i} if counters else {}
            c.proc.call(c, "ncclAllReduce", 1 + 0.01 * i, count=1 + i**3 % 1009, **seq)
    cover(job.procs, 5)
    run = Run(job)
    run.all()
    run.analysis.matcher.settle()
    (comm,) = run.analysis.matcher.comms.values()
    assert comm.endpoints[1].base == ("exact" if counters else "aligned")
    assert comm.closed == 200


@pytest.mark.parametrize("calls", [10, 100])
def test_a_late_member_is_placed_by_enough_calls_and_held_while_its_place_is_a_guess(
    calls: int,
) -> None:
    """All calls are alike: more of them may tell, so no slot is closed by the guess."""
    job = Job()
    early, late = job.proc(0), job.proc(1)
    a = early.comm(HASH, 0, 2)
    b = late.comm(HASH, 1, 2, t=1.5, learnt="struct")
    steps([a], calls, start=1, step=0.01)
    steps([b], calls, start=2, step=0.01)
    cover(job.procs, 4)
    run = Run(job)
    run.all()
    run.analysis.matcher.settle()
    (comm,) = run.analysis.matcher.comms.values()
    assert comm.endpoints[1].base == ("unknown" if calls == 10 else "ambiguous")
    assert (comm.closed, comm.holding) == (0, True)
