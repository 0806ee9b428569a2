"""attach, a job, analyze: what a user gets from the two commands."""

from __future__ import annotations

import json
import signal

import pytest
from support.daemon import Daemon, until
from support.e2e import Analyze, Stage
from support.traces import Line, by_pid, validate, waited
from support.waiting import wait_for

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]


def test_rank_that_never_enters_is_named(stage: Stage, analyze: Analyze) -> None:
    """Attached first; 42 collectives by all of 4 ranks; in the next one rank 3 is missing."""
    daemon = stage.attach_glob()
    ranks = stage.ranks(4, job="job-42").init()
    ranks.collective(n=42)
    for rank in range(3):
        ranks[rank].send("call", fn="ncclAllReduce", count=1024, sync=True)
    until(daemon, lambda t: waited(t, ranks.pids, 3.5), "a wait of 3.5 s in the trace")
    report = analyze(daemon.out)
    assert report.rc == 10, report.text
    assert len(report.open) == 1, report.findings
    found = report.open[0]
    assert found["hang_type"] == "collective_missing_enter"
    assert found["severity"] == "error"
    assert found["run_id"] == "job-42"
    assert found["comm_seq"] == 42
    details = found["details"]
    assert details["api"] == "ncclAllReduce"
    assert details["expected_nranks"] == 4
    assert details["entered_comm_ranks"] == [0, 1, 2]
    assert details["missing_comm_ranks"] == [3]
    assert details["reason"] == "rank_alive_but_not_entered"
    assert details["trace_event_loss_possible"] is False
    assert details["waited_s"] > 2
    traces = by_pid(daemon.traces())
    hashes = {c["hash"] for t in traces.values() for c in t.comms.values()}
    assert hashes == {found["comm_uid_hash"]}
    assert "3" in report.text and "AllReduce" in report.text
    # Rank 3 comes after all: the same trace later holds no open finding.
    assert ranks[3].call("ncclAllReduce", count=1024, sync=True) == 0
    for rank in range(3):
        ranks[rank].reply()
    ranks.destroy().end()
    daemon.stop()
    validate(daemon.traces())
    after = analyze(daemon.out)
    assert [f for f in after.open if f["hang_type"] == "collective_missing_enter"] == []


def test_follow_opens_and_resolves(stage: Stage, nccluprobe_command: list[str]) -> None:
    """``analyze --follow`` beside the running job: the finding comes, and is taken back."""
    daemon = stage.attach_glob()
    ranks = stage.ranks(2, job="live").init()
    ranks.collective(n=3)
    folder = stage.tmp / "findings"
    folder.mkdir()
    analyzer = Daemon(
        [
            *nccluprobe_command,
            *("analyze", daemon.out, "--follow", "--missing-after", "1", "--late-after", "1"),
            *("--error-after", "2", "--out", folder),
        ],
        folder,
    )
    stage.adopt(analyzer.process)

    def findings() -> list[Line]:
        file = folder / "findings.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def says(state: str) -> list[Line]:
        return [
            f
            for f in findings()
            if f["state"] == state and f["hang_type"] == "collective_missing_enter"
        ]

    def context() -> str:
        return f"{findings()}\n{analyzer.stderr.text}{analyzer.stdout.text}"

    ranks[0].send("call", fn="ncclBroadcast", sync=True)
    opened = wait_for(lambda: says("open"), "an open finding", context=context)
    assert opened[0]["details"]["missing_comm_ranks"] == [1]
    assert opened[0]["details"]["api"] == "ncclBroadcast"
    assert opened[0]["comm_seq"] == 3
    assert ranks[1].call("ncclBroadcast", sync=True) == 0
    ranks[0].reply()
    wait_for(lambda: says("resolved"), "the finding resolved", context=context)
    analyzer.send_signal(signal.SIGINT)
    analyzer.wait()
    daemon.stop()
