"""Writes flight recorder dumps of made-up jobs, in the shape that PyTorch gives them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

T0 = 1_758_610_505_000_000_000
SECOND = 1_000_000_000
TIMEOUT_MS = 600_000


class Rank:
    """One rank's recorder."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.rank = rank
        self.entries: list[dict[str, Any]] = []
        self.seq: dict[str, int] = {}
        self.p2p: dict[str, int] = {}
        self.first_record = 0

    def _entry(self, group: str, name: str, t: float, done: bool, **other: Any) -> dict[str, Any]:
        at = int(T0 + t * SECOND)
        entry = {
            "record_id": self.first_record + len(self.entries),
            "pg_id": self.job.ids(self.rank)[group],
            "process_group": (group, self.job.groups[group][0]),
            "collective_seq_id": self.seq.get(group, self.job.start),
            "p2p_seq_id": self.p2p.get(group, 0),
            "op_id": 0,
            "profiling_name": f"nccl:{name}",
            "time_created_ns": at,
            "input_sizes": [[1024, 8]],
            "input_dtypes": ["Float"],
            "output_sizes": [[1024, 8]],
            "output_dtypes": ["Float"],
            "state": "completed" if done else "scheduled",
            "time_discovered_started_ns": at + 1000 if done else None,
            "time_discovered_completed_ns": at + 2000 if done else None,
            "retired": done,
            "timeout_ms": TIMEOUT_MS,
            "is_p2p": False,
        }
        entry.update(other)
        self.entries.append(entry)
        return entry

    def call(
        self, group: str, t: float, name: str = "all_reduce", done: bool = True, **other: Any
    ) -> dict[str, Any]:
        """A collective."""
        self.seq[group] = self.seq.get(group, self.job.start) + 1
        return self._entry(group, name, t, done, **other)

    def part(self, group: str, t: float, name: str, **other: Any) -> dict[str, Any]:
        """A collective that is put together with others: it gets no state of its own."""
        return self._entry(group, name, t, False, **other)

    def transfer(
        self, group: str, t: float, send: bool, peer: int, done: bool = True, **other: Any
    ) -> dict[str, Any]:
        """A send or receive; ``peer``: rank in the group."""
        self.p2p[group] = self.p2p.get(group, 0) + 1
        mine = self.job.groups[group][1].index(self.rank)
        name = f"send {mine}->{peer}" if send else f"recv {mine}<-{peer}"
        return self._entry(group, name, t, done, is_p2p=True, **other)

    def dump(self, active_only: bool = False, ring: int | None = None) -> dict[str, Any]:
        """The dump; ``active_only``: without what is retired; ``ring``: its newest entries."""
        ids = self.job.ids(self.rank)
        status = {}
        for group, number in ids.items():
            mine = [e for e in self.entries if e["process_group"][0] == group]
            key = "p2p_seq_id" if mine and mine[-1]["is_p2p"] else "collective_seq_id"
            done = [e[key] for e in mine if e["state"] == "completed"]
            status[str(number)] = {
                "last_enqueued_collective": mine[-1][key] if mine else self.job.start,
                "last_started_collective": -1,
                "last_completed_collective": max(done, default=self.job.start),
            }
        entries = [e for e in self.entries if not (active_only and e["retired"])]
        return {
            "version": "2.9",
            "pg_config": {
                g: {"name": g, "desc": self.job.groups[g][0], "ranks": str(self.job.groups[g][1])}
                for g in ids
            },
            "nccl_version": "2.27.3",
            "pg_status": status,
            "entries": entries if ring is None else entries[-ring:],
        }


class Job:
    """A job: ``groups``: name -> (description, global ranks)."""

    def __init__(self, groups: dict[str, tuple[str, list[int]]], start: int = 0) -> None:
        self.groups = groups
        self.start = start
        members = sorted({r for _, ranks in groups.values() for r in ranks})
        self.ranks = {r: Rank(self, r) for r in members}

    def ids(self, rank: int) -> dict[str, int]:
        """Group -> pg_id on a rank: a number of its own, in order of making."""
        mine = [g for g in sorted(self.groups, key=int) if rank in self.groups[g][1]]
        return {g: 2 * i for i, g in enumerate(mine)}

    def all(self, group: str, t: float, *without: int, **other: Any) -> None:
        """A collective of all members but some."""
        for rank in self.groups[group][1]:
            if rank not in without:
                self.ranks[rank].call(group, t + rank * 1e-4, **other)

    def write(
        self,
        folder: Path,
        as_json: bool = False,
        name: str = "nccl_trace_rank_{}",
        **options: Any,
    ) -> Path:
        """Write all dumps."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank, r in self.ranks.items():
            dump = r.dump(**options)
            data = json.dumps(dump).encode() if as_json else pickle.dumps(dump, 2)
            (folder / name.format(rank)).write_bytes(data)
        return folder


def one_group(n: int = 4, start: int = 0) -> Job:
    """All ranks in one group."""
    return Job({"0": ("default_pg", list(range(n)))}, start)
