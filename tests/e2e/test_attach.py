"""attach by itself: its end, its bounds, what it refuses, whose its files are."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.daemon import Daemon, met
from support.e2e import Stage
from support.puppets import Ranks
from support.traces import check_order, read_traces, validate
from support.waiting import wait_for

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]


Cli = Callable[..., subprocess.CompletedProcess[str]]


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


def test_dry_run_says_and_leaves_nothing(stage: Stage, cli: Cli) -> None:
    ranks = stage.ranks(1)
    out = stage.tmp / "out"
    command = ("attach", "--pid-glob", stage.glob, "--dry-run", "--out", out)
    done = cli(*command)
    assert done.returncode == 0, done.stderr
    (of_library,) = (x for x in done.stdout.splitlines() if str(stage.lib) in x)
    assert re.search(r"[1-9]\d* functions \(.*\), \d+ missing$", of_library)
    assert len(done.stdout.splitlines()) == 3
    said = cli(*command, "--verbose").stdout
    for name in ("ncclAllReduce", "ncclCommInitRank", "ncclGroupEnd", "ncclSend"):
        assert name in said
    # How dear the probe is: the first instruction is a push, which the kernel emulates.
    assert "emulate" in said
    assert not list(stage.tmp.glob("out/**/*.jsonl"))
    assert ranks[0].call("ncclGroupStart") == 0 and ranks[0].call("ncclGroupEnd") == 0


def test_it_ends_when_all_that_were_named_have_ended(stage: Stage) -> None:
    ranks = stage.ranks(2)
    pids = [word for pid in ranks.pids for word in ("--pid", str(pid))]
    daemon = stage.attach(*pids, "--lib", stage.lib).ready()
    ranks.init().collective(n=3)
    ranks[0].end()
    daemon.wait_text("exited")
    assert daemon.process.poll() is None  # the other one goes on
    ranks[1].end()
    assert daemon.wait(30) == 0
    assert f"processes {ranks.pids[0]}, {ranks.pids[1]} have ended" in daemon.stderr.text
    assert all(t.end and t.end["how"] == "exited" for t in daemon.traces())
    assert [t.counts()["ncclAllReduce"] for t in daemon.traces()] == [3, 3]


def test_with_a_pattern_others_may_come(stage: Stage) -> None:
    ranks = stage.ranks(1)
    one = ("--pid", str(ranks.pids[0]), "--pid-glob", stage.glob)
    daemon = stage.attach(*one, "--lib", stage.lib).ready()
    ranks.init().collective(n=1).end()
    daemon.wait_text("exited")
    later = stage.ranks(1).init().collective(n=2)
    met(daemon, later.pids)
    daemon.stop()


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
