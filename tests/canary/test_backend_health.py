"""Deadlines, the watchdog, errors of NCCL and of the device, reconnects."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from nccluprobe.canary import (
    ArgumentError,
    BootstrapError,
    CudaError,
    DeadlineError,
    NcclBackend,
    NcclError,
    UnhealthyError,
)

from .ranks import FORK, backend, free_port, options, run
from .values import pack, unpack
from .watching import logged, settle


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
