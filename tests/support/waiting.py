"""What the tests of processes share: waiting for a condition, output, a clean environment.

Nothing here waits for a fixed time: ``wait_for`` polls a condition, and says
what was awaited and what there was instead.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import IO, TypeVar

T = TypeVar("T")
#: Seconds after which something that should happen at once is given up: the
#: machine may be busy with other things.
PATIENCE = 30.0


def wait_for(
    condition: Callable[[], T],
    what: str,
    *,
    timeout: float = PATIENCE,
    context: Callable[[], str] = str,
    poll: float = 0.05,
) -> T:
    """The first true value of ``condition``; fails with ``context()`` after ``timeout``."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:.0f} s: {what}\n{context()}")
        time.sleep(poll)


class Output:
    """Lines of a pipe, read on a thread of its own."""

    def __init__(self, pipe: IO[str]) -> None:
        self.lines: list[str] = []
        self.queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._pipe = pipe
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._pipe:
            self.lines.append(line)
            self.queue.put(line)
        self.queue.put(None)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def finish(self) -> str:
        """All of it, once the process has ended."""
        self._thread.join(10)
        return self.text


def kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
    process.wait(PATIENCE)


def clean_env() -> dict[str, str]:
    """The environment without what a launcher would have set."""
    prefixes = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI", "PMIX_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return {k: v for k, v in os.environ.items() if k not in names and not k.startswith(prefixes)}
