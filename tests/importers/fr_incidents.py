"""Incidents with known culprits: a job of ``fr_jobs``, a fault, and the dumps of all ranks.

``make(kind, seed)`` gives the incident and the truth, ``dumps(form)`` what its ranks leave.
"""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from importers.fr_jobs import Megatron, Sharded
from importers.fr_parts import NEVER, Entry, Fault, Group
from importers.fr_sim import Host, Sim

T0 = 1_758_610_000.0
_POLL = 0.1  # how often PyTorch's watchdog looks
_END = 1e5

#: (tensor, data, stages, chunks)
SHAPES = (
    (2, 2, 4, 2),
    (4, 2, 2, 2),
    (2, 2, 2, 1),
    (2, 2, 4, 1),
    (1, 2, 4, 1),
    (2, 4, 2, 1),
    (2, 1, 4, 2),
    (4, 2, 4, 2),
)


@dataclass
class Form:
    """How dumps are written."""

    active_only: bool = True
    ring: int | None = None
    timing: bool = False
    as_json: bool = False
    status: bool = True
    #: The configuration tells of groups that were never used.
    eager: bool = False
    #: So many dumps of innocent ranks are missing.
    lost: int = 0
    name: str = "_dump_{}"
    version: str = "2.9"


def _job(rng: random.Random) -> Megatron | Sharded:
    if rng.random() < 0.75:
        t, d, p, chunks = rng.choice(SHAPES)
        return Megatron(rng, t, d, p, chunks)
    return Sharded(rng, *rng.choice(((8, 8, 1), (8, 4, 1), (16, 4, 2), (16, 8, 1), (8, 2, 2))))


def _built(seed: int) -> tuple[Megatron | Sharded, random.Random]:
    rng = random.Random(seed)
    return _job(rng), rng


def _alike(job: Megatron | Sharded, rng: random.Random, n: int, how: str) -> list[int]:
    """Ranks for several culprits: of one tensor-parallel group, of one stage, ..."""
    ranks = list(range(job.n))
    first = rng.choice(ranks)
    if how == "tensor":
        pool = list(job.tp[first].ranks)
    elif how == "stage" and isinstance(job, Megatron):
        pool = list(job.tdp[first].ranks)
    elif how == "pipe" and isinstance(job, Megatron):
        pool = list(job.pp[first].ranks)
    else:
        pool = ranks
    pool = [r for r in pool if r != first] or [r for r in ranks if r != first]
    return sorted([first, *rng.sample(pool, min(n - 1, len(pool)))])


@dataclass
class Incident:
    """What happened.

    ``culprits``: who is to be named; ``masked``: at fault as well, but held up by others before.
    """

    kind: str
    job: Megatron | Sharded
    sim: Sim
    culprits: set[int]
    masked: set[int]
    seed: int

    def dumps(self, form: Form) -> dict[str, bytes]:
        """File name -> what is in it."""
        name = self.kind.partition("-")[0]
        rng = random.Random(f"{self.kind} {self.seed} dumps")
        faults = self.sim.faults
        missing = set(faults) if name in ("stop", "crash") else set()
        if form.lost:
            innocent = sorted(self.sim.hosts.keys() - faults.keys())
            missing |= set(rng.sample(innocent, form.lost))
        # A late rank goes on just before the others have dumped, and dumps last.
        cutoff = min((f.at for f in faults.values()), default=0.0) + 180
        found = {}
        for r, h in self.sim.hosts.items():
            until = cutoff if name == "late" and r not in faults else _END
            if self.kind == "late-gone" and r in faults:
                # The others are gone by then: what it queues does not end any more.
                until = (h.stopped_at or 0.0) + faults[r].length + 5e-3
            writer = Writer(self.job, h, form, rng, until)
            if self.kind == "late-gone":
                writer.known = min(writer.known, cutoff)
            dump = writer.dump()
            if r not in missing:
                data = json.dumps(dump).encode() if form.as_json else pickle.dumps(dump, 2)
                found[form.name.format(r)] = data
        return found

    def write(self, folder: Path, form: Form) -> Path:
        """All dumps as files."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.dumps(form).items():
            (folder / name).write_bytes(data)
        return folder


def make(kind: str, seed: int) -> Incident | None:
    """The incident of this kind and seed; None when the fault had no effect."""
    job, _ = _built(seed)
    healthy = Sim(job.n, {})
    job.start(healthy)
    healthy.run()
    length = healthy.now
    job, _ = _built(seed)
    rng = random.Random(f"{kind} {seed}")
    at = length * rng.uniform(0.3, 0.98)
    faults: dict[int, Fault] = {}
    cut: dict[Group, float] = {}
    name, _, how = kind.partition("-")
    count = 1 if how in ("", "one", "gone") else rng.choice((2, 2, 2, 3))
    if name == "cut":
        cut[rng.choice([g for g in job.groups.all if len(g.ranks) > 1])] = at
    elif name != "healthy":
        for r in _alike(job, rng, count, how):
            later = rng.choice((0.0, 0.0, rng.uniform(0, 2e-3), rng.uniform(0, 0.02)))
            stop = rng.choice(("step", "sync", "sync"))
            real = {"stop": "hang", "crash": "kill"}.get(name, name)
            faults[r] = Fault(real, at + later, stop, 200.0 if name == "late" else NEVER)
    sim = Sim(job.n, faults, cut)
    job.start(sim)
    sim.run(length * rng.uniform(0.3, 0.9) if name == "healthy" else NEVER)
    if name not in ("healthy", "late") and not sim.stuck():
        return None
    culprits = {r for r in faults if sim.hosts[r].stopped_at is not None}
    if name in ("sleep", "crash", "gpu"):
        culprits = set(faults)
    if faults and not culprits:
        return None
    return Incident(kind, job, sim, culprits, set(faults) - culprits, seed)


class Writer:
    """One rank's dump, as PyTorch makes it."""

    def __init__(
        self,
        job: Megatron | Sharded,
        host: Host,
        form: Form,
        rng: random.Random,
        until: float = _END,
    ) -> None:
        self.job, self.host, self.form, self.rng = job, host, form, rng
        self.until = until
        fault = host.sim.faults.get(host.rank)
        #: What was done later is not known: the device's events cannot be asked any more.
        self.known = until
        if fault is not None and fault.kind == "gpu":
            self.known = fault.at - rng.uniform(0, _POLL)
        self.first = rng.randrange(100_000)

    def _offset(self, g: Group) -> int:
        """What was called before: ranks of one stage have run one program."""
        stage = len(self.job.tdp[0].ranks) if isinstance(self.job, Megatron) else self.job.n
        return _offset(g.desc, list(g.ranks), stage)

    def _done(self, e: Entry) -> bool:
        return e.part is not None and e.part.done <= self.known

    def _entry(self, e: Entry, number: int) -> dict[str, Any]:
        done = self._done(e)
        started = done or (e.part is not None and e.part.ready <= self.known)
        seen = e.part.done + self.rng.uniform(0, _POLL) if done and e.part else 0.0
        begun = seen or (e.part.ready if started and e.part else 0.0)
        has_started = self.form.timing and started
        state = "completed" if done else "started" if has_started else "scheduled"
        offset = self._offset(e.group)
        return {
            "record_id": self.first + e.record,
            "pg_id": number,
            "process_group": (e.group.name, e.group.desc),
            "collective_seq_id": offset + e.seq,
            "p2p_seq_id": e.p2p and offset // 2 + e.p2p,
            "op_id": offset + (e.p2p and offset // 2) + e.op,
            "profiling_name": f"nccl:{e.name}",
            "time_created_ns": _ns(e.created),
            "input_sizes": e.inputs,
            "input_dtypes": [e.dtype] * len(e.inputs),
            "output_sizes": e.outputs,
            "output_dtypes": [e.dtype] * len(e.outputs),
            "state": state,
            "time_discovered_started_ns": _ns(begun) if has_started else None,
            "time_discovered_completed_ns": _ns(seen) if done else None,
            "retired": done,
            "timeout_ms": e.timeout_ms,
            "is_p2p": e.is_p2p,
            "thread_id": "23456244340032",
            "thread_name": "python3",
        }

    def _ids(self) -> dict[str, int]:
        """Group -> its number in this process, where it has a communicator."""
        found: dict[str, int] = {}
        number = 0
        for i in range(int(self.job.groups.all[-1].name) + 1):
            g = next((g for g in self.job.groups.all if g.name == str(i)), None)
            if g is None:
                number += 1
            elif self.host.rank in g.ranks:
                found[g.name] = number
                number += 1
        return found

    def dump(self) -> dict[str, Any]:
        """The dump."""
        ids = self._ids()
        mine = self.job.groups.of(self.host.rank)
        used = [g for g in mine if self.host.works.get(g.name)]
        entries = [e for e in self.host.entries if e.created <= self.until]
        if self.form.ring is not None:
            entries = entries[-self.form.ring :]
        if self.form.active_only:
            entries = [e for e in entries if not self._done(e)]
        content: dict[str, Any] = {
            "version": self.form.version,
            "nccl_version": "2.27.3",
            "pg_config": {
                g.name: {"name": g.name, "desc": g.desc, "ranks": str(list(g.ranks))}
                for g in (mine if self.form.eager else used)
            },
            "entries": [self._entry(e, ids[e.group.name]) for e in entries],
        }
        if self.form.status:
            content["pg_status"] = {str(ids[g.name]): self._status(g) for g in used}
        return content

    def _status(self, g: Group) -> dict[str, int]:
        works = [w for w in self.host.works.get(g.name, []) if w[1].queued <= self.until]
        p2p = {id(e.part) for e in self.host.entries if e.is_p2p}
        offset = self._offset(g)

        def number(w: tuple[int, Any]) -> int:
            return w[0] + (offset // 2 if id(w[1]) in p2p else offset)

        # The watchdog goes through what is open in order, and notes what it finds done.
        done = [w for w in works if w[1].done <= self.known]
        done.sort(key=lambda w: (w[1].done // _POLL, w[1].queued))
        begun = [w for w in works if self.form.timing and w[1].ready <= self.known]
        return {
            "last_enqueued_collective": number(works[-1]) if works else offset,
            "last_started_collective": number(begun[-1]) if begun else -1,
            "last_completed_collective": number(done[-1]) if done else offset,
        }


def _offset(desc: str, ranks: list[int], stage: int) -> int:
    where = f"{desc} {len(ranks)} {min(ranks) // stage} {max(ranks) // stage}"
    return random.Random(where).randrange(1000, 90_000)


def _ns(t: float) -> int:
    return int((T0 + t) * 1e9)


#: What is tried: faults of one rank and of several, near each other and not.
KINDS = (
    "healthy",
    "hang-one",
    "hang-any",
    "hang-tensor",
    "hang-stage",
    "hang-pipe",
    "gpu-one",
    "gpu-any",
    "gpu-tensor",
    "gpu-stage",
    "gpu-pipe",
    "crash-one",
    "crash-any",
    "stop-one",
    "stop-tensor",
    "sleep-one",
    "late-one",
    "late-any",
    "late-gone",
    "cut",
    "size-one",
    "op-one",
    "skip-one",
    "extra-one",
    "unsent-one",
)

FORMS: dict[str, Callable[[], Form]] = {
    "active": Form,
    "full": lambda: Form(active_only=False, timing=True, name="nccl_trace_rank_{}"),
    "ring": lambda: Form(active_only=False, ring=40, name="node0_nccl_trace_rank_{}.json",
                         as_json=True, version="2.10"),
    "timed": lambda: Form(timing=True),
    "bare": lambda: Form(status=False),
    "eager": lambda: Form(eager=True),
    "lost": lambda: Form(lost=2),
}  # fmt: skip
