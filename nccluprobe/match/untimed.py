"""Findings that rest on sources without times: what is assumed is not said as a fact.

NCCL's log does not tell for how long its last calls have been open, and mostly has no clock
at all.  A flight recorder dump whose file has lost its time is taken to have been made when
PyTorch's timeout was over.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from nccluprobe.match.finding import Finding
from nccluprobe.match.process import Process

#: What a source does not tell: until when its last calls were open; no time at all; or it is
#: taken to end a timeout after the newest call.
LAST, ALL, TIMEOUT = "last", "all", "timeout"
#: How a sentence says for how long something lasts.
_LASTS = re.compile(r"(?:, the last)? for \d+(?:\.\d+)? s\b(?: since)?")
_WAITED, _SINCE = "waited_s", "first_entered_unix_ns"


def settle(findings: Iterable[Finding], processes: Collection[Process]) -> None:
    """Mark what is assumed, and take it out of the sentences."""
    untimed = {p.who: p.info.untimed for p in processes if p.info and p.info.untimed}
    if not untimed:
        return
    for p in processes:  # another source of the same process tells the times
        if p.info is not None and not p.info.untimed and not p.snapshot:
            untimed.pop(p.who, None)
    for f in findings:
        kinds = {untimed[who] for who in (*f.waiters, *f.culprits) if who in untimed}
        if not kinds or (f.hang_type == "delayed_collective_enter" and ALL not in kinds):
            continue  # how late one came is told by the entries of the calls
        f.details["assumed"] = [_WAITED, _SINCE] if ALL in kinds else [_WAITED]
        if kinds == {TIMEOUT}:
            f.details["assumed_by"] = TIMEOUT
        if summary := f.details.get("summary"):
            f.details["summary"] = _LASTS.sub(_by_timeout if kinds == {TIMEOUT} else "", summary)


def _by_timeout(lasts: re.Match[str]) -> str:
    return f"{lasts[0]} (PyTorch timeout)"
