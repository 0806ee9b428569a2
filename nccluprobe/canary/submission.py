"""The submission log: every host call of the canary, before it and after it.

``NCCLUPROBE_CANARY_LOG`` is the one switch: ``0`` (or unset) off, ``1`` to
standard error, a path that contains ``/`` to that file (appended). Any other
value is refused. A line is a JSON object: ``event`` (submit or return), ``t``
(ns, CLOCK_MONOTONIC), ``pid``, ``tid``, ``rank``, ``id`` (joins the two lines
of a call), ``call``; with submit the arguments, with return the result. A call
without its return line is one that the process is still inside.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from nccluprobe.canary.errors import ArgumentError

logger = logging.getLogger("nccluprobe.canary")

VARIABLE = "NCCLUPROBE_CANARY_LOG"


def _plain(argument: object) -> object:
    """An argument as JSON has it; out-parameters and structs by their type."""
    if argument is None or isinstance(argument, (int, str, float)):
        return argument
    if isinstance(argument, ctypes.c_void_p):
        return argument.value
    return type(argument).__name__


class SubmissionLog:
    """Writes the lines; does nothing when `stream` is None."""

    def __init__(self, stream: TextIO | None, rank: int = -1, *, close: bool = False) -> None:
        self._stream = stream
        self._close = close
        self.rank = rank

    @classmethod
    def from_environment(
        cls, rank: int = -1, environ: Mapping[str, str] | None = None
    ) -> SubmissionLog:
        """As the switch says; ArgumentError for an invalid value or a path it cannot open."""
        value = (os.environ if environ is None else environ).get(VARIABLE, "")
        if value in ("", "0"):
            return cls(None, rank)
        if value == "1":
            return cls(sys.stderr, rank)
        if "/" not in value:
            raise ArgumentError(f"{VARIABLE}={value!r}: give 0, 1 or a path that contains a slash")
        try:
            return cls(Path(value).open("a", encoding="utf-8"), rank, close=True)
        except OSError as error:
            raise ArgumentError(
                f"{VARIABLE}: {value} cannot be written: {error.strerror}"
            ) from error

    @property
    def on(self) -> bool:
        return self._stream is not None

    def submit(self, number: int, call: str, arguments: tuple[object, ...]) -> None:
        if self._stream is not None:
            self._write("submit", number, call, "arguments", [_plain(a) for a in arguments])

    def returned(self, number: int, call: str, result: int) -> None:
        if self._stream is not None:
            self._write("return", number, call, "result", result)

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None and self._close:
            stream.close()

    def _write(self, event: str, number: int, call: str, key: str, value: object) -> None:
        line = json.dumps(
            {
                "event": event,
                "t": time.monotonic_ns(),
                "pid": os.getpid(),
                "tid": threading.get_native_id(),
                "rank": self.rank,
                "id": number,
                "call": call,
                key: value,
            }
        )
        stream = self._stream
        if stream is not None:
            # One write, flushed: a line is whole, and there before the call that may hang.
            try:
                stream.write(line + "\n")
                stream.flush()
            except OSError as error:
                # A full disk is no reason to leave the other ranks waiting.
                self._stream = None
                logger.warning("%s: no more is written: %s", VARIABLE, error.strerror)
