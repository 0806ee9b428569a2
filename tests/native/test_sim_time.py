"""The stand-in for libnccl: when a call blocks."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
from pathlib import Path

from .sim import (
    FLOAT32,
    FORK,
    INT,
    PROGRESS,
    PTR,
    SUCCESS,
    Config,
    Nccl,
    UniqueId,
    elapsed,
    ranks,
)


def test_first_collective_blocks_then_calls_queue(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        times = [elapsed(lambda: time.sleep(0.3 * rank) or nccl.init(uid, 2, rank))]
        uid2 = UniqueId.from_buffer_copy(bytes(uid)[::-1])
        comm = nccl.init(uid2, 2, rank)
        for _ in range(2):
            time.sleep(0.3 * rank)
            times.append(elapsed(lambda: nccl.allreduce(comm)))
        times.append(elapsed(nccl.sync))
        return times

    init, first, second, sync = ranks(built["libsimnccl.so"], 2, body)[0]  # rank 0 waits
    assert 0.2 < init < 2
    assert 0.2 < first < 2
    assert second < 0.1
    assert 0.2 < sync < 2


def test_launch_queue_blocks_call_1022(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 2, rank)
        nccl.allreduce(comm)
        nccl.sync()
        time.sleep(0.5 * rank)
        slow = [i for i in range(1, 1500) if elapsed(lambda: nccl.allreduce(comm)) > 0.2]
        nccl.sync()
        return slow

    assert ranks(built["libsimnccl.so"], 2, body)[0] == [1022]


def test_device_goes_on_while_the_host_is_elsewhere(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 2, rank)
        for _ in range(50):
            nccl.allreduce(comm)
        if rank == 1:
            time.sleep(1)
        return elapsed(nccl.sync)

    assert ranks(built["libsimnccl.so"], 2, body)[0] < 0.7


def test_stream_order_across_communicators_can_deadlock(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        world = nccl.init(uid, 2, rank)
        comms = [world, nccl.split(world, 0)]
        for comm in comms:
            nccl.allreduce(comm)
        nccl.sync()
        for comm in comms if rank else reversed(comms):
            nccl.allreduce(comm)
        time.sleep(0.2)
        stuck = nccl.simStreamQuery(None)
        time.sleep(0.3)  # the other rank has looked, too
        for comm in comms:
            nccl.ncclCommAbort(comm)
        return stuck, nccl.simStreamQuery(None)

    assert ranks(built["libsimnccl.so"], 2, body) == [(600, 0), (600, 0)]


def test_other_call_in_the_slot_never_completes(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 2, rank)
        nccl.allreduce(comm, count=8 + rank)
        time.sleep(0.2)
        stuck = nccl.simStreamQuery(None)
        time.sleep(0.3)
        nccl.ncclCommAbort(comm)
        return stuck

    assert ranks(built["libsimnccl.so"], 2, body) == [600, 600]


def test_small_send_is_buffered_large_is_not(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 2, rank)
        move = nccl.ncclRecv if rank else nccl.ncclSend
        assert move(None, 8, FLOAT32, 1 - rank, comm, None) == SUCCESS
        nccl.sync()
        times = []
        for count in (8, 1 << 20):
            time.sleep(0.3 * rank)
            times.append(
                elapsed(
                    lambda count=count: (
                        move(None, count, FLOAT32, 1 - rank, comm, None),
                        nccl.sync(),
                    )
                )
            )
        return times

    small, large = ranks(built["libsimnccl.so"], 2, body)[0]
    assert small < 0.1
    assert large > 0.2


def test_first_p2p_group_blocks_in_group_end(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 2, rank)
        time.sleep(0.3 * rank)
        nccl.ncclGroupStart()
        inside = elapsed(lambda: nccl.ncclSend(None, 8, FLOAT32, 1 - rank, comm, None))
        nccl.ncclRecv(None, 8, FLOAT32, 1 - rank, comm, None)
        end = elapsed(nccl.ncclGroupEnd)
        nccl.sync()
        assert nccl.ncclAlltoAll(None, None, 8, FLOAT32, comm, None) == SUCCESS
        nccl.sync()
        return inside, end

    inside, end = ranks(built["libsimnccl.so"], 2, body)[0]
    assert inside < 0.1
    assert end > 0.2


def test_nonblocking_connect_behind_other_work(built: dict[str, Path]) -> None:
    """Three ranks of a process on one stream: the second's work stands behind the first's,
    which waits for it, and yet the second's connection is reported as made."""

    def ranks(conn: multiprocessing.connection.Connection) -> None:
        nccl = Nccl(built["libsimnccl.so"])
        uid, ready, connected = nccl.unique_id(), threading.Barrier(3), []

        def rank(number: int) -> None:
            comm, state = PTR(), INT(PROGRESS)
            config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 22809, 0)
            nccl.ncclCommInitRankConfig(ctypes.byref(comm), 3, uid, number, ctypes.byref(config))
            for step in (None, nccl.allreduce):
                if step:
                    ready.wait()
                    assert step(comm.value or 0) in (SUCCESS, PROGRESS)
                    state.value = PROGRESS
                while state.value == PROGRESS:
                    nccl.ncclCommGetAsyncError(comm, ctypes.byref(state))
                    time.sleep(0.001)
            connected.append(number)

        threads = [threading.Thread(target=rank, args=(r,), daemon=True) for r in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        conn.send(sorted(connected))
        os._exit(0)

    here, there = FORK.Pipe()
    process = FORK.Process(target=ranks, args=(there,))
    process.start()
    try:
        assert here.poll(40) and here.recv() == [0, 1, 2]
    finally:
        process.kill()
        process.join()
