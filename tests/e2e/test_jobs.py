"""Which processes belong together is told by their communicators, not by labels."""

from __future__ import annotations

import pytest
from support.daemon import Daemon, until
from support.e2e import Analyze, Stage
from support.puppets import Ranks
from support.traces import Trace, validate
from support.waiting import wait_for

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]


def stall(ranks: Ranks, missing: int, before: int, fn: str) -> None:
    """All but one enter the next collective."""
    ranks.collective(n=before)
    for rank in range(len(ranks)):
        if rank != missing:
            ranks[rank].send("call", fn=fn, sync=True)


def stalled(daemon: Daemon, pids: list[int], fn: str) -> bool:
    """Each of these has entered it, and more than the threshold ago."""
    traces = {t.pid: t for t in daemon.traces()}
    for pid in pids:
        found = (
            traces[pid].of("call", api=fn) + traces[pid].of("enter", api=fn)
            if pid in traces
            else []
        )
        if not found or traces[pid].coverage["through"] < found[-1]["t"] + 3.5e9:
            return False
    return True


def test_two_jobs_on_a_node_are_reported_apart(stage: Stage, analyze: Analyze) -> None:
    daemon = stage.attach_glob()
    one = stage.ranks(3, job="job-one").init()
    two = stage.ranks(2, job="job-two").init()
    stall(one, missing=2, before=7, fn="ncclBroadcast")
    stall(two, missing=0, before=4, fn="ncclReduce")
    wait_for(
        lambda: (
            stalled(daemon, one.pids[:2], "ncclBroadcast")
            and stalled(daemon, two.pids[1:], "ncclReduce")
        ),
        "both waits",
        context=lambda: daemon.stderr.text,
    )
    report = analyze(daemon.out)
    daemon.stop()
    validate(daemon.traces())
    by_run: dict[str, list[Trace]] = {}
    for trace in daemon.traces():
        by_run.setdefault(trace.path.parent.name, []).append(trace)
    assert {k: len(v) for k, v in by_run.items()} == {"job-one": 3, "job-two": 2}
    assert len(report.open) == 2, report.text
    found = {f["run_id"]: f for f in report.open}
    for job, seq, api, missing, size in (
        ("job-one", 7, "ncclBroadcast", 2, 3),
        ("job-two", 4, "ncclReduce", 0, 2),
    ):
        finding = found[job]
        details = finding["details"]
        assert (finding["comm_seq"], details["api"]) == (seq, api)
        assert details["missing_comm_ranks"] == [missing]
        assert details["expected_nranks"] == size
        assert finding["severity"] == "error" and finding["role"] == "root_cause"
        hashes = {c["hash"] for t in by_run[job] for c in t.comms.values()}
        assert hashes == {finding["comm_uid_hash"]}
    # Each folder by itself gives its own job, and only that.
    for job, finding in found.items():
        alone = analyze(daemon.out / "tracing" / job)
        assert [f["comm_uid_hash"] for f in alone.open] == [finding["comm_uid_hash"]]


def test_one_job_whose_nodes_chose_different_run_ids(stage: Stage, analyze: Analyze) -> None:
    """Two daemons, two labels, two folders, one communicator: one job, one verdict."""
    ranks = stage.ranks(4)
    daemons = []
    for n in range(2):
        pids = [a for pid in ranks.pids[2 * n : 2 * n + 2] for a in ("--pid", str(pid))]
        label = f"label-{n}"
        daemons.append(
            stage.attach(
                *pids, "--lib", stage.lib, "--run-id", label, out=stage.tmp / label
            ).ready()
        )
    ranks.init()
    stall(ranks, missing=3, before=11, fn="ncclAllGather")
    wait_for(
        lambda: (
            stalled(daemons[0], ranks.pids[:2], "ncclAllGather")
            and stalled(daemons[1], ranks.pids[2:3], "ncclAllGather")
        ),
        "the waits",
        context=lambda: daemons[0].stderr.text + daemons[1].stderr.text,
    )
    report = analyze(*(d.out for d in daemons))
    half = analyze(daemons[0].out)
    for daemon in daemons:
        daemon.stop()
        validate(daemon.traces())
    assert {t.process["run_id"] for d in daemons for t in d.traces()} == {"label-0", "label-1"}
    (found,) = report.open
    assert (found["comm_seq"], found["details"]["missing_comm_ranks"]) == (11, [3])
    assert found["details"]["entered_comm_ranks"] == [0, 1, 2]
    assert found["severity"] == "error"
    # Half of the ranks alone: nobody is accused of an absence that was not seen.
    assert half.errors == [], half.text


def test_one_process_in_two_daemons_of_two_outputs(stage: Stage, analyze: Analyze) -> None:
    """The same job watched twice, analysed together: still one job and one verdict."""
    daemons = [
        stage.attach_glob("--run-id", label, out=stage.tmp / label) for label in ("left", "right")
    ]
    ranks = stage.ranks(3).init()
    stall(ranks, missing=1, before=5, fn="ncclAllReduce")
    for daemon in daemons:
        until(
            daemon,
            lambda t: all(
                p in t
                and t[p].counts()["ncclAllReduce"] == 6
                and t[p].coverage["through"] > t[p].of("call")[-1]["t"] + 3.5e9
                for p in (ranks.pids[0], ranks.pids[2])
            ),
            "the waits",
        )
    report = analyze(*(d.out for d in daemons))
    for daemon in daemons:
        daemon.stop()
        validate(daemon.traces())
    (found,) = report.open
    assert (found["comm_seq"], found["details"]["missing_comm_ranks"]) == (5, [1])
    assert "conflict" not in found["hang_type"]
