"""What else keeps ranks from coming: findings of another kind than their absence."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from math import inf

from nccluprobe.match.communicator import Communicator
from nccluprobe.match.finding import Finding
from nccluprobe.match.waits import Wait

#: Findings that explain why a rank does not come to a collective elsewhere.
_STOPS = frozenset(
    {
        "collective_mismatch",
        "skipped_or_extra_call",
        "p2p_mismatch",
        "comm_init_missing_enter",
        "comm_init_rank_conflict",
        "comm_init_stuck",
        "collective_all_ranks_stuck",
        "collective_missing_exit",
        "nccl_missing_exit",
        "waiting_for_unobserved",
        "nccl_error_exit",
        "cross_comm_order_inversion",
    }
)


def explained(
    waits: list[Wait], findings: list[Finding], comms: Iterable[Communicator]
) -> dict[Hashable, str]:
    """Process -> a finding of another kind that keeps it from coming."""
    found: dict[Hashable, str] = {}
    last: dict[Hashable, int] = {}
    until: dict[Hashable, float] = {}
    first: dict[Hashable, int] = {}
    ended: set[Hashable] = set()
    own = {id(w.finding) for w in waits if w.finding is not None}
    for w in waits:
        over = inf if w.until is None else w.until
        for e in w.absent:
            p, at = e.process, max(e.last_t, e.info.t)
            until[p.who] = max(until.get(p.who, over), over)
            last[p.who] = max(last.get(p.who, 0), e.last_t)
            first[p.who] = min(first.get(p.who, at), w.first, at)
            if p.ended and any(x.process.outlived(p) for x in w.entered):
                ended.add(p.who)
    given_up: dict[tuple[str | None, Hashable], int] = {
        (c.key.hash, e.process.who): e.end.t
        for c in (comms if first else ())
        for e in c.members()
        if e.end is not None and not e.end.orderly
    }
    for f in findings:
        if f.hang_type not in _STOPS or id(f) in own:
            continue
        if f.hang_type == "nccl_error_exit":
            if f.role == "root_cause":
                # It failed after its last good call, and did not come since.
                for who in f.culprits:
                    if f.since >= last.get(who, 0):
                        found.setdefault(who, f.id)
            if f.role != "unknown":
                # It came, and its call failed because of another rank.
                for who, t in f.failed.items():
                    if t >= last.get(who, 0):
                        found.setdefault(who, f.id)
        else:
            for who in f.waiters:
                since = first.get(who, 0)
                if f.since > until.get(who, inf):
                    continue  # nobody waited for it any more: a cause does not come afterwards
                # Who aborted the communicator and went on before that is no longer held by it.
                if who not in ended and given_up.get((f.comm_uid_hash, who), since) >= since:
                    found.setdefault(who, f.id)
    return found
