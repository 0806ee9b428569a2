"""Processes to be looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.e2e import Stage

HOLDER = Path(__file__).with_name("holder.py")


class Held:
    """A running holder.py."""

    def __init__(self, *args: str | Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HOLDER), *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first = self._line()
        self.pid: int = self.first["pid"]
        self.now = self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def do(self, word: str) -> dict[str, Any]:
        """Let it do something; what it holds then."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        self.now = self._line()
        return self.now

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def hold() -> Iterator[Callable[..., Held]]:
    """Starts holders and ends them."""
    running: list[Held] = []

    def start(*args: str | Path) -> Held:
        running.append(Held(*args))
        return running[-1]

    yield start
    for one in running:
        one.close()


@pytest.fixture
def stage(tmp_path: Path, nccluprobe_command: Sequence[str], simnccl: Path) -> Iterator[Stage]:
    """Processes, folders and mounts of one test."""
    made = Stage(tmp_path, nccluprobe_command, simnccl)
    yield made
    made.close()
