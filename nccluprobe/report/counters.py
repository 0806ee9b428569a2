"""Where ranks stand by the counters of NCCL, where no call was seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nccluprobe.match.finding import Finding
from nccluprobe.match.names import numbers
from nccluprobe.nccl.enums import SEQ_NAMES
from nccluprobe.report.calls import clock
from nccluprobe.report.text import wrap

#: So many ranks are shown one by one, those that are behind first.
_RANKS = 16


def counters(f: Finding) -> Iterator[str]:
    """A row for each rank; empty: the finding does not rest on counters."""
    positions: dict[str, dict[str, Any]] = f.details.get("positions") or {}
    if not positions:
        return
    shown = [i for i in range(len(SEQ_NAMES)) if any(_at(p, i) for p in positions.values())]
    widths = {i: len(SEQ_NAMES[i]) for i in shown}
    yield from wrap(
        "Calls that NCCL has counted, rank by rank; >: behind the others. Times are UTC.", "  "
    )
    yield "   rank    " + "  ".join(f"{SEQ_NAMES[i]:>{widths[i]}}" for i in shown) + "  read at"
    behind = {s["comm_rank"]: s for s in f.details.get("missing_rank_status") or ()}
    order = sorted(positions, key=lambda r: (int(r) not in behind, int(r)))
    most = {i: max(_at(p, i) for p in positions.values()) for i in shown}
    for r in order[:_RANKS]:
        p = positions[r]
        mark = ">" if int(r) in behind else " "
        row = "  ".join(f"{_at(p, i):>{widths[i]}}" for i in shown)
        yield f"  {mark}{r:<7} {row}  {clock(p['unix_ns'])}"
        if lag := [f"{most[i] - _at(p, i)} {SEQ_NAMES[i]}" for i in shown if _at(p, i) < most[i]]:
            yield from wrap(f"{', '.join(lag)} behind the furthest", " " * 11, " " * 11)
    if rest := order[_RANKS:]:
        alike = {tuple(positions[r]["counters"]) for r in rest}
        same = ", with equal counters" if len(alike) == 1 else ""
        yield from wrap(f"and {len(rest)} more ({numbers(map(int, rest))}){same}", "    ", "  ")


def _at(position: dict[str, Any], i: int) -> int:
    counted = position["counters"]
    return int(counted[i]) if i < len(counted) else 0
