"""Run ids: labels of a folder, never part of a match."""

from __future__ import annotations

import re
import time

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST = 100


def component(text: str) -> str:
    """``text`` as one safe component of a path; "" when nothing is left.

    Never "." or "..", no separator, no leading dot or dash (an option to a
    shell command), at most 100 characters.
    """
    return _UNSAFE.sub("_", text.strip())[:_LONGEST].lstrip(".-").rstrip(".")


def dated(unix_s: float) -> str:
    """The run id of a tracer that knows no better: its start, local time."""
    return time.strftime("%Y%m%dT%H%M%S", time.localtime(unix_s))


def run_id(explicit: str | None, job: str | None, fallback: str) -> str:
    """The run id of a process: as told, else the launcher's, else the date."""
    for candidate in (explicit, job):
        if candidate:
            safe = component(candidate)
            if safe:
                return safe
    return fallback
