"""Canary jobs of a test: started as a user does, on the stand-ins, with the truth at hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nccluprobe import resources
from nccluprobe.canary.truth import Verdict, compare, truths
from support.e2e import Report, Stage
from support.traces import Line
from support.waiting import clean_env, wait_for

#: As on one node of NVLink: nobody learns of an abort.
ENV = {"abort": {"SIMNCCL_ABORT_LOCAL": "1"}}


class Canary:
    """Under a script name of the test's own, so that only these are traced."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.script = stage.tmp / f"{stage.token}_canary"
        self.script.write_text("from nccluprobe.cli.main import run\n\nrun()\n")
        self.cuda = resources.native_file(resources.SIMCUDA)
        self.jobs: dict[str, subprocess.Popen[str]] = {}

    def command(
        self, *args: str, world: int = 3, ops: str = "all_reduce,broadcast"
    ) -> list[str | Path]:
        return [
            *(sys.executable, self.script, "canary", "--nproc", str(world)),
            *("--nccl", self.stage.lib, "--cuda", self.cuda, "--sizes", "4K"),
            *("--ops", ops, *args),
        ]

    def start(
        self,
        job: str,
        *args: str,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[Any] = (),
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        log = self._log(job).open("w")
        self.jobs[job] = self.stage.popen(
            [*prefix, *self.command(*args, "--truth", str(self.truth_file(job)))],
            stdin=stdin,
            stdout=log,
            stderr=log,
            env={**clean_env(), **ENV.get(job, {}), **(env or {}), "TORCHELASTIC_RUN_ID": job},
        )

    def tell(self, job: str, line: str) -> None:
        pipe = self.jobs[job].stdin
        assert pipe is not None
        pipe.write(line + "\n")
        pipe.flush()

    def log(self, job: str) -> str:
        """What it printed, and what it complained about."""
        return self._log(job).read_text()

    def wait_log(self, job: str, text: str) -> None:
        wait_for(lambda: text in self.log(job), text, context=lambda: self.log(job))

    def _log(self, job: str) -> Path:
        return self.stage.tmp / f"{job}.log"

    def truth_file(self, job: str) -> Path:
        return self.stage.tmp / f"{job}.truth"

    def truth(self, job: str) -> Line | None:
        file = self.truth_file(job)
        found = truths(file.read_text().splitlines()) if file.exists() else []
        return found[0] if found else None

    def verdict(self, job: str, report: Report) -> Verdict:
        mine = [f for f in report.findings if f["run_id"] == job]
        truth = self.truth(job)
        if truth is None and job not in ("healthy", "serve"):
            return Verdict(False, "nothing planted yet: " + self.log(job))
        return compare(truth, mine)

    def stop(self) -> None:
        for process in self.jobs.values():
            process.terminate()
        for process in self.jobs.values():
            process.wait(30)
        self.jobs.clear()
