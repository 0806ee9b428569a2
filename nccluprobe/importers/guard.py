"""Runs a reader of untrusted files in processes of its own, with limits.

A pickle that may not call anything can still ask for all memory (one memo index)
or all time (hashing nested tuples).  A worker that does dies alone, and the file
is named.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

#: Address space that a worker may take beyond what it has, per byte of the largest file.
_MEMORY_PER_BYTE = 64
_MEMORY_LEAST = 512 << 20
#: CPU seconds: this, and one for so many bytes read.
_CPU_LEAST = 20
_CPU_BYTES = 2 << 20
#: A worker is worth its start for so many bytes.
_WORKER_BYTES = 512 << 10


@dataclass(frozen=True)
class Read(Generic[T]):
    """What became of one file: its contents, or why there are none."""

    path: str
    value: T | None
    error: str | None = None


def read_guarded(read: Callable[[str], T], files: Sequence[tuple[str, int]]) -> Iterator[Read[T]]:
    """Apply ``read`` to files (path, size in bytes), in order.

    ``read`` raises ValueError for a file that it cannot take: its text becomes
    the error.  A file that kills its worker gets an error, too.
    """
    if not files:
        return
    total = sum(size for _, size in files)
    largest = max(size for _, size in files)
    workers = max(1, min(os.cpu_count() or 1, len(files), total // _WORKER_BYTES))
    # Several files a task: a task costs a round trip.
    per_task = max(1, min(16, len(files) // (workers * 4)))
    tasks = [[p for p, _ in files[i : i + per_task]] for i in range(0, len(files), per_task)]
    with _pool(workers, largest, total) as pool:
        futures: list[Future[list[Read[T]]]] = [pool.submit(_task, read, t) for t in tasks]
        for task, future in zip(tasks, futures, strict=True):
            try:
                yield from future.result()
            except BrokenProcessPool:
                for path in task:
                    yield _alone(read, path, largest)


def _alone(read: Callable[[str], T], path: str, size: int) -> Read[T]:
    """Read one file in a worker that may die of it."""
    with _pool(1, size, size) as pool:
        try:
            return pool.submit(_task, read, [path]).result()[0]
        except BrokenProcessPool:
            return Read(path, None, "reading it takes more memory or time than such a file needs")


def _pool(workers: int, largest: int, total: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_limit,
        initargs=(_MEMORY_LEAST + largest * _MEMORY_PER_BYTE, _CPU_LEAST + total // _CPU_BYTES),
    )


def _limit(memory: int, seconds: int) -> None:
    with open("/proc/self/statm", "rb") as f:  # noqa: PTH123
        has = int(f.read().split()[0]) * resource.getpagesize()
    for what, most in ((resource.RLIMIT_AS, has + memory), (resource.RLIMIT_CPU, seconds)):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # What is read is a tree: there are no cycles to look for.
    gc.disable()


def _task(read: Callable[[str], T], paths: list[str]) -> list[Read[T]]:
    found: list[Read[T]] = []
    for path in paths:
        try:
            found.append(Read(path, read(path)))
        except OSError as error:
            found.append(Read(path, None, error.strerror or str(error)))
        except MemoryError:
            found.append(Read(path, None, "it takes more memory than such a file needs"))
        except ValueError as error:
            found.append(Read(path, None, str(error)[:200]))
        except RecursionError:
            found.append(Read(path, None, "it is nested too deeply"))
    return found
