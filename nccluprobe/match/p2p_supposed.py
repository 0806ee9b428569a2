"""Who would not have come only if what it waits for was sent, and the record lost.

That a lost record was the very send or receive that a rank stands in, and that this
rank stays away by itself besides, is less likely than that its peer left the call
out.  Where the host may wait for its device, neither of the two is blamed.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

from nccluprobe.match.finding import Finding
from nccluprobe.match.hosts import may_wait

_LOST = "probe_event_loss_possible"
_NOTE = "left out, or its record was lost; then who waits for it keeps the others waiting"


def settle(findings: Collection[Finding]) -> None:
    """Make the cause of it the send or receive, and name nobody."""
    open_ = [f for f in findings if f.state == "open"]
    for f in open_:
        if f.role != "root_cause" or not f.supposes:
            continue
        free = _may_wait(f)
        for g in open_:
            mine = free.intersection(g.waiters)
            if not mine or not _is_message(g) or g.job != f.job:
                continue
            f.culprits = tuple(who for who in f.culprits if who not in mine)
            g.role, g.downstream_of, g.culprits = "root_cause", None, ()
            g.details["note"] = _NOTE
            if not f.culprits:
                f.role, f.downstream_of = "downstream", g.id
                break


def _is_message(f: Finding) -> bool:
    """Whether it is of a send or receive that may have been made, and nobody's fault so far."""
    unknown = f.role == "unknown" or (f.role == "root_cause" and not f.culprits)
    return f.hang_type == "p2p_unmatched" and unknown and f.details.get("reason") == _LOST


def _may_wait(f: Finding) -> set[Hashable]:
    """Whom it blames and who may only wait for the device."""
    found: set[Hashable] = set()
    for who in f.culprits:
        pid = getattr(who, "pid", None)
        # Of two hosts, or two containers, two may have one pid: then both must.
        own = [s for s in f.details.get("missing_rank_status") or () if s.get("pid") == pid]
        if own and all(map(_is_free_to_wait, own)):
            found.add(who)
    return found


def _is_free_to_wait(status: dict[str, Any]) -> bool:
    alive = status["reason"] == "rank_alive_but_not_entered"
    return alive and may_wait(status.get("main_thread"), status.get("syscall"))
