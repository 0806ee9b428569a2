"""Communicators that are made without blocking: who has entered and still waits.

Such a call returns at once, with ncclInProgress or, of a split, ncclSuccess, and its
rank polls ncclCommGetAsyncError, which is not traced.  It has entered, and waits until
something shows that the communicator is there: a call that NCCL ran on it (before
that it refuses all), or after a split, on the parent.  Who ends it has given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nccluprobe.match import model as m
from nccluprobe.match.absence import Context, waiting_until
from nccluprobe.match.children import At, Children, Made
from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.p2p_queue import Side
from nccluprobe.match.process import Inside, Process


@dataclass
class Uses:
    """What shows that communicators are there."""

    comms: Mapping[CommKey, Communicator]
    endpoints: Mapping[At, Endpoint]
    of_source: Mapping[int, list[Endpoint]]
    sides: Mapping[At, Side]
    children: Children

    def members(self, comm_hash: str) -> list[Endpoint]:
        """Endpoints of the communicators of a hash."""
        comms = (c for key, c in self.comms.items() if key.hash == comm_hash)
        return [e for c in comms for e in c.endpoints.values()]

    def is_used(self, e: Endpoint) -> bool:
        """Whether NCCL ran a call on it."""
        at = (e.info.source, e.info.id)
        return e.entered > 0 or at in self.sides or self.children.newest(e) is not None

    def has_child(self, e: Endpoint, child: int) -> bool:
        """Whether a member was seen with the child of this ordinal."""
        of = (e.info.id, child)
        return any((x.info.parent, x.info.child) == of for x in self.of_source[e.info.source])

    def root(self, e: Endpoint) -> str | None:
        """Hash of the communicator that a split one comes from, in the end."""
        seen: set[int] = set()
        while e.info.parent is not None and e.info.id not in seen:
            seen.add(e.info.id)
            parent = self.endpoints.get((e.info.source, e.info.parent))
            if parent is None:
                break
            e = parent
        return e.info.hash

    def is_watched(self, p: Process, since: int) -> bool:
        """Whether all that a process called since then was seen."""
        known = [e.info.t for e in self.of_source.get(p.source, ())]
        known += [p.first_coverage] if p.first_coverage else []
        return min(known, default=since + 1) <= since and not p.lost_since(since)

    def are_all_seen(self, inside: Iterable[Process], others: Iterable[Process], n: int) -> bool:
        """Whether the ``n`` processes that lack in an initialisation must be among ``others``.

        Not where a part of the job is not traced: they may have come there.
        """
        seen, spare = {p.who for p in inside}, {p.who for p in others}
        sizes = [p.info.world_size for p in (*inside, *others) if p.info is not None]
        if len(spare) < n or any(size is not None and size > len(seen | spare) for size in sizes):
            return False
        mine = (c for c in self.comms.values() if any(self.is_used(e) for e in c.members()))
        return all(c.complete_view for c in mine if seen & {e.process.who for e in c.members()})


def is_quiet(p: Process, until: int, ctx: Context) -> bool:
    """Whether a process has called nothing for so long that it may only poll."""
    return until - p.last_activity >= ctx.options.missing_after


def waiting_members(
    comm: Communicator, uses: Uses, nonblocking: bool, ctx: Context
) -> list[tuple[Endpoint, Inside]]:
    """Members that wait for a child, in a call that has returned.

    ``nonblocking``: whether the communicator itself does not block.
    """
    members = comm.members()
    if not uses.children.any_made or any(not e.info.from_start for e in members):
        return []  # who was attached late numbers its children otherwise
    newest = {e: uses.children.newest(e) or 0 for e in members}
    child = min(newest.values(), default=0) + 1
    came = [e for e, n in newest.items() if n >= child]
    if any(uses.has_child(e, child) for e in came):
        return []
    found = []
    for e in came:
        x = uses.children.made(e, child)
        if x is None or not (x.nonblocking or nonblocking) or not _waits(e, x, uses, ctx):
            continue
        found.append((e, Inside(x.api, x.t, x.thread, e.info.id, x.group, child)))
    return found


def _waits(e: Endpoint, made: Made, uses: Uses, ctx: Context) -> bool:
    side = uses.sides.get((e.info.source, e.info.id))
    newest = uses.children.made(e, uses.children.newest(e) or 0)
    later = max(e.last_t, 0 if side is None else side.last_t)
    if newest is not None and newest is not made and (newest.group != made.group or not made.group):
        later = newest.t
    if e.end is not None or later > made.t or not made.returned:
        return False
    end = e.process.groups.get(made.group) if made.group else None
    if made.group and (end is None or end.open or m.not_run(end.rc)):
        return False
    return is_quiet(e.process, waiting_until(e, ctx), ctx)
