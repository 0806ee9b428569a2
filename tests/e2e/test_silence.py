"""Silence is not absence: a collector that stops talking never makes a rank guilty.

The job is healthy in every test here, so no finding may be an error, and no
finding may name the rank that merely was not observed as a cause.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.daemon import Daemon, met, until
from support.e2e import Analyze, Report, Stage
from support.puppets import Ranks
from support.traces import Trace, by_pid, check_order, read_trace, trace_paths, validate
from support.waiting import wait_for

from nccluprobe.errors import ExitCode

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(150)]

RANKS = 4
SILENT = 1  # the rank whose collector falls silent
#: Older than this, a collector is silent (design 4), and the analysis looks further.
SILENCE_S = 5


class Beat:
    """A healthy job: all ranks make the same calls, again and again, until told to stop."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.done = 0  # collectives that all ranks have finished
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.ranks.collective(n=5)
                self.done += 5
                time.sleep(0.01)  # its pace, not a wait for anything
        except BaseException as e:
            self._error = e

    def further(self, calls: int = 20) -> None:
        """Until the job has made more calls."""
        want = self.done + calls
        wait_for(lambda: self.done >= want or self._error, "further calls of the job")
        assert self._error is None, self._error

    @contextmanager
    def running(self) -> Iterator[Beat]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join()
        assert self._error is None, self._error


def collectors(stage: Stage, ranks: Ranks, outs: list[Path] | None = None) -> list[Daemon]:
    """One per rank, each with an output folder of its own."""
    outs = outs or [stage.tmp / f"out{r}" for r in range(len(ranks))]
    daemons = [
        stage.attach("--pid", str(pid), "--lib", stage.lib, out=out)
        for pid, out in zip(ranks.pids, outs, strict=True)
    ]
    for daemon in daemons:
        daemon.ready()
    return daemons


def through(daemon: Daemon) -> int:
    """Up to when its trace is known to be whole."""
    found = [line["through"] for t in daemon.traces() for line in t.of("coverage")]
    return max(found, default=0)


def until_past(daemons: list[Daemon], beat: Beat, since: int, seconds: float) -> None:
    """Until the other collectors are past the silent one by so much."""
    others = [d for r, d in enumerate(daemons) if r != SILENT]
    wait_for(
        lambda: min(map(through, others)) > since + seconds * 1e9,
        "coverage of the others",
        timeout=60,
    )
    beat.further()


def no_rank_is_blamed(report: Report) -> None:
    assert report.rc in (0, 11), report.text
    assert report.errors == [], report.errors
    for found in report.open:
        status = found["details"].get("missing_rank_status") or {}
        assert "rank_alive_but_not_entered" not in str(found)
        assert found["role"] != "root_cause", found
        assert "alive" not in str(status), found


def says_not_observed(report: Report) -> None:
    said = report.text.lower()
    assert "not observed" in said or "silent" in said, report.text


@pytest.mark.parametrize("how", ["stopped", "killed", "disk_full"])
def test_one_of_four_collectors_falls_silent(stage: Stage, analyze: Analyze, how: str) -> None:
    ranks = stage.ranks(RANKS, job="healthy")
    outs = [stage.tmp / f"out{r}" for r in range(RANKS)]
    if how == "disk_full":
        outs[SILENT] = stage.tmpfs("small", "1m") / "out"
    daemons = collectors(stage, ranks, outs)
    ranks.init()
    beat = Beat(ranks)
    with beat.running():
        beat.further()
        wait_for(lambda: all(through(d) for d in daemons), "coverage of all", timeout=60)
        silent = daemons[SILENT]
        if how == "stopped":
            silent.send_signal(signal.SIGSTOP)
        elif how == "killed":
            silent.send_signal(signal.SIGKILL)
        else:
            fill(outs[SILENT].parent)
        since = time.monotonic_ns()
        # The analysis runs while the job does; it sees what is on disk now.
        until_past(daemons, beat, since, SILENCE_S / 2)
        no_rank_is_blamed(analyze(*outs))  # past the thresholds, and not silent for long yet
        until_past(daemons, beat, since, SILENCE_S + 3)
        report = analyze(*outs)
        no_rank_is_blamed(report)
        says_not_observed(report)
        if how == "stopped":
            silent.send_signal(signal.SIGCONT)
            now = time.monotonic_ns()
            wait_for(lambda: through(silent) > now, "coverage after it goes on", timeout=60)
            beat.further()
        elif how == "disk_full":
            assert silent.process.poll() is None
    for rank, daemon in enumerate(daemons):
        if not (rank == SILENT and how == "killed"):
            daemon.stop()
    if how == "stopped":  # nothing was lost meanwhile: the ring held it
        for daemon in daemons:
            (trace,) = daemon.traces()
            check_order(trace)
            assert trace.counts()["ncclAllReduce"] == beat.done
            assert trace.coverage["lost_kernel"] == 0
        report = analyze(*outs)
        no_rank_is_blamed(report)
        assert "silent" not in report.text.lower()


def fill(folder: Path) -> Path:
    """Leaves no byte free."""
    filler = folder / "filler"
    with suppress(OSError), filler.open("ab", buffering=0) as f:
        while True:
            f.write(b"\0" * 65536)
    with suppress(OSError), filler.open("ab", buffering=0) as f:
        while True:
            f.write(b"\0")
    return filler


def test_daemon_killed_job_goes_on(stage: Stage) -> None:
    """kill -9: the job finishes; the trace is readable to its last whole line."""
    daemon = stage.attach_glob()
    ranks = stage.ranks(2).init()
    beat = Beat(ranks)
    with beat.running():
        beat.further()
        until(daemon, lambda t: len(t) == 2 and all(x.counts() for x in t.values()), "traces")
        daemon.send_signal(signal.SIGKILL)
        daemon.process.wait(30)
        beat.further(200)
    ranks.destroy().end()
    for path in trace_paths(daemon.out):
        trace = read_trace(path)
        whole = [line for line in trace.lines if line["kind"] == "call"]
        assert whole
        trace.torn = False  # a torn last line is allowed, and left out by the reader
        validate([trace])
        check_order(trace)


def test_daemon_restarted_into_the_same_folder(stage: Stage, analyze: Analyze) -> None:
    """The second one writes files of its own; nobody is accused for the gap between them.

    What happens after it is found in its traces.
    """
    first = stage.attach_glob("--run-id", "same")
    ranks = stage.ranks(3).init()
    ranks.collective(n=10)
    met(first, ranks.pids)
    until(first, lambda t: all(x.counts()["ncclAllReduce"] == 10 for x in t.values()), "calls")
    first.send_signal(signal.SIGKILL)
    first.process.wait(30)
    before = {p: p.read_bytes() for p in trace_paths(first.out)}
    ranks.collective(n=10)  # nobody sees these
    second = stage.attach_glob("--run-id", "same")
    ranks.collective(n=10)

    def fresh() -> list[Trace]:
        return [t for t in second.traces() if t.path not in before]

    wait_for(
        lambda: len(fresh()) == 3 and all(t.counts()["ncclAllReduce"] == 10 for t in fresh()),
        "files of the second",
        context=lambda: second.stderr.text,
    )
    now = time.monotonic_ns()
    wait_for(
        lambda: all(t.coverage["through"] > now + 3.5e9 for t in fresh()), "time without calls"
    )
    no_rank_is_blamed(analyze(second.out))
    for n in (0, 1):
        assert ranks[n].call("ncclAllReduce") == 0
    then = time.monotonic_ns()
    # Longer than a collector may be silent: then the second one speaks for its ranks.
    wait_for(lambda: all(t.coverage["through"] > then + 6e9 for t in fresh()), "a hang")
    report = analyze(second.out)
    assert [f["details"]["missing_comm_ranks"] for f in report.errors] == [[2]], report.text
    assert report.errors[0]["comm_seq"] == 30
    second.stop()
    assert {p: p.read_bytes() for p in before} == before
    validate(fresh())


def test_daemon_killed_with_a_call_inside(stage: Stage) -> None:
    """The return probe of a call under way goes with the daemon; the call returns as it would."""
    daemon = stage.attach_glob()
    ranks = stage.ranks(2).init()
    ranks[0].send("call", fn="ncclAllReduce")  # the first one blocks in the call
    until(daemon, lambda t: any(x.of("enter") for x in t.values()), "the enter")
    daemon.send_signal(signal.SIGKILL)
    daemon.process.wait(30)
    assert ranks[1].call("ncclAllReduce") == 0
    assert ranks[0].reply()["rc"] == 0
    ranks.destroy().end()


def test_full_disk_is_survived_and_counted(stage: Stage, analyze: Analyze) -> None:
    """Writing stops, tracing does not; it goes on when space returns, the loss exact."""
    disk = stage.tmpfs("disk", "1m")
    daemon = stage.attach_glob(out=disk / "out")
    ranks = stage.ranks(2, job="disk").init()
    made = 0

    def calls(n: int) -> None:
        nonlocal made
        ranks.collective(n=n)
        made += n

    def skipped() -> list[int]:
        return [t.coverage["skipped_disk"] for t in daemon.traces() if t.of("coverage")]

    calls(50)
    until(
        daemon,
        lambda t: len(t) == 2 and all(x.counts()["ncclAllReduce"] == 50 for x in t.values()),
        "the calls before",
    )
    filler = fill(disk)
    for _ in range(20):
        calls(50)
    daemon.wait_text(r"not written")
    calls(50)
    filler.unlink()
    wait_for(
        lambda: len(skipped()) == 2 and all(skipped()),
        "writing again",
        context=lambda: daemon.stderr.text,
    )
    calls(30)
    ranks.destroy().end()
    until(daemon, lambda t: all(x.end for x in t.values()), "the ends")
    daemon.stop()
    traces = daemon.traces()
    validate(traces)
    assert len(traces) == 2
    for trace in traces:
        written = trace.counts()["ncclAllReduce"]
        cover = trace.coverage
        assert 80 <= written < made
        assert lines_lost(trace) == cover["skipped_disk"]
        assert made - written == calls_lost(trace)
        assert cover["lost_kernel"] == cover["lost_queue"] == 0
        states = [s["state"] for s in trace.of("state")]
        assert "disk_full" in states and "disk_ok" in states
        assert states.index("disk_full") < states.index("disk_ok")
    report = analyze(daemon.out)
    assert report.errors == [], report.text


def calls_lost(trace: Trace) -> int:
    """Holes in the ordinals: calls that were made and are not in the file."""
    (comm,) = trace.comms
    idx: list[int] = sorted(line["idx"] for line in trace.of("call", comm=comm))
    return idx[-1] + 1 - len(idx)


def lines_lost(trace: Trace) -> int:
    """In this job every line that can be lost is a call."""
    return calls_lost(trace)


def test_a_disk_that_stays_full(stage: Stage, analyze: Analyze) -> None:
    """The count of what was not written is in the traces, and the report has it."""
    disk = stage.tmpfs("disk", "1m")
    daemon = stage.attach_glob(out=disk / "out")
    ranks = stage.ranks(2, job="disk").init().collective(n=50)
    met(daemon, ranks.pids)
    fill(disk)
    for _ in range(30):
        ranks.collective(n=50)
    daemon.wait_text(r"not written")
    ranks[0].end()
    daemon.wait_text("exited")
    daemon.stop()
    assert "the traces say of which processes" in daemon.stderr.text
    traces = daemon.traces()
    validate(traces)
    assert [t.end and t.end["how"] for t in traces] == ["exited", "detached"]
    lost = 0
    for trace in traces:
        skipped, missing = trace.coverage["skipped_disk"], 1550 - trace.counts()["ncclAllReduce"]
        assert 0 < missing <= skipped <= missing + 3  # a coverage or clock line may be among them
        lost += skipped
    assert f"{lost:,} events lost." in " ".join(analyze(*[daemon.out]).text.split())


def test_a_trace_that_cannot_be_closed(stage: Stage) -> None:
    """No room from the first line to the last: on stderr, and in the exit code."""
    disk = stage.tmpfs("disk", "1m")
    daemon = stage.attach_glob(out=disk / "out")
    fill(disk)
    stage.ranks(2).init().collective(n=10)
    daemon.wait_text(r"not written")
    daemon.send_signal(signal.SIGINT)
    assert daemon.wait() == ExitCode.OUTPUT
    assert "2 traces have no closing lines" in daemon.stderr.text
    assert "lines were skipped before" in daemon.stderr.text


def test_unwritable_from_the_start(stage: Stage) -> None:
    """The disk is full when the first call comes: the tracer waits for space."""
    disk = stage.tmpfs("disk", "1m")
    daemon = stage.attach_glob(out=disk / "out")
    filler = fill(disk)
    ranks = stage.ranks(2).init().collective(n=10)
    assert daemon.process.poll() is None
    daemon.wait_text(r"not written")
    filler.unlink()
    wait_for(lambda: daemon.stderr.text.count("written again") == 2, "both files")
    ranks.collective(n=10)
    until(
        daemon,
        lambda t: len(t) == 2 and all(x.counts()["ncclAllReduce"] >= 10 for x in t.values()),
        "writing once there is space",
    )
    daemon.stop()
    traces = by_pid(daemon.traces())
    validate(traces.values())
    for trace in traces.values():
        written = trace.counts()["ncclAllReduce"]
        assert calls_lost(trace) == 20 - written
        assert trace.coverage["skipped_disk"] >= calls_lost(trace)
