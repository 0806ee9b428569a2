"""What is mutated: small valid inputs of every kind that ``analyze`` reads."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

from importers import frgen
from importers.test_inspector import job as inspector_job
from importers.test_inspector import write as write_inspector
from importers.test_nccl_log import job as nccl_log
from importers.test_ras import AHEAD, BEHIND, TEXT, report
from support.tracegen import UNIX, Job

Files = dict[str, bytes]


def traces() -> Files:
    """Four ranks: two communicators, groups, transfers, a split, losses, calls inside."""
    job = Job()
    comms = job.world(4)
    pairs = [c.proc.comm("00000000000000bb", c.proc.rank, 4) for c in comms]
    for i in range(12):
        t = 1.0 + i
        for r, (c, p) in enumerate(zip(comms, pairs, strict=True)):
            api = ("ncclAllReduce", "ncclBroadcast", "ncclAllGather", "ncclReduce")[i % 4]
            c.proc.call(c, api, t, count=i * 1000)
            send = (p, "ncclSend", {"peer": (r + 1) % 4})
            c.proc.group([send, (p, "ncclRecv", {"peer": (r - 1) % 4})], t + 0.1)
            if r != 2 or i < 8:
                c.proc.call(c, "ncclAllReduce", t + 0.3, rc=0 if i % 5 else 7, seq=i)
    for r, c in enumerate(comms):
        proc = c.proc
        proc.call(c, "ncclCommSplit", 14.0, color=r % 2, key=r)
        proc.call(None, "ncclCommInitRank", 14.5, uid_hash="00000000000000cc", nranks=4, rank=r)
        if r == 3:
            proc.call(c, "ncclAllReduce", 15.0, rc=2)
            proc.comm_end(c, 16.0, "abort")
            proc.end(17.0, "signaled", signal=9)
        elif r == 1:
            proc.group([(c, "ncclAllReduce", {})], 15.0, state="inside")
        else:
            proc.enter(c, "ncclAllReduce", 15.0)
        proc.cover(0.5, 16.5 if r == 3 else 400.0, 20.0, lost_kernel=3 if r == 2 else 0)
    return {f"run/{p.name}.jsonl": p.data() for p in job.procs}


def _fr() -> frgen.Job:
    job = frgen.Job({"0": ("default_pg", [0, 1, 2, 3]), "1": ("pair", [0, 1])})
    for i in range(6):
        job.all("0", float(i))
        for rank, peer in ((0, 1), (1, 0)):
            job.ranks[rank].transfer("1", i + 0.5, rank == 0, peer)
    job.all("0", 7.0, 3, done=False)
    return job


def fr_pickles() -> Files:
    return {f"fr/nccl_trace_rank_{r}": pickle.dumps(x.dump(), 2) for r, x in _fr().ranks.items()}


def fr_json() -> Files:
    return {f"fr/dump_{r}.json": json.dumps(x.dump()).encode() for r, x in _fr().ranks.items()}


def ras() -> Files:
    t = UNIX // 10**9
    return {
        "ras/text.txt": (TEXT + BEHIND).encode(),
        "ras/ahead.txt": (TEXT + AHEAD).encode(),
        "ras/one.json": json.dumps(report(t, dict.fromkeys(range(4), 10))).encode(),
        "ras/two.json": json.dumps(report(t + 60, {0: 10, 1: 10, 2: 9, 3: 10})).encode(),
    }


def _written(write: Callable[[Path], object], folder: Path) -> Files:
    write(folder)
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def corpus(scratch: Path) -> dict[str, Files]:
    """Kind -> files; ``scratch``: an empty folder that may be written to."""
    (scratch / "inspector").mkdir()
    (scratch / "log").mkdir()
    return {
        "trace": traces(),
        "fr_pickle": fr_pickles(),
        "fr_json": fr_json(),
        "ras": ras(),
        "inspector": _written(lambda f: write_inspector(f, inspector_job()), scratch / "inspector"),
        "nccl_log": _written(lambda f: nccl_log(2).merged(f / "nccl.log"), scratch / "log"),
    }
