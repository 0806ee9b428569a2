"""``attach`` as a process, and what it has written so far."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from support.traces import (
    Trace,
    by_pid,
    read_traces,
    trace_paths,
)
from support.waiting import PATIENCE, Output, wait_for


class Daemon:
    """A running ``nccluprobe attach``."""

    def __init__(self, command: Sequence[str | Path], out: Path, **popen: Any) -> None:
        self.out = out
        self.process = subprocess.Popen(
            [*map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **popen,
        )
        assert self.process.stderr is not None and self.process.stdout is not None
        self.stderr = Output(self.process.stderr)
        self.stdout = Output(self.process.stdout)

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_text(self, pattern: str, timeout: float = PATIENCE) -> re.Match[str]:
        """Until a line of standard error matches; fails when the daemon ends first."""

        def seen() -> re.Match[str] | None:
            for line in list(self.stderr.lines):
                if found := re.search(pattern, line):
                    return found
            if self.process.poll() is not None:
                text = self.stderr.finish()
                if found := re.search(pattern, text):
                    return found
                raise AssertionError(f"attach ended ({self.process.returncode}):\n{text}")
            return None

        found = wait_for(
            seen, f"a line like {pattern!r}", timeout=timeout, context=lambda: self.stderr.text
        )
        assert found
        return found

    def ready(self, timeout: float = 60) -> Daemon:
        self.wait_text(r"\bready\b", timeout)
        return self

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 60) -> int:
        """Exit code, once it has ended by itself."""
        try:
            rc = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"attach still runs:\n{self.stderr.text}") from None
        self.stderr.finish()
        return rc

    def stop(self, number: int = signal.SIGINT, timeout: float = 60) -> None:
        """Ctrl-C, and a clean end."""
        if self.process.poll() is None:
            self.send_signal(number)
        rc = self.wait(timeout)
        assert rc == 0, f"attach ended with {rc}:\n{self.stderr.text}"

    def traces(self) -> list[Trace]:
        return read_traces(self.out)

    def rss(self) -> int:
        """Resident bytes."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the daemon is gone")


def until(
    daemon: Daemon, condition: Callable[[dict[int, Trace]], object], what: str, timeout: float = 30
) -> dict[int, Trace]:
    """Traces by pid, once they satisfy a condition."""

    def check() -> dict[int, Trace] | None:
        found = by_pid(daemon.traces())
        return found if condition(found) else None

    def context() -> str:
        tails = [f"{t.path.name}: {dict(t.counts())}, last {t.lines[-1]}" for t in daemon.traces()]
        return "\n".join([daemon.stderr.text, *tails])

    found = wait_for(check, what, timeout=timeout, context=context, poll=0.1)
    assert found is not None
    return found


def met(daemon: Daemon, pids: Iterable[int]) -> None:
    """Until the daemon has a file of each process.

    A process that ends within milliseconds of its first NCCL call may be gone
    before anyone can look at who it was; no real job is like that.
    """
    wanted = [f"_pid_{pid}." for pid in pids]

    def all_there() -> bool:
        names = [p.name for p in trace_paths(daemon.out)]
        return all(any(w in name for name in names) for w in wanted)

    wait_for(all_there, "a file of each process", context=lambda: daemon.stderr.text)
