"""The tear-down: its order, and that everything is given back."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from nccluprobe.canary import (
    BootstrapError,
    DeadlineError,
    NcclBackend,
    NcclError,
    UnhealthyError,
)
from nccluprobe.canary.cuda import Cuda
from nccluprobe.canary.nccl import Nccl

from .ranks import backend, free_port, options, run
from .watching import calls_of, settle


def teardown(rank: int, world: int, port: int) -> Any:
    b = NcclBackend(rank, world, **options(port))
    buf = b.alloc(4)
    b.barrier()
    work = b.all_reduce_async(buf, 1, "float32")
    work.wait()
    child = b.split(0)
    assert child is not None
    settle(b)
    seen = calls_of(b)
    buf.free()
    buf.free()
    if world == 3:
        b.close(abort=True)
    b.close()
    b.close()
    with pytest.raises(UnhealthyError):
        b.barrier()
    with pytest.raises(UnhealthyError):
        child.barrier()
    return [name for name in seen if name != "ncclCommGetAsyncError"]


def test_teardown_order() -> None:
    destroyed = ["ncclCommDeregister", "ncclCommDestroy"]
    assert run(2, teardown) == [destroyed * 2] * 2
    assert run(3, teardown) == [["ncclCommAbort"] * 2] * 3


def interrupted(rank: int, world: int, port: int) -> Any:
    """Frees while a child's collective is stuck: they wait for its abort."""
    with backend(rank, world, port, deadline=0.3) as b:
        child = b.split(0)
        assert child is not None
        mine, others = b.alloc(4), child.alloc(4)
        child.barrier()  # the first call of a communicator would block inside NCCL
        settle(b)
        if rank == 1:
            time.sleep(1.2)
            return True
        freed: list[int] = []
        free = b.cuda.free

        def noted(pointer: int) -> None:
            freed.append(pointer)
            free(pointer)

        b.cuda.free = noted  # type: ignore[method-assign]
        with pytest.raises(DeadlineError):
            child.broadcast(others, 1, "float32", 1)
        pointers = {mine.pointer, others.pointer}
        mine.free()
        others.free()
        others.free()
        waited = not freed
        child.abort()
        b.memory.flush()
        return waited and pointers == set(freed)


def test_memory_is_freed_when_nothing_is_stuck_any_more() -> None:
    assert run(2, interrupted) == [True, True]


def broken(rank: int, world: int, port: int) -> Any:
    """An error in the block of a rank: it aborts, and does not wait for the others."""
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError), backend(rank, world, port) as b:
        settle(b)
        if rank == 0:
            raise ZeroDivisionError
        buf = b.alloc(4)
        try:
            while True:
                b.broadcast(buf, 1, "float32", 0)
        except (NcclError, UnhealthyError):
            raise ZeroDivisionError from None
    return time.monotonic() - start < 15


def test_an_error_in_the_block_aborts() -> None:
    assert run(2, broken) == [True, True]


MADE_AND_GIVEN_BACK = {
    "cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRelease_v2",
    "cuMemAlloc_v2": "cuMemFree_v2",
    "cuStreamCreate": "cuStreamDestroy_v2",
    "cuEventCreate": "cuEventDestroy_v2",
    "cuModuleLoadData": "cuModuleUnload",
}


def held_after(scenario: str) -> Any:
    """A job of two ranks; per rank, its calls of the driver and of NCCL in order."""

    def job(rank: int, world: int, port: int) -> list[str]:
        seen: list[str] = []
        driver, calls = Cuda._check, Nccl.call

        def check(self: Cuda, function: str, *arguments: object) -> None:
            driver(self, function, *arguments)
            seen.append(function)

        def call(self: Nccl, function: str, *arguments: object) -> int:
            seen.append(function)
            return calls(self, function, *arguments)

        Cuda._check, Nccl.call = check, call  # type: ignore[method-assign]
        changes: dict[str, Any] = {"deadline": 0.5 if scenario == "deadline" else 20.0}
        if scenario == "nobody comes":
            changes |= {"bootstrap_timeout": 0.4, "address": ("127.0.0.1", free_port())}
        with (
            contextlib.suppress(ZeroDivisionError, BootstrapError, DeadlineError, NcclError),
            backend(rank, world, port, **changes) as b,
        ):
            buf = b.alloc(16)
            b.alloc(16)  # that nobody frees
            b.barrier()
            b.all_reduce(buf, 4, "float32")
            b.all_reduce_async(buf, 4, "float32")
            b.synchronize()
            child = b.split(0)
            assert child is not None
            child.barrier()
            b.barrier()
            if scenario == "reconnect":
                settle(b)
                b.abort()
                b.attempt_reconnect()
                b.barrier()
            buf.free()
            if scenario == "error":
                raise ZeroDivisionError
            if scenario == "deadline":
                extra = b.alloc(4)
                if rank == 1:
                    time.sleep(1.5)
                try:
                    b.broadcast(extra, 1, "float32", 1)
                finally:
                    extra.free()
        return seen

    return run(2, job)


@pytest.mark.parametrize("scenario", ["none", "error", "nobody comes", "deadline", "reconnect"])
def test_everything_is_given_back_also_after_an_error(scenario: str) -> None:
    for seen in held_after(scenario):
        for made, given_back in MADE_AND_GIVEN_BACK.items():
            assert seen.count(made) == seen.count(given_back), (made, seen)
        comms = seen.count("ncclCommInitRankConfig") + seen.count("ncclCommSplit")
        assert comms == seen.count("ncclCommDestroy") + seen.count("ncclCommAbort")
        assert (comms == 0) is (scenario == "nobody comes")
        # A free waits for what runs on the device: never while a collective is stuck.
        if "ncclBroadcast" in seen:
            stuck = seen[seen.index("ncclBroadcast") :]
            end = max(i for i, name in enumerate(stuck) if name == "ncclCommAbort")
            assert "cuMemFree_v2" in stuck[end:] and "cuMemFree_v2" not in stuck[:end]
        # The communicator before what it works on, the context last.
        ends = [i for i, name in enumerate(seen) if name in ("ncclCommDestroy", "ncclCommAbort")]
        last = {name: len(seen) - 1 - seen[::-1].index(name) for name in set(seen)}
        assert last["cuDevicePrimaryCtxRelease_v2"] == len(seen) - 1
        assert all(end < last["cuStreamDestroy_v2"] < last["cuModuleUnload"] for end in ends)
