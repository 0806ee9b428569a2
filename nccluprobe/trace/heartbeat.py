"""Heartbeat files: what a job says about itself, in a phase that takes long.

``<out>/tracing/<run_id>/heartbeat/rank_<rank>.json`` (or ``pid_<pid>.json``), one
small JSON object, replaced atomically.  Whoever can write the folder can write
anything: what is no heartbeat is refused with the reason, and no phase lasts for ever.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from dataclasses import dataclass
from typing import Any

import orjson

FOLDER = "heartbeat"
SUFFIX = ".json"
#: A larger file is none.
LARGEST = 16 << 10
LONGEST_NAME = 64
_LONGEST_TEXT = 100
#: No phase lasts longer, whatever its file says.
LONGEST_S = 86_400
#: Clocks of a file server and a host may differ by this much.
_AHEAD_NS = 60 * 1_000_000_000
_SECOND = 1_000_000_000
#: The nature of a healthy job, not a phase of it.
_NO_PHASE = frozenset({"", "none", "null", "train", "training", "step", "run", "running"})


class NotAHeartbeat(Exception):
    """Why a file is refused, in a few words."""


@dataclass(frozen=True)
class Heartbeat:
    """Times are unix ns, durations ns; ``phase`` None: in none now.

    ``pid`` is that of any pid namespace the process is in.
    """

    host: str
    pid: int
    phase: str | None
    time: int
    rank: int | None = None
    since: int | None = None
    limit: int | None = None
    every: int | None = None
    step: int | None = None
    progress: str | None = None

    def mismatch(
        self, host: str, pids: tuple[int | None, ...], rank: int | None, start: int
    ) -> str | None:
        """Why it does not speak of a process (which started at unix ns ``start``), or None."""
        if self.pid not in pids:
            return f"pid {self.pid} is not that of the rank"
        if self.rank is not None and rank is not None and self.rank != rank:
            return f"rank {self.rank} is not that of pid {self.pid}"
        # A container may have a host name of its own: then the rank has to do.
        if self.host != host and (self.rank is None or self.rank != rank):
            return f"host {self.host} is another"
        return "older than its process" if self.time < start - _AHEAD_NS else None


def parse(data: bytes, now: int) -> Heartbeat:
    """The heartbeat in a file's contents; ``now``: unix ns, to refuse what comes from the future.

    Raises NotAHeartbeat.
    """
    try:
        row = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise NotAHeartbeat("not JSON") from None
    if not isinstance(row, dict):
        raise NotAHeartbeat("not a JSON object")
    time = _time(row, "time")
    if time is None:
        raise NotAHeartbeat("time is missing")
    if time > now + _AHEAD_NS:
        raise NotAHeartbeat("time lies in the future")
    since = _time(row, "since")
    phase = _text(row, "phase", LONGEST_NAME)
    host, pid = _text(row, "host", 255), _natural(row, "pid")
    if not host or not pid:
        raise NotAHeartbeat("host or pid is missing")
    return Heartbeat(
        host=host,
        pid=pid,
        phase=None if phase is None or phase.lower() in _NO_PHASE else phase,
        time=time,
        rank=_natural(row, "rank"),
        since=None if since is None else min(since, time),
        limit=_seconds(row, "limit_s"),
        every=_seconds(row, "every_s"),
        step=_natural(row, "step"),
        progress=_text(row, "progress", _LONGEST_TEXT),
    )


def read(folder: int, name: str, now: int) -> Heartbeat | None:
    """The heartbeat in a file of an open folder; None: there is no such file.

    Raises NotAHeartbeat.  Follows no link, waits for no FIFO.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = "a link" if error.errno == errno.ELOOP else error.strerror or str(error)
        raise NotAHeartbeat(why) from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise NotAHeartbeat("not a regular file")
        if found.st_size > LARGEST:
            raise NotAHeartbeat(f"larger than {LARGEST} bytes")
        data = os.read(fd, LARGEST + 1)
    except OSError as error:
        raise NotAHeartbeat(error.strerror or str(error)) from None
    finally:
        os.close(fd)
    if len(data) > LARGEST:
        raise NotAHeartbeat(f"larger than {LARGEST} bytes")
    return parse(data, now)


def open_folder(run: int) -> int | None:
    """A descriptor of the heartbeat folder in an open run folder; None: there is none."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(FOLDER, flags, dir_fd=run)
    except OSError:
        return None


def names_of(rank: int | None, pids: tuple[int | None, ...]) -> list[str]:
    """File names that may speak of a process, the best first."""
    names = [] if rank is None else [f"rank_{rank}{SUFFIX}"]
    return names + [f"pid_{pid}{SUFFIX}" for pid in dict.fromkeys(pids) if pid is not None]


def _time(row: dict[str, Any], name: str) -> int | None:
    """Unix seconds as ns."""
    value = _number(row, name)
    if value is None:
        return None
    if not 0 < value < 2**33:
        raise NotAHeartbeat(f"{name} is not a time in unix seconds")
    return round(value * _SECOND)


def _seconds(row: dict[str, Any], name: str) -> int | None:
    value = _number(row, name)
    if value is None:
        return None
    if value < 0:
        raise NotAHeartbeat(f"{name} is negative")
    return round(min(value, LONGEST_S) * _SECOND)


def _number(row: dict[str, Any], name: str) -> float | None:
    value = row.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise NotAHeartbeat(f"{name} is not a number")
    return float(value)


def _natural(row: dict[str, Any], name: str) -> int | None:
    value = row.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < 2**53:
        raise NotAHeartbeat(f"{name} is not a whole number from 0 on")
    return value


def _text(row: dict[str, Any], name: str, longest: int) -> str | None:
    value = row.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise NotAHeartbeat(f"{name} is not a text")
    if len(value) > longest:
        raise NotAHeartbeat(f"{name} is longer than {longest} characters")
    return value
