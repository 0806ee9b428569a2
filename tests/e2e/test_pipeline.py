"""attach, a job, analyze: what a user gets from the two commands."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.e2e import (
    Analyze,
    Daemon,
    Line,
    Ranks,
    Stage,
    Trace,
    by_pid,
    check_order,
    met,
    read_traces,
    until,
    validate,
    wait_for,
)

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

REPO = Path(__file__).resolve().parent.parent.parent

Cli = Callable[..., subprocess.CompletedProcess[str]]
Traces = dict[int, Trace]


def waited(traces: Traces, pids: list[int], seconds: float) -> bool:
    """All are known to have done nothing but wait for this long."""
    if any(pid not in traces for pid in pids):
        return False
    last = max(
        line["t"] for pid in pids for line in traces[pid].lines if line["kind"] in ("call", "enter")
    )
    through = min(
        t.of("coverage")[-1]["through"] if t.of("coverage") else 0
        for t in (traces[pid] for pid in pids)
    )
    return bool(through - last > seconds * 1e9)


# --- the finding --------------------------------------------------------------


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


# --- the trace ----------------------------------------------------------------


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


# --- the end of the daemon ----------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_flushes_first(stage: Stage, number: int) -> None:
    """What returned before the signal is in the file."""
    daemon = stage.attach_glob()
    ranks = stage.ranks(2).init()
    done = 0
    stop = threading.Event()

    def work() -> None:
        nonlocal done
        while not stop.is_set():
            ranks.collective(n=20)
            done += 20

    thread = threading.Thread(target=work)
    thread.start()
    try:
        wait_for(lambda: done > 200, "calls")
        before = done
        daemon.stop(number)
    finally:
        stop.set()
        thread.join()
    traces = daemon.traces()
    validate(traces)
    assert len(traces) == 2
    for trace in traces:
        check_order(trace)
        assert trace.counts()["ncclAllReduce"] >= before
        assert trace.end and trace.end["how"] == "detached"


def test_duration(stage: Stage) -> None:
    daemon = stage.attach("--pid-glob", stage.glob, "--lib", stage.lib, "--duration", "2")
    daemon.ready()
    started = time.monotonic()
    ranks = stage.ranks(2).init().collective(n=5)
    assert daemon.wait(30) == 0
    assert time.monotonic() - started > 1
    assert {t.counts()["ncclAllReduce"] for t in daemon.traces()} == {5}
    ranks.collective(n=1)


def on_disk(daemon: Daemon, ranks: Ranks, calls: int) -> bool:
    """Whether so many calls of each rank have been written, as its newest line tells."""
    last = dict.fromkeys(ranks.pids, 0)
    for trace in daemon.traces():
        for call in trace.of("call", api="ncclAllReduce"):
            last[trace.pid] = max(last[trace.pid], call["idx"] + 1)
    return min(last.values()) >= calls


def test_rotation_bounds_the_folder(stage: Stage) -> None:
    bound = 200_000
    daemon = stage.attach_glob("--max-bytes", str(bound))
    ranks = stage.ranks(2).init()
    for made in range(250, 5001, 250):
        ranks.collective(n=250)
        wait_for(partial(on_disk, daemon, ranks, made), "the calls on disk")
    ranks.destroy().end()

    def ended() -> bool:
        return sum(1 for t in read_traces(daemon.out) if t.end) == 2

    wait_for(ended, "the ends", context=lambda: daemon.stderr.text)
    daemon.stop()
    parts = daemon.traces()
    validate(parts)
    for pid in ranks.pids:
        mine = sorted((t for t in parts if t.pid == pid), key=lambda t: t.process["part"])
        assert len(mine) > 1
        assert sum(t.path.stat().st_size for t in mine) <= bound * 1.1
        assert mine[-1].end
        for trace in mine:  # each is complete in itself
            assert trace.lines[0]["kind"] == "process"
            known: set[int] = set()
            for line in trace.lines:
                if line["kind"] == "comm":
                    known.add(line["id"])
                elif line["kind"] == "call" and line.get("comm") is not None:
                    assert line["comm"] in known
        # The newest calls are those kept, and none of them twice.
        idx = sorted(c["idx"] for t in mine for c in t.of("call") if c.get("idx") is not None)
        assert idx == list(range(idx[0], 5001))


# --- dry run and errors -------------------------------------------------------


def test_dry_run_says_and_leaves_nothing(stage: Stage, cli: Cli) -> None:
    ranks = stage.ranks(1)
    out = stage.tmp / "out"
    done = cli("attach", "--pid-glob", stage.glob, "--dry-run", "--out", out)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert str(stage.lib) in said
    for name in ("ncclAllReduce", "ncclCommInitRank", "ncclGroupEnd", "ncclSend"):
        assert name in said
    # How dear the probe is: the first instruction is a push, which the kernel emulates.
    assert "emulate" in said
    assert not list(stage.tmp.glob("out/**/*.jsonl"))
    assert ranks[0].call("ncclGroupStart") == 0 and ranks[0].call("ncclGroupEnd") == 0


def test_no_process(stage: Stage, cli: Cli) -> None:
    done = cli("attach", "--pid-glob", stage.glob, "--exit-if-none", "--out", stage.tmp / "out")
    assert one_line(done) and done.returncode == 6
    done = cli("attach", "--pid", "4194304", "--out", stage.tmp / "out")
    assert one_line(done) and done.returncode == 6


def one_line(done: subprocess.CompletedProcess[str]) -> bool:
    said = done.stderr.strip().splitlines()
    assert len(said) == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout == ""
    return True


def test_not_root(stage: Stage, nccluprobe_command: list[str]) -> None:
    stage.tmp.chmod(0o777)
    done = subprocess.run(
        [
            *("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"),
            *("--inh-caps", "-all", "--"),
            *nccluprobe_command,
            *("attach", "--pid-glob", stage.glob, "--out", "/tmp/never"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        check=False,
    )
    assert one_line(done) and done.returncode == 3


@pytest.mark.parametrize("what", ["text", "library", "absent"])
def test_unknown_library(stage: Stage, cli: Cli, what: str) -> None:
    path = stage.tmp / "some.so"
    if what == "text":
        path.write_text("not a library")
    elif what == "library":
        found = next(
            p for p in map(Path, ("/lib/x86_64-linux-gnu/libm.so.6", "/usr/lib64/libm.so.6"))
            if p.exists()
        )  # fmt: skip
        path = found
    done = cli("attach", "--pid-glob", stage.glob, "--lib", path, "--out", stage.tmp / "out")
    assert one_line(done) and done.returncode == 7
    assert str(path) in done.stderr


@pytest.mark.parametrize("what", ["file", "proc", "readonly"])
def test_output_folder_unusable(stage: Stage, cli: Cli, what: str) -> None:
    if what == "file":
        out = stage.tmp / "file"
        out.write_text("")
    elif what == "proc":
        out = Path("/proc/nccluprobe-out")
    else:
        out = stage.tmpfs("ro", "1m")
        subprocess.run(["mount", "-o", "remount,ro", out], check=True)
    done = cli("attach", "--pid-glob", stage.glob, "--out", out)
    assert one_line(done) and done.returncode == 8
    assert str(out) in done.stderr


def test_analyze_without_a_trace(stage: Stage, cli: Cli) -> None:
    empty = stage.tmp / "empty"
    empty.mkdir()
    for folder in (empty, stage.tmp / "nowhere"):
        done = cli("analyze", folder)
        assert one_line(done) and done.returncode == 12


@pytest.mark.parametrize("who", ["process", "option"])
def test_files_belong_to_the_traced_user(stage: Stage, who: str) -> None:
    """0640, and readable by the user whose process it is, or by the one that was named."""
    user: tuple[str, ...] = ()
    if who == "process":
        stage.tmp.chmod(0o755)
        for parent in itertools.takewhile(lambda p: p != Path("/tmp"), stage.tmp.parents):
            parent.chmod(0o755)
        user = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--")
    daemon = stage.attach_glob(*(("--owner", "nobody:nogroup") if who == "option" else ()))
    ranks = Ranks([stage.puppet(prefix=user) for _ in range(2)], stage.lib)
    ranks.load().init().collective(n=2)
    met(daemon, ranks.pids)
    daemon.stop()
    for trace in daemon.traces():
        stat = trace.path.stat()
        assert (stat.st_uid, stat.st_gid, stat.st_mode & 0o777) == (65534, 65534, 0o640)
        assert trace.path.parent.stat().st_uid == 65534
