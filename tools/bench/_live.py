"""A job of thousands of ranks that writes its traces while ``analyze`` watches.

One process writes the files of all ranks, as their collectors would: every
second what each rank called since, and a coverage line.  After a while one rank
calls no more; the others go on.  Measured is how long after the threshold the
finding stands in ``findings.jsonl``.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import _traffic

#: Calls per second and rank.
RATE = 20
THRESHOLD_S = 10
STALLED = 7
_ROOT = Path(__file__).resolve().parents[2]


def _now() -> int:
    """The traffic's monotonic clock."""
    return time.time_ns() - _traffic.UNIX + _traffic.MONO


class _Job:
    def __init__(self, folder: Path, ranks: int) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        folder.mkdir(parents=True)
        gap = _traffic.S // RATE
        self.ranks = [_traffic.Rank(r, ranks, gap=gap) for r in range(ranks)]
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.files = [
            os.open(folder / f"rank_{r}_pid_{1000 + r}.jsonl", flags, 0o644) for r in range(ranks)
        ]
        for k, f in zip(self.ranks, self.files, strict=True):
            os.write(f, k.head())
        self.start = _now()
        self.lines: list[list[bytes]] = [[] for _ in self.ranks]
        self.written = 0
        self.made = [0] * ranks

    def tick(self, stalled: bool) -> None:
        """Write what was called until now."""
        now = _now()
        due = (now - self.start) * RATE // _traffic.S
        for i, k in enumerate(self.ranks):
            n = due - self.made[i]
            out = b""
            if not (stalled and i == STALLED):
                lines = self.lines[i]
                while len(lines) < n:
                    # Without its coverage line: that is for now.
                    lines += k.steps(1, k.n.through if self.made[i] or lines else self.start)[
                        :-1
                    ].split(b"\n")[:-1]
                out = b"\n".join(lines[:n]) + b"\n" if n else b""
                del lines[:n]
                self.made[i] += n
                self.written += n
            os.write(self.files[i], out + k.coverage(now))


def _first_waits(folder: Path) -> float:
    """When the finding says that the first member entered, unix seconds; 0: no finding."""
    path = folder / "findings.jsonl"
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0.0
    for line in lines:
        f = json.loads(line)
        blamed = [c["rank"] for c in f["culprits"]]
        if f["hang_type"] == "collective_missing_enter" and STALLED in blamed:
            return float(f["details"]["first_entered_unix_ns"]) / 1e9
    return 0.0


def measure(work: Path, ranks: int, seconds: float) -> list[dict[str, Any]]:
    """Runs the job and the analyzer; how late the finding was."""
    job, out = _Job(work / "trace", ranks), work / "out"
    job.tick(False)
    command = [sys.executable, "-m", "nccluprobe", "analyze", "--follow", "--json"]
    command += ["--missing-after", str(THRESHOLD_S), "--out", str(out), str(work / "trace")]
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    watcher = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    began, found, slowest = time.time(), 0.0, 0.0
    try:
        while time.time() - began < seconds + THRESHOLD_S + 30 and not found:
            round_began = time.time()
            job.tick(round_began - began > seconds)
            slowest = max(slowest, time.time() - round_began)
            while time.time() - round_began < 1.0 and not found:
                time.sleep(0.05)
                found = _first_waits(out)
        seen = time.time()
        usage = Path(f"/proc/{watcher.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        cpu = (int(usage[11]) + int(usage[12])) / os.sysconf("SC_CLK_TCK")
        rss = int(usage[21]) * 4096 / (1 << 20)
    finally:
        watcher.terminate()
        watcher.wait()
    if not found:
        raise SystemExit("live: the missing enter was not reported")
    late = seen - found - THRESHOLD_S
    return [
        {
            "what": f"live, {ranks:,} ranks x {RATE} calls/s: reported after the threshold, s",
            "value": late,
            "target": -2.0,
            "note": f"the writer (slowest round {slowest:.2f} s) and the analyzer "
            f"({cpu / (seen - began):.0%} of a core, {rss:.0f} MB) share {os.cpu_count()} cores; "
            f"files on disk; {job.written:,} calls",
        }
    ]
