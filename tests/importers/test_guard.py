"""Workers that read hostile files: how they end, and what they may take together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from nccluprobe.importers import guard
from nccluprobe.importers.guard import Read, read_guarded


def for_ever(path: str) -> str:
    Path(path).with_suffix(".pid").write_text(str(os.getpid()))
    while True:
        pass


def slow_or_name(path: str) -> str:
    return for_ever(path) if "slow" in path else path


def handlers(_: str) -> list[bool]:
    return [signal.getsignal(n) is signal.SIG_DFL for n in (signal.SIGINT, signal.SIGTERM)]


def test_who_is_interrupted_waits_for_no_worker(tmp_path: Path) -> None:
    """A second Ctrl-C raises at once, whatever a worker does."""
    pid = tmp_path / "slow.pid"

    def interrupt(*_: object) -> None:
        if not pid.exists():
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            return
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    began = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            list(read_guarded(for_ever, [(str(tmp_path / "slow"), 1)]))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < guard._CPU_LEAST / 2
    assert multiprocessing.active_children() == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_workers_do_not_inherit_handlers() -> None:
    """Those of ``--follow`` only note that they were asked to end."""
    before = [(n, signal.signal(n, lambda *_: None)) for n in (signal.SIGINT, signal.SIGTERM)]
    try:
        assert [r.value for r in read_guarded(handlers, [("x", 1)])] == [[True, True]]
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def test_hostile_files_have_a_bound_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_CPU_LEAST", 1)
    names = [str(tmp_path / n) for n in ("good", "slow1", "slow2", "slow3", "slow4")]
    began = time.process_time(), guard._cpu_of_workers()
    reads = list(read_guarded(slow_or_name, [(n, 1) for n in names]))
    assert guard._cpu_of_workers() - began[1] < 4
    assert reads[0] == Read(names[0], names[0])
    assert [r.path for r in reads] == names
    assert all(r.value is None and r.error for r in reads[1:])
    assert reads[-1].error == guard._NOT_TRIED
