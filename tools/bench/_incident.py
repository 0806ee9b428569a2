"""Flight recorder dumps of a job that hangs, for our analyzer and for PyTorch's own.

Tensor parallelism of 8, the rest data parallel; every rank runs the same list of
collectives, and one rank stops.  The others go on until they have a few calls
open whose partners do not come.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import _traffic

TP = 8
#: Calls that a host has open before it waits for the device.
_AHEAD = 4
_T0 = 1_758_610_505_000_000_000


def _groups(ranks: int) -> dict[str, tuple[str, list[int]]]:
    found = {"0": ("default_pg", list(range(ranks)))}
    for i in range(ranks // TP):
        found[str(1 + i)] = ("tensor_parallel", list(range(i * TP, i * TP + TP)))
    for i in range(TP):
        found[str(1 + ranks // TP + i)] = ("data_parallel", list(range(i, ranks, TP)))
    return found


def _program(rank: int, ranks: int, calls: int) -> list[str]:
    """Group of each call: six in the tensor-parallel group, one in the data-parallel one."""
    tensor, data = str(1 + rank // TP), str(1 + ranks // TP + rank % TP)
    return [data if i % 7 == 6 else tensor for i in range(calls)]


def _run(
    ranks: int, programs: list[list[str]], stalled: int, at: int
) -> tuple[list[int], list[int]]:
    """How many calls each rank has made, and how many of them are complete."""
    groups = _groups(ranks)
    #: (group, n) -> the ranks whose n-th call on the group is on the device now
    ready: dict[tuple[str, int], set[int]] = {}
    made, done = [0] * ranks, [0] * ranks
    turn: list[dict[str, int]] = [{} for _ in range(ranks)]
    moving = True
    while moving:
        moving = False
        for r in range(ranks):
            most = at if r == stalled else len(programs[r])
            ahead = min(most, done[r] + _AHEAD)
            if ahead > made[r]:
                made[r], moving = ahead, True
            if done[r] < made[r]:
                group = programs[r][done[r]]
                call = (group, turn[r].get(group, 0))
                here = ready.setdefault(call, set())
                here.add(r)
                if len(here) == len(groups[group][1]):
                    for member in here:
                        done[member] += 1
                        turn[member][group] = call[1] + 1
                    del ready[call]
                    moving = True
    return made, done


def write(folder: Path, ranks: int, calls: int, stalled: int) -> int:
    """Writes one dump per rank; returns how many entries."""
    groups = _groups(ranks)
    programs = [_program(r, ranks, calls) for r in range(ranks)]
    made, done = _run(ranks, programs, stalled, calls - 40)
    folder.mkdir(parents=True)
    total = 0
    for r in range(ranks):
        ids = {g: 2 * i for i, g in enumerate(g for g in groups if r in groups[g][1])}
        seq: dict[str, int] = {}
        entries: list[dict[str, Any]] = []
        for i, group in enumerate(programs[r][: made[r]]):
            seq[group] = seq.get(group, 0) + 1
            entries.append(_entry(i, ids[group], group, groups[group][0], seq[group], i < done[r]))
        total += len(entries)
        dump = {
            "version": "2.10",
            "pg_config": {
                g: {"name": g, "desc": groups[g][0], "ranks": str(groups[g][1])} for g in ids
            },
            "pg_status": _status(entries, ids),
            "nccl_version": "2.27.3",
            "entries": entries,
        }
        (folder / f"nccl_trace_rank_{r}").write_bytes(pickle.dumps(dump, 2))
    return total


def _entry(i: int, pg: int, group: str, desc: str, seq: int, done: bool) -> dict[str, Any]:
    t = _T0 + i * 20_000_000
    return {
        "frames": [{"name": "train_step", "filename": "train.py", "line": 100 + i % 7}],
        "record_id": i,
        "pg_id": pg,
        "process_group": (group, desc),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": i,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": t,
        "input_sizes": [[4096, 1024]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4096, 1024]],
        "output_dtypes": ["BFloat16"],
        "state": "completed" if done else "scheduled",
        "time_discovered_started_ns": t + 1000 if done else None,
        "time_discovered_completed_ns": t + 2000 if done else None,
        "retired": done,
        "timeout_ms": 600_000,
        "is_p2p": False,
    }


def _status(entries: list[dict[str, Any]], ids: dict[str, int]) -> dict[str, Any]:
    found = {}
    for group, number in ids.items():
        mine = [e for e in entries if e["process_group"][0] == group]
        done = [e["collective_seq_id"] for e in mine if e["state"] == "completed"]
        found[str(number)] = {
            "last_enqueued_collective": mine[-1]["collective_seq_id"] if mine else -1,
            "last_started_collective": max(done, default=-1),
            "last_completed_collective": max(done, default=-1),
        }
    return found


def write_trace(folder: Path, ranks: int, calls: int, stalled: int) -> int:
    """The same job as ``attach`` would have traced it, and 400 s after; returns its calls."""
    groups = _groups(ranks)
    programs = [_program(r, ranks, calls) for r in range(ranks)]
    made, _ = _run(ranks, programs, stalled, calls - 40)
    folder.mkdir(parents=True)
    for r in range(ranks):
        mine = [g for g in groups if r in groups[g][1]]
        members = [(int(g) + 1, groups[g][1].index(r), len(groups[g][1])) for g in mine]
        rank = _traffic.Rank(r, ranks, pure=True, gap=20_000_000)
        rank.comms = members
        with (folder / f"rank_{r}_pid_{1000 + r}.jsonl").open("wb") as f:
            f.write(rank.head())
            t = _traffic.MONO + _traffic.S
            for group in programs[r][: made[r]]:
                f.write(rank.collective(b"ncclAllReduce", t, mine.index(group), 1 << 22))
                t += rank.gap
            end = _traffic.MONO + _traffic.S + calls * rank.gap + 400 * _traffic.S
            f.write(rank.coverage(end))
    return sum(made)
