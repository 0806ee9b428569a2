"""The analyzer beside PyTorch's own, on one incident: times, and whom each blames."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import _incident

HERE = Path(__file__).resolve().parent
Result = dict[str, Any]


def _command(command: list[str], path: str) -> tuple[float, float, float, str]:
    """Seconds by the clock, seconds of CPU, peak MB, output."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        env = {**os.environ, "PYTHONPATH": path}
        child = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        _, _, used = os.wait4(child.pid, 0)
        wall = time.perf_counter() - began
        out.seek(0)
        text = out.read().decode(errors="replace")
    return wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, text


def _peer(args: argparse.Namespace, work: Path) -> Path | str:
    """A folder with PyTorch's analyzer, or why there is none.  Nothing else of PyTorch is kept."""
    wheels = [Path(args.peer)] if args.peer else []
    if not wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--dest", str(work / "wheel"), "torch"],
            capture_output=True,
            text=True,
            check=False,
        )
        wheels = list((work / "wheel").glob("*.whl"))
        if not wheels:
            return f"pip cannot get torch: {done.stderr.strip()[-200:]}"
    with zipfile.ZipFile(wheels[0]) as z:
        names = [n for n in z.namelist() if "/flight_recorder/" in n and n.endswith(".py")]
        if not names:
            return f"{wheels[0].name} has no torch.distributed.flight_recorder"
        z.extractall(work / "peer", names)
    shutil.rmtree(work / "wheel", ignore_errors=True)
    (work / "peer" / "version").write_text("-".join(wheels[0].name.split("-")[:2]))
    return work / "peer"


def peer(work: Path, args: argparse.Namespace) -> list[Result]:
    ranks, calls, stalled = 256, 2000, 13
    dumps, trace = work / "dumps", work / "trace"
    entries = _incident.write(dumps, ranks, calls, stalled)
    _incident.write_trace(trace, ranks, calls, stalled)
    ours = [sys.executable, "-m", "nccluprobe", "analyze", "--json"]
    root = str(HERE.parents[1])
    results: list[Result] = []
    theirs = _peer(args, work)
    them = 0.0, 0.0
    if isinstance(theirs, Path):
        command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(dumps)]
        wall, cpu, mb, text = _command([*command, "-p", "nccl_trace_rank_"], str(theirs))
        them = wall, cpu
        blamed = text.count("missing ranks: {")
        exact = text.count(f"missing ranks: {{{stalled}}}")
        results.append(
            {
                "what": f"{(theirs / 'version').read_text()}, flight recorder dumps, s of CPU",
                "value": cpu,
                "target": None,
                "note": f"{wall:.1f} s by the clock, {mb:.0f} MB; {entries:,} entries; names "
                f"rank {stalled} in {exact} of {blamed} findings",
            }
        )
    else:
        note = f"left out: {theirs}"
        results.append({"what": "PyTorch's analyzer", "value": None, "target": None, "note": note})
    for what, kind, folder in (("dumps", ["--from", "fr"], dumps), ("trace", [], trace)):
        command = [*ours, *kind, "--out", str(work / f"out_{what}"), str(folder)]
        wall, cpu, mb, text = _command(command, root)
        findings = [json.loads(x) for x in text.splitlines() if x.startswith("{")]
        named = sorted(
            {c["rank"] for f in findings if f["role"] == "root_cause" for c in f["culprits"]}
        )
        if named != [stalled]:
            raise SystemExit(f"{what}: named {named}, not {stalled}: {text[-2000:]}")
        times = "" if not them[0] else f", {them[0] / wall:.1f} times by the clock"
        results.append(
            {
                "what": f"times faster than that, {what} of the same incident",
                "value": them[1] / cpu if them[1] else None,
                "target": 10 if them[1] else None,
                "note": f"{cpu:.1f} s of CPU, {wall:.1f} s by the clock{times}, {mb:.0f} MB; "
                f"blames rank {stalled} and nobody else",
            }
        )
    return results
