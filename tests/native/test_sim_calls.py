"""The stand-in for libnccl: groups, arguments, initialisations."""

from __future__ import annotations

import ctypes
import platform
import time
from pathlib import Path

import pytest

from .sim import (
    ARGUMENT,
    FLOAT32,
    INT,
    PROGRESS,
    PTR,
    SUCCESS,
    SUM,
    USAGE,
    Config,
    Nccl,
    UniqueId,
    elapsed,
    ranks,
)


def test_group_is_all_or_none(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 2, rank)
        nccl.allreduce(comm)
        codes = []
        if rank == 0:  # were the good call queued, the ranks would disagree from here on
            codes = [
                nccl.ncclGroupStart(),
                nccl.ncclGroupStart(),
                nccl.allreduce(comm),
                nccl.allreduce(None),
                nccl.ncclGroupEnd(),
                nccl.ncclGroupEnd(),
            ]
        nccl.ncclGroupStart()
        for _ in range(3):
            nccl.allreduce(comm)
        nccl.ncclGroupEnd()
        return codes, nccl.sync()

    assert ranks(built["libsimnccl.so"], 2, body) == [
        ([SUCCESS, SUCCESS, SUCCESS, ARGUMENT, SUCCESS, ARGUMENT], 0),
        ([], 0),
    ]


def test_arguments(built: dict[str, Path]) -> None:
    nccl = Nccl(built["libsimnccl.so"])
    comm = nccl.init(nccl.unique_id(), 1, 0)
    assert nccl.allreduce(comm) == SUCCESS
    assert nccl.allreduce(comm, 0) == SUCCESS
    assert nccl.ncclAllReduce(None, None, 0, 99, SUM, comm, None) == ARGUMENT
    assert nccl.ncclAllReduce(None, None, 1, FLOAT32, 77, comm, None) == ARGUMENT
    assert nccl.ncclBroadcast(None, None, 1, FLOAT32, 5, comm, None) == ARGUMENT
    assert nccl.ncclSend(None, 1, FLOAT32, 1, comm, None) == ARGUMENT
    assert nccl.ncclGroupEnd() == USAGE
    bad = PTR(57005)
    assert nccl.ncclCommInitRank(ctypes.byref(bad), 2, UniqueId(), 5) == ARGUMENT
    assert bad.value == 57005
    for name in ("Destroy", "Abort", "Finalize"):
        assert getattr(nccl, f"ncclComm{name}")(None) == SUCCESS
    assert nccl.ncclCommDestroy(comm) == SUCCESS


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 code")
def test_init_in_group(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        time.sleep(0.3 * rank)
        comm = PTR()
        nccl.ncclGroupStart()
        start = time.monotonic()
        assert nccl.ncclCommInitRank(ctypes.byref(comm), 2, uid, rank) == SUCCESS
        inner = time.monotonic() - start
        assert comm.value
        early = nccl.field(comm.value, "hash"), nccl.field(comm.value, "nranks")
        end = elapsed(nccl.ncclGroupEnd)
        return inner, early, end, nccl.field(comm.value, "nranks")

    inner, early, end, nranks = ranks(built["libsimnccl.so"], 2, body)[0]
    assert inner < 0.1 and early == (0, 0) and end > 0.2 and nranks == 2


def test_init_all_and_one_thread_per_device(built: dict[str, Path]) -> None:
    nccl = Nccl(built["libsimnccl.so"])
    comms = (PTR * 3)()
    assert nccl.ncclCommInitAll(comms, 3, None) == SUCCESS
    streams = [nccl.simStreamCreate() for _ in comms]
    nccl.ncclGroupStart()
    for comm, stream in zip(comms, streams, strict=True):
        assert nccl.allreduce(comm, stream=stream) == SUCCESS
    assert nccl.ncclGroupEnd() == SUCCESS
    assert [nccl.sync(s) for s in streams] == [0, 0, 0]
    for comm, stream in zip(comms, streams, strict=True):
        nccl.ncclCommDestroy(comm)
        nccl.simStreamDestroy(stream)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 code")
def test_nonblocking_init(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        time.sleep(0.3 * rank)
        config = Config(size=ctypes.sizeof(Config), magic=0xCAFEBEEF, version=22809, blocking=0)
        comm, state = PTR(), INT(PROGRESS)
        start = time.monotonic()
        rc = nccl.ncclCommInitRankConfig(ctypes.byref(comm), 2, uid, rank, ctypes.byref(config))
        returned = time.monotonic() - start
        assert comm.value
        early = None
        if rank == 0:
            early = nccl.field(comm.value, "hash"), nccl.allreduce(comm.value)
        while state.value == PROGRESS:
            nccl.ncclCommGetAsyncError(comm, ctypes.byref(state))
            time.sleep(0.001)
        ready = time.monotonic() - start
        child = PTR()
        assert nccl.ncclCommSplit(comm, 0, 0, ctypes.byref(child), None) == SUCCESS
        state.value = PROGRESS
        while state.value == PROGRESS:  # the parent tells when the child is there
            nccl.ncclCommGetAsyncError(comm, ctypes.byref(state))
            time.sleep(0.001)
        assert nccl.allreduce(comm.value) in (SUCCESS, PROGRESS)
        nccl.sync()
        return rc, returned, early, state.value, ready, nccl.field(comm.value, "rank"), child.value

    rc, returned, early, state, ready, rank, child = ranks(built["libsimnccl.so"], 2, body)[0]
    assert rc == PROGRESS and returned < 0.1 and early == (0, ARGUMENT)
    assert state == SUCCESS and 0.2 < ready < 3 and rank == 0 and child
