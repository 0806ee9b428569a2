"""Ends of processes that are not the tracer's children to wait for."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nccluprobe.collect import exits
from nccluprobe.collect.exits import Exit, ExitWatcher
from nccluprobe.collect.proc_events import ProcConnector, ProcEvents

pytestmark = pytest.mark.root

THREADS = r"""
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
static char how;
static void *last(void *unused) {
  usleep(400000);
  if (how == 'e') exit(3);
  if (how == 's') raise(SIGTERM);
  if (how == 'x') execl("/bin/sh", "sh", "-c", "sleep 0.3; exit 5", NULL);
  return unused;
}
int main(int argc, char **argv) {
  pthread_t t;
  how = argv[1][0];
  pthread_create(&t, 0, last, 0);
  if (argc > 2) for (;;) pause();
  pthread_exit(0);
}
"""

#: what may be asked: (proc connector, PIDFD_GET_INFO, the parent reaps at once)
WAYS = [
    pytest.param(True, True, True, id="all"),
    pytest.param(False, True, True, id="pidfd-info"),
    pytest.param(True, False, True, id="connector"),
    pytest.param(False, False, False, id="zombie"),
]


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exits") / "threads"
    subprocess.run(
        ["gcc", "-pthread", "-x", "c", "-", "-o", str(path)], input=THREADS, text=True, check=True
    )
    return path


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool, bool], ExitWatcher]]:
    made: list[ExitWatcher] = []

    def build(connector: bool = True, info: bool = True) -> ExitWatcher:
        if not info:
            monkeypatch.setattr(exits, "_pidfd_status", lambda fd: None)
        watcher = ExitWatcher(connector)
        assert watcher.connector is connector, watcher.fallback
        made.append(watcher)
        return watcher

    yield build
    for watcher in made:
        watcher.close()


def collect(watcher: ExitWatcher, count: int, seconds: float = 10) -> list[Exit]:
    found: list[Exit] = []
    end = time.monotonic() + seconds
    while len(found) < count:
        found += watcher.poll()
        assert time.monotonic() < end, found
        time.sleep(0.02)
    return found


def ended(watcher: ExitWatcher, command: list[str], reap: bool) -> Exit:
    began = time.monotonic_ns()
    child = subprocess.Popen(command)
    assert watcher.watch(child.pid)
    if reap:
        threading.Thread(target=child.wait).start()
    (found,) = collect(watcher, 1)
    child.wait()
    assert found.pid == child.pid
    assert began < found.t_ns < time.monotonic_ns()
    return found


@pytest.mark.parametrize(("connector", "info", "reap"), WAYS)
@pytest.mark.parametrize(
    ("end", "how", "code", "signal_"),
    [
        ("exit 0", "exited", 0, None),
        ("exit 1", "exited", 1, None),
        ("exit 200", "exited", 200, None),
        ("kill -KILL $$", "signaled", None, signal.SIGKILL),
        ("kill -TERM $$", "signaled", None, signal.SIGTERM),
    ],
)
def test_codes(
    make: Callable[[bool, bool], ExitWatcher],
    connector: bool,
    info: bool,
    reap: bool,
    end: str,
    how: str,
    code: int | None,
    signal_: int | None,
) -> None:
    found = ended(make(connector, info), ["sh", "-c", f"sleep 0.15; {end}"], reap)
    assert (found.how, found.code, found.signal) == (how, code, signal_)


@pytest.mark.parametrize(("connector", "info", "reap"), WAYS)
@pytest.mark.parametrize(
    ("way", "how", "code", "signal_"),
    [
        ("e", "exited", 3, None),
        ("s", "signaled", None, signal.SIGTERM),
        ("x", "exited", 5, None),
        ("n", "exited", 0, None),
    ],
)
def test_first_thread_ends_before_the_process(
    make: Callable[[bool, bool], ExitWatcher],
    threads: Path,
    connector: bool,
    info: bool,
    reap: bool,
    way: str,
    how: str,
    code: int | None,
    signal_: int | None,
) -> None:
    watcher = make(connector, info)
    began = time.monotonic()
    found = ended(watcher, [str(threads), way], reap)
    assert time.monotonic() - began > 0.35
    assert (found.how, found.code, found.signal) == (how, code, signal_)


def test_exec_by_another_thread_is_no_end(
    make: Callable[[bool, bool], ExitWatcher], threads: Path
) -> None:
    watcher = make(True, True)
    child = subprocess.Popen([threads, "x", "stay"])
    assert watcher.watch(child.pid)
    time.sleep(0.1)
    watcher.poll()
    watcher.take_execs()  # of the child's own beginning
    (found,) = collect(watcher, 1)
    assert (found.how, found.code) == ("exited", 5)
    assert [e.pid for e in watcher.take_execs()] == [child.pid]
    child.wait()


def test_nothing_is_known(make: Callable[[bool, bool], ExitWatcher]) -> None:
    found = ended(make(False, False), ["sh", "-c", "sleep 0.2; exit 1"], True)
    assert (found.how, found.code, found.signal) == ("gone", None, None)


@pytest.mark.parametrize(("connector", "info", "reap"), WAYS)
def test_200_at_once(
    make: Callable[[bool, bool], ExitWatcher], connector: bool, info: bool, reap: bool
) -> None:
    watcher = make(connector, info)
    read, write = os.pipe()
    children = [
        subprocess.Popen(["sh", "-c", f"read x; exit {n % 7}"], stdin=read) for n in range(200)
    ]
    os.close(read)
    for child in children:
        assert watcher.watch(child.pid)
    assert watcher.poll() == []
    os.close(write)
    if reap:
        for child in children:
            child.wait()
    began = time.monotonic()
    found = {e.pid: e for e in collect(watcher, 200)}
    assert time.monotonic() - began < 2
    assert {p.pid: n % 7 for n, p in enumerate(children)} == {e.pid: e.code for e in found.values()}
    for child in children:
        child.wait()
    assert watcher.poll() == []
    assert watcher._watched == {} and watcher._by_fd == {} and watcher._ended == []


def test_overflow_of_the_connector(
    make: Callable[[bool, bool], ExitWatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nccluprobe.collect.proc_events._BUFFER", 1)
    watcher = make(True, True)
    child = subprocess.Popen(["sh", "-c", "read x; exit 9"], stdin=subprocess.PIPE)
    assert watcher.watch(child.pid)
    for _ in range(100):
        subprocess.run(["true"], check=True)
    child.communicate(b"\n")
    (found,) = collect(watcher, 1)
    assert (found.how, found.code) == ("exited", 9)


def test_overflow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nccluprobe.collect.proc_events._BUFFER", 1)
    connector = ProcConnector()
    for _ in range(100):
        subprocess.run(["true"], check=True)
    assert connector.drain().lost
    assert not connector.drain().lost
    connector.close()


def test_a_lost_event_makes_no_false_zero(
    make: Callable[[bool, bool], ExitWatcher], threads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first thread's 0 arrives, the event of the thread that ended the process does not."""
    watcher = make(True, False)
    connector = watcher._connector
    assert connector is not None
    drain = connector.drain

    def lossy() -> ProcEvents:
        events = drain()
        events.lost = any(status for _, status, _ in events.exits)
        events.exits = [e for e in events.exits if e[1] == 0]
        return events

    monkeypatch.setattr(connector, "drain", lossy)
    found = ended(watcher, [str(threads), "e"], True)
    assert (found.how, found.code, found.signal) == ("gone", None, None)


def test_watch_guards_against_a_reused_pid(make: Callable[[bool, bool], ExitWatcher]) -> None:
    watcher = make(True, True)
    child = subprocess.Popen(["sleep", "60"])
    assert not watcher.watch(child.pid, start=1)
    assert watcher.watch(child.pid)
    assert watcher.watch(child.pid)
    child.kill()
    child.wait()
    assert not watcher.watch(child.pid)  # gone, and its end is still reported
    (found,) = collect(watcher, 1)
    assert found.signal == signal.SIGKILL
    assert not watcher.watch(child.pid)


def test_unwatch(make: Callable[[bool, bool], ExitWatcher]) -> None:
    watcher = make(True, True)
    child = subprocess.Popen(["sleep", "60"])
    watcher.watch(child.pid)
    watcher.unwatch(child.pid)
    child.kill()
    child.wait()
    for _ in range(5):
        assert watcher.poll() == []
        time.sleep(0.02)


def test_without_pidfds(
    make: Callable[[bool, bool], ExitWatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    found = ended(make(True, True), ["sh", "-c", "sleep 0.2; exit 4"], True)
    assert (found.how, found.code) == ("exited", 4)


def test_an_idle_poll_is_cheap(make: Callable[[bool, bool], ExitWatcher]) -> None:
    watcher = make(True, True)
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(64)]
    for child in children:
        watcher.watch(child.pid)
    watcher.poll()
    began = time.process_time()
    for _ in range(100):
        watcher.poll()
    assert (time.process_time() - began) / 100 < 1e-3
    for child in children:
        child.kill()
        child.wait()
