"""Calls of the made-up library, on addresses that no test has used."""

from __future__ import annotations

import ctypes

from bpf.fakelib import FakeLib, uid
from nccluprobe.nccl.api import BY_ID
from nccluprobe.record import Record

_next = iter(range(0x100000, 0x1000000000, 0x100000))


def new_ptr() -> int:
    """An address that no test has used."""
    return next(_next)


def names(records: list[Record]) -> list[str]:
    return [BY_ID[r.api].name.removeprefix("nccl") for r in records]


def init(fake: FakeLib, ptr: int) -> int:
    out = ctypes.c_uint64()
    fake.set(handle=ptr)
    return int(fake.dll.ncclCommInitRank(ctypes.addressof(out), 2, uid(bytes(128)), 0))


def allreduce(fake: FakeLib, ptr: int, count: int = 1) -> int:
    return int(fake.dll.ncclAllReduce(0, 0, count, 7, 0, ptr, 0))
