"""Traces, as the end-to-end tests read and check them."""

from __future__ import annotations

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped,unused-ignore]

from nccluprobe.trace import schema

Line = dict[str, Any]


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


Traces = dict[int, Trace]


def waited(traces: Traces, pids: list[int], seconds: float) -> bool:
    """All are known to have done nothing but wait for this long."""
    if any(pid not in traces for pid in pids):
        return False
    last = max(
        line["t"] for pid in pids for line in traces[pid].lines if line["kind"] in ("call", "enter")
    )
    through = min(
        t.of("coverage")[-1]["through"] if t.of("coverage") else 0
        for t in (traces[pid] for pid in pids)
    )
    return bool(through - last > seconds * 1e9)
