"""One call of a trace for people."""

from __future__ import annotations

import time
from typing import Any

from nccluprobe.report.words import escape

_SHOWN = ("count", "datatype", "op", "root", "peer", "site")


def clock(unix_ns: int) -> str:
    """UTC time of day with milliseconds."""
    return time.strftime("%H:%M:%S", time.gmtime(unix_ns // 10**9)) + (
        f".{unix_ns // 10**6 % 1000:03d}"
    )


def call_text(line: dict[str, Any]) -> str:
    """A call with its arguments."""
    parts = [
        f"{k} {line[k]}" if k in ("count", "root", "peer", "site") else str(line[k])
        for k in _SHOWN
        if line.get(k) is not None
    ]
    if line.get("group"):
        parts.append(f"group {line['group']}")
    return escape(f"{line.get('api')}({', '.join(parts)})")


def ended(line: dict[str, Any]) -> str:
    """How it ended, as far as its source tells."""
    if line.get("kind") == "enter":
        return "inside"
    if line.get("rc") not in (0, None):
        return f"returned {line['rc']}"
    took = line.get("dur")
    if not isinstance(took, int):
        return str(line.get("end") or "no return")
    return f"host {took / 1e9:.3f} s" if took >= 10**8 else f"host {took / 1e3:.1f} us"
