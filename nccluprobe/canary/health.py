"""Health of a communicator, and the watchdog over the host's calls."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from nccluprobe.canary.errors import UnhealthyError
from nccluprobe.canary.submission import SubmissionLog

logger = logging.getLogger("nccluprobe.canary")


class Health:
    """Whether a communicator may be used.

    `generation` grows with every reconnect, so that a thread that comes back
    late from a call on the old communicator does not mark the new one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.generation = 0
        self.reason: str | None = None

    @property
    def healthy(self) -> bool:
        return self.reason is None

    def fail(self, generation: int, reason: str, *, raised: bool = False) -> None:
        """Marks the communicator of `generation` unhealthy; the first reason stays.

        raised: an exception tells the same to the caller, so the log need not.
        """
        with self._lock:
            if generation == self.generation and self.reason is None:
                self.reason = reason
                level = logging.INFO if raised else logging.ERROR
                logger.log(level, "communicator unhealthy: %s", reason)

    def close(self, reason: str) -> None:
        """The end that was wanted: unhealthy, without an error in the log."""
        with self._lock:
            self.reason = self.reason or reason

    def renew(self) -> None:
        """A new communicator is in place."""
        with self._lock:
            self.generation += 1
            self.reason = None

    def require(self, function: str) -> int:
        """The generation; UnhealthyError when the communicator may not be used."""
        with self._lock:
            if self.reason is not None:
                raise UnhealthyError(
                    f"{function} refused, the communicator is unhealthy: {self.reason}; "
                    "reconnect on every rank"
                )
            return self.generation

    def current(self, generation: int, function: str) -> None:
        """UnhealthyError when the communicator of `generation` failed or was replaced."""
        with self._lock:
            reason = self.reason
            if generation != self.generation:
                reason = "it was replaced by a reconnect"
        if reason is not None:
            raise UnhealthyError(f"{function} did not complete, its communicator failed: {reason}")


@dataclass
class _Call:
    function: str
    start: float
    told: bool = False


class HostCalls:
    """Observer of the host's NCCL calls: submission log and watchdog.

    A call that is still inside after `deadline` seconds gets one line in the
    log; it cannot be interrupted from here. ``stuck`` keeps what was said.
    """

    def __init__(self, log: SubmissionLog, deadline: float) -> None:
        self.log = log
        self.deadline = deadline
        self.stuck: list[str] = []
        self._numbers = itertools.count()
        self._inside: dict[int, _Call] = {}
        self._patient = threading.local()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="canary-watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.log.close()

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Inside it this thread's calls may block as long as they like: an idle receive."""
        self._patient.on = True
        try:
            yield
        finally:
            self._patient.on = False

    def enter(self, function: str, arguments: tuple[object, ...]) -> int:
        number = next(self._numbers)
        if not getattr(self._patient, "on", False):
            self._inside[number] = _Call(function, time.monotonic())
        self.log.submit(number, function, arguments)
        return number

    def exit(self, token: int, function: str, result: int) -> None:
        call = self._inside.pop(token, None)
        self.log.returned(token, function, result)
        if call is not None and call.told:
            seconds = time.monotonic() - call.start
            logger.warning("%s returned %d after %.1f s", function, result, seconds)

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.deadline / 4)):
            now = time.monotonic()
            for call in list(self._inside.values()):
                if not call.told and now - call.start > self.deadline:
                    call.told = True
                    line = (
                        f"{call.function} has not returned for {now - call.start:.1f} s, "
                        f"past the deadline of {self.deadline:g} s; it cannot be interrupted"
                    )
                    self.stuck.append(line)
                    logger.error("%s", line)
