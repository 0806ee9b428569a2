"""Refusals, deadlines, the watchdog, aborts, reconnects and the tear-down."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nccluprobe.canary import (
    ArgumentError,
    BootstrapError,
    CudaError,
    DeadlineError,
    KernelMissingError,
    LibraryError,
    NcclBackend,
    NcclError,
    UnhealthyError,
)
from nccluprobe.canary.cuda import Cuda
from nccluprobe.canary.nccl import Nccl
from nccluprobe.canary.submission import VARIABLE, SubmissionLog

from .ranks import FORK, backend, free_port, options, run
from .values import pack, unpack


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    handler = Lines()
    logger = logging.getLogger("nccluprobe.canary")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def calls_of(b: NcclBackend) -> list[str]:
    """From now on, the names of the backend's NCCL calls."""
    seen: list[str] = []
    inner = b.calls

    class Spy:
        def enter(self, function: str, arguments: tuple[object, ...]) -> int:
            seen.append(function)
            return inner.enter(function, arguments)

        def exit(self, token: int, function: str, result: int) -> None:
            inner.exit(token, function, result)

    b.nccl.observer = Spy()
    return seen


def settle(b: NcclBackend) -> None:
    """All ranks have come and have seen it: an abort after this meets no peer in a barrier."""
    b.barrier()
    time.sleep(0.3)


# ---- arguments -------------------------------------------------------------------------------


def refusals(rank: int, world: int, port: int) -> Any:
    with backend(rank, world, port, capacity=256) as b:
        buf, small = b.alloc(4096), b.alloc(64)
        seen = calls_of(b)
        attempts: list[Callable[[], object]] = [
            lambda: b.all_reduce(buf, 65, "float32"),  # 260 bytes, the receive buffer has 256
            lambda: b.all_reduce(buf, 129, "bfloat16"),
            lambda: b.all_reduce(small, 17, "float32"),
            lambda: b.all_reduce(buf, 32, "float32", out=small),
            lambda: b.all_reduce(buf, -1, "float32"),
            lambda: b.all_reduce(buf, 1, "float31"),
            lambda: b.all_reduce(buf, 1, "float32", "mean"),
            lambda: b.broadcast(buf, 1, "float32", 2),
            lambda: b.broadcast(buf, 1, "float32", -1),
            lambda: b.broadcast(small, 65, "int8", 0),
            lambda: b.receive_command(small, 65, "int8"),
            lambda: b.reduce(buf, 1, "float32", 2),
            lambda: b.all_gather(buf, small, 9, "float32"),
            lambda: b.reduce_scatter(small, buf, 9, "float32"),
            lambda: b.all_to_all(small, buf, 9, "float32"),
            lambda: b.send(buf, 1, "float32", 2),
            lambda: b.recv(buf, 1, "float32", -1),
            lambda: b.send(buf, 1, "float32", rank),
            lambda: b.split(-2),
            lambda: b.split(1 << 31),
            lambda: b.split(0, 1 << 31),
            lambda: b.all_reduce(buf, 1.5, "float32"),  # type: ignore[arg-type]
            lambda: b.send(buf, 1, "float32", None),  # type: ignore[arg-type]
            lambda: b.alloc(0),
            lambda: small.write(b"x" * 65),
            lambda: small.read(65),
            lambda: small.view(60, 8),
        ]
        for attempt in attempts:
            with pytest.raises(ArgumentError):
                attempt()
        empty: list[Callable[[], object]] = [
            lambda: b.all_reduce(buf, 0, "float32"),
            lambda: b.broadcast(buf, 0, "float32", 0),
            lambda: b.all_gather(buf, buf, 0, "float32"),
            lambda: b.reduce_scatter(buf, buf, 0, "float32"),
            lambda: b.reduce(buf, 0, "float32", 0),
            lambda: b.all_to_all(buf, buf, 0, "float32"),
            lambda: b.send(buf, 0, "float32", 1 - rank),
            lambda: b.recv(buf, 0, "float32", 1 - rank),
        ]
        for nothing in empty:
            nothing()
        assert b.healthy
        before = [name for name in seen if name != "ncclCommGetAsyncError"]
        registrations = seen.count("ncclCommRegister")
        assert b.register(buf) and b.register(buf) and b.registered(buf)
        assert not b.registered(buf.view(0, 8))
        assert seen.count("ncclCommRegister") == registrations + 1
        b.deregister(buf)
        b.deregister(buf)
        assert seen.count("ncclCommDeregister") == 1
        seen.clear()
        b.all_reduce(buf, 64, "float32")  # exactly the capacity
        b.synchronize()
        return [*before, "|", *(name for name in seen if name != "ncclCommGetAsyncError")]


def test_a_refused_or_empty_operation_makes_no_nccl_call() -> None:
    pair = ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"]
    assert run(2, refusals) == [["|", *pair]] * 2


@pytest.mark.parametrize(
    ("rank", "world", "changes"),
    [
        (2, 2, {}),
        (-1, 2, {}),
        (0, 0, {}),
        (0, 2, {"capacity": 0}),
        (0, 1, {"capacity": -1}),
        (0, 1, {"deadline": 0.0}),
        (0, 2, {"address": ("127.0.0.1", 70000)}),
    ],
)
def test_settings_that_make_no_sense(rank: int, world: int, changes: dict[str, Any]) -> None:
    def attempt(_rank: int, _world: int, port: int) -> str:
        with pytest.raises(ArgumentError) as refused, backend(rank, world, port, **changes):
            pass
        return str(refused.value)

    assert run(1, attempt)[0].count("\n") == 0


def test_no_receive_buffer_is_needed_but_by_two_ranks() -> None:
    def attempt(rank: int, world: int, port: int) -> bool:
        with backend(rank, world, port, capacity=0) as b:
            b.barrier()
            return b.receive_buffer is None

    assert run(3, attempt) == [True] * 3


@pytest.mark.parametrize("which", ["nccl", "cuda"])
def test_a_library_that_is_missing_or_another(which: str, tmp_path: Path) -> None:
    def attempt(_rank: int, _world: int, port: int) -> list[str]:
        said = []
        nothing = tmp_path / "libnothing.so"
        text = tmp_path / "text.so"
        text.write_text("not a library")
        for path in (str(nothing), str(text), "libc.so.6", "libnot_there.so.9"):
            with pytest.raises(LibraryError) as refused, backend(0, 1, port, **{which: path}):
                pass
            said.append(str(refused.value))
        return said

    said = run(1, attempt)[0]
    assert "is no file" in said[0] and all("\n" not in line for line in said)


def test_a_machine_without_a_device_and_a_device_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attempt(_rank: int, _world: int, port: int) -> list[str]:
        said = []
        for count, device in (("0", None), ("2", 2)):
            os.environ["SIMCUDA_DEVICES"] = count
            with pytest.raises(Exception, match="device") as e, backend(0, 1, port, device=device):
                pass
            said.append(str(e.value))
        return said

    assert run(1, attempt)[0] == [
        "there is no CUDA device here",
        "device 2: there are devices 0 to 1",
    ]


# ---- the add kernel and the registration ------------------------------------------------------


def without_kernel(rank: int, world: int, port: int) -> Any:
    ptx = None if rank else b"not PTX"  # rank 0 has none, its peer is not to suffer
    changes = {} if ptx is None else {"ptx": ptx}
    with logged() as lines, backend(rank, world, port, **changes) as b:
        buf = b.alloc(16)
        buf.write(pack("float32", [1.0, 2.0, 3.0, 4.0]))
        seen = calls_of(b)
        error = ""
        try:
            b.all_reduce(buf, 4, "float32")
        except KernelMissingError as missing:
            error = str(missing)
        posted = [name for name in seen if name != "ncclCommGetAsyncError"]
        b.synchronize()
        b.barrier()
        said = [line for line in lines if "add kernels cannot be loaded" in line]
        return posted, bool(error), len(said), unpack("float32", buf.read())


def test_a_missing_add_kernel_is_an_error_after_the_exchange() -> None:
    pair = ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"]
    first, second = run(2, without_kernel)
    assert first == (pair, True, 1, [1.0, 2.0, 3.0, 4.0])
    assert second == (pair, False, 0, [2.0, 4.0, 6.0, 8.0])


def unregistered(rank: int, world: int, port: int) -> Any:
    original = Nccl.call

    def refuse(self: Nccl, function: str, *arguments: object) -> int:
        return 1 if function == "ncclCommRegister" else original(self, function, *arguments)

    # In a rank's own process, which ends with the test.
    Nccl.call = refuse  # type: ignore[method-assign]
    with logged() as lines, backend(rank, world, port) as b:
        buf = b.alloc(4)
        buf.write(pack("float32", [1.5]))
        b.all_reduce(buf, 1, "float32")
        b.synchronize()
        assert not b.register(buf)
        assert b.healthy
        said = [line for line in lines if "receive buffer not registered" in line]
        return len(said), unpack("float32", buf.read())


def test_a_failed_registration_is_logged_and_not_fatal() -> None:
    assert run(2, unregistered) == [(1, [3.0])] * 2


# ---- failures --------------------------------------------------------------------------------


def late_root(rank: int, world: int, port: int) -> Any:
    with backend(rank, world, port, deadline=0.4) as b:
        buf = b.alloc(4)
        b.barrier()
        if rank == 0:
            time.sleep(1.2)
            return None
        start = time.monotonic()
        with pytest.raises(DeadlineError):
            b.broadcast(buf, 1, "float32", 0)
        took = time.monotonic() - start
        assert not b.healthy
        refused = 0
        for attempt in (
            lambda: b.all_reduce(buf, 1, "float32"),
            lambda: b.broadcast(buf, 1, "float32", 0),
            lambda: b.receive_command(buf, 1, "float32"),
            lambda: b.send(buf, 1, "float32", 0),
            lambda: b.synchronize(),
            lambda: b.barrier(),
            lambda: b.split(0),
            lambda: b.all_reduce_async(buf, 1, "float32"),
            lambda: b.register(buf),
        ):
            with pytest.raises(UnhealthyError):
                attempt()
            refused += 1
        return took, refused


def test_a_broadcast_has_a_deadline_and_an_unhealthy_communicator_is_refused() -> None:
    _, (took, refused) = run(2, late_root)
    assert 0.4 <= took < 3 and refused == 9


def grouped(rank: int, world: int, port: int) -> Any:
    with backend(rank, world, port) as b:
        buf = b.alloc(8)
        buf.write(pack("float32", [1.0, 2.0]))
        with b.group():
            for refused in (b.barrier, lambda: b.all_reduce_async(buf, 1, "float32")):
                with pytest.raises(ArgumentError, match="group"):
                    refused()
            b.all_reduce(buf.view(0, 4), 1, "float32")
            b.broadcast(buf.view(4, 4), 1, "float32", 0)  # does not wait in here
        b.synchronize()
        with pytest.raises(KeyError), b.group():
            raise KeyError("the group is ended all the same")
        b.barrier()
        return unpack("float32", buf.read())


def test_groups() -> None:
    assert run(2, grouped) == [[2.0, 2.0]] * 2


def held_back(rank: int, world: int, port: int) -> Any:
    order: list[str] = []
    with backend(rank, world, port, before_init=lambda: order.append("hook")) as b:
        settle(b)
        b.abort()
        b.before_init = lambda: order.append("hook again")
        b.attempt_reconnect()
        b.barrier()
    return order


def test_a_rank_can_be_held_back_between_bootstrap_and_init() -> None:
    assert run(2, held_back) == [["hook", "hook again"]] * 2


def idle(rank: int, world: int, port: int) -> Any:
    with logged() as lines, backend(rank, world, port, deadline=0.2) as b:
        buf = b.alloc(8)
        # No barrier before: the first collective blocks inside NCCL, without a word.
        if rank == 0:
            time.sleep(1.0)
            buf.write(b"command!")
            b.broadcast(buf, 8, "uint8", 0)
            return None
        b.receive_command(buf, 8, "uint8")
        return buf.read(), b.healthy, b.calls.stuck, [x for x in lines if "deadline" in x]


def test_an_idle_receive_has_no_deadline() -> None:
    assert run(2, idle)[1] == (b"command!", True, [], [])


def blocked_call(rank: int, world: int, port: int) -> Any:
    with logged() as lines, backend(rank, world, port, deadline=0.3) as b:
        buf = b.alloc(4)
        if rank == 0:
            time.sleep(1.2)
        b.all_reduce(buf, 1, "int32")  # the first one waits for its peers inside NCCL
        b.synchronize()
        return b.calls.stuck, [line for line in lines if "has not returned" in line]


def test_the_watchdog_tells_once_of_a_call_that_blocks() -> None:
    (none, no_line), (stuck, lines) = run(2, blocked_call)
    assert (none, no_line) == ([], [])
    assert len(stuck) == 1 and lines == stuck
    assert "ncclAllReduce has not returned for" in stuck[0] and "deadline of 0.3 s" in stuck[0]


def async_error(rank: int, world: int, port: int) -> Any:
    with backend(rank, world, port) as b:
        buf = b.alloc(4)
        settle(b)
        if rank == 0:
            b.abort()
            assert not b.healthy and b.comm == 0
            return "aborted"
        with pytest.raises(NcclError) as failed:
            while True:
                b.all_reduce(buf, 1, "float32")
                b.synchronize(10)
        assert not b.healthy
        return failed.value.result


def test_an_asynchronous_error_makes_the_communicator_unhealthy() -> None:
    assert run(3, async_error) == ["aborted", 6, 6]


def illegal_address(rank: int, world: int, port: int) -> Any:
    with logged() as lines:
        b = NcclBackend(rank, world, **options(port))
        buf = b.alloc(16)
        assert b.kernels is not None
        b.kernels.add("float32", 4096, buf.pointer, buf.pointer, 4, b.stream)
        with pytest.raises(CudaError) as failed:
            b.synchronize()
        assert not b.healthy
        b.close()
        b.close()
        assert any("tear-down goes on" in line for line in lines)
        return failed.value.result, b.comm


def test_a_fault_of_the_device_makes_unhealthy_and_is_torn_down() -> None:
    assert run(1, illegal_address) == [(700, 0)]


# ---- reconnect -------------------------------------------------------------------------------


def reconnect(rank: int, world: int, port: int) -> Any:
    with backend(rank, world, port) as b:
        buf, extra = b.alloc(4), b.alloc(64)
        assert b.register(extra) and b.registered(extra)
        child = b.split(0)
        assert child is not None
        old = b.comm
        sums = []
        for round_ in range(2):
            settle(b)
            if rank == 0:
                b.abort()
            else:
                # Peers learn of it in their next operation.
                with pytest.raises((NcclError, UnhealthyError)):
                    while True:
                        b.broadcast(buf, 1, "float32", 0)
            assert b.attempt_reconnect()
            assert not b.attempt_reconnect(), "nothing to do on a healthy communicator"
            assert b.healthy and b.reconnects == round_ + 1 and b.comm
            buf.write(pack("float32", [rank + 1.0]))
            b.all_reduce(buf, 1, "float32")
            b.synchronize()
            sums += unpack("float32", buf.read())
        with pytest.raises(UnhealthyError):
            child.barrier()
        held = b.receive_buffer is not None and b.registered(b.receive_buffer)
        b.barrier()
        return sums, b.registered(extra), held, old != 0


@pytest.mark.parametrize("world", [2, 3])
def test_reconnect(world: int) -> None:
    total = world * (world + 1) / 2
    assert run(world, reconnect) == [([total, total], False, world == 2, True)] * world


def two_threads(rank: int, world: int, port: int) -> Any:
    """A thread waits in an idle receive; two others reconnect at the same time."""
    with backend(rank, world, port) as b:
        buf = b.alloc(4)
        settle(b)
        ended: list[str] = []

        def wait() -> None:
            b.cuda.set_current()
            try:
                b.receive_command(buf, 1, "float32", 1 - rank)  # nobody sends
            except (UnhealthyError, NcclError) as error:
                ended.append(type(error).__name__)

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.3)
        b.abort()
        waiter.join(10)
        results: list[bool] = []
        threads = [
            threading.Thread(target=lambda: results.append(b.attempt_reconnect())) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        b.barrier()
        return len(ended), sorted(results), b.reconnects


def test_one_of_two_threads_reconnects_and_an_abort_ends_an_idle_receive() -> None:
    assert run(2, two_threads) == [(1, [False, True], 1)] * 2


def absent(rank: int, world: int, port: int) -> Any:
    with backend(rank, world, port, bootstrap_timeout=3.0) as b:
        settle(b)
        b.abort()
        if rank == 1:
            return None
        with pytest.raises(BootstrapError) as failed:
            b.attempt_reconnect()
        return str(failed.value), b.healthy, b.reconnects


def test_a_reconnect_that_a_rank_does_not_join_fails_and_stays_unhealthy() -> None:
    first, _, third = run(3, absent)
    assert first == ("after 3 s 1 of 3 ranks have not come: ranks 1", False, 0)
    assert third == (f"rank 0 refused: {first[0]}", False, 0) or "did not reach" in third[0]
    assert third[1:] == (False, 0)


# ---- the end ---------------------------------------------------------------------------------


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


# ---- the submission log ----------------------------------------------------------------------


def test_submission_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "calls.jsonl"
    monkeypatch.setenv(VARIABLE, str(path))

    def job(rank: int, world: int, port: int) -> None:
        with backend(rank, world, port) as b:
            buf = b.alloc(12)
            b.all_reduce(buf, 3, "int32")
            b.synchronize()

    run(2, job)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for rank in range(2):
        mine = [line for line in lines if line["rank"] == rank]
        reduce = [line for line in mine if line["call"] == "ncclAllReduce"]
        assert [line["event"] for line in reduce] == ["submit", "return"]
        assert reduce[0]["arguments"][2:5] == [3, 2, 0] and reduce[1]["result"] == 0
        assert reduce[0]["id"] == reduce[1]["id"] and reduce[0]["t"] <= reduce[1]["t"]
        calls = {line["call"] for line in mine}
        assert {"ncclCommInitRankConfig", "ncclCommRegister", "ncclCommDestroy"} <= calls


@pytest.mark.parametrize("value", ["2", "yes", "on", "calls.jsonl", "/no/such/folder/log"])
def test_an_invalid_switch_is_refused(value: str) -> None:
    with pytest.raises(ArgumentError, match=VARIABLE):
        SubmissionLog.from_environment(environ={VARIABLE: value})


@pytest.mark.parametrize(("value", "on"), [("", False), ("0", False), ("1", True)])
def test_the_switch(value: str, on: bool) -> None:
    assert SubmissionLog.from_environment(environ={VARIABLE: value}).on is on


def test_the_backend_refuses_an_invalid_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "maybe")

    def attempt(rank: int, world: int, port: int) -> None:
        with pytest.raises(ArgumentError, match="maybe"), backend(rank, world, port):
            pass

    run(1, attempt)


def test_start_is_logged_with_the_settings_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    monkeypatch.setenv("NCCL_NOT_OF_INTEREST", "1")

    def job(rank: int, world: int, port: int) -> list[str]:
        with logged() as lines, backend(rank, world, port):
            pass
        return lines

    lines = run(1, job)[0]
    assert any(line.startswith("rank 0 of 1: NCCL ") for line in lines)
    assert "rank 0: NCCL_PROTO=Simple" in lines


def test_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCLUPROBE_CANARY_ADDRESS", f"127.0.0.1:{free_port()}")

    def job(rank: int, world: int, port: int) -> Any:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank + 1))
        settings = options(port)
        del settings["address"]
        with NcclBackend.from_environment(**settings) as b:
            b.barrier()
            return b.rank, b.world, b.cuda.device

    assert run(2, job) == [(0, 2, 1), (1, 2, 2)]


def test_from_environment_without_a_launcher() -> None:
    def job(_rank: int, _world: int, _port: int) -> None:
        for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
            os.environ.pop(name, None)
        with pytest.raises(ArgumentError, match="launcher"):
            NcclBackend.from_environment()

    run(1, job)


def wrong_rank(rank: int, world: int, port: int) -> None:
    with backend(rank, world, port, init_rank=0):
        pass


def test_a_wrong_rank_at_init_hangs_in_nccl() -> None:
    """What a tracer has to name, as NCCL itself only waits."""
    port = free_port()
    ranks = [FORK.Process(target=wrong_rank, args=(rank, 2, port)) for rank in range(2)]
    for process in ranks:
        process.start()
    time.sleep(2.5)
    alive = [process.is_alive() for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    assert alive == [True, True]
