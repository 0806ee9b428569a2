"""What scripts for machines with GPUs share."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

#: SIM=1: on the stand-ins, to try the scripts where there is no GPU.
SIM = os.environ.get("SIM") == "1"
#: The command with BCC at hand, and the one for everything else.
PROBE = shlex.split(os.environ.get("NCCLUPROBE", f"{sys.executable} -m nccluprobe"))
PLAIN = shlex.split(os.environ.get("NCCLUPROBE_PLAIN", "")) or PROBE


def canary(*arguments: str) -> list[str]:
    """A command line of the canary."""
    return [*PLAIN, "canary", *(["--sim"] if SIM else []), *arguments]


class Attach:
    """``nccluprobe attach``, ready when the constructor returns."""

    def __init__(self, out: Path, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*PROBE, "attach", *arguments, "--out", str(out)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        deadline = time.monotonic() + 60
        while "ready" not in log.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"attach did not get ready:\n{log.read_text()}")
            time.sleep(0.05)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def analyze(*what: str | Path, out: Path) -> tuple[list[dict[str, Any]], str, int]:
    """Findings, as each was written last, the report, and the exit code, at thresholds of seconds.

    ``what``: paths, and options before them.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = out / "findings.jsonl"
    file.unlink(missing_ok=True)
    done = subprocess.run(
        [
            *(*PLAIN, "analyze", *map(str, what), "--missing-after", "2", "--late-after", "1"),
            *("--error-after", "4", "--out", str(out)),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    lines = file.read_text().splitlines() if file.exists() else []
    found = {f["id"]: f for f in map(json.loads, lines)}
    return list(found.values()), done.stdout + done.stderr, done.returncode


def end(process: subprocess.Popen[Any]) -> None:
    """By SIGTERM, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(8)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints aligned columns."""
    from nccluprobe.canary.table import columns

    print("\n".join(columns(head, rows, left=len(head))), flush=True)
