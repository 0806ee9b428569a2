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
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

#: Address space that a worker may take beyond what it has, per byte of the largest file.
_MEMORY_PER_BYTE = 64
_MEMORY_LEAST = 512 << 20
#: CPU seconds: this, and one for so many bytes read.
_CPU_LEAST = 10
_CPU_BYTES = 2 << 20
#: The same for a file that is read again alone, after a worker died that had it.
_CPU_AGAIN = 2
#: A worker is worth its start for so many bytes.
_WORKER_BYTES = 512 << 10

_TAKES_MORE = "reading it takes more memory or time than such a file needs"
_NOT_TRIED = "not read: other files took the time that reading all should take"


@dataclass(frozen=True)
class Read(Generic[T]):
    """What became of one file: its contents, or why there are none."""

    path: str
    value: T | None
    error: str | None = None


def read_guarded(read: Callable[[str], T], files: Sequence[tuple[str, int]]) -> Iterator[Read[T]]:
    """Apply ``read`` to files (path, size in bytes), in order.

    ``read`` raises ValueError for a file that it cannot take: its text becomes
    the error.  A file that kills its worker gets an error, too.  When such files
    have taken as much CPU time as all files may, what is left is not tried.
    """
    if not files:
        return
    total = sum(size for _, size in files)
    largest = max(size for _, size in files)
    workers = max(1, min(os.cpu_count() or 1, len(files), total // _WORKER_BYTES))
    # Several files a task: a task costs a round trip.
    per_task = max(1, min(16, len(files) // (workers * 4)))
    tasks = [[p for p, _ in files[i : i + per_task]] for i in range(0, len(files), per_task)]
    left = float(_seconds(_CPU_LEAST, total))
    with _pool(workers, largest, _seconds(_CPU_LEAST, total)) as pool:
        futures: list[Future[list[Read[T]]]] = [pool.submit(_task, read, t) for t in tasks]
        for task, future in zip(tasks, futures, strict=True):
            try:
                yield from future.result()
            except BrokenProcessPool:
                for path in task:
                    if left <= 0:
                        yield Read(path, None, _NOT_TRIED)
                        continue
                    before = _cpu_of_workers()
                    again = _alone(read, path, largest)
                    if again.error == _TAKES_MORE:
                        left -= _cpu_of_workers() - before
                    yield again


def _alone(read: Callable[[str], T], path: str, size: int) -> Read[T]:
    """Read one file in a worker that may die of it."""
    most = _seconds(min(_CPU_AGAIN, _CPU_LEAST), size)
    with _pool(1, size, most) as pool:
        try:
            return pool.submit(_task, read, [path]).result()[0]
        except BrokenProcessPool:
            return Read(path, None, _TAKES_MORE)


def _seconds(least: int, size: int) -> int:
    return least + size // _CPU_BYTES


def _cpu_of_workers() -> float:
    """CPU seconds of all workers that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def _pool(workers: int, largest: int, seconds: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of workers; who leaves it by an exception, as by Ctrl-C, waits for none of them."""
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_limit,
        initargs=(_MEMORY_LEAST + largest * _MEMORY_PER_BYTE, seconds),
    )
    try:
        yield pool
    except BaseException:
        for worker in set(multiprocessing.active_children()) - before:
            worker.kill()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


def _limit(memory: int, seconds: int) -> None:
    # Handlers are inherited, and what they do is for the process that reads the findings.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
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
