"""What attach writes of a job: every call, of late processes, libraries and links of all kinds."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.daemon import met, until
from support.e2e import Analyze, Stage
from support.puppets import Ranks
from support.traces import Line, Trace, by_pid, check_order, validate, waited

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]


REPO = Path(__file__).resolve().parent.parent.parent


def test_healthy_job_is_in_the_trace_call_by_call(stage: Stage, analyze: Analyze) -> None:
    daemon = stage.attach_glob()
    ranks = stage.ranks(4, job="healthy").init()
    program: list[dict[str, Any]] = []
    for i in range(50):
        program += [
            {"fn": "ncclAllReduce", "count": 1000 + i},
            {"fn": "ncclBroadcast", "root": i % 4, "datatype": 1},
            {"fn": "ncclAllGather", "count": 3, "datatype": 9},
            {"fn": "ncclReduceScatter", "redop": 2},
            {"fn": "ncclReduce", "root": 1, "redop": 4},
        ]
    for rank, puppet in enumerate(ranks.puppets):
        ring = [
            {"op": "call", "fn": "ncclGroupStart"},
            {"op": "call", "fn": "ncclSend", "peer": (rank + 1) % 4, "count": 17},
            {"op": "call", "fn": "ncclRecv", "peer": (rank + 3) % 4, "count": 17},
            {"op": "call", "fn": "ncclGroupEnd"},
        ]
        puppet.send("list", cmds=[{"op": "call", **p} for p in program] + ring * 25)
    for puppet in ranks.puppets:
        assert all(r["rc"] == 0 for r in puppet.reply()["replies"])
    ranks.all("sync")
    met(daemon, ranks.pids)
    ranks.destroy().end()
    until(daemon, lambda t: all(x.end for x in t.values()) and len(t) == 4, "the ends")
    daemon.stop()

    traces = by_pid(daemon.traces())
    validate(traces.values())
    assert set(traces) == set(ranks.pids)
    expected = Counter({p["fn"]: 50 for p in program})
    expected.update(
        ncclSend=25, ncclRecv=25, ncclGroupStart=25, ncclGroupEnd=25,
        ncclCommInitRank=1, ncclCommDestroy=1,
    )  # fmt: skip
    for rank, pid in enumerate(ranks.pids):
        trace = traces[pid]
        assert trace.counts() == expected
        check_order(trace)
        assert (trace.rank, trace.process["world_size"]) == (rank, 4)
        assert trace.process["rank_source"] == "torchrun"
        assert trace.process["run_id"] == "healthy"
        assert trace.path.parent.name == "healthy"
        (comm,) = trace.comms.values()
        assert (comm["comm_rank"], comm["nranks"], comm["learnt"]) == (rank, 4, "init")
        # The arguments, in the order in which the calls were made.
        calls = sorted(trace.of("call", comm=comm["id"]), key=lambda c: c["idx"])
        made = [c for c in calls if c["api"] in {p["fn"] for p in program}]
        assert [c["api"] for c in made] == [p["fn"] for p in program]
        assert [c["count"] for c in made] == [p.get("count", 8) for p in program]
        assert [c["root"] for c in made if "root" in c] == [
            p["root"] for p in program if "root" in p
        ]
        assert [c["ord"] for c in made] == list(range(len(program)))
        assert all(c["rc"] == 0 and c["dur"] > 0 for c in calls)
        sends = trace.of("call", api="ncclSend")
        assert {c["peer"] for c in sends} == {(rank + 1) % 4}
        assert [c["ord"] for c in sorted(sends, key=lambda c: c["t"])] == list(range(25))
        assert len({c["group"] for c in sends}) == 25
        assert trace.of("comm_end", comm=comm["id"], how="destroy")
        assert trace.end and (trace.end["how"], trace.end["code"]) == ("exited", 0)
        cover = trace.coverage
        assert cover["captured"] >= sum(expected.values())
        for lost in ("lost_kernel", "lost_queue", "overwritten", "skipped_disk", "blind"):
            assert cover[lost] == 0
    report = analyze(daemon.out)
    assert report.rc == 0, report.text
    assert report.findings == []


def test_late_processes_and_late_dlopen(stage: Stage) -> None:
    """No --lib: the library is found when a matching process maps it."""
    daemon = stage.attach("--pid-glob", stage.glob).ready()
    sleeper = stage.puppet()  # it runs already and maps NCCL later
    rounds: list[Ranks] = []
    for n in range(2):
        first = sleeper if n == 0 else stage.puppet()
        ranks = Ranks([first, stage.puppet()], stage.lib)
        ranks.load()
        # Probes that come after the mapping miss what is called before them.
        daemon.wait_text(rf"library {re.escape(str(stage.lib))}.* links?")
        ranks.init().collective(n=10).destroy()
        rounds.append(ranks)
    pids = [pid for r in rounds for pid in r.pids]
    until(
        daemon,
        lambda t: all(pid in t and t[pid].counts()["ncclCommDestroy"] == 1 for pid in pids),
        "all calls",
    )
    daemon.stop()
    traces = by_pid(daemon.traces())
    validate(traces.values())
    for pid in pids:
        assert traces[pid].counts()["ncclAllReduce"] == 10
        assert traces[pid].counts()["ncclCommInitRank"] == 1
        check_order(traces[pid])


def test_two_copies_in_one_process(stage: Stage, tmp_path: Path) -> None:
    """An old and a new NCCL, the old one inside a library of another name."""
    old = build_sim(tmp_path / "old", "2.21.5").rename(stage.tmp / "libtorch_with_nccl.so")
    daemon = stage.attach_glob("--lib", old)
    env = {"NCCL_DEBUG": "INFO"}
    ranks = Ranks([stage.puppet(env) for _ in range(2)], stage.lib).load()
    for p in ranks.puppets:
        p.load(old, lib="old")
    ranks.init("a").init("b", lib="old")
    ranks.collective(comm="a", n=7).collective("ncclAllGather", comm="b", n=11)
    until(
        daemon,
        lambda t: all(
            p in t and t[p].counts()["ncclAllReduce"] == 7 and t[p].counts()["ncclAllGather"] == 11
            for p in ranks.pids
        ),
        "the calls of both copies",
    )
    daemon.stop()
    traces = by_pid(daemon.traces())
    validate(traces.values())
    for puppet in ranks.puppets:
        trace = traces[puppet.pid]
        logged = re.findall(r"commId 0x([0-9a-f]+) - Init COMPLETE", puppet.stdout.text)
        libs = {lib["lib"]: lib for lib in trace.process["libs"]}
        assert len(libs) == len(trace.comms) == 2
        seen = {}
        for comm in trace.comms.values():
            lib = libs[comm["lib"]]
            counts = Counter(c["api"] for c in trace.of("call", comm=comm["id"]))
            # The hash in NCCL's own log; before 2.26 that is not its commHash.
            log_id = comm.get("log_id") or comm["hash"]
            seen[lib["nccl_version"]] = (Path(lib["path"]).name, counts, int(log_id, 16))
        new_id, old_id = (int(x, 16) for x in logged)
        assert seen == {
            "2.28.9": ("libnccl.so.2", {"ncclAllReduce": 7}, new_id),
            "2.21.5": ("libtorch_with_nccl.so", {"ncclAllGather": 11}, old_id),
        }
        assert all("log_id" in c for c in trace.comms.values() if c["lib"] == old_lib(libs))


def old_lib(libs: dict[int, Line]) -> int:
    return next(n for n, lib in libs.items() if lib["nccl_version"] == "2.21.5")


def build_sim(folder: Path, version: str) -> Path:
    """The stand-in, claiming to be this version of NCCL."""
    subprocess.run(
        [
            *(sys.executable, REPO / "native" / "build.py", "--out", folder),
            *("--target", "libsimnccl.so", "--sim-version", version),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return folder / "libsimnccl.so"


def test_library_deleted_while_mapped(stage: Stage) -> None:
    """As after `pip install --upgrade` under a running job."""
    ranks = stage.ranks(2)
    stage.lib.unlink()
    daemon = stage.attach("--pid-glob", stage.glob).ready()
    ranks.init().collective(n=5)
    until(
        daemon,
        lambda t: all(p in t and t[p].counts()["ncclAllReduce"] == 5 for p in ranks.pids),
        "the calls",
    )
    daemon.stop()
    validate(daemon.traces())
    for trace in daemon.traces():
        assert trace.counts() == {"ncclCommInitRank": 1, "ncclAllReduce": 5}


def test_attach_in_the_middle(stage: Stage, analyze: Analyze) -> None:
    """Communicators made before the attach: the identity comes from the live struct."""
    ranks = stage.ranks(3, job="mid").init().collective(n=30)
    daemon = stage.attach("--pid-glob", stage.glob).ready()
    ranks.collective(n=12)
    for rank in range(2):
        ranks[rank].send("call", fn="ncclAllReduce", sync=True)
    until(daemon, lambda t: waited(t, ranks.pids, 3.5), "a wait of 3.5 s in the trace")
    report = analyze(daemon.out)
    for found in report.open:  # who can be named is the one that is missing
        assert found["details"]["missing_comm_ranks"] == [2]
    assert report.open or "not judged" in report.text, report.text
    ranks[2].call("ncclAllReduce", sync=True)
    for rank in range(2):
        ranks[rank].reply()
    ranks.init("new").collective("ncclBroadcast", comm="new", n=5)
    until(
        daemon,
        lambda t: all(t[p].counts()["ncclBroadcast"] == 5 for p in ranks.pids),
        "the calls of the new communicator",
    )
    daemon.stop()
    validate(daemon.traces())
    hashes: set[str | None] = set()
    for trace in daemon.traces():
        assert trace.counts()["ncclAllReduce"] == 13
        check_order(trace)
        old, new = trace.comms.values()
        assert (old["learnt"], old["nranks"]) == ("struct", 3)
        hashes.add(old["hash"])
        assert (new["learnt"], new["nranks"]) == ("init", 3)
    assert len(hashes) == 1 and None not in hashes


@pytest.mark.slow
def test_two_kinds_of_link_give_equal_traces(stage: Stage) -> None:
    """Two daemons on one job: all but times and what a tracer numbers by itself.

    And a second Ctrl-C: perf_event links are slow to remove (0.1 s each), so there
    is time for one.
    """
    daemons = [
        stage.attach_glob("--link", kind, out=stage.tmp / kind) for kind in ("multi", "perf")
    ]
    ranks = stage.ranks(2, job="both").init()
    ranks.collective(n=20, count=77).collective("ncclBroadcast", root=1, n=3)
    for rank, puppet in enumerate(ranks.puppets):
        peer = 1 - rank
        puppet.send(
            "list",
            cmds=[
                {"op": "call", "fn": "ncclGroupStart"},
                {"op": "call", "fn": "ncclSend", "peer": peer},
                {"op": "call", "fn": "ncclRecv", "peer": peer},
                {"op": "call", "fn": "ncclAllReduce"},
                {"op": "call", "fn": "ncclGroupEnd"},
                {"op": "sync"},
            ],
        )
    for puppet in ranks.puppets:
        puppet.reply()
    for daemon in daemons:
        met(daemon, ranks.pids)
    ranks.destroy().end()
    seen: list[list[Any]] = []
    for daemon in daemons:
        until(daemon, lambda t: len(t) == 2 and all(x.end for x in t.values()), "the ends")
    multi, perf = daemons
    multi.stop()
    perf.send_signal(signal.SIGINT)
    perf.wait_text("removing the probes")
    asked = time.monotonic()
    perf.send_signal(signal.SIGINT)
    assert perf.wait(60) == 130
    print(f"\ngone {time.monotonic() - asked:.1f} s after the second signal")
    for daemon in daemons:
        traces = sorted(daemon.traces(), key=lambda t: t.pid)
        validate(traces)
        seen.append([comparable(t) for t in traces])
    assert seen[0] == seen[1]


def comparable(trace: Trace) -> dict[str, Any]:
    groups: dict[int, int] = {}
    calls = []
    for line in sorted(trace.of("call"), key=lambda c: c["t"]):
        line = {k: v for k, v in line.items() if k not in ("t", "dur")}
        if "group" in line:
            line["group"] = groups.setdefault(line["group"], len(groups))
        calls.append(line)
    comms = [{k: v for k, v in c.items() if k not in ("t", "lib")} for c in trace.comms.values()]
    process = {k: v for k, v in trace.process.items() if k not in ("libs",)}
    end = trace.end
    assert end is not None
    return {
        "process": process,
        "libs": [{k: v for k, v in lib.items() if k != "lib"} for lib in trace.process["libs"]],
        "comms": comms,
        "calls": calls,
        "end": {k: v for k, v in end.items() if k != "t"},
        "name": trace.path.name,
    }


def test_enter_only(stage: Stage) -> None:
    daemon = stage.attach_glob("--no-exit")
    ranks = stage.ranks(2).init().collective(n=9)
    until(
        daemon,
        lambda t: all(p in t and t[p].counts()["ncclAllReduce"] == 9 for p in ranks.pids),
        "the calls",
    )
    daemon.stop()
    validate(daemon.traces())
    for trace in daemon.traces():
        assert trace.process["exits"] is False
        check_order(trace)
        for call in trace.of("call"):
            assert (call["dur"], call["rc"], call["end"]) == (None, None, "enter_only")
