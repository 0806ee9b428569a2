"""The stand-in for libnccl: aborts, kills and what is left of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from .sim import (
    REMOTE,
    SUCCESS,
    SYSTEM,
    Nccl,
    UniqueId,
    elapsed,
    random_id,
    ranks,
    segment,
)


def test_abort_wakes_own_threads_and_peers(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 3, rank)
        if rank == 2:
            time.sleep(0.3)
            return nccl.ncclCommAbort(comm)
        codes: list[int] = []
        thread = threading.Thread(target=lambda: codes.append(nccl.allreduce(comm)))
        if rank == 0:  # aborts itself, its other thread is inside
            thread.start()
            time.sleep(0.1)
            nccl.ncclCommAbort(comm)
            thread.join(5)
        else:
            codes.append(nccl.allreduce(comm))
        return codes

    uid = random_id()
    assert ranks(built["libsimnccl.so"], 3, body, uid) == [[SYSTEM], [REMOTE], SUCCESS]
    assert not segment(uid).exists()


def test_same_rank_twice_hangs_all(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        thread = threading.Thread(target=lambda: nccl.init(uid, 2, 0), daemon=True)
        thread.start()
        thread.join(0.5)
        return thread.is_alive()

    assert ranks(built["libsimnccl.so"], 2, body) == [True, True]


def test_killed_rank_leaves_nothing(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 3, rank)
        if rank == 1:
            child = os.fork()  # holds the parent's files, must not keep the segment alive
            if child == 0:
                time.sleep(1.5)
                os._exit(0)
        time.sleep(0.3)
        held = segment(uid).exists()  # all have come: it has no name any more
        time.sleep(0.2)
        if rank == 1:
            threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        else:
            time.sleep(0.4)
            nccl.ncclCommAbort(comm)
        return held

    path = built["libsimnccl.so"]
    uid = random_id()
    assert ranks(path, 3, body, uid) == [False] * 3
    assert not segment(uid).exists()


def test_ranks_killed_before_all_have_come_leave_what_is_swept(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        threading.Thread(target=lambda: nccl.init(uid, 3, rank), daemon=True).start()
        time.sleep(0.3)
        nccl.simCleanup()
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        return segment(uid).exists()

    path = built["libsimnccl.so"]
    uid = random_id()
    assert ranks(path, 2, body, uid) == [True, True]
    assert segment(uid).exists()
    Nccl(path).simCleanup()
    assert not segment(uid).exists()


def test_destroy_waits_for_queued_work(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 2, rank)
        nccl.allreduce(comm)
        time.sleep(0.3 * rank)
        nccl.allreduce(comm)
        return elapsed(lambda: nccl.ncclCommDestroy(comm))

    uid = random_id()
    assert ranks(built["libsimnccl.so"], 2, body, uid)[0] > 0.2
    assert not segment(uid).exists()
