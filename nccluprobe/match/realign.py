"""An endpoint's calls moved to the slots where they belong, after a disagreement."""

from __future__ import annotations

from nccluprobe.match import model as m
from nccluprobe.match.disagree import Shift
from nccluprobe.match.endpoint import Endpoint


def move(e: Endpoint, slot: int, shift: Shift) -> None:
    """Leave room at a slot for calls that were not made, or take out those too many."""
    at = slot - e.dropped
    if shift.skip:
        known = (o for o in e.rows.ord[at:].tolist() if o >= 0)
        e.tail.gap(next(known, e.next_ord), shift.by)
        e.rows.insert(at, m.SIG_LOST, int(e.rows.t[at]), shift.by)
    else:
        by = min(shift.by, len(e.rows) - at)
        e.tail.discard(e.rows.ord[at : at + by])
        e.rows.delete(at, by)
