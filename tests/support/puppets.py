"""Processes that the daemon watches: puppets, ranks of them, and a load."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.daemon import Daemon, met
from support.waiting import PATIENCE, Output, wait_for

PUPPET = Path(__file__).resolve().parent.parent / "e2e" / "puppet.py"


class Puppet:
    """A process that makes the NCCL calls it is told to (see e2e/puppet.py)."""

    def __init__(
        self,
        script: Path,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.script = script
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-u", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(env) if env is not None else None,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self.stdout = Output(self.process.stdout)
        self.stderr = Output(self.process.stderr)
        #: Its pid as it sees itself; ``process.pid`` is the pid here.
        self.ns_pid: int = self.reply()["pid"]

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, op: str, **args: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **args}) + "\n")
        self.process.stdin.flush()

    def reply(self, timeout: float = PATIENCE) -> dict[str, Any]:
        line: str | None = ""
        while not line or not line.startswith("{"):  # the library logs there, too
            try:
                line = self.stdout.queue.get(timeout=timeout)
            except queue.Empty:
                raise AssertionError(f"no reply from {self.pid}:\n{self.stderr.text}") from None
            if line is None:
                raise AssertionError(f"{self.pid} ended:\n{self.stderr.finish()}")
        found: dict[str, Any] = json.loads(line)
        assert "error" not in found, found["error"]
        return found

    def ask(self, op: str, **args: Any) -> dict[str, Any]:
        self.send(op, **args)
        return self.reply()

    def load(self, path: Path, lib: str = "nccl") -> None:
        self.ask("load", path=str(path), lib=lib)

    def call(self, fn: str, **args: Any) -> int:
        rc: int = self.ask("call", fn=fn, **args)["rc"]
        return rc

    def end(self, code: int = 0) -> None:
        """Ends at once, without destroy."""
        self.send("exit", code=code)
        assert self.process.wait(PATIENCE) == code


class Ranks:
    """The puppets of one job, driven together."""

    def __init__(self, puppets: list[Puppet], lib: Path) -> None:
        self.puppets = puppets
        self.lib = lib

    def __getitem__(self, rank: int) -> Puppet:
        return self.puppets[rank]

    def __len__(self) -> int:
        return len(self.puppets)

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self.puppets]

    def all(self, op: str, **args: Any) -> list[dict[str, Any]]:
        """The same command at all ranks at once."""
        for p in self.puppets:
            p.send(op, **args)
        return [p.reply() for p in self.puppets]

    def load(self) -> Ranks:
        self.all("load", path=str(self.lib))
        return self

    def init(self, comm: str = "world", lib: str = "nccl") -> Ranks:
        uid = self.puppets[0].ask("uid", lib=lib)["uid"]
        n = len(self.puppets)
        for rank, p in enumerate(self.puppets):
            p.send("init", comm=comm, lib=lib, nranks=n, uid=uid, rank=rank)
        for p in self.puppets:
            assert p.reply()["rc"] == 0
        return self

    def collective(self, fn: str = "ncclAllReduce", **args: Any) -> Ranks:
        """A call that all ranks make, waited for."""
        for reply in self.all("call", fn=fn, sync=True, **args):
            assert reply["rc"] == 0
        return self

    def destroy(self, comm: str = "world") -> Ranks:
        for reply in self.all("call", fn="ncclCommDestroy", comm=comm):
            assert reply["rc"] == 0
        return self

    def end(self) -> None:
        for p in self.puppets:
            p.end()


class Load:
    """Several ``nccl_load`` processes that begin together; what they made is the truth."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes
        self.seconds = 0.0
        self._truth: dict[int, dict[str, Any]] = {}
        self._outputs: list[Output] = []
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready")
            self._outputs.append(Output(process.stdout))

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self.processes]

    def go(self) -> Load:
        self._started = time.monotonic()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return self

    def truth(self, timeout: float = 120) -> dict[int, dict[str, Any]]:
        """By pid, once all have made their calls; they stay until ``end``."""

        def read() -> bool:
            for process, output in zip(self.processes, self._outputs, strict=True):
                if process.pid not in self._truth and output.lines:
                    self._truth[process.pid] = json.loads(output.lines[0])
            return len(self._truth) == len(self.processes)

        wait_for(read, "the load's end", timeout=timeout, poll=0.01)
        self.seconds = time.monotonic() - self._started
        return self._truth

    def done(self) -> bool:
        """Whether all have made their calls."""
        return all(output.lines for output in self._outputs)

    def end(self, daemon: Daemon) -> None:
        """Ends them, once the daemon has met them all."""
        met(daemon, self.pids)
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(PATIENCE)
