"""Positions without events: ``inspect`` lines as evidence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
from support.analysis import Run, cover
from support.looks import comm, look
from support.tracegen import Job

from nccluprobe.match.finding import Finding
from nccluprobe.match.options import Options
from nccluprobe.match.pipeline import Analysis

A, B = "00000000000000aa", "00000000000000bb"
AR = "ncclAllReduce"


def found(lines: list[dict[str, Any]], job: Job | None = None) -> list[Finding]:
    run = Run(job or Job(), Options())
    run.all()
    raw = [orjson.dumps(line) for line in lines]
    analysis: Analysis = run.analysis
    analysis.feed(len(run.lines), "looks.jsonl", 1, raw, True)
    analysis.scan()
    assert not analysis.decoder.counts.bad_lines, analysis.decoder.counts.examples
    return analysis.matcher.book.all()


def hung(t: float) -> list[dict[str, Any]]:
    """facts/gpu.md: rank 1 never comes to the default group; the other group is level."""
    return [
        look(0, t, [comm(A, 0, 2, AllReduce=13), comm(B, 0, 2, Broadcast=3)]),
        look(1, t, [comm(A, 1, 2, AllReduce=10), comm(B, 1, 2, Broadcast=3)]),
    ]


def test_one_look_at_a_hung_job_says_who_is_behind_and_by_how_much() -> None:
    (f,) = found(hung(10))
    assert (f.hang_type, f.comm_uid_hash, f.comm_seq) == ("collective_missing_enter", A, 10)
    assert f.details["missing_comm_ranks"] == [1]
    assert f.details["missing_rank_status"][0]["behind"] == {AR: 3}
    assert (f.details["api"], f.details["evidence"]) == (AR, "inspect")
    assert (f.severity, f.role, f.details["confidence"]) == ("notice", "unknown", "inferred")
    assert "one look" in f.details["note"]


def test_two_looks_show_that_nobody_moves() -> None:
    (f,) = found(hung(10) + hung(100))
    assert (f.severity, f.role, f.details["waited_s"]) == ("notice", "root_cause", 90)
    assert [(who["pid"], who["rank"]) for who in f.named] == [(hung(10)[1]["pid"], 1)]
    (f,) = found(hung(10) + hung(400))
    assert (f.severity, f.role) == ("error", "root_cause")


def test_only_those_that_lack_the_first_open_call_are_to_blame() -> None:
    """Ranks 2 and 3 lack calls of one function each; rank 1 lacks less than rank 2."""
    counts = [(9, 9), (8, 9), (6, 9), (9, 7)]
    lines = [
        look(r, t, [comm(A, r, 4, AllReduce=x, AllGather=y)])
        for t in (10.0, 400.0)
        for r, (x, y) in enumerate(counts)
    ]
    (f,) = found(lines)
    assert [who["rank"] for who in f.named] == [2, 3]
    assert f.details["missing_comm_ranks"] == [2, 3]
    assert f.details["entered_comm_ranks"] == [0, 1]
    assert "rank 1 is behind, too, but has made calls that ranks 2-3" in f.details["summary"]


def test_a_tracer_that_came_to_the_hung_job_shows_that_nobody_moves() -> None:
    job = Job()
    for r in range(2):
        job.proc(r)
    cover(job.procs, 400)
    (f,) = found(hung(10), job)
    assert (f.severity, f.role, f.details["missing_comm_ranks"]) == ("error", "root_cause", [1])
    assert f.job is not None


def test_counters_that_move_say_nothing() -> None:
    lines = [
        look(0, 10, [comm(A, 0, 2, AllReduce=13, moving=True)]),
        look(1, 10, [comm(A, 1, 2, AllReduce=10)]),
    ]
    assert found(lines) == []


def test_level_ranks_say_nothing() -> None:
    lines = [look(r, 10, [comm(A, r, 2, AllReduce=13)]) for r in range(2)]
    assert found(lines) == []


def test_a_rank_inside_the_call_has_entered_it() -> None:
    lines = [
        look(0, 10, [comm(A, 0, 2, AllReduce=13)]),
        look(1, 10, [comm(A, 1, 2, AllReduce=12)], inside=AR),
    ]
    assert found(lines) == []


def test_two_communicators_with_one_hash_are_not_told_apart() -> None:
    lines = [
        look(0, 10, [comm(A, 0, 2, AllReduce=13), comm(A, 0, 2, AllReduce=1)]),
        look(1, 10, [comm(A, 1, 2, AllReduce=10)]),
    ]
    assert found(lines) == []


def test_a_rank_that_waits_elsewhere_is_not_the_cause() -> None:
    """Rank 2 left; rank 1 waits for it on B, and so rank 0 for rank 1 on A."""
    lines = []
    for t in (10.0, 500.0):
        lines += [
            look(0, t, [comm(A, 0, 2, AllReduce=8)]),
            look(1, t, [comm(A, 1, 2, AllReduce=7), comm(B, 0, 2, AllReduce=4)]),
            look(2, t, [comm(B, 1, 2, AllReduce=3)]),
        ]
    a, b = sorted(found(lines), key=lambda f: f.comm_uid_hash or "")
    assert (b.role, b.details["missing_rank_status"][0]["global_rank"]) == ("root_cause", 2)
    assert (a.role, a.downstream_of) == ("downstream", b.id)
    assert a.details["reason"] == "rank_waiting_elsewhere"


def test_a_look_at_a_rank_without_a_trace_is_compared_with_the_traces_of_others() -> None:
    job = Job()
    for r in range(2):
        c = job.proc(r).comm(A, r, 3)
        for i in range(20):
            c.proc.call(c, AR, 1 + i * 0.1)
    cover(job.procs, 400)
    (f,) = found([look(2, 100, [comm(A, 2, 3, AllReduce=17)])], job)
    assert (f.details["missing_comm_ranks"], f.comm_seq) == ([2], 17)
    assert f.details["entered_comm_ranks"] == [0, 1]
    assert f.details["missing_rank_status"][0]["behind"] == {AR: 3}
    assert f.details["positions"]["0"]["source"] == "trace"


def test_what_the_traces_show_is_said_once() -> None:
    job = Job()
    comms = job.world(2)
    for c in comms:
        for i in range(20 - 2 * (c.proc.rank or 0)):
            c.proc.call(c, AR, 1 + i * 0.1)
    cover(job.procs, 400)
    lines = [look(r, 100, [comm(A, r, 2, AllReduce=20 - 2 * r)]) for r in range(2)]
    (f,) = found(lines, job)
    assert f.details.get("evidence") is None


def test_what_the_traces_show_of_a_job_that_is_traced_in_part_is_said_once() -> None:
    job = Job()
    for c in job.world(2, nranks=3):
        for i in range(20 - 2 * (c.proc.rank or 0)):
            c.proc.call(c, AR, 1 + i * 0.1)
    cover(job.procs, 400)
    (f,) = found([look(2, 100, [comm(A, 2, 3, AllReduce=20)])], job)
    assert (f.details["missing_comm_ranks"], f.details.get("evidence")) == ([1], None)


def test_analyze_reads_a_folder_of_looks(tmp_path: Path) -> None:
    (tmp_path / "node0.jsonl").write_bytes(
        b"".join(orjson.dumps(x) + b"\n" for x in hung(10) + hung(400))
    )
    done = subprocess.run(
        [sys.executable, "-m", "nccluprobe.cli.main", "analyze", str(tmp_path), "--run-id", "x"],
        capture_output=True,
        text=True,
        check=False,
    )
    text = " ".join(done.stdout.split())
    assert "Rank 1 (pid 1001 on node0) is 3 ncclAllReduce behind on communicator" in text, (
        done.stdout + done.stderr
    )
    assert (
        "Coverage: 1 job, 2 processes, 4 ranks of 2 communicators, looked at 2 times: NCCL's "
        "counters, no calls."
    ) in text
    assert "collector silent" not in text
