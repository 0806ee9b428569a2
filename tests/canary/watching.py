"""What a backend logs and calls, watched."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nccluprobe.canary import (
    NcclBackend,
)


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
