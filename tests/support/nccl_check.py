"""Traces tests/support/real_nccl.py with ``nccluprobe attach`` and compares.

The program knows what it called; the trace must say exactly that: every call
once, in order, with its arguments, return code, communicator and numbers.
Used by tests/nccl and by tools/nccl-matrix.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from support import nccl_program

REPO = Path(__file__).resolve().parent.parent.parent
PROGRAM = Path(__file__).with_name("real_nccl.py")
NCCLUPROBE = [
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'nccluprobe'; from nccluprobe.cli.main import run; sys.exit(run())",
]

#: commHash of the two unique ids, by the first version that makes it so.
UID_HASHES: tuple[tuple[tuple[int, int], dict[str, str]], ...] = (
    ((2, 26), {"A": "6afe1cc17717e1f4", "B": "3002dcd1bbe6653d"}),
    ((2, 18), {"A": "bf47c767cbdf3105", "B": "65bb3b0cba527185"}),
    # Before 2.18 no hash is stored: it is the one that NCCL's log prints.
    ((2, 0), {"A": "20b485532cbd7f67", "B": "ae3632082b38c8d3"}),
)

#: Names of the program's notes in the trace, where they differ.
FIELDS = {"size": "count"}
COMPARED = (
    "count", "size", "datatype", "op", "root", "peer", "nranks", "rank", "color", "key",
)  # fmt: skip


class CheckError(Exception):
    """The comparison could not be made."""


@dataclass
class Result:
    """What came out of one comparison."""

    functions: int = 0
    made: int = 0
    traced: int = 0
    #: Calls whose line carries the struct's own counter.
    with_seq: int = 0
    #: Communicators in the trace, and those of them with hash, rank and size.
    comms: int = 0
    identified: int = 0
    differences: list[str] = field(default_factory=list)
    #: The last ``process_end`` line of the trace.
    end: dict[str, Any] = field(default_factory=dict)
    libs: list[dict[str, Any]] = field(default_factory=list)


class _Reader(threading.Thread):
    """Collects the lines of a pipe, so that they can be waited for."""

    def __init__(self, pipe: IO[str]) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self._pipe = pipe
        self.start()

    def run(self) -> None:
        for line in self._pipe:
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, pattern: str, seconds: float, process: subprocess.Popen[str]) -> str:
        deadline = time.monotonic() + seconds
        seen = 0
        while True:
            ended = process.poll() is not None
            while seen < len(self.lines):
                seen += 1
                if re.search(pattern, self.lines[seen - 1]):
                    return self.lines[seen - 1]
            if ended or time.monotonic() > deadline:
                said = "\n".join(self.lines[-20:])
                how = f"exit {process.returncode}" if ended else f"not within {seconds:.0f} s"
                raise CheckError(f"no line like {pattern!r} ({how}); it said:\n{said}")
            time.sleep(0.02)


def check(
    library: Path,
    version: str,
    work: Path,
    *,
    link: str = "auto",
    calls: int | None = None,
    fewer: int = 101,
    crash: bool = False,
    attach_args: tuple[str, ...] = (),
) -> Result:
    """One run under our probes; ``work`` is an empty folder for its files."""
    out, truth, go, done = (work / name for name in ("out", "truth.json", "go", "done"))
    command = [
        sys.executable, str(PROGRAM), str(library), version, "--go", str(go),
        "--truth", str(truth), "--done", str(done), "--calls", str(calls or 1009),
        "--fewer", str(fewer), *(["--crash"] if crash else []),
    ]  # fmt: skip
    program = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd=work
    )
    tracer: subprocess.Popen[str] | None = None
    try:
        assert program.stdout is not None
        said = _Reader(program.stdout)
        said.wait_for(r"^ready", 30, program)
        tracer = subprocess.Popen(
            [
                *NCCLUPROBE, "attach", "--pid", str(program.pid), "--out", str(out),
                "--link", link, *attach_args,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPO,
        )  # fmt: skip
        assert tracer.stderr is not None
        traced = _Reader(tracer.stderr)
        traced.wait_for(r"\bready\b", 60, tracer)
        go.touch()
        said.wait_for(r"^called", 120, program)
        done.touch()
        program.wait(60)
        # The end of the process is noticed, then the tracer is told to stop.
        time.sleep(1.5)
        tracer.send_signal(signal.SIGINT)
        try:
            tracer.wait(120)
        except subprocess.TimeoutExpired:
            raise CheckError("attach did not end within 120 s of SIGINT") from None
        if tracer.returncode not in (0,):
            raise CheckError(
                f"attach ended with {tracer.returncode}: " + "\n".join(traced.lines[-20:])
            )
    finally:
        for process in (program, tracer):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
    return compare(json.loads(truth.read_text()), read_trace(out, program.pid))


def read_trace(out: Path, pid: int) -> list[dict[str, Any]]:
    """All lines of one process, in the order of its parts."""
    files = sorted(out.glob(f"tracing/*/rank_*_pid_{pid}*.jsonl"), key=lambda p: p.stat().st_mtime)
    if not files:
        raise CheckError(f"no trace of process {pid} under {out}")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def expected_lines(truth: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """What the trace must hold, by thread, numbered as the trace format says."""
    version = tuple(int(part) for part in truth["version"].split("."))
    uid_hashes = next(hashes for since, hashes in UID_HASHES if version >= since)
    generation: Counter[int] = Counter()
    numbers: Counter[tuple[Any, ...]] = Counter()
    threads: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for note in truth["calls"]:
        api, comm = note["api"], note["comm"]
        line: dict[str, Any] = {"api": api, "rc": note["rc"]}
        if note["rc"] is None:
            line["end"] = "no_return"
        line["seq"] = note.get("seq")
        for name in COMPARED:
            if name in note:
                line[FIELDS.get(name, name)] = note[name]
        if "stream" in note:
            line["stream"] = note["stream"]
        # A grown communicator's hash is not one of the unique id.
        if "uid" in note and api != "ncclCommGrow":
            line["uid_hash"] = uid_hashes[note["uid"]]
        if note.get("nonblocking"):
            line["nonblocking"] = True
        if "group" in note:
            line["group"], line["gpos"] = note["group"], note["gpos"]
        tokens = nccl_program.SIGNATURES[api].split()
        if "newcomm" in tokens:
            line["new_comm"] = None
        if "comm" in tokens:
            if comm is None:
                line["comm"] = line["idx"] = None
            else:
                key = (comm, generation[comm])
                rank, nranks, ident = nccl_program.COMMS[comm]
                line["comm"] = (*key, rank, nranks, f"{ident:016x}")
                line["idx"] = numbers[(key, "idx")]
                numbers[(key, "idx")] += 1
            order = _order_of(api, note)
            if order is not None:
                line["ord"] = None
                if comm is not None:
                    line["ord"] = numbers[(key, order)] + (order == "child")
                    numbers[(key, order)] += 1
        if comm is not None and api in ("ncclCommDestroy", "ncclCommAbort"):
            generation[comm] += 1
        threads[note["thread"]].append(line)
    return threads


def _order_of(api: str, note: dict[str, Any]) -> Any:
    if api in nccl_program.COLLECTIVES:
        return "collective"
    if api in nccl_program.P2P:
        return (api, note["peer"])
    if api in ("ncclCommSplit", "ncclCommShrink", "ncclCommGrow"):
        return "child"
    return None


def compare(truth: dict[str, Any], lines: list[dict[str, Any]]) -> Result:
    """Every difference between what was called and what the trace says."""
    threads = expected_lines(truth)
    result = Result(
        functions=len({note["api"] for note in truth["calls"]}), made=len(truth["calls"])
    )
    comms: dict[int, dict[str, Any]] = {}
    for line in lines:
        if line["kind"] == "comm":
            comms[line["id"]] = line
        elif line["kind"] == "process":
            result.libs = line["libs"]
        elif line["kind"] == "process_end":
            result.end = line
    traced: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["kind"] == "call":
            traced[line["thread"]].append(line)
            result.traced += 1
    for thread in traced:
        traced[thread].sort(key=lambda line: line["t"])

    differ = result.differences
    for line in lines:
        if line["kind"] == "coverage":
            lost = {k: line[k] for k in ("lost_kernel", "lost_queue", "blind") if line[k]}
            if lost:
                differ.append(f"coverage says {lost}")
                break
    for thread in sorted(set(traced) - set(threads)):
        differ.append(f"thread {thread} made no call, the trace has {len(traced[thread])}")
    maps = _Maps()
    for thread, wanted in threads.items():
        found = traced.get(thread, [])
        for at, want in enumerate(wanted):
            if at >= len(found):
                differ.append(f"thread {thread}: {len(wanted) - at} calls are not in the trace")
                break
            before = len(differ)
            _compare_call(f"thread {thread} call {at}", want, found[at], comms, maps, differ)
            if len(differ) > before and want["api"] != found[at]["api"]:
                break  # everything behind is shifted
        if len(found) > len(wanted):
            differ.append(f"thread {thread}: {len(found) - len(wanted)} calls too many")
    result.with_seq = maps.seen
    result.comms = len(comms)
    result.identified = sum(
        None not in (comm["comm_rank"], comm["nranks"], comm["hash"]) for comm in comms.values()
    )
    return result


class _Maps:
    """Small numbers of the trace that stand for pointers or groups of the program."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Any], Any] = {}
        self.seen = 0

    def same(self, what: str, ours: Any, theirs: Any) -> bool:
        """One to one: the first sight fixes it in both directions."""
        return (
            self._known.setdefault((what, ours), theirs) == theirs
            and self._known.setdefault((what + " back", theirs), ours) == ours
        )


def _compare_call(
    where: str,
    want: dict[str, Any],
    found: dict[str, Any],
    comms: dict[int, dict[str, Any]],
    maps: _Maps,
    differ: list[str],
) -> None:
    if want["api"] != found["api"]:
        differ.append(f"{where}: {want['api']} was called, the trace has {found['api']}")
        return
    where = f"{where} ({want['api']})"
    for name, value in want.items():
        has = found.get(name, "nothing")
        if name == "comm" and value is not None:
            comm = comms.get(has) if isinstance(has, int) else None
            if comm is None:
                differ.append(f"{where}: no communicator, {value} was passed")
                continue
            shown = (comm["comm_rank"], comm["nranks"], comm["hash"])
            # A communicator whose init was not seen may stay without identity; what
            # is said of it must be right.
            if any(s not in (None, v) for s, v in zip(shown, value[2:], strict=True)):
                differ.append(f"{where}: communicator {shown}, {value[2:]} was passed")
            if not maps.same("comm", value[:2], has):
                differ.append(f"{where}: communicator id {has} stands for two")
        elif name == "seq":
            # Where the struct has a counter, the trace may leave it out but not err.
            if "seq" in found and found["seq"] != value:
                differ.append(f"{where}: seq {has}, the struct had {value}")
            maps.seen += "seq" in found
        elif name in ("stream", "group"):
            if not isinstance(has, int) or not maps.same(name, value, has):
                differ.append(f"{where}: {name} {has} does not stand for {value}")
        elif has != value:
            differ.append(f"{where}: {name} {has}, {value} was passed")
    if want["rc"] is not None and (found["dur"] is None or found["dur"] < 0):
        differ.append(f"{where}: duration {found['dur']}")
    for name in ("group", "gpos", "nonblocking", "blind", "end"):
        if name in found and name not in want and not want["api"].startswith("ncclGroup"):
            differ.append(f"{where}: {name} {found[name]} out of place")
