"""What the end-to-end tests share: a stage of daemons and processes, and the analysis."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.daemon import Daemon
from support.puppets import PUPPET, Load, Puppet, Ranks
from support.traces import (
    Line,
)
from support.waiting import clean_env, kill


class Stage:
    """Starts daemons and processes for one test and ends all of them after it.

    ``token`` is in the script name of every process started, and is unique: it
    keeps tests apart that run at the same time.  ``lib`` is a copy of the
    stand-in that only this test maps, so that nobody else's probes are on it.
    """

    def __init__(self, tmp: Path, nccluprobe: Sequence[str], simnccl: Path) -> None:
        self.tmp = tmp
        self.nccluprobe = nccluprobe
        self.token = f"ncp{secrets.token_hex(4)}"
        self.lib = self.copy_lib(simnccl, "libnccl.so.2")
        self.script = tmp / f"{self.token}_rank.py"
        shutil.copy(PUPPET, self.script)
        self._processes: list[subprocess.Popen[str]] = []
        self._undo: list[Callable[[], object]] = []

    @property
    def glob(self) -> str:
        return f"{self.token}*"

    def copy_lib(self, simnccl: Path, name: str) -> Path:
        path = self.tmp / name
        shutil.copy(simnccl, path)
        return path

    def popen(self, command: Sequence[str | Path], **kwargs: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen([*map(str, command)], text=True, **kwargs)
        self._processes.append(process)
        return process

    def adopt(self, process: subprocess.Popen[str]) -> None:
        """Ends with the test."""
        self._processes.append(process)

    def attach(self, *args: str | Path, out: Path | None = None, **popen: Any) -> Daemon:
        out = out or self.tmp / "out"
        daemon = Daemon([*self.nccluprobe, "attach", *args, "--out", out], out, **popen)
        self._processes.append(daemon.process)
        return daemon

    def attach_glob(self, *args: str | Path, out: Path | None = None) -> Daemon:
        """On this test's processes, with this test's library probed beforehand."""
        return self.attach("--pid-glob", self.glob, "--lib", self.lib, *args, out=out).ready()

    def puppet(
        self,
        env: Mapping[str, str] | None = None,
        *,
        script: Path | None = None,
        prefix: Sequence[str] = (),
    ) -> Puppet:
        puppet = Puppet(script or self.script, {**clean_env(), **(env or {})}, prefix)
        self._processes.append(puppet.process)
        return puppet

    def ranks(self, n: int, *, job: str | None = None, script: Path | None = None) -> Ranks:
        """``n`` processes with a launcher's environment; the library is loaded."""
        env = {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
        if job is not None:
            env["TORCHELASTIC_RUN_ID"] = job
        puppets = [
            self.puppet({**env, "RANK": str(r), "LOCAL_RANK": str(r)}, script=script)
            for r in range(n)
        ]
        return Ranks(puppets, self.lib).load()

    def load(self, binary: Path, n: int, *args: str, env: Mapping[str, str] | None = None) -> Load:
        """``n`` load generators, each with communicators of one rank."""
        path = self.tmp / f"{self.token}_load"
        if not path.exists():
            shutil.copy(binary, path)
        command: list[str | Path] = [
            path,
            "--lib",
            self.lib,
            "--wait-stdin",
            "--print-truth",
            *args,
        ]
        return Load(
            [
                self.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=clean_env())
                for _ in range(n)
            ]
        )

    def tmpfs(self, name: str, size: str) -> Path:
        path = self.tmp / name
        path.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "nccluprobe-test", path], check=True
        )
        self._undo.append(lambda: subprocess.run(["umount", "-l", path], check=True))
        return path

    def close(self) -> None:
        for process in reversed(self._processes):
            kill(process)
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        for step in reversed(self._undo):
            step()
        self._undo.clear()


@dataclass
class Report:
    """What ``analyze`` said."""

    rc: int
    findings: list[Line]
    text: str

    @property
    def open(self) -> list[Line]:
        """The last word on each finding, those that still stand."""
        last = {f["id"]: f for f in self.findings}
        return [f for f in last.values() if f["state"] == "open"]

    @property
    def errors(self) -> list[Line]:
        return [f for f in self.open if f["severity"] == "error"]


class Analyze:
    """Runs ``nccluprobe analyze``: exit code, findings.jsonl and text."""

    def __init__(self, cli: Callable[..., subprocess.CompletedProcess[str]], tmp: Path) -> None:
        self.cli = cli
        self.tmp = tmp
        self.runs = 0

    def __call__(
        self,
        *folders: Path,
        missing: float = 1,
        late: float = 1,
        error: float = 2,
        more: Sequence[str] = (),
    ) -> Report:
        self.runs += 1
        out = self.tmp / f"analyze{self.runs}"
        out.mkdir()
        args = [
            *("--missing-after", str(missing)),
            *("--late-after", str(late)),
            *("--error-after", str(error)),
            *("--out", str(out)),
            *more,
        ]
        done = self.cli("analyze", *folders, *args)
        file = out / "findings.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return Report(
            done.returncode, [json.loads(line) for line in lines], done.stdout + done.stderr
        )
