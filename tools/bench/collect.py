"""Cost of the collector: from a ring's bytes to lines on the disk.

    python tools/bench/collect.py [--records N] [--processes P] [--dir FOLDER]

Feeds the real ``Collector`` with made-up chunks of several processes, interleaved
as a ring would have them, one chunk per step, into real files, and prints JSON.
The CPU time is that of the whole process, between the first and the last step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nccluprobe.capture.source import Library, Losses
from nccluprobe.collect.collector import Collector
from nccluprobe.collect.writer import Limits
from nccluprobe.nccl.api import BY_NAME
from nccluprobe.record import KIND_CALL, STRUCT, UNKNOWN_SEQ, Record

_T0 = 10**14
_ZERO = Record(*([0] * len(Record._fields)))
#: Another collector at this rate may take this much of one core.
TARGET_RATE = 160_000
TARGET_SHARE = 0.25


class _Source:
    """A front whose ring is a list of chunks."""

    front = "ebpf"
    exits = True

    def __init__(self) -> None:
        self.chunks: list[bytes] = []

    def drain(self) -> Iterator[bytes]:
        taken, self.chunks = self.chunks, []
        return iter(taken)

    def in_flight(self) -> bytes:
        return b""

    def losses(self) -> Losses:
        return Losses()

    def library(self, lib: int) -> Library | None:
        return Library(lib, "/usr/lib/libnccl.so.2", "2.28.9", "00" * 20)

    def deny(self, pid: int, epoch: int) -> None:
        pass

    def forget(self, pid: int, epoch: int) -> None:
        pass


class _Ranks:
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    source = "unknown"
    job: str | None = None


class _Info:
    start_ns = 1
    start_ticks = 1
    exe = "python3"
    ns_pid: int | None = None
    uid = 0
    gid = 0
    host = "bench"
    boot_id = "bench"
    ranks = _Ranks()
    alive = True
    main = "running"
    syscall: str | None = None
    cpu_ns = 0


class _Procs:
    def read(self, pid: int) -> Any:
        return _Info()

    def read_state(self, pid: int) -> Any:
        return _Info()


def _init(pid: int, rank: int, world: int, t: int) -> bytes:
    api = BY_NAME["ncclCommInitRank"].id
    return STRUCT.pack(
        *_ZERO._replace(
            t_enter=t, t_exit=t + 1000, new_comm=0x1000, new_gen=pid, uid_hash=7, pid=pid, tid=pid,
            epoch=1, peer=rank, nranks=world, api=api, kind=KIND_CALL, nccl_seq=UNKNOWN_SEQ,
        )
    )  # fmt: skip


def _mix(name: str, n: int) -> Record:
    """The n-th record of a process, in the manner of a kind of job."""
    base = _ZERO._replace(kind=KIND_CALL, datatype=9, nccl_seq=UNKNOWN_SEQ, stream=0x5550)
    sizes = (4096, 1 << 20, 25 << 20, 333, 8 << 20)
    if name == "training":  # sharded data parallel: three collectives, counters known
        api = ("ncclAllGather", "ncclReduceScatter", "ncclAllReduce")[n % 3]
        return base._replace(
            api=BY_NAME[api].id, count=sizes[n % 5], call_idx=n, order_idx=n, nccl_seq=n // 3
        )
    # pipeline: groups of a send and a receive
    at = n % 4
    group = {"group_id": n // 4 + 1, "group_pos": max(0, at - 1), "group_depth": 1}
    idx = n // 2
    if at == 0:
        return base._replace(api=BY_NAME["ncclGroupStart"].id, datatype=0, stream=0)
    if at == 3:
        return base._replace(api=BY_NAME["ncclGroupEnd"].id, datatype=0, stream=0, **group)
    api = "ncclSend" if at == 1 else "ncclRecv"
    return base._replace(
        api=BY_NAME[api].id, count=1 << 20, call_idx=idx, order_idx=n // 4, peer=3, **group
    )


def _chunks(mix: str, records: int, processes: int, per_chunk: int) -> Iterable[bytes]:
    t, n, out = _T0, 0, []
    for i in range(records):
        pid = 1000 + i % processes
        if pid == 1000 and i:
            n += 1
        t += 6250
        rec = _mix(mix, n)
        gen = 0 if rec.api in (48, 49) else pid
        rec = rec._replace(
            t_enter=t, t_exit=t + 2000 + i % 700, pid=pid, tid=pid, epoch=1, comm_gen=gen,
            comm=0x1000 if gen else 0,
        )  # fmt: skip
        out.append(STRUCT.pack(*rec))
        if len(out) == per_chunk:
            yield b"".join(out)
            out = []
    if out:
        yield b"".join(out)


def measure(
    mix: str, records: int, processes: int, per_chunk: int, folder: Path
) -> dict[str, float | int | str]:
    """One run; ``per_chunk`` records come with each step."""
    source = _Source()
    out = folder / f"{mix}_{per_chunk}"
    collector = Collector(
        source, out, wanted=lambda pid: True, procs=_Procs(), run_id="bench", limits=Limits()
    )
    source.chunks = [_init(1000 + p, p, processes, _T0 + p) for p in range(processes)]
    now = _T0
    collector.step(now)
    prepared = list(_chunks(mix, records, processes, per_chunk))
    cpu, wall = time.process_time(), time.perf_counter()
    for chunk in prepared:
        source.chunks = [chunk]
        now += per_chunk * 6250
        collector.step(now)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    collector.close(now)
    written = sum(f.stat().st_size for f in out.rglob("*.jsonl"))
    count = sum(f.read_bytes().count(b'"kind":"call"') for f in out.rglob("*.jsonl"))
    for file in out.rglob("*.jsonl"):
        file.unlink()
    if count != records + processes:
        raise SystemExit(f"{count} call lines, not {records + processes}")
    each = cpu / records * 1e9
    return {
        "mix": mix,
        "records": records,
        "processes": processes,
        "records_per_step": per_chunk,
        "ns_per_record_cpu": round(each),
        "lines_per_s": round(records / wall),
        "bytes_per_line": round(written / count),
        "core_share_at_160k": round(each * TARGET_RATE / 1e9, 3),
        "within_target": each * TARGET_RATE / 1e9 <= TARGET_SHARE,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run all mixes and print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--records", type=int, default=400_000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument(
        "--dir", type=Path, default=None, help="where to write; default: a temp dir"
    )
    options = parser.parse_args(arguments)
    runs = []
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        for mix in ("training", "pipeline"):
            # 800: what 5 ms bring at the target rate; 8000: after a pause.
            for per_chunk in (800, 8000):
                runs.append(
                    measure(mix, options.records, options.processes, per_chunk, Path(folder))
                )
    print(
        json.dumps({"bench": "collect", "python": sys.version.split()[0], "runs": runs}, indent=1)
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
