"""kill -9 of a rank, of the collector, of both: what was recorded is in the trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.traces import Trace, read_traces, validate
from support.waiting import kill, wait_for

from nccluprobe.capture.preload_env import private_folders
from nccluprobe.errors import ExitCode
from preload.conftest import Compile, Rings, alive

Cli = Callable[..., subprocess.CompletedProcess[str]]

BODY = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
typedef struct { char b[128]; } uid_s;
extern unsigned fake_sleep_us;
extern void *fake_handle;
int ncclCommInitRank(void **, int, uid_s, int);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int main(int argc, char **argv) {
  uid_s id = {{1, 2, 3}};
  void *comm = 0;
  long before = atol(argv[1]), after = atol(argv[2]);
  fake_handle = (void *)0x1000;
  ncclCommInitRank(&comm, 2, id, 1);
  for (long i = 0; i < before; i++) ncclAllReduce(0, 0, i, 7, 0, comm, 0);
  puts("first"); fflush(stdout);
  if (getchar() == EOF) return 1;
  for (long i = before; i < before + after; i++) ncclAllReduce(0, 0, i, 7, 0, comm, 0);
  puts("second"); fflush(stdout);
  fake_sleep_us = 100000000;
  ncclAllReduce(0, 0, 4242, 7, 0, comm, 0);
  return 0;
}
"""


@pytest.fixture
def program(compile_c: Compile, fake: Path) -> Path:
    return compile_c(BODY, fake, f"-Wl,-rpath,{fake.parent}")


@pytest.fixture
def rank(program: Path, rings: Rings) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a rank that has made some calls, and waits for a line on stdin."""
    started = []

    def start(before: int, after: int, ring_kb: int = 1024) -> subprocess.Popen[str]:
        process = rings.popen(program, str(before), str(after), ring_kb=ring_kb)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "first\n"
        return process

    yield start
    for process in started:
        kill(process)


def go_on(process: subprocess.Popen[str]) -> None:
    """Until it is inside its last call."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "second\n"
    time.sleep(0.05)


def once(cli: Cli, rings: Rings, out: Path, *args: str) -> Trace:
    done = cli("collect", "--once", rings.folder, "--out", out, *args)
    assert done.returncode == 0, done.stderr
    traces = read_traces(out)
    validate(traces)
    return max(traces, key=lambda t: t.path.stat().st_mtime_ns)


def numbers(trace: Trace) -> list[int]:
    return [c["count"] for c in trace.of("call", api="ncclAllReduce") if c.get("end") is None]


def test_rank_killed_in_a_call(
    rank: Callable[..., subprocess.Popen[str]], rings: Rings, cli: Cli, tmp_path: Path
) -> None:
    process = rank(100, 50)
    go_on(process)
    process.kill()
    process.wait()
    trace = once(cli, rings, tmp_path / "out")
    assert numbers(trace) == list(range(150))
    last = trace.of("call", count=4242)
    assert len(last) == 1 and last[0]["end"] == "no_return"
    assert trace.process["exe"] == "program" and trace.process["ns_pid"] == process.pid
    assert trace.comms[0]["comm_rank"] == 1 and trace.comms[0]["hash"]
    assert trace.end and trace.end["in_flight"] == 1
    assert rings.files == []  # read, and its process is gone


def test_collector_killed(
    rank: Callable[..., subprocess.Popen[str]],
    rings: Rings,
    cli: Cli,
    nccluprobe_command: list[str],
    tmp_path: Path,
) -> None:
    process = rank(100, 50)
    first, second = tmp_path / "first", tmp_path / "second"
    collector = subprocess.Popen(
        [*nccluprobe_command, "collect", rings.folder, "--out", first], stderr=subprocess.DEVNULL
    )
    wait_for(lambda: any(len(numbers(t)) == 100 for t in read_traces(first)), "100 calls")
    time.sleep(0.3)
    collector.kill()
    collector.wait()
    go_on(process)
    trace = once(cli, rings, second)
    assert process.poll() is None
    assert numbers(trace) == list(range(100, 150))  # nothing twice, nothing left out
    comm = trace.comms[trace.of("call", api="ncclAllReduce")[0]["comm"]]
    assert comm["hash"] and comm["comm_rank"] == 1 and comm["nranks"] == 2
    assert [c["idx"] for c in trace.of("call", api="ncclAllReduce")][:50] == list(range(100, 150))
    assert rings.files  # the process lives


def test_both_killed(
    rank: Callable[..., subprocess.Popen[str]],
    rings: Rings,
    cli: Cli,
    nccluprobe_command: list[str],
    tmp_path: Path,
) -> None:
    process = rank(100, 50)
    collector = subprocess.Popen(
        [*nccluprobe_command, "collect", rings.folder, "--out", tmp_path / "a"],
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: read_traces(tmp_path / "a"), "a trace")
    go_on(process)
    collector.kill()
    process.kill()
    collector.wait()
    process.wait()
    trace = once(cli, rings, tmp_path / "b")
    before = numbers(next(iter(read_traces(tmp_path / "a"))))
    both = before + numbers(trace)
    assert set(both) == set(range(150))
    assert len(both) - 150 <= 50  # at most what was read last and not yet marked as read
    assert [c["end"] for c in trace.of("call", count=4242)] == ["no_return"]


@pytest.mark.parametrize("dies", [False, True])
def test_a_killed_collector_had_read_all(
    rank: Callable[..., subprocess.Popen[str]],
    rings: Rings,
    cli: Cli,
    nccluprobe_command: list[str],
    tmp_path: Path,
    dies: bool,
) -> None:
    """What is left to tell: which communicators there are, no further call, and the end."""
    process = rank(100, 0)
    collector = subprocess.Popen(
        [*nccluprobe_command, "collect", rings.folder, "--out", tmp_path / "first"],
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: any(len(numbers(t)) == 100 for t in read_traces(tmp_path / "first")), "calls")
    time.sleep(0.3)
    collector.kill()
    collector.wait()
    if dies:
        process.kill()
        process.wait()
    trace = once(cli, rings, tmp_path / "second")
    assert numbers(trace) == [] and trace.comms[0]["hash"]
    assert trace.coverage["alive"] is not dies
    assert trace.end and trace.end["how"] == ("gone" if dies else "detached")
    if dies:
        assert len(read_traces(tmp_path / "second")) == 1


def test_rings_that_are_kept_are_read_once(
    rank: Callable[..., subprocess.Popen[str]], rings: Rings, cli: Cli, tmp_path: Path
) -> None:
    process = rank(100, 0)
    process.kill()
    process.wait()
    once(cli, rings, tmp_path / "out", "--keep")
    assert len(read_traces(tmp_path / "out")) == 1 and rings.files


def test_flight_recorder(
    rank: Callable[..., subprocess.Popen[str]], rings: Rings, cli: Cli, tmp_path: Path
) -> None:
    """Nobody reads for long: the last calls, who their communicator is, and an exact count."""
    process = rank(100_000, 50, ring_kb=64)
    go_on(process)
    process.kill()
    process.wait()
    trace = once(cli, rings, tmp_path / "out")
    places = (64 << 10) // 152
    assert numbers(trace) == list(range(100_050 - places + 1, 100_050))
    assert trace.coverage["overwritten"] == 100_051 - places + 1
    comm = trace.comms[trace.of("call", api="ncclAllReduce")[0]["comm"]]
    assert comm["hash"] and comm["comm_rank"] == 1 and comm["nranks"] == 2


def test_wrapped_command_is_killed(
    fake: Path, program: Path, nccluprobe_command: list[str], cli: Cli, tmp_path: Path
) -> None:
    """kill -9 of `nccluprobe preload` itself: the command goes on, its ring is found."""
    folder, out = tmp_path / "rings", tmp_path / "out"
    wrapper = subprocess.Popen(
        [*nccluprobe_command, "preload", "--dir", folder, "--out", out, "--", program, "10", "5"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert wrapper.stdout is not None and wrapper.stdout.readline() == "first\n"
    pid = int(next(folder.glob("*.ring")).name.split(".")[0])
    wrapper.kill()
    wrapper.wait()
    try:
        assert alive(pid)
    finally:
        subprocess.run(["kill", "-9", str(pid)], check=True)
    done = cli("collect", "--once", folder, "--out", tmp_path / "rest")
    assert done.returncode == 0
    found = [n for o in (out, tmp_path / "rest") for t in read_traces(o) for n in numbers(t)]
    assert set(found) == set(range(10))


def test_wrapped_command_is_killed_in_the_usual_folder(
    program: Path, nccluprobe_command: list[str], cli: Cli, tmp_path: Path
) -> None:
    """`collect --once` finds the folders of single runs, and lets those alone that are read."""
    begun = []
    for name in ("killed", "lives"):
        wrapper = subprocess.Popen(
            [*nccluprobe_command, "preload", "--out", tmp_path / name, "--", program, "10", "5"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert wrapper.stdout is not None and wrapper.stdout.readline() == "first\n"
        begun.append(wrapper)
    killed, lives = begun
    children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    killed.kill()
    killed.wait()
    go_on(killed)  # the program: nobody reads what it records now
    subprocess.run(["kill", "-9", *children], check=True)
    try:
        done = cli("collect", "--once", "--out", tmp_path / "rest")
        assert done.returncode == 0, done.stderr
    finally:
        assert lives.stdin is not None
        lives.stdin.close()
        lives.wait(30)
    rest = {t.process["ns_pid"]: t for t in read_traces(tmp_path / "rest")}
    early = read_traces(tmp_path / "killed")
    (late,) = [rest[int(pid)] for pid in children if int(pid) in rest]
    assert {n for t in (*early, late) for n in numbers(t)} == set(range(15))
    (alone,) = read_traces(tmp_path / "lives")
    assert alone.process["ns_pid"] not in rest and set(numbers(alone)) >= set(range(10))


@pytest.mark.parametrize("code", [0, 1, 42, 255])
def test_exit_status(code: int, cli: Cli, tmp_path: Path) -> None:
    done = cli(
        "preload", "--out", tmp_path, "--", "sh", "-c", f"echo out; echo err >&2; exit {code}"
    )
    assert (done.returncode, done.stdout) == (code, "out\n")
    of_command, said = done.stderr.splitlines()  # and that there is no trace
    assert of_command == "err" and "a communicator was seen, so there is no trace" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGINT])
def test_death_by_signal(number: int, cli: Cli, tmp_path: Path) -> None:
    done = cli("preload", "--out", tmp_path, "--", "sh", "-c", f"kill -{number} $$")
    assert done.returncode == -number


def test_signals_are_passed_on(nccluprobe_command: list[str], tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "def on(n, f): print(signal.Signals(n).name, flush=True); n == 15 and sys.exit(7)\n"
        "for n in (1, 2, 3, 10, 12, 15): signal.signal(n, on)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.01)"
    )
    wrapper = subprocess.Popen(
        [*nccluprobe_command, "preload", "--out", tmp_path, "--", sys.executable, "-c", code],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert wrapper.stdout is not None and wrapper.stdout.readline() == "ready\n"
    for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTERM"):
        wrapper.send_signal(getattr(signal, name))
        assert wrapper.stdout.readline() == name + "\n"
    assert wrapper.wait(30) == 7


def test_no_such_command(cli: Cli, tmp_path: Path) -> None:
    assert cli("preload", "--out", tmp_path, "--", "no-such-command").returncode == 127
    (tmp_path / "text").write_text("x")
    assert cli("preload", "--out", tmp_path, "--", tmp_path / "text").returncode == 126


def test_musl_is_refused(cli: Cli, tmp_path: Path) -> None:
    """A made-up program that asks for musl's loader."""
    loader = b"/lib/ld-musl-x86_64.so.1\0"
    head = bytearray(64 + 56)
    head[:5] = b"\x7fELF\x02"
    head[32:40] = (64).to_bytes(8, "little")
    head[54:58] = (56).to_bytes(2, "little") + (1).to_bytes(2, "little")
    head[64:68] = (3).to_bytes(4, "little")
    head[72:80] = (120).to_bytes(8, "little")
    program = tmp_path / "muslprog"
    program.write_bytes(bytes(head) + loader)
    program.chmod(0o755)
    done = cli("preload", "--out", tmp_path, "--", program)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "glibc" in done.stderr


def test_print_env(cli: Cli, tmp_path: Path, rings: Rings, program: Path) -> None:
    """For launchers: a shell that takes the variables over, and `collect` as the collector."""
    done = cli("preload", "--print-env", "--dir", rings.folder)
    assert done.returncode == 0
    subprocess.run(
        ["sh", "-c", f"{done.stdout}\nexec {program} 10 0 </dev/null"], check=False,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    trace = once(cli, rings, tmp_path / "out")
    assert numbers(trace) == list(range(10))


def test_a_folder_is_taken_as_seen_from_here(
    cli: Cli, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library takes whole paths only: a program may go elsewhere before its first call."""
    monkeypatch.chdir(tmp_path)
    done = cli("preload", "--dir", "rings", "--out", tmp_path / "out", "--", program, "10", "0")
    assert done.returncode == 1, done.stderr  # the program's, at the end of its input
    assert [list(range(10))] == [numbers(t) for t in read_traces(tmp_path / "out")]
    assert f"NCCLUPROBE_PRELOAD_DIR={tmp_path}/rings" in cli(
        "preload", "--print-env", "--dir", "rings"
    ).stdout.replace("'", "")


def test_a_pipe_is_no_copy_of_nccl(cli: Cli, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = cli("preload", "--out", tmp_path / "t", "--lib", tmp_path / "pipe", "--", "true")
    assert done.returncode == ExitCode.NOT_NCCL and done.stderr.count("\n") == 1


def test_what_fails_before_the_command_leaves_no_folder(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no library")
    before = set(private_folders())
    done = cli("preload", "--out", tmp_path / "t", "--lib", tmp_path / "text", "--", "true")
    assert done.returncode == ExitCode.NOT_NCCL
    assert set(private_folders()) <= before
