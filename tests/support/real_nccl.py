"""A program that calls NVIDIA's own libnccl without a GPU, with known arguments.

    python real_nccl.py LIBNCCL VERSION --go GO --truth TRUTH --done DONE [--calls N]

It loads the library, prints "ready PID", waits until the file GO exists (so
that probes are on before the first call), makes the calls, writes to TRUTH
what it called and what came back, prints "called", and waits for DONE.

The communicators are made up: zeroed memory of the struct's size with rank,
nRanks, hash and magics planted where this version keeps them
(tests/data/nccl_layouts.json).  From 2.21 on, real collectives of count 0 on
such a one return ncclSuccess; with a count they fail for want of CUDA.  Each
call is one that returns in every version that has the function (what crashes,
such as Send on a made-up communicator up to 2.27 or Shrink(NULL), is not done),
except the last one of ``--crash``.

Only ctypes and the standard library: this is the independent side of the
comparison and takes nothing from nccluprobe.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nccl_program import COLLECTIVES, COMMS, DATATYPES, OPS, P2P, SIGNATURES, UID_A, UID_B, Program


def verify(program: Program) -> None:
    """The accessors of the library give back what was planted."""
    for comm in program.comms:
        for accessor, planted in (
            ("ncclCommUserRank", comm.rank),
            ("ncclCommCount", comm.nranks),
            ("ncclCommCuDevice", 5),
        ):
            value = ctypes.c_int(-1)
            rc = getattr(program.lib, accessor)(ctypes.c_void_p(comm.pointer), ctypes.byref(value))
            if rc != 0 or value.value != planted:
                raise SystemExit(f"{accessor} gave rc {rc} and {value.value}, planted {planted}")
    number = ctypes.c_int()
    program.lib.ncclGetVersion(ctypes.byref(number))
    major, minor, patch = program.version
    if number.value != major * 10000 + minor * 100 + patch:
        raise SystemExit(f"ncclGetVersion says {number.value}")


BIG = 1 << 33  # counts beyond 32 bits
STREAMS = (0, 0x1000, 0x7F0000002000)


def plan(program: Program, calls: int, fewer: int) -> Iterator[str]:
    """All calls of one run; gives a name after each part.

    ``calls`` of each collective and point-to-point function outside groups,
    ``fewer`` of each other one.
    """
    for api in program.has(*COLLECTIVES):
        rooted = "root" in SIGNATURES[api]
        for i in range(calls):
            # In turn: works, fails for want of CUDA, refused for its root, no communicator.
            turn = i % 4
            comm = None if turn == 3 else i % 2
            nranks = COMMS[comm][1] if comm is not None else 8
            program.call(
                api,
                comm,
                count=(0, 1 + i, BIG + i, 3 * BIG + i)[turn],
                datatype=i % len(DATATYPES),
                op=i % len(OPS),
                root=nranks + 100 + i if rooted and turn == 2 else i % nranks,
                stream=STREAMS[i % 3],
            )
    yield "collectives"
    for api in program.has(*P2P, "ncclPutSignal", "ncclSignal", "ncclWaitSignal"):
        for i in range(calls):
            # A peer beyond the last rank is refused; a valid one would be used.
            comm = None if i % 3 == 2 else i % 2
            program.call(
                api,
                comm,
                count=BIG + i,
                datatype=i % len(DATATYPES),
                peer=100 + i % 5,
                stream=STREAMS[i % 3],
            )
    yield "p2p"
    for i in range(fewer):
        program.group(i)
        inner = i % 3 == 1
        if inner:
            program.call("ncclGroupStart")
        for j, api in enumerate(program.has("ncclAllReduce", "ncclBcast", "ncclReduceScatter")):
            program.call(api, j % 2, count=0, datatype=i % 10, op=j, root=1, stream=STREAMS[i % 3])
        if inner:
            program.call("ncclGroupEnd")
        if i % 5 == 4:  # one refused call makes the whole group fail
            program.call("ncclSend", 0, count=i, datatype=7, peer=100, stream=0)
        program.end_group()
    for api in program.has("ncclGroupSimulateEnd"):
        for _ in range(fewer):
            program.call(api)
    yield "groups"
    for i in range(fewer):
        uid = (UID_A, UID_B)[i % 2]
        for api in program.has(
            "ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommInitRankScalable"
        ):
            extra = {} if api == "ncclCommInitRank" else {"blocking": i % 2}
            program.call(api, nranks=2 + i, rank=i % 2, uid=uid, I=1, **extra)
        program.call("ncclCommInitAll", nranks=-1 - i)
        for api in program.has("ncclCommSplit"):
            program.call(api, i % 2, color=i - 1, key=1000 - i)
            program.call(api, None, color=i - 1, key=-i, blocking=0)
        for api in program.has("ncclCommShrink"):
            program.call(api, i % 2, nranks=1, blocking=i % 2)
        for api in program.has("ncclCommGrow"):
            program.call(api, i % 2, nranks=20 + i, rank=i, uid=uid)  # refused
            program.call(api, None, nranks=20 + i, rank=1 + i, uid=uid)
    yield "init"
    for i in range(fewer):
        for api in program.has("ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort"):
            program.call(api)
        for api in program.has("ncclCommRevoke"):
            program.call(api)
        for api in program.has("ncclCommSuspend", "ncclCommResume"):
            program.call(api, i % 2)
            program.call(api)
    yield "ends"
    for i in range(fewer):
        for api in program.has("ncclCommRegister"):
            program.call(api, None, size=BIG + i)
        for api in program.has("ncclCommDeregister"):
            program.call(api)
        for api in program.has("ncclCommWindowRegister"):
            program.call(api, i % 2, size=4096 * i)
        for api in program.has(
            "ncclCommWindowDeregister", "ncclDevCommCreate", "ncclDevCommDestroy"
        ):
            program.call(api, i % 2)
        for api in program.has("ncclMemAlloc"):
            program.call(api, size=BIG + i)
        for api in program.has("ncclMemFree"):
            program.call(api)
        program.call("ncclRedOpCreatePreMulSum", None, datatype=i % 10)
        program.call("ncclRedOpDestroy", i % 2, op=i % 5)
    yield "registration"
    for _turn in range(2):  # the same pointer again after its end: another communicator
        for _ in range(fewer):
            program.call("ncclAllReduce", 2, count=0, datatype=7, op=0, stream=0)
        program.call("ncclCommDestroy", 2)
    yield "generations"


def in_thread(program: Program, comm: int, calls: int) -> None:
    for i in range(calls):
        program.call("ncclReduce", comm, count=0, datatype=i % 10, op=1, root=i % 16, stream=0)
        program.call("ncclAllGather", comm, count=0, datatype=i % 10, stream=0)


def crash(program: Program) -> Any:
    """A call that ends the process inside NCCL, where this version has one."""
    if program.version >= (2, 26):
        return program.call("ncclCommAbort", 0, later=True)
    return program.call("ncclSend", 0, later=True, count=0, datatype=7, peer=1, stream=0)


def wait_for(path: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{path} did not appear within {seconds:.0f} s")
        time.sleep(0.01)


def main() -> int:
    parser = argparse.ArgumentParser(description="calls NVIDIA's libnccl without a GPU")
    parser.add_argument("library", type=Path)
    parser.add_argument("version")
    parser.add_argument("--verify", action="store_true", help="check the layout table and exit")
    parser.add_argument("--go", type=Path, help="begin when this file exists")
    parser.add_argument("--truth", type=Path, help="write what was called here")
    parser.add_argument("--done", type=Path, help="end when this file exists")
    parser.add_argument("--calls", type=int, default=1009, help="of each data function")
    parser.add_argument("--fewer", type=int, default=101, help="of each other function")
    parser.add_argument("--crash", action="store_true", help="die inside a call at the end")
    args = parser.parse_args()
    program = Program(args.library, args.version)
    if args.verify:
        verify(program)
        return 0
    print(f"ready {os.getpid()}", flush=True)
    if args.go:
        wait_for(args.go, 120)
    for part in plan(program, args.calls, args.fewer):
        print(f"part {part}", flush=True)
    threads = [
        threading.Thread(target=in_thread, args=(program, comm, args.calls)) for comm in (3, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = crash(program) if args.crash else None
    if args.truth:
        truth = {"pid": os.getpid(), "version": args.version, "calls": program.calls}
        args.truth.write_text(json.dumps(truth))
    print("called", flush=True)
    if args.done:
        wait_for(args.done, 120)
    if last is not None:
        last()
    # The library's own clean-up at exit has nothing to clean up.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
