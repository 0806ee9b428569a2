"""Writes traces of made-up jobs, valid by the schema.

A ``Job`` has processes; a process has communicators and calls.  Times are
seconds since the job's start on its host's clock.  Lines are kept in order of
time, as a collector writes them: a call at its exit, coverage every second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from nccluprobe.nccl.api import BY_NAME, Kind, Role

S = 1_000_000_000
UNIX = 1_700_000_000 * S
MONO = 5_000 * S

_DEFAULTS: dict[Role, tuple[str, Any]] = {
    Role.COUNT: ("count", 1024),
    Role.DATATYPE: ("datatype", "float32"),
    Role.OP: ("op", "sum"),
    Role.ROOT: ("root", 0),
    Role.PEER: ("peer", 0),
    Role.STREAM: ("stream", 0),
}


@dataclass(frozen=True)
class Host:
    """A host with its clocks.  ``skew``: seconds its unix time is ahead."""

    name: str = "node0"
    skew: float = 0.0
    err: int | None = 1_000
    synced: bool | None = True
    mono: int = MONO

    @property
    def boot_id(self) -> str:
        return f"boot-{self.name}"

    def at(self, t: float) -> int:
        return self.mono + round(t * S)


@dataclass
class Comm:
    """One endpoint's view of a communicator."""

    id: int
    proc: Proc
    ords: int = 0
    idx: int = 0
    peers: dict[tuple[str, int], int] = field(default_factory=dict)


@dataclass
class Proc:
    """One traced process."""

    rank: int | None
    pid: int
    host: Host
    run_id: str = "run"
    known_rank: bool = True
    cannot_see: list[str] = field(default_factory=list)
    lines: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)
    comms: list[Comm] = field(default_factory=list)
    captured: int = 0
    groups: int = 0
    busy: float = 0.0

    @property
    def name(self) -> str:
        return f"rank_{self.rank}_pid_{self.pid}"

    def add(self, t: float, line: dict[str, Any]) -> dict[str, Any]:
        self.lines.append((self.host.at(t), len(self.lines), line))
        return line

    def header(self, part: int = 0) -> dict[str, Any]:
        return {
            "kind": "process",
            "schema": 1,
            "run_id": self.run_id,
            "host": self.host.name,
            "boot_id": self.host.boot_id,
            "pid": self.pid,
            "ns_pid": None,
            "start": self.pid * 1000,
            "exe": "python3",
            "rank": self.rank if self.known_rank else None,
            "rank_source": "torchrun" if self.known_rank else "unknown",
            "world_size": None,
            "local_rank": None,
            "front": "ebpf",
            "probe_version": "0.1.0",
            "libs": [
                {"lib": 0, "path": "/x/libnccl.so.2", "nccl_version": "2.28.9", "build_id": None}
            ],
            "exits": True,
            "cannot_see": self.cannot_see,
            "part": part,
        }

    def clock(self, t: float) -> None:
        self.add(
            t,
            {
                "kind": "clock",
                "mono": self.host.at(t),
                "unix": UNIX + round((t + self.host.skew) * S),
                "synced": self.host.synced,
                "err": self.host.err,
            },
        )

    def comm(
        self,
        comm_hash: str | None,
        rank: int | None,
        nranks: int | None,
        t: float = 0.0,
        instance: int = 0,
        learnt: str = "init",
        **more: Any,
    ) -> Comm:
        made = Comm(len(self.comms), self)
        self.comms.append(made)
        self.add(
            t,
            {
                "kind": "comm",
                "id": made.id,
                "t": self.host.at(t),
                "hash": comm_hash,
                "instance": instance,
                "comm_rank": rank,
                "nranks": nranks,
                "parent": None,
                "name": None,
                "learnt": learnt,
                "lib": 0,
                **more,
            },
        )
        return made

    def _line(
        self, kind: str, comm: Comm | None, name: str, t: float, **args: Any
    ) -> dict[str, Any]:
        api = BY_NAME[name]
        line: dict[str, Any] = {
            "kind": kind,
            "api": name,
            "t": self.host.at(t),
            "thread": args.pop("thread", self.pid),
        }
        for role in api.args:
            if role in _DEFAULTS:
                key, value = _DEFAULTS[role]
                line[key] = args.pop(key, value)
        if api.has(Role.COMM):
            line["comm"] = None if comm is None else comm.id
            line["idx"] = None if comm is None else comm.idx
            if comm is not None:
                comm.idx += 1
            if api.kind is Kind.COLLECTIVE:
                line["ord"] = None if comm is None else comm.ords
                if comm is not None:
                    comm.ords += 1
            elif api.kind is Kind.P2P and comm is not None:
                lane = (api.direction or "", line["peer"])
                line["ord"] = comm.peers.get(lane, 0)
                comm.peers[lane] = line["ord"] + 1
        self.captured += 1
        line.update(args)
        return line

    def call(
        self,
        comm: Comm | None,
        name: str,
        t: float,
        dur: float = 1e-5,
        rc: int | None = 0,
        lost: bool = False,
        **args: Any,
    ) -> dict[str, Any]:
        line = self._line("call", comm, name, t, **args)
        line["dur"] = None if rc is None and dur < 0 else round(dur * S)
        line["rc"] = rc
        if rc is None:
            line["end"] = args.get("end", "no_return")
        self.busy = max(self.busy, t + dur)
        return line if lost else self.add(t + dur, line)

    def enter(self, comm: Comm | None, name: str, t: float, **args: Any) -> dict[str, Any]:
        return self.add(t + 0.2, self._line("enter", comm, name, t, **args))

    def group(self, calls: list[tuple[Comm, str, dict[str, Any]]], t: float, **end: Any) -> None:
        """A group; ``end``: rc and dur of GroupEnd, or state="open" or "inside"."""
        self.groups += 1
        state = end.pop("state", "ended")
        self.call(None, "ncclGroupStart", t)
        at = t
        for i, (comm, name, args) in enumerate(calls):
            at = t + 1e-5 * (i + 1)
            self.call(comm, name, at, dur=1e-6, group=self.groups, gpos=i, **args)
        if state == "inside":
            self.enter(None, "ncclGroupEnd", at + 1e-5, group=self.groups, gpos=len(calls))
        elif state == "ended":
            self.call(None, "ncclGroupEnd", at + 1e-5, group=self.groups, gpos=len(calls), **end)

    def coverage(self, t: float, through: float | None = None, **more: Any) -> None:
        self.add(
            t,
            {
                "kind": "coverage",
                "t": self.host.at(t),
                "through": self.host.at(t if through is None else through),
                "captured": self.captured,
                "lost_kernel": 0,
                "lost_queue": 0,
                "overwritten": 0,
                "skipped_disk": 0,
                "blind": 0,
                "in_flight": None,
                "alive": True,
                "main": "running",
                "last_call_age": None,
                **more,
            },
        )

    def cover(self, start: float, end: float, step: float = 1.0, **more: Any) -> None:
        """Coverage lines from start to end."""
        t = start
        while t < end:
            self.coverage(t, **more)
            t += step
        self.coverage(end, **more)

    def phase(self, t: float, name: str | None, since: float | None = None, **more: int) -> None:
        """What it declares of itself from ``t`` on; seconds in ``more`` become ns."""
        at = self.host.at(t if since is None else since)
        line = {"kind": "state", "t": self.host.at(t), "state": "phase", "phase": name, "since": at}
        if name is not None:
            line["beat"] = self.host.at(t)
        self.add(t, line | {k: v if k == "step" else round(v * S) for k, v in more.items()})

    def comm_end(self, comm: Comm, t: float, how: str = "destroy") -> None:
        self.add(t, {"kind": "comm_end", "comm": comm.id, "t": self.host.at(t), "how": how})

    def end(
        self,
        t: float,
        how: str = "exited",
        code: int | None = 0,
        signal: int | None = None,
        in_flight: int = 0,
    ) -> None:
        if how == "signaled":
            code = None
        self.add(
            t,
            {
                "kind": "process_end",
                "t": self.host.at(t),
                "how": how,
                "code": code,
                "signal": signal,
                "in_flight": in_flight,
            },
        )

    def output(self) -> list[dict[str, Any]]:
        """All lines in file order."""
        lines = [line for _, _, line in sorted(self.lines, key=lambda x: x[:2])]
        inside: set[tuple[int, int]] = set()
        for line in lines:
            if line["kind"] == "enter":
                inside.add((line["thread"], line["t"]))
            elif line["kind"] == "call":
                inside.discard((line["thread"], line["t"]))
            elif line["kind"] == "coverage" and line["in_flight"] is None:
                line["in_flight"] = len(inside)
        return [self.header(), *lines]

    def data(self) -> bytes:
        return b"".join(orjson.dumps(line) + b"\n" for line in self.output())


@dataclass
class Job:
    """Some processes."""

    run_id: str = "run"
    procs: list[Proc] = field(default_factory=list)

    def proc(self, rank: int | None, host: Host | None = None, **more: Any) -> Proc:
        pid = more.pop("pid", 1000 + (rank if rank is not None else 500 + len(self.procs)))
        made = Proc(rank, pid, host or _NODE, more.pop("run_id", self.run_id), **more)
        made.clock(0.0)
        self.procs.append(made)
        return made

    def world(self, n: int, comm_hash: str = "00000000000000aa", **more: Any) -> list[Comm]:
        """``n`` ranks with one communicator; nranks=... for a partial view."""
        nranks = more.pop("nranks", n)
        return [self.proc(r, **more).comm(comm_hash, r, nranks) for r in range(n)]

    def write(self, out: Path) -> Path:
        """Write as ``attach`` does; returns the folder of the run's output."""
        for p in self.procs:
            folder = out / "tracing" / p.run_id
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"{p.name}.jsonl").open("ab") as f:
                f.write(p.data())
        return out


_NODE = Host()


def unix(t: float) -> int:
    """Unix ns of a moment on an unskewed host."""
    return UNIX + round(t * S)
