"""What the end-to-end tests share: the daemon, the processes it watches, the traces.

Nothing here waits for a fixed time: ``wait_for`` polls a condition, and says
what was awaited and what there was instead.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import jsonschema  # type: ignore[import-untyped,unused-ignore]

from nccluprobe.trace import schema

T = TypeVar("T")
Line = dict[str, Any]

PUPPET = Path(__file__).resolve().parent.parent / "e2e" / "puppet.py"

#: Seconds after which something that should happen at once is given up: the
#: machine may be busy with other things.
PATIENCE = 30.0


def wait_for(
    condition: Callable[[], T],
    what: str,
    *,
    timeout: float = PATIENCE,
    context: Callable[[], str] = str,
    poll: float = 0.05,
) -> T:
    """The first true value of ``condition``; fails with ``context()`` after ``timeout``."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:.0f} s: {what}\n{context()}")
        time.sleep(poll)


# --- processes ----------------------------------------------------------------


class Output:
    """Lines of a pipe, read on a thread of its own."""

    def __init__(self, pipe: IO[str]) -> None:
        self.lines: list[str] = []
        self.queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._pipe = pipe
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._pipe:
            self.lines.append(line)
            self.queue.put(line)
        self.queue.put(None)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def finish(self) -> str:
        """All of it, once the process has ended."""
        self._thread.join(10)
        return self.text


def kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
    process.wait(PATIENCE)


class Daemon:
    """A running ``nccluprobe attach``."""

    def __init__(self, command: Sequence[str | Path], out: Path, **popen: Any) -> None:
        self.out = out
        self.process = subprocess.Popen(
            [*map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **popen,
        )
        assert self.process.stderr is not None and self.process.stdout is not None
        self.stderr = Output(self.process.stderr)
        self.stdout = Output(self.process.stdout)

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_text(self, pattern: str, timeout: float = PATIENCE) -> re.Match[str]:
        """Until a line of standard error matches; fails when the daemon ends first."""

        def seen() -> re.Match[str] | None:
            for line in list(self.stderr.lines):
                if found := re.search(pattern, line):
                    return found
            if self.process.poll() is not None:
                text = self.stderr.finish()
                if found := re.search(pattern, text):
                    return found
                raise AssertionError(f"attach ended ({self.process.returncode}):\n{text}")
            return None

        found = wait_for(
            seen, f"a line like {pattern!r}", timeout=timeout, context=lambda: self.stderr.text
        )
        assert found
        return found

    def ready(self, timeout: float = 60) -> Daemon:
        self.wait_text(r"\bready\b", timeout)
        return self

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 60) -> int:
        """Exit code, once it has ended by itself."""
        try:
            rc = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"attach still runs:\n{self.stderr.text}") from None
        self.stderr.finish()
        return rc

    def stop(self, number: int = signal.SIGINT, timeout: float = 60) -> None:
        """Ctrl-C, and a clean end."""
        if self.process.poll() is None:
            self.send_signal(number)
        rc = self.wait(timeout)
        assert rc == 0, f"attach ended with {rc}:\n{self.stderr.text}"

    def traces(self) -> list[Trace]:
        return read_traces(self.out)

    def rss(self) -> int:
        """Resident bytes."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the daemon is gone")


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


def clean_env() -> dict[str, str]:
    """The environment without what a launcher would have set."""
    prefixes = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI", "PMIX_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return {k: v for k, v in os.environ.items() if k not in names and not k.startswith(prefixes)}


# --- traces -------------------------------------------------------------------


@dataclass
class Trace:
    """One file of a trace."""

    path: Path
    lines: list[Line] = field(default_factory=list)
    torn: bool = False

    def of(self, kind: str, **values: Any) -> list[Line]:
        """Lines of a kind that have these values."""
        return [
            line
            for line in self.lines
            if line["kind"] == kind and all(line.get(k) == v for k, v in values.items())
        ]

    @property
    def process(self) -> Line:
        return self.of("process")[-1]

    @property
    def pid(self) -> int:
        pid: int = self.process["pid"]
        return pid

    @property
    def rank(self) -> int | None:
        rank: int | None = self.process["rank"]
        return rank

    @property
    def comms(self) -> dict[int, Line]:
        return {line["id"]: line for line in self.of("comm")}

    @property
    def coverage(self) -> Line:
        return self.of("coverage")[-1]

    @property
    def end(self) -> Line | None:
        found = self.of("process_end")
        return found[-1] if found else None

    def counts(self) -> Counter[str]:
        """Finished calls by api."""
        return Counter(line["api"] for line in self.of("call"))

    def inside(self) -> list[Line]:
        """Enters without a call line of the same time and thread."""
        done = {(line["t"], line["thread"]) for line in self.of("call")}
        return [line for line in self.of("enter") if (line["t"], line["thread"]) not in done]


def read_trace(path: Path) -> Trace:
    """Whole lines only; a torn last one is noted."""
    data = path.read_bytes()
    whole, _, rest = data.rpartition(b"\n")
    lines = [json.loads(line) for line in whole.splitlines()] if whole else []
    return Trace(path, lines, torn=bool(rest))


def trace_paths(out: Path) -> list[Path]:
    return sorted(out.glob("tracing/*/rank_*.jsonl*"))


def read_traces(out: Path) -> list[Trace]:
    found = []
    for path in trace_paths(out):
        with contextlib.suppress(FileNotFoundError):  # a part that rotation has just deleted
            found.append(read_trace(path))
    return [trace for trace in found if trace.lines]


def by_pid(traces: Iterable[Trace]) -> dict[int, Trace]:
    """Traces by process; a process has one file here."""
    found: dict[int, Trace] = {}
    for trace in traces:
        assert trace.pid not in found, f"two files of process {trace.pid}"
        found[trace.pid] = trace
    return found


def until(
    daemon: Daemon, condition: Callable[[dict[int, Trace]], object], what: str, timeout: float = 30
) -> dict[int, Trace]:
    """Traces by pid, once they satisfy a condition."""

    def check() -> dict[int, Trace] | None:
        found = by_pid(daemon.traces())
        return found if condition(found) else None

    def context() -> str:
        tails = [f"{t.path.name}: {dict(t.counts())}, last {t.lines[-1]}" for t in daemon.traces()]
        return "\n".join([daemon.stderr.text, *tails])

    found = wait_for(check, what, timeout=timeout, context=context, poll=0.1)
    assert found is not None
    return found


def met(daemon: Daemon, pids: Iterable[int]) -> None:
    """Until the daemon has a file of each process.

    A process that ends within milliseconds of its first NCCL call may be gone
    before anyone can look at who it was; no real job is like that.
    """
    wanted = [f"_pid_{pid}." for pid in pids]

    def all_there() -> bool:
        names = [p.name for p in trace_paths(daemon.out)]
        return all(any(w in name for name in names) for w in wanted)

    wait_for(all_there, "a file of each process", context=lambda: daemon.stderr.text)


@functools.cache
def _validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema.json_schema())


@functools.cache
def _shape_error(text: str) -> str | None:
    errors = [e.message for e in _validator().iter_errors(json.loads(text))]
    return "; ".join(errors[:3]) if errors else None


def _shape(value: Any) -> Any:
    """The value, with what cannot matter to the schema made equal.

    Numbers are constrained by type, sign and the constant 1 of ``schema`` only.
    """
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if value in (-1, 0, 1) else (2 if value > 1 else -2)
    if isinstance(value, dict):
        return {k: _shape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_shape(v) for v in value]
    return value


def validate(traces: Iterable[Trace]) -> None:
    """Every line of every file is one that the schema allows."""
    for trace in traces:
        assert not trace.torn, f"{trace.path}: torn last line"
        for number, line in enumerate(trace.lines, 1):
            error = _shape_error(json.dumps(_shape(line), sort_keys=True))
            assert error is None, f"{trace.path}:{number}: {error}\n{line}"


def check_order(trace: Trace) -> None:
    """Nothing twice, no hole: the ordinals on each communicator are 0, 1, 2, ..."""
    seen: dict[int, list[int]] = {}
    for line in trace.of("call"):
        if line.get("comm") is not None:
            seen.setdefault(line["comm"], []).append(line["idx"])
    for comm, idx in seen.items():
        assert sorted(idx) == list(range(len(idx))), f"{trace.path}: comm {comm}"


# --- findings -----------------------------------------------------------------


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
