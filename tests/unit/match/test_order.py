"""Communicators used in orders that exclude each other."""

from __future__ import annotations

import pytest
from support.analysis import analyze_job, cover
from support.tracegen import Comm, Job

AR = "ncclAllReduce"


def _job(n: int, swapped: tuple[int, ...], wait: float, streams: int = 1) -> Job:
    """``n`` ranks that call X then Y in every step; some swap them in the last."""
    job = Job()
    xs = job.world(n)
    ys = [c.proc.comm("00000000000000bb", r, n) for r, c in enumerate(xs)]

    def call(c: Comm, at: float) -> None:
        c.proc.call(c, AR, at, stream=0 if c in xs or streams == 1 else 1)

    for step in range(10):
        for x, y in zip(xs, ys, strict=True):
            call(x, 1 + step)
            call(y, 1.5 + step)
    for r, (x, y) in enumerate(zip(xs, ys, strict=True)):
        one, two = (y, x) if r in swapped else (x, y)
        call(one, 11)
        call(two, 11.5)
    cover(job.procs, 11.5 + wait)
    return job


@pytest.mark.parametrize(("wait", "severity"), [(70, "notice"), (400, "error")])
def test_one_rank_that_swaps_them_on_one_stream_is_named(wait: float, severity: str) -> None:
    (f,) = analyze_job(_job(4, (2,), wait))
    assert (f.hang_type, f.severity, f.role) == (
        "cross_comm_order_inversion",
        severity,
        "root_cause",
    )
    assert [c["rank"] for c in f.named] == [2]
    assert "rank 2 called #10 of 00000000000000bb before #10" in f.details["summary"]


def test_a_tie_names_nobody() -> None:
    (f,) = analyze_job(_job(2, (1,), 400))
    assert (f.hang_type, f.role, f.named) == ("cross_comm_order_inversion", "root_cause", [])


def test_the_same_order_is_silent() -> None:
    assert analyze_job(_job(4, (), 400)) == []


def test_on_two_streams_it_is_no_finding() -> None:
    assert analyze_job(_job(4, (2,), 400, streams=2)) == []


def test_a_job_that_went_on_is_silent_but_for_the_lint() -> None:
    def job() -> Job:
        made = _job(4, (2,), 0)
        for p in made.procs:
            for c in p.comms:
                p.call(c, AR, 12.0 + 0.1 * c.id)
            p.cover(12.0, 20.0)
        return made

    assert analyze_job(job()) == []
    (f,) = analyze_job(job(), lint=True)
    assert (f.hang_type, f.severity, f.role) == ("cross_comm_order_inversion", "notice", "unknown")


def test_a_call_left_out_is_no_inversion() -> None:
    """All calls after it are shifted against those of the other communicator."""
    job = _job(4, (), 0)
    xs, ys = [[p.comms[i] for p in job.procs] for i in (0, 1)]
    for step in range(5):
        for r, (x, y) in enumerate(zip(xs, ys, strict=True)):
            if (r, step) != (2, 1):
                x.proc.call(x, AR, 12.0 + step)
            y.proc.call(y, AR, 12.5 + step)
    cover(job.procs, 400)
    (f,) = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert f.hang_type != "cross_comm_order_inversion"
    assert [c["rank"] for c in f.named] == [2]


def _named(*last: str) -> list[tuple[str, list[int], str]]:
    """Root causes: kind, who is named, and how sure.

    ``last``: the calls of each rank on X and Y at the end; of a capital letter the record
    is lost.
    """
    job = Job()
    xs = job.world(len(last))
    ys = [c.proc.comm("00000000000000bb", r, len(last)) for r, c in enumerate(xs)]
    for r, (x, y) in enumerate(zip(xs, ys, strict=True)):
        calls = "xy" * 10 + last[r]
        for i, c in enumerate(calls):
            comm = x if c in "xX" else y
            comm.proc.call(comm, AR, 1.0 + 0.5 * i, stream=0, lost=c.isupper())
        x.proc.cover(0.5, 10.5)
        x.proc.cover(20.0, 420.0, lost_kernel=sum(c.isupper() for c in calls))
    found = [f for f in analyze_job(job) if f.role == "root_cause"]
    return [(f.hang_type, [c["rank"] for c in f.named], f.details["confidence"]) for f in found]


INVERSION = "cross_comm_order_inversion"


@pytest.mark.parametrize("one", ["Xyxy", "xYxy", "xyXy"])
def test_lost_calls_of_others_do_not_hide_it(one: str) -> None:
    """Ordinals are given before anything is lost: nothing is shifted by a hole."""
    assert _named("xyxy", one, "yxxy", "xyxy", "xyxy") == [(INVERSION, [2], "reduced")]


@pytest.mark.parametrize("one", ["Yxxy", "yXxy"])
def test_a_lost_call_stands_at_no_known_place_among_those_beside_it(one: str) -> None:
    assert _named("xyxy", "xyxy", one, "xyxy") == []


def test_who_has_lost_the_last_call_may_have_made_it_in_either_order() -> None:
    found = _named("xy", "xy", "xY", "xy")
    assert INVERSION not in [kind for kind, *_ in found]
    assert _named("yx", "xy", "Yx", "yx", "yx") == [(INVERSION, [1], "reduced")]


def test_a_side_is_the_smaller_one_wherever_those_of_unknown_order_stand() -> None:
    assert _named("xyxy", "xyxy", "yxxy", "xYxy", "xyxy") == [(INVERSION, [2], "reduced")]
    assert _named("xyxy", "xYxy", "yxxy", "xYxy") == [(INVERSION, [], "reduced")]


def test_others_that_went_further_do_not_hide_it() -> None:
    assert _named("xy", "xyx", "yxx", "xy") == [(INVERSION, [2], "inferred")]


def test_who_swapped_them_may_have_gone_furthest() -> None:
    """It has made a call more on X, but after the swap its calls stand as the others' do."""
    assert _named("xyxyxy", "xyxyxy", "yxxyxyx", "xyxyxy") == [(INVERSION, [2], "inferred")]


def test_one_who_stands_behind_two_orders_is_a_consequence() -> None:
    """Rank 2 came to neither: on its device, or for its host, what is before does not end."""
    assert _named("yx", "xy", "y", "yx") == [(INVERSION, [], "inferred")]


def test_one_call_more_than_the_others_is_no_other_order() -> None:
    """Behind the last call on Y all have made as many of it, and that says nothing of X."""
    found = _named("xyxx", "xyxx", "xxyxx", "xyxx")
    assert INVERSION not in [kind for kind, *_ in found]
    assert [named for _, named, _ in found] == [[2]]


def test_others_that_made_both_tell_which_call_comes_first() -> None:
    """Rank 1 made Y without X, and rank 0, outside NCCL, has made X alone."""
    job = Job()
    xs = job.world(3)
    ys = [c.proc.comm("00000000000000bb", r, 3) for r, c in enumerate(xs)]
    for x, y in zip(xs, ys, strict=True):
        x.proc.call(x, AR, 1.0, stream=0)
        y.proc.call(y, AR, 1.5, stream=0)
    for r in (0, 2):
        xs[r].proc.call(xs[r], AR, 2.0, stream=0)
    for r in (1, 2):
        ys[r].proc.enter(ys[r], AR, 2.5, stream=0)
    cover(job.procs, 400)
    (f,) = [f for f in analyze_job(job) if f.role == "root_cause"]
    assert [c["rank"] for c in f.named] == [1]


def test_who_has_run_ahead_in_both_may_have_another_order_or_one_call_more() -> None:
    """Its calls of both are alike: that those after them are shifted is not excluded."""
    job = Job()
    xs = job.world(4)
    ys = [c.proc.comm("00000000000000bb", r, 4) for r, c in enumerate(xs)]
    for r, (x, y) in enumerate(zip(xs, ys, strict=True)):
        for c in (y, x) if r == 1 else (x, y):
            c.proc.call(c, AR, 10.0 + 0.1 * (c is (x if r == 1 else y)), stream=0)
        if r == 1:
            for i, c in enumerate((y, y, x, x)):
                c.proc.call(c, AR, 11.0 + i, stream=0)
    cover(job.procs, 400)
    (f,) = (f for f in analyze_job(job) if f.role == "root_cause")
    assert (f.hang_type, f.named) == ("cross_comm_order_inversion", [])
    assert "each stands behind another one in a stream" in f.details["summary"]


@pytest.mark.parametrize("streams", [1, 2])
def test_who_is_outside_is_not_named_where_the_other_could_only_come_behind_it(
    streams: int,
) -> None:
    """Rank 1 has queued a call on X; rank 0 has not come to it, and waits for rank 1 on Y.

    On one stream the call that rank 0 lacks would stand behind the one that rank 1 lacks, and
    the other way round: no way of going on ends it.
    """
    job = Job()
    xs = job.world(2)
    ys = [c.proc.comm("00000000000000bb", r, 2) for r, c in enumerate(xs)]
    for i in range(5):
        for x, y in zip(xs, ys, strict=True):
            x.proc.call(x, AR, 1 + i, stream=0)
            y.proc.call(y, AR, 1.5 + i, stream=streams - 1)
    xs[1].proc.call(xs[1], AR, 7, stream=0)
    ys[0].proc.call(ys[0], AR, 7, stream=streams - 1)
    send = {"peer": 1, "count": 1 << 20, "stream": streams - 1}
    xs[0].proc.group([(ys[0], "ncclSend", send), (ys[0], "ncclRecv", send)], 7.1, state="inside")
    xs[0].proc.cover(0.5, 400, main="syscall", syscall="poll")
    xs[1].proc.cover(0.5, 400, main="running")
    found = analyze_job(job)
    named = {c["rank"] for f in found if f.role == "root_cause" for c in f.named}
    assert named == (set() if streams == 1 else {1})
    roots = {f.hang_type for f in found if f.role == "root_cause"}
    assert roots == {"p2p_order_inversion" if streams == 1 else "collective_missing_enter"}
