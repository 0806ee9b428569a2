"""A thin binding of the CPU stand-in for libnccl, and ranks that use it."""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import re
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[2] / "native"
SHM = Path("/dev/shm")
FLOAT32, SUM = 7, 0
SUCCESS, SYSTEM, ARGUMENT, USAGE, REMOTE, PROGRESS = 0, 2, 4, 5, 6, 7
ID_B = bytes((37 * i + 11) % 256 for i in range(128))
FORK = multiprocessing.get_context("fork")

_spec = importlib.util.spec_from_file_location("native_build", NATIVE / "build.py")
assert _spec and _spec.loader
native_build = importlib.util.module_from_spec(_spec)
sys.modules["native_build"] = native_build
_spec.loader.exec_module(native_build)


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("ints", ctypes.c_int * 3),
        ("net_name", ctypes.c_char_p),
        ("more", ctypes.c_int * 2),
        ("comm_name", ctypes.c_char_p),
        ("rest", ctypes.c_int * 4),
    ]


PTR, SIZE, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
OUT = ctypes.POINTER(PTR)
SIGNATURES = {
    "ncclCommInitRank": [OUT, INT, UniqueId, INT],
    "ncclCommInitRankConfig": [OUT, INT, UniqueId, INT, ctypes.POINTER(Config)],
    "ncclCommInitAll": [OUT, INT, ctypes.POINTER(INT)],
    "ncclCommSplit": [PTR, INT, INT, OUT, PTR],
    "ncclCommShrink": [PTR, ctypes.POINTER(INT), INT, OUT, PTR, INT],
    "ncclCommGrow": [PTR, INT, ctypes.POINTER(UniqueId), INT, OUT, PTR],
    "ncclCommGetUniqueId": [PTR, ctypes.POINTER(UniqueId)],
    "ncclCommFinalize": [PTR],
    "ncclCommDestroy": [PTR],
    "ncclCommAbort": [PTR],
    "ncclCommUserRank": [PTR, ctypes.POINTER(INT)],
    "ncclCommGetAsyncError": [PTR, ctypes.POINTER(INT)],
    "ncclAllReduce": [PTR, PTR, SIZE, INT, INT, PTR, PTR],
    "ncclBroadcast": [PTR, PTR, SIZE, INT, INT, PTR, PTR],
    "ncclBcast": [PTR, SIZE, INT, INT, PTR, PTR],
    "ncclAlltoAll": [PTR, PTR, SIZE, INT, PTR, PTR],
    "ncclSend": [PTR, SIZE, INT, INT, PTR, PTR],
    "ncclRecv": [PTR, SIZE, INT, INT, PTR, PTR],
    "simStreamSynchronize": [PTR],
    "simStreamQuery": [PTR],
    "simStreamDestroy": [PTR],
}


class Nccl:
    """The library of one process, with calls as short as the tests need them."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))
        for name, types in SIGNATURES.items():
            getattr(self.lib, name).argtypes = types
        self.lib.simStreamCreate.restype = PTR

    def __getattr__(self, name: str) -> Callable[..., int]:
        return getattr(self.lib, name)

    def unique_id(self) -> UniqueId:
        uid = UniqueId()
        assert self.ncclGetUniqueId(ctypes.byref(uid)) == SUCCESS
        return uid

    def init(self, uid: UniqueId, nranks: int, rank: int) -> int:
        comm = PTR()
        assert self.ncclCommInitRank(ctypes.byref(comm), nranks, uid, rank) == SUCCESS
        return comm.value or 0

    def split(self, comm: int, color: int, key: int = 0) -> int | None:
        child = PTR()
        assert self.ncclCommSplit(comm, color, key, ctypes.byref(child), None) == SUCCESS
        return child.value

    def allreduce(self, comm: int, count: int = 8, stream: int | None = None) -> int:
        return self.ncclAllReduce(None, None, count, FLOAT32, SUM, comm, stream)

    def sync(self, stream: int | None = None) -> int:
        return self.simStreamSynchronize(stream)

    def field(self, comm: int, name: str) -> int:
        """A field of the struct, by its distance from rank, which NCCL keeps too."""
        rank = self.rank_offset()
        kind, distance = {
            "hash": (ctypes.c_uint64, -8),
            "rank": (INT, 0),
            "nranks": (INT, 4),
            "dev": (INT, 8),
        }[name]
        return kind.from_address(comm + rank + distance).value

    def rank_offset(self) -> int:
        """As the tool does: the displacement of the last 32-bit load in ncclCommUserRank."""
        address = ctypes.cast(self.lib.ncclCommUserRank, PTR).value or 0
        code = ctypes.string_at(address, 256)
        loads = re.findall(rb"\x8b[\x80-\xbf]\x24?(..[\x00-\x1f]\x00)", code, re.S)
        return max(int.from_bytes(d, "little") for d in loads)


def elapsed(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def random_id() -> UniqueId:
    return UniqueId.from_buffer_copy(os.urandom(128))


def ranks(
    path: Path,
    nranks: int,
    body: Callable[[Nccl, UniqueId, int], object],
    uid: UniqueId | None = None,
    timeout: float = 20,
) -> list[object]:
    """Runs body on processes and gives what each returned; a failure or a hang fails the test."""
    uid = uid or random_id()
    pipes = []
    processes = []
    for rank in range(nranks):
        here, there = FORK.Pipe(duplex=False)

        def main(rank: int = rank, pipe: object = there) -> None:
            pipe.send(body(Nccl(path), uid, rank))  # type: ignore[attr-defined]

        process = FORK.Process(target=main)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        deadline = time.monotonic() + timeout
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} hangs"
            results.append(pipe.recv())
        return results
    finally:
        for process in processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()


def segment(uid: UniqueId) -> Path:
    """The file that joins the ranks of a communicator made from this id."""
    p, q, mask = 1 ^ 128, 1, (1 << 64) - 1
    for word in struct.unpack("<16Q", bytes(uid)):
        p = (p + q) & mask
        q ^= p
        p = ((p ^ (p >> 31)) * 0x9DE62BBC8CEF3CE3) & mask
        q = ((q ^ (q >> 32)) * 0x485CD6311B599E79) & mask
        p = (p + word) & mask
    h = (((p ^ (p >> 31)) * 0xBAC3BD562846DE6B) + q) & mask
    h = ((h ^ (h >> 32)) * 0x995A187A14E7B445) & mask
    return SHM / f"simnccl-{h:016x}"
