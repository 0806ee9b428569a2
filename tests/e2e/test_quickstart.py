"""The README's first command, as a user gives it, with NVIDIA's library at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.root, pytest.mark.nccl, pytest.mark.slow]


def test_quickstart_names_the_rank_and_counts_on_the_real_library(
    real_nccl: Callable[[str], Path],
) -> None:
    if Path(sys.prefix).resolve() != REPO / ".venv":
        pytest.skip("needs the environment that tools/test makes: run `sudo ./tools/test`")
    done = subprocess.run(
        [REPO / "tools" / "quickstart", "--no-install"],
        cwd="/",
        env={**os.environ, "NCCL_LIB": str(real_nccl("2.28.9"))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "a stand-in for NCCL" in done.stdout
    assert "right: never of rank 3: collective_missing_enter names rank 3" in done.stdout
    counts = [line.split() for line in done.stdout.splitlines() if line.startswith("    nccl")]
    assert len(counts) == 9
    assert all(called == traced == "1009" for _, called, traced in counts), counts
    assert "nccluprobe attach --pid-glob nccluprobe" in done.stdout
    assert not (REPO / "nccluprobe-demo").exists()
