#!/usr/bin/env python3
"""A small multi-process job on simnccl, with faults to plant.

    python native/build.py --out build/native
    python tools/demo_job.py --lib build/native/libsimnccl.so --ranks 4 --stall-rank 3 --stall-at 42

Each rank loops: one all-reduce (and a broadcast in every tenth iteration), a wait for the
stream, a pause. Faults take effect just before the all-reduce of the iteration given with
--...-at. The parent prints what it planted as one JSON line and ends all ranks after --hold
seconds, on SIGTERM and on SIGINT.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

DEFAULT_LIB = Path(__file__).resolve().parent.parent / "build" / "native" / "libsimnccl.so"
BANNER = (
    "demo_job: simnccl is a CPU-only stand-in for tests. "
    "It is not NVIDIA NCCL, uses no GPU and moves no data."
)
COUNT = 1024
FLOAT32, SUM = 7, 0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Fault:
    """One kind of fault: an option --<name>-rank and --<name>-at, and at most one value more."""

    name: str
    help: str
    value: str | None = None  # a further option --<name>-<value>
    default: float = 0


FAULTS = (
    Fault("stall", "does not come to the all-reduce and sleeps"),
    Fault("late", "comes late", "by", 2.0),
    Fault("exit", "leaves the process", "code", 3),
    Fault("kill", "kills itself with SIGKILL"),
    Fault("skip", "leaves out one all-reduce"),
    Fault("wrong-api", "calls a broadcast instead"),
    Fault("wrong-count", "passes twice the count"),
)


def attribute(*parts: str) -> str:
    return "_".join(parts).replace("-", "_")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lib", type=Path, default=DEFAULT_LIB, help="path of libsimnccl.so")
    parser.add_argument(
        "--resolve",
        choices=("handle", "default"),
        default="handle",
        help="look functions up in the library, or in the global scope, where an "
        "LD_PRELOAD library comes first",
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--iters", type=int, default=200)
    parser.add_argument("--period", type=float, default=0.05, help="pause of an iteration, seconds")
    parser.add_argument(
        "--warmup",
        type=float,
        default=0.5,
        help="seconds between mapping the library and the first call; real programs import "
        "their framework and open their GPU in this time",
    )
    parser.add_argument(
        "--destroy",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end with ncclCommDestroy",
    )
    parser.add_argument(
        "--hold",
        type=float,
        default=120.0,
        help="end all ranks this many seconds after the start (default 120)",
    )
    for fault in FAULTS:
        parser.add_argument(
            f"--{fault.name}-rank", type=int, metavar="R", help=f"this rank {fault.help}"
        )
        parser.add_argument(
            f"--{fault.name}-at",
            type=int,
            default=10,
            metavar="K",
            help="in iteration K, from 0 (default 10)",
        )
        if fault.value:
            kind = int if isinstance(fault.default, int) else float
            parser.add_argument(f"--{fault.name}-{fault.value}", type=kind, default=fault.default)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # set: this process is a rank
    parser.add_argument("--uid-file", type=Path, help=argparse.SUPPRESS)
    return parser


def comm_seq(iteration: int) -> int:
    """Number, from 0, of the all-reduce of an iteration among the communicator's collectives."""
    return iteration + iteration // 10


def planted(args: argparse.Namespace) -> list[dict[str, object]]:
    found = []
    for fault in FAULTS:
        rank = getattr(args, attribute(fault.name, "rank"))
        if rank is None:
            continue
        at = getattr(args, attribute(fault.name, "at"))
        entry: dict[str, object] = {
            "fault": fault.name,
            "rank": rank,
            "iteration": at,
            "comm_seq": comm_seq(at),
            "api": "ncclAllReduce",
        }
        if fault.value:
            entry[fault.value] = getattr(args, attribute(fault.name, fault.value))
        found.append(entry)
    return found


# ---- a rank ----------------------------------------------------------------------------------


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class Job:
    """One rank's library, communicator and stream."""

    def __init__(
        self, lib: Path, resolve: str, warmup: float, rank: int, nranks: int, uid_file: Path
    ) -> None:
        ptr, size, num = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self.nccl = ctypes.CDLL(
            str(lib), ctypes.RTLD_LOCAL if resolve == "handle" else ctypes.RTLD_GLOBAL
        )
        if resolve == "default":
            self.nccl = ctypes.CDLL(None)
        self.nccl.ncclCommInitRank.argtypes = [ctypes.POINTER(ptr), num, UniqueId, num]
        self.nccl.ncclAllReduce.argtypes = [ptr, ptr, size, num, num, ptr, ptr]
        self.nccl.ncclBroadcast.argtypes = [ptr, ptr, size, num, num, ptr, ptr]
        self.nccl.ncclCommDestroy.argtypes = [ptr]
        self.nccl.simStreamCreate.restype = ptr
        self.nccl.simStreamSynchronize.argtypes = [ptr]
        self.stream = self.nccl.simStreamCreate()
        self.comm = ptr()
        time.sleep(warmup)
        uid = self._share_id(rank, uid_file)
        self.check(self.nccl.ncclCommInitRank(ctypes.byref(self.comm), nranks, uid, rank))

    def _share_id(self, rank: int, path: Path) -> UniqueId:
        uid = UniqueId()
        if rank == 0:
            self.check(self.nccl.ncclGetUniqueId(ctypes.byref(uid)))
            partial = path.with_suffix(".partial")
            partial.write_bytes(bytes(uid))
            partial.rename(path)
            return uid
        while not path.exists():
            time.sleep(0.005)
        return UniqueId.from_buffer_copy(path.read_bytes())

    @staticmethod
    def check(rc: int) -> None:
        if rc != 0:
            raise SystemExit(f"demo_job: NCCL call returned {rc}")

    def all_reduce(self, count: int = COUNT) -> None:
        self.check(self.nccl.ncclAllReduce(None, None, count, FLOAT32, SUM, self.comm, self.stream))

    def broadcast(self) -> None:
        self.check(self.nccl.ncclBroadcast(None, None, COUNT, FLOAT32, 0, self.comm, self.stream))

    def synchronize(self) -> None:
        self.nccl.simStreamSynchronize(self.stream)

    def destroy(self) -> None:
        self.check(self.nccl.ncclCommDestroy(self.comm))


def run_rank(args: argparse.Namespace) -> None:
    # Never outlive the parent, also when it is killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    job = Job(args.lib, args.resolve, args.warmup, args.rank, args.ranks, args.uid_file)

    def hits(name: str, iteration: int) -> bool:
        return (
            getattr(args, attribute(name, "rank")) == args.rank
            and getattr(args, attribute(name, "at")) == iteration
        )

    for i in range(args.iters):
        time.sleep(args.period)  # the training step
        if hits("stall", i):
            time.sleep(args.hold + 3600)  # the parent ends it
        if hits("late", i):
            time.sleep(args.late_by)
        if hits("exit", i):
            os._exit(args.exit_code)
        if hits("kill", i):
            os.kill(os.getpid(), signal.SIGKILL)
        if hits("wrong-api", i):
            job.broadcast()
        elif not hits("skip", i):
            job.all_reduce(2 * COUNT if hits("wrong-count", i) else COUNT)
        if i % 10 == 9:
            job.broadcast()
        job.synchronize()
    if args.destroy:
        job.destroy()


# ---- the parent ------------------------------------------------------------------------------


class Stop(Exception):
    pass


def on_signal(signum: int, _frame: object) -> None:
    raise Stop(f"signal {signum}")


def rank_environment(args: argparse.Namespace, rank: int, run_id: str) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(args.ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(args.ranks),
        "TORCHELASTIC_RUN_ID": run_id,
    }


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + 2
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(processes: list[subprocess.Popen[bytes]], seconds: float) -> str:
    deadline = time.monotonic() + seconds
    told: set[int] = set()
    while True:
        for rank, process in enumerate(processes):
            if process.poll() is not None and rank not in told:
                told.add(rank)
                if process.returncode != 0:
                    print(f"demo_job: rank {rank} ended with {process.returncode}", flush=True)
        if len(told) == len(processes):
            return "all ranks ended"
        if time.monotonic() > deadline:
            return f"--hold {seconds:g} s is over"
        time.sleep(0.05)


def run_parent(args: argparse.Namespace, argv: list[str]) -> int:
    print(BANNER, flush=True)
    if not args.lib.exists():
        print(
            f"demo_job: {args.lib} is missing; build it: python native/build.py "
            f"--out {DEFAULT_LIB.parent}",
            file=sys.stderr,
        )
        return 2
    faults = planted(args)
    if any(not 0 <= f["rank"] < args.ranks for f in faults):
        print("demo_job: a fault's rank is not in the job", file=sys.stderr)
        return 2
    run_id = os.environ.get("TORCHELASTIC_RUN_ID") or f"demo-{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix="demo_job-"))
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        *argv,
        "--uid-file",
        str(folder / "uid"),
    ]
    processes: list[subprocess.Popen[bytes]] = []
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, on_signal)
    stopped = False
    try:
        for rank in range(args.ranks):
            processes.append(
                subprocess.Popen(
                    [*command, "--rank", str(rank)], env=rank_environment(args, rank, run_id)
                )
            )
        print(
            json.dumps(
                {
                    "run_id": run_id,
                    "parent_pid": os.getpid(),
                    "lib": str(args.lib),
                    "nranks": args.ranks,
                    "iters": args.iters,
                    "period": args.period,
                    "destroy": args.destroy,
                    "pids": {str(rank): p.pid for rank, p in enumerate(processes)},
                    "planted": faults,
                }
            ),
            flush=True,
        )
        why = wait_for(processes, args.hold)
    except Stop as stop:
        why, stopped = str(stop), True
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        finished = all(p.poll() == 0 for p in processes)
        end(processes)
        shutil.rmtree(folder, ignore_errors=True)
    print(f"demo_job: {why}", flush=True)
    return 0 if finished or faults or stopped else 1


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    if args.rank is None:
        return run_parent(args, argv)
    run_rank(args)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
