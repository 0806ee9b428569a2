"""The report that the README shows is that of the demo's job, line by line."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest
from support.waiting import clean_env

from nccluprobe.errors import ExitCode

REPO = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.alone, pytest.mark.slow]


def form(report: str) -> str:
    """A report without what differs from run to run, and however its lines are broken."""
    text = " ".join(report.split())
    text = re.sub(r"\[f[0-9a-f]+\]", "[ID]", text)
    text = re.sub(r"\b[0-9a-f]{16}\b", "HASH", text)
    text = re.sub(r"(?<= on )\S+?(?=[ )])", "HOST", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", text)
    text = re.sub(r"(?<=pid )\d+|[\d.,]+(?= (?:s\b|calls))", "N", text)
    return text.replace(" - ", "\n- ").replace(" Coverage:", "\nCoverage:")


def sample() -> str:
    (shown,) = re.findall(r"```\n(CAUSE .*?)```", (REPO / "README.md").read_text(), re.DOTALL)
    return str(shown)


def test_the_sample_is_what_the_demo_prints(
    tmp_path: Path, nccluprobe_command: list[str], simnccl: Path
) -> None:
    job = subprocess.Popen(
        [
            *nccluprobe_command, "preload", "--out", tmp_path, "--",
            *nccluprobe_command, "canary", "--sim", "--nproc", "4", "--ops", "all_reduce",
            "--sizes", "4K", "--pause", "0.05", "--inject", "never:rank=3,at=42", "--hold", "60",
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=clean_env(),
    )  # fmt: skip
    limits = ("--missing-after", "2", "--error-after", "4")
    try:
        deadline = time.monotonic() + 50
        while True:
            done = subprocess.run(
                [*nccluprobe_command, "analyze", *limits, tmp_path],
                capture_output=True, text=True, timeout=60, env=clean_env(), check=False,
            )  # fmt: skip
            if done.returncode == ExitCode.FINDINGS:
                break
            assert time.monotonic() < deadline, done.stdout + done.stderr
            time.sleep(1)
    finally:
        job.terminate()
        job.wait(30)
    assert form(done.stdout).splitlines() == form(sample()).splitlines()
    assert max(map(len, sample().splitlines())) <= 80
