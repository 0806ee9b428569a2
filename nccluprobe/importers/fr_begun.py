"""What devices have begun, where dumps tell it.

A host queues a call and goes on; its device begins it when what stands before it in
its streams is done.  A call that some members have begun and one has not waits for
that one: it has queued the call, and has not come to it.
"""

from __future__ import annotations

from collections.abc import Iterable

from nccluprobe.importers.fr_groups import Group, Part, by_peer


def hold_back(groups: Iterable[Group], timed: set[int]) -> set[int]:
    """Take back what the device of a rank has not begun, and others wait for.

    ``timed``: ranks whose dumps tell what has begun.  Returns the one that nothing
    else holds up: it has begun nothing that is not complete.  Several such ranks may
    be at work on the same step, and are left alone.
    """
    groups = list(groups)
    behind: set[int] = set()
    busy: set[int] = set()
    for group in groups:
        ranks = group.key[1]
        behind |= {ranks[r] for r in (*_collectives(group), *_transfers(group))} & timed
        busy |= {rank for rank, part in group.parts.items() if _is_busy(part)}
    free = behind - busy
    if len(free) != 1:
        return set()
    for group in groups:
        for rank in free & group.parts.keys():
            part = group.parts[rank]
            if part.collectives is not None:
                part.position = part.collectives.base
                part.collectives = part.collectives.as_begun()
            if part.transfers is not None:
                part.transfers = part.transfers.as_begun()
    return free


def _is_busy(part: Part) -> bool:
    """Whether its device has begun something that is not complete."""
    c, t = part.collectives, part.transfers
    begun = c is not None and c.begins(c.pending)
    return begun or (t is not None and bool((t.begun & ~t.done).any()))


def _collectives(group: Group) -> set[int]:
    """Members that have not begun the oldest call that is open, when others have."""
    number = group.complete
    came = [p for p in group.parts.values() if p.collectives and p.collectives.end > number]
    begun = {p.rank for p in came if p.collectives and p.collectives.begins(number)}
    return {p.rank for p in came} - begun if begun else set()


def _transfers(group: Group) -> set[int]:
    """Members that have not begun what their peer has begun."""
    found: set[int] = set()
    heads = {p.rank: _heads(p) for p in group.parts.values()}
    for rank, lanes in heads.items():
        for (send, peer), begun in lanes.items():
            if begun and heads.get(peer, {}).get((not send, rank)) is False:
                found.add(peer)
    return found


def _heads(part: Part) -> dict[tuple[bool, int], bool]:
    """(is a send, peer) -> whether the oldest that is not complete has begun."""
    t = part.transfers
    if t is None:
        return {}
    lanes = ((send, peer, rows[done]) for send, peer, rows, done in by_peer(t) if done < len(rows))
    return {(send, peer): bool(t.begun[row]) for send, peer, row in lanes}
