"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.e2e import Analyze, Stage


@pytest.fixture
def stage(tmp_path: Path, nccluprobe_command: list[str], simnccl: Path) -> Iterator[Stage]:
    """Daemons and processes of one test; all ended after it."""
    stage = Stage(tmp_path, nccluprobe_command, simnccl)
    try:
        yield stage
    finally:
        stage.close()


@pytest.fixture
def analyze(cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> Analyze:
    """Runs ``nccluprobe analyze`` with thresholds of a second or two."""
    return Analyze(cli, tmp_path)
