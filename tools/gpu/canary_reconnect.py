"""Abort and reconnect under `attach`: two communicators in each trace, and no finding.

canary_reconnect.py OUT
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _shared import Attach, analyze, canary, table

from nccluprobe.canary.truth import compare, truths


def main() -> int:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    run_id = f"reconnect-{os.getpid()}"  # other jobs of this machine are traced, too
    with tempfile.TemporaryDirectory(prefix="canary-") as folder:
        work = Path(folder)
        attach = Attach(
            work / "traces", out / "reconnect.attach.log", "--pid-glob", "nccluprobe",
            "--pid-glob", "python",
        )  # fmt: skip
        try:
            done = subprocess.run(
                canary(
                    *("--nproc", "2", "--ops", "all_gather,broadcast,all_reduce", "--sizes", "64K"),
                    *("--steps", "120", "--pause", "0.05", "--inject", "reconnect:at=20", "--json"),
                ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env={**os.environ, "TORCHELASTIC_RUN_ID": run_id},
                timeout=70,
                check=False,
            )
            time.sleep(3)
            (out / "reconnect.log").write_text(done.stdout + done.stderr)
        finally:
            attach.stop()
        traces = work / "traces" / "tracing" / run_id
        findings, report, _ = analyze(traces, out=work / "findings")
        rows = []
        for file in sorted(traces.glob("*.jsonl")):
            lines = map(json.loads, file.read_text().splitlines())
            hashes = sorted({str(x["hash"]) for x in lines if x["kind"] == "comm"})
            rows.append((file.name, str(len(hashes)), " ".join(hashes)))
    table(("trace", "communicators", "hashes"), rows)
    lines = done.stdout.splitlines()
    (planted,) = truths(lines)
    verdict = compare(planted, findings)
    found = json.loads(lines[-1])
    print(f"reconnects {found['reconnects']}, {found['checked']} results, {found['wrong']} wrong")
    print(verdict.text)
    print(report)
    good = [
        done.returncode == 0,
        found["reconnects"] == 1,
        found["wrong"] == 0,
        len(rows) == 2 and all(row[1] == "2" for row in rows),
        rows[0][2] == rows[1][2],
        verdict.right,
        not findings,
    ]
    print("as it must be" if all(good) else f"NOT as it must be: {good}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
