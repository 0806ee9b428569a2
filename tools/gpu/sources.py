"""On a machine with two GPUs and PyTorch: one fault, told by every source there is.

sources.py OUT [FAULT[.KIND]...]: two-rank jobs in which one thing goes wrong, a few at a time,
each under `attach`, with PyTorch's flight recorder, two looks by NCCL RAS (text and JSON) and
NCCL's log. Each source is analysed by itself; a table says whom it blames. What the sources
wrote is kept in OUT/sources.tar.xz, which tests/importers/test_two_h200.py replays.
Kinds: plain and coalesced (see sources_worker.py), timed (TORCH_NCCL_ENABLE_TIMING), active
(dumps of what is active only). Needs what `attach` needs; NCCLUPROBE: the command.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from _shared import Attach, analyze, end, table

#: Fault -> who is to blame; several: any of them, "": nobody, as two ranks that differ are equals.
TRUTH = {
    "healthy": {""},
    "stall": {"1"},
    "kill": {"1"},
    "exit": {"1"},
    "stop": {"1"},
    "gpu": {"", "1"},
    "skip": {"", "1"},
    "api": {"", "1"},
    "size": {"", "1"},
    "dtype": {"", "1"},
    "order": {"", "1"},
    "no_send": {"", "1"},
    "no_receive": {"", "1"},
}
#: After the faults by themselves.
KINDS = {
    "timed": ("stall", "gpu", "size", "no_send"),
    "active": ("stall", "kill", "gpu", "size", "api", "skip", "no_send"),
    "plain": ("healthy", "stall", "gpu", "no_send", "no_receive"),
    "coalesced": ("healthy", "stall", "gpu", "size", "skip"),
}
#: Lines of NCCL's log.
_READ = re.compile(rb"opCount|Init |commId|Destroy|Abort")
AT_ONCE = 5
PATIENCE_S = 15
#: Looks by RAS, seconds after the first step.
LOOKS_S = (6, 14)
HOLD_S = 55


@dataclass
class Job:
    fault: str
    out: Path
    port: int

    def start(self) -> list[subprocess.Popen[bytes]]:
        (self.out / "fr").mkdir(parents=True, exist_ok=True)
        (self.out / "log").mkdir(exist_ok=True)
        (self.out / "ras").mkdir(exist_ok=True)
        env = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "WORLD_SIZE": "2",
            "PATIENCE_S": str(PATIENCE_S),
            "HOLD_S": str(HOLD_S),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,COLL",
            "NCCL_DEBUG_FILE": f"{self.out}/log/nccl.%p.log",
            "NCCL_RAS_ADDR": f"127.0.0.1:{self.port + 1}",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            # By the names of today, and of before 2.10.
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
            "TORCH_FR_DUMP_TEMP_FILE": f"{self.out}/fr/rank_",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{self.out}/fr/rank_",
            "TORCH_INCLUDE_STACK_TRACE": "0",
        }
        fault, _, kind = self.fault.partition(".")
        if kind == "timed":
            env["TORCH_NCCL_ENABLE_TIMING"] = "1"
        if kind == "active":
            env["TORCH_INCLUDE_ONLY_ACTIVE"] = "1"
        worker = Path(__file__).with_name("sources_worker.py")
        processes = []
        for rank in range(2):
            with (self.out / f"rank{rank}.txt").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(worker), fault, kind],
                        env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
        return processes

    @property
    def run_id(self) -> str:
        return f"{self.fault}-{os.getpid()}"

    def ask_ras(self, look: int) -> None:
        """What `ncclras -v` and `ncclras -f json` would print, by their protocol."""
        for name, words in (("txt", []), ("json", ["SET FORMAT json"])):
            said = b""
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port + 1), 3) as s,
            ):
                s.settimeout(8)
                file = s.makefile("rb")
                for word in ["CLIENT PROTOCOL 2", "TIMEOUT 5", *words]:
                    s.sendall(word.encode() + b"\n")
                    said = file.readline()
                s.sendall(b"VERBOSE STATUS\n")
                said = file.read()
            (self.out / "ras" / f"{look}.{name}").write_bytes(said)

    def run(self) -> None:
        processes = self.start()
        started = time.monotonic()
        begun = 0.0
        looks = list(LOOKS_S)
        try:
            while time.monotonic() - started < HOLD_S + 5:
                time.sleep(0.2)
                if not begun and "first step" in (self.out / "rank0.txt").read_text():
                    begun = time.monotonic()
                if begun and looks and time.monotonic() - begun > looks[0]:
                    self.ask_ras(len(LOOKS_S) - len(looks))
                    looks.pop(0)
                # PyTorch ends a job a while after its dump; a stopped one never.
                if begun and time.monotonic() - begun > PATIENCE_S + 15:
                    break
                if all(p.poll() is not None for p in processes):
                    break
        finally:
            for p in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(p.pid, signal.SIGCONT)
                end(p)


def blame(out: Path, name: str, *what: str) -> str:
    """Whom a source blames: ranks or "nobody", the kinds of the root causes, the exit code."""
    folder = out / "findings" / name
    findings, report, code = analyze(*what, out=folder)
    (folder / "report.txt").write_text(report)
    causes = [f for f in findings if f["role"] == "root_cause" and f["state"] == "open"]
    ranks = sorted({str(c["rank"]) for f in causes for c in f["culprits"]})
    kinds = sorted({f["hang_type"] for f in causes})
    return f"{','.join(ranks) or 'nobody'} {' '.join(kinds)} ({code})"


def sources(job: Job, traces: Path) -> dict[str, list[str]]:
    """Name -> the arguments of analyze."""
    found = {"trace": [str(traces / "tracing" / job.run_id)]}
    if any((job.out / "fr").iterdir()):
        found["fr"] = ["--from", "fr", str(job.out / "fr")]
    if (job.out / "ras" / "1.txt").exists():
        found["ras text"] = ["--from", "ras", *(str(job.out / "ras" / f"{i}.txt") for i in (0, 1))]
        found["ras json"] = ["--from", "ras", *(str(job.out / "ras" / f"{i}.json") for i in (0, 1))]
    if logs := sorted(map(str, (job.out / "log").iterdir())):
        found["nccl-log"] = ["--from", "nccl-log", *logs]
    return found


def keep(out: Path, faults: Sequence[str]) -> None:
    """What the sources wrote, with its times, as one file."""
    with tarfile.open(out / "sources.tar.xz", "w:xz") as kept:
        for fault in faults:
            for path in sorted(
                p for s in ("fr", "ras", "log") for p in (out / fault / s).iterdir()
            ):
                if not path.stat().st_size:
                    continue
                if path.parent.name == "log":  # what is not read would be most of it
                    lines = [x for x in path.read_bytes().splitlines(True) if _READ.search(x)]
                    written = path.stat().st_mtime_ns
                    path.write_bytes(b"".join(lines))
                    os.utime(path, ns=(written, written))
                kept.add(path, str(path.relative_to(out)))


def main() -> int:
    out = Path(sys.argv[1]).resolve()
    faults = sys.argv[2:] or [
        *TRUTH,
        *(f"{f}.{kind}" for kind, some in KINDS.items() for f in some),
    ]
    out.mkdir(parents=True, exist_ok=True)
    jobs = [Job(f, out / f, 29600 + 10 * i) for i, f in enumerate(faults)]
    attach = Attach(out / "traces", out / "attach.log", "--pid-glob", "python")
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(Job.run, jobs))
        time.sleep(2)
    finally:
        attach.stop()
    asked = [
        (job, name, arguments)
        for job in jobs
        for name, arguments in sources(job, out / "traces").items()
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = pool.map(lambda x: blame(x[0].out, x[1].replace(" ", "_"), *x[2]), asked)
        rows = [(job.fault, name, a) for (job, name, _), a in zip(asked, answers, strict=True)]
    wrong = sum(
        said.split()[0].replace("nobody", "") not in TRUTH[fault.partition(".")[0]] | {""}
        for fault, _, said in rows
    )
    table(("fault", "source", "blamed"), rows)
    keep(out, faults)
    print(f"\n{wrong} of {len(rows)} name somebody who did nothing wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
