"""Plants faults on two ranks under `attach`, one after another, and compares the findings.

canary_faults.py OUT [KIND...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _shared import Attach, analyze, canary, end, table

from nccluprobe.canary.truth import Verdict, compare, truths

#: In the order of what they must show; two ranks that disagree may name nobody.
#: An inversion of orders is not among them: with two ranks whose hosts are free, a trace
#: cannot tell it from two ranks that each went away.
FAULTS = {
    "healthy": "",
    "never": "never:rank=1,at=20",
    "wrong_rank": "wrong_rank:rank=1",
    "kill": "kill:rank=0,at=20",
    "exit": "exit:rank=1,at=20",
    "stop": "stop:rank=1,at=20",
    "busy": "busy:rank=0,at=20",
    "abort": "abort:rank=1,at=20",
    "late": "late:rank=1,at=20,s=3",
    "api": "api:rank=1,at=20",
    "skip": "skip:rank=1,at=20",
    "extra": "extra:rank=1,at=20",
    "unmatched_send": "unmatched_send:rank=1,at=20",
    "subset_split": "subset_split:rank=1,at=20",
    "no_reconnect": "no_reconnect:rank=1,at=20",
    "count": "count:rank=1,at=20",
    "dtype": "dtype:rank=1,at=20",
    "op": "op:rank=1,at=20",
    "root": "root:rank=0,at=20",
}
#: Seconds for one fault, from the start of its job.
PATIENCE_S = 20.0
#: How long a healthy job is watched.
HEALTHY_S = 8.0


def run(kind: str, text: str, work: Path, out: Path) -> tuple[Verdict, float, str]:
    truth_file = work / f"{kind}.truth"
    run_id = f"{kind}-{os.getpid()}"  # other jobs of this machine are traced, too
    arguments = ["--nproc", "2", "--ops", "all_reduce,broadcast", "--dtypes", "int32"]
    arguments += ["--sizes", "4K", "--steps", "5000", "--pause", "0.05", "--deadline", "100"]
    arguments += ["--hold", "60", "--truth", str(truth_file)]
    started = time.monotonic()
    with (out / f"fault.{kind}.log").open("w") as log:
        job = subprocess.Popen(
            canary(*arguments, *(["--inject", text] if text else [])),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # As NVLink does: nobody learns of an abort.
            env={**os.environ, "TORCHELASTIC_RUN_ID": run_id, "SIMNCCL_ABORT_LOCAL": "1"},
        )
    traces = work / "traces" / "tracing" / run_id
    verdict, report = Verdict(False, "nothing planted"), ""
    try:
        while time.monotonic() - started < PATIENCE_S:
            time.sleep(1)
            planted = truths(truth_file.read_text().splitlines()) if truth_file.exists() else []
            if not traces.exists() or (text and not planted):
                continue
            findings, report, _ = analyze(traces, out=work / "findings" / kind)
            verdict = compare(planted[0] if planted else None, findings)
            watched = bool(text) or time.monotonic() - started > HEALTHY_S
            if verdict.right and watched:
                break
    finally:
        end(job)
    (out / f"fault.{kind}.txt").write_text(f"{verdict.text}\n\n{report}")
    return verdict, time.monotonic() - started, report


def main() -> int:
    out = Path(sys.argv[1])
    kinds = sys.argv[2:] or list(FAULTS)
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    right = 0
    with tempfile.TemporaryDirectory(prefix="canary-") as folder:
        work = Path(folder)
        attach = Attach(
            work / "traces", out / "faults.attach.log", "--pid-glob", "nccluprobe", "--pid-glob",
            "python",
        )  # fmt: skip
        try:
            for kind in kinds:
                verdict, seconds, _ = run(kind, FAULTS[kind], work, out)
                right += verdict.right
                rows.append((kind, f"{seconds:.1f}", verdict.text))
                print(f"{kind}: {verdict.text}", flush=True)
        finally:
            attach.stop()
            print()
            table(("fault", "s", "verdict"), rows)
            print(f"\n{right} of {len(kinds)} as planted")
    return 0 if right == len(kinds) else 1


if __name__ == "__main__":
    sys.exit(main())
