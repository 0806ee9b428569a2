"""Runs the command, and looks at its ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from support.waiting import clean_env

COMMAND = [sys.executable, "-m", "nccluprobe", "canary"]
FULL = "/dev/full"
SMALL = ("--sim", "--sizes", "8,4K", "--iters", "2")
SERVICE = ("--sim", "--nproc", "3", "--sizes", "8", "--serve", "--every", "0.05")


def run(
    *arguments: str, text: str = "", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**clean_env(), **(env or {})},
    )


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.stdout == ""
    return one_line_of(done.stderr)


def one_line_of(text: str) -> str:
    (line,) = text.splitlines()
    return line


def ranks_of(pid: int) -> list[int]:
    """Children of `pid`."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]
