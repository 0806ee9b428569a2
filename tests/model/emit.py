"""Writes what a tracer would have seen of a run of the model, as trace lines."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import orjson

from model.engine import Engine
from model.process import Process

S = 1_000_000_000
UNIX = 1_700_000_000 * S
#: A call that is inside for longer has an ``enter`` line.
INSIDE = 0.4
#: How far the watermark of a coverage line is behind.
LAG = 0.45


@dataclass
class Trace:
    """One process's trace: lines with the time at which they were written."""

    rank: int
    host: str
    pid: int
    mono: int
    skew: int = 0
    lines: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"rank_{self.rank}_pid_{self.pid}"

    def data(self) -> bytes:
        return b"\n".join(line for _, line in self.lines) + b"\n"

    def at(self, t: float) -> int:
        """Seconds of the model -> ns of the host's monotonic clock."""
        return self.mono + round(t * S)


@dataclass
class JobTrace:
    """The traces of a job, as ``support.analysis.Run`` takes them."""

    procs: list[Trace]
    run_id: str = "model"

    def written(self, t: float) -> list[int]:
        """How many lines each process's trace had at this time."""
        return [bisect_right(p.lines, t, key=lambda x: x[0]) for p in self.procs]


def emit(engine: Engine, horizon: float, lost: dict[int, set[int]] | None = None) -> JobTrace:
    """Traces of all processes up to ``horizon``.  ``lost``: rank -> indices of lost records."""
    traces = []
    for proc in engine.procs:
        if proc.records and proc.records[0].t <= horizon:
            traces.append(_process(engine, proc, horizon, (lost or {}).get(proc.rank, set())))
    return JobTrace(traces)


def _process(engine: Engine, proc: Process, horizon: float, lost: set[int]) -> Trace:
    node = proc.rank // engine.program.per_host
    pid = 1000 + proc.rank
    trace = Trace(proc.rank, f"node{node}", pid, (5_000 + 1_234 * node) * S, node * 40_000)
    end = horizon if proc.ended is None else min(horizon, proc.ended[0])
    over = proc.ended is not None and proc.ended[0] <= horizon
    first = proc.records[0].t
    items: list[tuple[float, int, bytes]] = []

    def add(t: float, line: dict[str, Any]) -> None:
        items.append((t, len(items), orjson.dumps(line)))

    add(-2.0, _header(engine, trace))
    t = first
    while t < end:
        unix = UNIX + round(t * S) + trace.skew
        add(t - 0.001, {"kind": "clock", "mono": trace.at(t), "unix": unix,
                        "synced": True, "err": 100_000})  # fmt: skip
        t += 10.0
    _calls(trace, proc, end, over, lost, add)
    _coverage(trace, proc, (first, end), over, engine.program.host_state, lost, add)
    if over:
        assert proc.ended is not None
        _, code, signal = proc.ended
        inside = sum(1 for r in proc.records if r.t <= end and (r.end is None or r.end > end))
        add(end + 0.03, {"kind": "process_end", "t": trace.at(end),
                         "how": "exited" if signal is None else "signaled", "code": code,
                         "signal": signal, "in_flight": inside})  # fmt: skip
    items.sort()
    trace.lines = [(t, line) for t, _, line in items]
    return trace


def _header(engine: Engine, trace: Trace) -> dict[str, Any]:
    lib = {"lib": 0, "path": "/x/libnccl.so.2", "nccl_version": "2.28.9", "build_id": None}
    return {
        "kind": "process",
        "schema": 1,
        "run_id": "model",
        "host": trace.host,
        "boot_id": f"boot-{trace.host}",
        "pid": trace.pid,
        "ns_pid": None,
        "start": trace.pid * 1000,
        "exe": "python3",
        "rank": trace.rank,
        "rank_source": "torchrun",
        "world_size": engine.program.nranks,
        "local_rank": trace.rank % engine.program.per_host,
        "front": "ebpf",
        "probe_version": "0.1.0",
        "libs": [lib],
        "exits": True,
        "cannot_see": ["graph_replay"],
        "part": 0,
    }


def _calls(trace: Trace, proc: Process, end: float, over: bool, lost: set[int], add: Any) -> None:
    made = {"kind": "comm", "instance": 0, "name": None, "lib": 0}
    for i, record in enumerate(proc.records):
        if record.t > end:
            continue
        t = trace.at(record.t)
        head = {"api": record.api, "t": t, "thread": trace.pid + 10_000 * record.thread}
        left = record.end is not None and record.end <= end
        stop = record.end if left and record.end is not None else end
        long = stop - record.t > INSIDE
        ends = record.comm_line is not None and "how" in record.comm_line
        if long:
            if ends:
                add(record.t + INSIDE, {"kind": "comm_end", "t": t, **(record.comm_line or {})})
            fields = {k: v for k, v in record.fields.items() if k != "new_comm"}
            add(record.t + INSIDE, {"kind": "enter", **head, **fields})
        if i in lost:
            if long and left:
                tail = {"dur": None, "rc": None, "end": "lost"}
                add(stop + 0.75, {"kind": "call", **head, **tail, **record.fields})
            continue
        if left:
            if record.comm_line is not None and not ends:
                add(stop, {**made, "t": t, **record.comm_line})
            elif ends and not long:
                add(stop, {"kind": "comm_end", "t": t, **(record.comm_line or {})})
            dur = {"dur": round((stop - record.t) * S), "rc": 0}
            add(stop, {"kind": "call", **head, **dur, **record.fields})
        elif over:
            tail = {"dur": None, "rc": None, "end": "no_return"}
            add(end + 0.01, {"kind": "call", **head, **tail, **record.fields})


def _coverage(
    trace: Trace,
    proc: Process,
    span: tuple[float, float],
    over: bool,
    seen: bool,
    lost: set[int],
    add: Any,
) -> None:
    """Coverage lines.  ``over``: the process has ended; ``seen``: its main thread is."""
    first, end = span
    starts = sorted(r.t for r in proc.records)
    done = [(r.end, i) for i, r in enumerate(proc.records) if r.end is not None]
    ends = sorted(t for t, _ in done)
    kept = sorted(t for t, i in done if i not in lost)
    states = [s[0] for s in proc.states]

    def line(t: float, through: float, dead: bool) -> None:
        begun, ended = bisect_right(starts, t), bisect_right(ends, t)
        captured = bisect_right(kept, t)
        latest = max(starts[begun - 1] if begun else 0.0, ends[ended - 1] if ended else 0.0)
        _, main, syscall = proc.states[max(0, bisect_right(states, t) - 1)]
        stopped = any(a <= t and (b is None or b > t) for a, b in proc.stops)
        if stopped and main != "nccl":
            main, syscall = "stopped", None
        if dead:
            main, syscall = "dead", None
        elif not seen and main != "nccl":
            main, syscall = "unknown", None
        body: dict[str, Any] = {
            "kind": "coverage",
            "t": trace.at(t),
            "through": trace.at(through),
            "captured": captured,
            "lost_kernel": ended - captured,
            "lost_queue": 0,
            "overwritten": 0,
            "skipped_disk": 0,
            "blind": 0,
            "in_flight": 0 if dead else begun - ended,
            "alive": not dead,
            "main": main,
            "last_call_age": round((t - latest) * S),
        }
        if syscall is not None:
            body["syscall"] = syscall
        add(t, body)

    t = first + 0.5
    while t < end:
        line(t, t - LAG, False)
        t += 1.0
    if over:
        line(end + 0.02, end, True)
    else:
        line(end, end - LAG, False)
