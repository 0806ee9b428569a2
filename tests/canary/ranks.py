"""Runs a function as the ranks of a job, each a process of its own, on the stand-ins."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from nccluprobe.canary import NcclBackend, bootstrap, libraries

FORK = multiprocessing.get_context("fork")  # the parent has loaded neither library


def free_port() -> int:
    """A port that is free, and the one after it (a reconnect takes that)."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


def options(port: int, **changes: Any) -> dict[str, Any]:
    nccl, cuda = libraries.simulated()
    settings: dict[str, Any] = {
        "address": ("127.0.0.1", port),
        "nccl": nccl,
        "cuda": cuda,
        "capacity": 1 << 20,
        "deadline": 20.0,
        "bootstrap_timeout": 20.0,
    }
    return {**settings, **changes}


@contextlib.contextmanager
def backend(rank: int, world: int, port: int, **changes: Any) -> Iterator[NcclBackend]:
    with NcclBackend(rank, world, **options(port, **changes)) as made:
        yield made


def _child(
    function: Callable[..., Any], rank: int, world: int, port: int, pipe: Connection
) -> None:
    bootstrap.RETRY_PERIOD = 0.02
    try:
        pipe.send((function(rank, world, port), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    pipe.close()


def run(
    world: int, function: Callable[..., Any], *, timeout: float = 40.0, dies: set[int] | None = None
) -> list[Any]:
    """`function(rank, world, port)` in `world` processes; what each returned.

    A rank of `dies` ends without an answer. Any exception fails the test.
    """
    port = free_port()
    ranks = []
    for rank in range(world):
        here, there = FORK.Pipe()
        process = FORK.Process(target=_child, args=(function, rank, world, port, there))
        process.start()
        there.close()
        ranks.append((process, here))
    end = time.monotonic() + timeout
    results: list[Any] = []
    try:
        for rank, (process, pipe) in enumerate(ranks):
            result: Any = None
            error: str | None = f"rank {rank} gave no answer within {timeout:g} s"
            try:
                if pipe.poll(max(0.0, end - time.monotonic())):
                    result, error = pipe.recv()
            except EOFError:
                error = f"rank {rank} died"
            if rank in (dies or set()):
                process.join(5)
                error = None
            assert error is None, f"rank {rank}: {error}"
            results.append(result)
    finally:
        for process, _ in ranks:
            process.join(0 if process.exitcode is not None else 5)
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGKILL)
                process.join()
    return results
