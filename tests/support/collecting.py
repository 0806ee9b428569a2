"""A front, processes and a clock that do as a test says, and a reader of what came out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from nccluprobe import record as layout
from nccluprobe.capture.source import Library, Losses
from nccluprobe.collect.clock import Reading
from nccluprobe.collect.collector import Collector
from nccluprobe.nccl.api import BY_NAME
from nccluprobe.record import STRUCT, UNKNOWN_SEQ, Record
from nccluprobe.trace.schema import json_schema

ZERO = Record(*([0] * len(Record._fields)))
S = 1_000_000_000
MS = 1_000_000
T0 = 1_000 * S


def rec(api: str = "ncclAllReduce", **fields: Any) -> Record:
    """A call's record; what is not given is plausible."""
    base = {
        "api": BY_NAME[api].id,
        "kind": layout.KIND_CALL,
        "pid": 100,
        "tid": 100,
        "epoch": 1,
        "nccl_seq": UNKNOWN_SEQ,
        "t_enter": T0,
    }
    base.update(fields)
    if "t_exit" not in base:
        base["t_exit"] = base["t_enter"] + 1000
    return ZERO._replace(**base)


def init(gen: int, rank: int = 0, nranks: int = 2, uid_hash: int = 0xABC, **fields: Any) -> Record:
    """A finished ncclCommInitRank."""
    return rec(
        "ncclCommInitRank",
        **{
            "new_comm": 0x7000 + gen,
            "new_gen": gen,
            "peer": rank,
            "nranks": nranks,
            "uid_hash": uid_hash,
            **fields,
        },
    )


def name_record(gen: int, name: str, **fields: Any) -> Record:
    """A KIND_NAME record."""
    raw = bytearray(STRUCT.pack(*rec(kind=layout.KIND_NAME, new_gen=gen, **fields)))
    text = name.encode()[:63].ljust(64, b"\0")
    raw[layout.NAME_OFFSET : layout.NAME_OFFSET + 64] = text
    return Record._make(STRUCT.unpack(raw))


def packed(records: Iterable[Record]) -> bytes:
    """As a ring has them."""
    return b"".join(STRUCT.pack(*r) for r in records)


class FakeSource:
    """A front: a test appends to ``ring`` and ``inside``."""

    front = "ebpf"
    exits = True

    def __init__(self, version: str = "2.28.9") -> None:
        self.ring: list[Record] = []
        self.inside: list[Record] = []
        self.lost = Losses()
        self.version = version
        self.denied: list[tuple[int, int]] = []
        self.forgotten: list[tuple[int, int]] = []

    def drain(self) -> Iterator[bytes]:
        taken, self.ring = self.ring, []
        return iter([packed(taken)] if taken else [])

    def in_flight(self) -> bytes:
        return packed(self.inside)

    def losses(self) -> Losses:
        return self.lost

    def library(self, lib: int) -> Library | None:
        return Library(lib, f"/usr/lib/{lib}/libnccl.so.2", self.version, "ab" * 20)

    def deny(self, pid: int, epoch: int) -> None:
        self.denied.append((pid, epoch))

    def forget(self, pid: int, epoch: int) -> None:
        self.forgotten.append((pid, epoch))


@dataclass
class Ranks:
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    source: str = "unknown"
    job: str | None = None


@dataclass
class Info:
    start_ns: int = 5 * S
    start_ticks: int = 500
    exe: str | None = "python3"
    ns_pid: int | None = None
    uid: int = 0
    gid: int = 0
    host: str = "node1"
    boot_id: str = "boot"
    ranks: Ranks = field(default_factory=Ranks)


@dataclass
class State:
    alive: bool = True
    main: str = "running"
    syscall: str | None = None
    cpu_ns: int = 7
    start_ticks: int = 500


class FakeProcs:
    """/proc: processes not set are of the default kind."""

    def __init__(self) -> None:
        self.infos: dict[int, Info | None] = {}
        self.states: dict[int, State] = {}

    def read(self, pid: int) -> Info:
        info = self.infos.get(pid, Info())
        if info is None:
            raise ProcessLookupError
        return info

    def read_state(self, pid: int) -> State:
        return self.states.get(pid, State())


@dataclass
class Exit:
    pid: int
    how: str
    code: int | None
    signal: int | None
    t_ns: int


@dataclass
class Exec:
    pid: int
    t_ns: int


class FakeWatcher:
    def __init__(self) -> None:
        self.watched: list[int] = []
        self.exits: list[Exit] = []
        self.execs: list[Exec] = []

    def watch(self, pid: int, start: int | None = None) -> bool:
        self.watched.append(pid)
        return True

    def poll(self) -> list[Exit]:
        taken, self.exits = self.exits, []
        return taken

    def take_execs(self) -> list[Exec]:
        taken, self.execs = self.execs, []
        return taken


class FakeClock:
    def __init__(self) -> None:
        self.now = T0

    def mono(self) -> int:
        return self.now

    def reading(self) -> Reading:
        return Reading(self.now, self.now + 10**18, True, 1500)


class Bench:
    """A collector with all its surroundings faked but the disk."""

    def __init__(
        self,
        out: Path,
        wanted: Callable[[int], bool | None] = lambda pid: True,
        version: str = "2.28.9",
        **options: Any,
    ) -> None:
        self.out = out
        self.source = FakeSource(version)
        self.procs = FakeProcs()
        self.watcher = FakeWatcher()
        self.clock = FakeClock()
        self.messages: list[tuple[str, str]] = []
        options.setdefault("run_id", "run")
        self.collector = Collector(
            self.source,
            out,
            wanted=wanted,
            watcher=self.watcher,
            procs=self.procs,
            clock=self.clock,
            notify=lambda kind, text: self.messages.append((kind, text)),
            **options,
        )

    def step(self, *records: Record, ms: int = 10) -> None:
        """Time goes on, records come, one round."""
        self.clock.now += ms * MS
        self.source.ring += records
        self.collector.step(self.clock.now)

    def steps(self, seconds: float, ms: int = 10) -> None:
        """Rounds without records."""
        for _ in range(round(seconds * 1000 / ms)):
            self.step(ms=ms)

    def close(self) -> None:
        self.clock.now += MS
        self.collector.close(self.clock.now)

    def files(self, run: str = "run") -> list[Path]:
        return sorted((self.out / "tracing" / run).glob("*.jsonl"))

    def lines(self, name: str | None = None, check: bool = True) -> list[dict[str, Any]]:
        """The lines of a file (of the only one), all valid by the schema."""
        found = [f for f in self.files() if name is None or f.name == name]
        assert len(found) == 1, found
        return read(found[0], check)

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["kind"] in kinds]


def calls(bench: Bench, n: int, start: int = 0) -> list[Any]:
    """``n`` calls on the first communicator, numbered from ``start``."""
    return [
        rec(comm_gen=1, t_enter=bench.clock.now + i, call_idx=start + i, order_idx=start + i)
        for i in range(n)
    ]


def inside(bench: Bench, **fields: Any) -> Any:
    """A call that enters now and stays."""
    found = rec(
        **{"api": "ncclAllReduce", "comm_gen": 1, "t_enter": bench.clock.now, "t_exit": 0, **fields}
    )
    bench.source.inside = [*bench.source.inside, found]
    return found


@cache
def validator() -> Any:
    """Of one line."""
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def read(path: Path, check: bool = True) -> list[dict[str, Any]]:
    """All lines of a file: whole ones, and valid."""
    data = path.read_bytes()
    assert data.endswith(b"\n")
    lines = [json.loads(line) for line in data.splitlines()]
    if check:
        for line in lines:
            validator().validate(line)
            assert all(
                not isinstance(v, int) or k == "unix" or abs(v) < 2**53 for k, v in line.items()
            ), line
    return lines
