"""A program that calls every function of the API table, the same way each time.

    python workload.py LIBRARY [--go FILE] [--done FILE] [--kind fake|sim]

For the parity of the two fronts: what it does depends on nothing but its
arguments.  ``fake`` is the made-to-order library of tests/bpf, whose functions
do what they are told; ``sim`` is simnccl.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from bpf.fakelib import FakeLib, config, ctype, uid  # noqa: E402

from nccluprobe.nccl.api import API_TABLE, BY_NAME, TRACED, Role  # noqa: E402

#: Something different for every kind of argument.
VALUES = {
    Role.COUNT: 4321,
    Role.SIZE: 8192,
    Role.DATATYPE: 7,
    Role.OP: 2,
    Role.ROOT: 3,
    Role.PEER: 1,
    Role.STREAM: 0x5000,
    Role.NRANKS: 4,
    Role.RANK: 2,
    Role.COLOR: 5,
    Role.KEY: 6,
    Role.OTHER: 0,
}
ID_A, ID_B = bytes(range(128)), bytes((7 * i + 3) % 256 for i in range(128))


class Caller:
    """Calls by role: ``call("ncclAllReduce", comm=..., count=...)``."""

    def __init__(self, dll: ctypes.CDLL) -> None:
        self.dll = dll
        self.keep: list[Any] = []
        for api in API_TABLE:
            if hasattr(dll, api.name):
                getattr(dll, api.name).argtypes = [ctype(role) for role in api.args]

    def call(self, name: str, **given: Any) -> int:
        args = []
        for role in BY_NAME[name].args:
            value = given.get(role.value, VALUES.get(role, 0))
            if isinstance(value, (ctypes.Structure, ctypes.Array)) and role is not Role.UID:
                self.keep.append(value)
                value = ctypes.addressof(value)
            args.append(value)
        rc: int = getattr(self.dll, name)(*args)
        return rc


def handle() -> Any:
    return (ctypes.c_uint64 * 1)(0)


def everything(c: Caller, fake: FakeLib) -> None:
    """Each function alone, and each data call in a group."""
    for api in TRACED:
        if api.kind.value == "group":
            continue
        fake.set(handle=0x70000000 + api.id * 0x1000)
        given: dict[str, Any] = {"comm": 0x10000000}
        if api.makes_comm:
            given |= {"newcomm": handle(), "comms": (ctypes.c_uint64 * 8)(), "uid_ptr": uid(ID_B)}
            given |= {"uid": uid(ID_A), "config": config(name=b"named")}
        c.call(api.name, **given)
        if api.ends_comm:
            c.call("ncclAllReduce", comm=0x10000000)
    with fake.group():
        for api in TRACED:
            if api.kind.value in ("collective", "p2p", "one_sided"):
                c.call(api.name, comm=0x20000000, count=api.id)
        with fake.group():
            c.call("ncclAllGather", comm=0x20000000)
    c.call("ncclGroupSimulateEnd")
    fake.dll.ncclGroupEnd()  # without a start


def returns(c: Caller, fake: FakeLib) -> None:
    """Failures, and handles that come late."""
    for rc in (1, 4, 7, 0):
        fake.set(rc=rc, handle=0x30000000)
        c.call("ncclAllReduce", comm=0x10000000)
        c.call("ncclCommInitRank", newcomm=handle(), uid=uid(ID_A), nranks=2, rank=rc % 2)
        c.call("ncclCommSplit", comm=0x10000000, newcomm=handle(), color=rc)
    fake.set(rc=0, handle=0x31000000, defer=1)
    with fake.group():
        for color in (1, 2, -1):
            c.call(
                "ncclCommSplit", comm=0x10000000, color=color, newcomm=handle(),
                config=config(name=b"late child"),
            )  # fmt: skip
    c.call("ncclAllReduce", comm=0x31000000)
    c.call("ncclAllReduce", comm=0x31001000)
    # Not blocking: NULL at the end of the call, found at the first use.
    fake.set(handle=0x32000000)
    late = handle()
    c.call("ncclCommSplit", comm=0x10000000, newcomm=late, config=config(blocking=0))
    late[0] = 0x32000000
    c.call("ncclAllReduce", comm=0x32000000)
    fake.set(rc=5, defer=1, handle=0x33000000)
    fake.dll.ncclGroupStart()
    c.call("ncclCommSplit", comm=0x10000000, newcomm=handle())
    fake.dll.ncclGroupEnd()
    fake.set(rc=0, defer=0)


def generations(c: Caller, fake: FakeLib) -> None:
    """One address, several communicators."""
    for n in range(3):
        fake.set(handle=0x40000000)
        c.call("ncclCommInitRank", newcomm=handle(), uid=uid(ID_A), rank=0, nranks=2)
        for peer in (1, 0, 1):
            c.call("ncclSend", comm=0x40000000, peer=peer)
            c.call("ncclRecv", comm=0x40000000, peer=peer)
        for _ in range(n + 2):
            c.call("ncclAllReduce", comm=0x40000000)
        c.call("ncclCommAbort" if n % 2 else "ncclCommDestroy", comm=0x40000000)
    c.call("ncclCommDestroy", comm=0x41000000)  # never seen
    fake.set_uid(ID_B)
    fake.set(handle=0x42000000)
    c.call("ncclCommInitAll", comms=(ctypes.c_uint64 * 4)(), nranks=4)
    for i in range(4):
        c.call("ncclReduce", comm=0x42000000 + 0x1000 * i)


def nested(c: Caller, fake: FakeLib) -> None:
    fake.dll.drive_bcast(5, 0x10000000)
    fake.dll.drive_allreduce(700, 0x10000000, 0x5000)
    fake.dll.drive_jump(0, 0x10000000)
    fake.dll.drive_jump(4000, 0x10000000)
    c.call("ncclAllReduce", comm=0x10000000)


def threads(c: Caller, fake: FakeLib) -> None:
    """Several at once, each with a communicator of its own and one they share."""

    def work(n: int) -> None:
        for i in range(50):
            fake.dll.ncclGroupStart()
            c.call("ncclSend", comm=0x50000000 + n * 0x1000, peer=i % 3)
            c.call("ncclRecv", comm=0x50000000 + n * 0x1000, peer=i % 3)
            fake.dll.ncclGroupEnd()
            fake.dll.drive_bcast(2, 0x50000000 + n * 0x1000)

    for n in range(6):
        c.call("ncclAllReduce", comm=0x50000000 + n * 0x1000)
    running = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def simulated(c: Caller) -> None:
    """Real life on simnccl, one rank."""
    c.dll.simStreamCreate.restype = ctypes.c_void_p
    stream = c.dll.simStreamCreate()

    def all_data(comm: int) -> None:
        for api in TRACED:
            if api.kind.value == "collective" and hasattr(c.dll, api.name):
                c.call(api.name, comm=comm, stream=stream, root=0, op=0)
        c.dll.ncclGroupStart()
        c.call("ncclSend", comm=comm, stream=stream, peer=0)
        c.call("ncclRecv", comm=comm, stream=stream, peer=0)
        c.dll.ncclGroupEnd()

    for n in range(3):
        out = handle()
        with_config = n == 1
        name = "ncclCommInitRankConfig" if with_config else "ncclCommInitRank"
        c.call(
            name, newcomm=out, uid=uid(bytes([n + 1] * 128)), nranks=1, rank=0,
            config=config(name=b"world"),
        )  # fmt: skip
        comm = out[0]
        all_data(comm)
        child, late = handle(), handle()
        c.call("ncclCommSplit", comm=comm, color=0, key=0, newcomm=child, config=0)
        all_data(child[0])
        c.dll.ncclGroupStart()
        c.call("ncclCommSplit", comm=comm, color=1, key=0, newcomm=late, config=0)
        c.dll.ncclGroupEnd()
        all_data(late[0])
        c.call("ncclCommDestroy", comm=child[0])
        c.call("ncclCommDestroy", comm=late[0])
        c.call("ncclCommAbort" if n == 1 else "ncclCommDestroy", comm=comm)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", type=Path)
    parser.add_argument("--kind", choices=("fake", "sim"), default="fake")
    parser.add_argument("--go", type=Path)
    parser.add_argument("--done", type=Path)
    args = parser.parse_args()
    if args.kind == "fake":
        fake = FakeLib(args.library)
        caller = Caller(fake.dll)
    else:
        caller = Caller(ctypes.CDLL(str(args.library)))
    print(f"ready {os.getpid()}", flush=True)
    wait_for(args.go)
    if args.kind == "fake":
        for part in (everything, returns, generations, nested, threads):
            part(caller, fake)
            time.sleep(0.05)
    else:
        simulated(caller)
    print("called", flush=True)
    wait_for(args.done)
    os._exit(3)


def wait_for(path: Path | None) -> None:
    while path is not None and not path.exists():
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
