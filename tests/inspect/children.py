"""Two ranks as threads of one process, on simnccl; communicators made in all ways.

    python children.py LIBNCCL

Waits for a line, makes the calls, prints what it did, waits for another line.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from typing import Any


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


lib = ctypes.CDLL(sys.argv[1])
P, I = ctypes.c_void_p, ctypes.c_int  # noqa: E741
lib.ncclCommInitRank.argtypes = (P, I, UniqueId, I)
lib.ncclCommInitRankConfig.argtypes = (P, I, UniqueId, I, P)
lib.ncclCommSplit.argtypes = (P, I, I, P, P)
lib.ncclCommGetAsyncError.argtypes = (P, P)
lib.ncclAllReduce.argtypes = (P, P, ctypes.c_size_t, I, I, P, P)
buffer = ctypes.create_string_buffer(4096)
truth: list[dict[str, Any]] = []
both = threading.Barrier(2)


def reduce(comm: P, calls: int) -> None:
    for _ in range(calls):
        rc = lib.ncclAllReduce(buffer, buffer, 8, 7, 0, comm, None)
        assert rc in (0, 7)


def fields(comm: P) -> tuple[int, int]:
    rank, nranks = I(-1), I(-1)
    lib.ncclCommUserRank(comm, ctypes.byref(rank))
    lib.ncclCommCount(comm, ctypes.byref(nranks))
    return rank.value, nranks.value


def note(how: str, comm: P, calls: int) -> None:
    rank, nranks = fields(comm)
    reduce(comm, calls)
    truth.append({"how": how, "rank": rank, "nranks": nranks, "calls": calls})


def ready(comm: P) -> None:
    state = I(7)
    while state.value == 7:
        lib.ncclCommGetAsyncError(comm, ctypes.byref(state))
    assert state.value == 0


def ranks(rank: int, ids: list[UniqueId]) -> None:
    world = P()
    assert lib.ncclCommInitRank(ctypes.byref(world), 2, ids[0], rank) == 0
    note("init", world, 200)
    # Ranks turn round by the key: only the struct tells who is who.
    child = P()
    assert lib.ncclCommSplit(world, 3, -rank, ctypes.byref(child), None) == 0
    note("split", child, 3)
    grouped = P()
    assert lib.ncclGroupStart() == 0
    assert lib.ncclCommSplit(world, 4, rank, ctypes.byref(grouped), None) == 0
    assert lib.ncclGroupEnd() == 0
    note("split", grouped, 2)
    both.wait()
    config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 22809, 0)
    later = P()
    rc = lib.ncclCommInitRankConfig(ctypes.byref(later), 2, ids[1], rank, ctypes.byref(config))
    assert rc in (0, 7)
    ready(later)
    note("init", later, 1)


def main() -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    ids = [UniqueId() for _ in range(2)]
    for uid in ids:
        assert lib.ncclGetUniqueId(ctypes.byref(uid)) == 0
    threads = [threading.Thread(target=ranks, args=(rank, ids)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(truth), flush=True)
    sys.stdin.readline()


main()
