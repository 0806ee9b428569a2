"""Ranks of a communicator of which nothing was read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.p2p_pair import At
from nccluprobe.match.p2p_queue import Side


class Untraced(NamedTuple):
    """What is told of them."""

    nranks: int
    #: Ranks in the communicator, ascending.
    ranks: list[int]
    label: str
    #: How long no member had called on it, before now or before the last one left it, ns.
    quiet: int


def untraced(
    comm: Communicator, sides: Mapping[At, Side], now_of: Callable[[int], int]
) -> Untraced | None:
    """The ranks without a trace; None: all have one, or who has one is not known.

    ``sides``: sends and receives; ``now_of``: source -> the moment of judging, unix ns.
    """
    seen = {e.comm_rank for e in comm.endpoints.values()}
    lacking = sorted(set(range(comm.key.nranks)) - seen)
    if not lacking or None in seen:
        return None
    until = max((_until(e, now_of) for e in comm.members()), default=0)
    last = max((_last_call(e, sides) for e in comm.members()), default=until)
    return Untraced(comm.key.nranks, lacking, comm.label, until - last)


def note(
    found: dict[CommKey, Untraced],
    comm: Communicator,
    sides: Mapping[At, Side],
    now_of: Callable[[int], int],
    least: int,
) -> None:
    """Remember those of a communicator whose members had called nothing at all so long, ns.

    Who made other calls did not wait for them, unless it aborted the communicator before.
    """
    u = untraced(comm, sides, now_of)
    if u is None or u.quiet < least:
        return
    until = max((_until(e, now_of) for e in comm.members()), default=0)
    stay = (e for e in comm.members() if e.end is None or e.end.orderly)
    if all(until - min(e.process.last_call, until) >= least for e in stay):
        found[comm.key] = u


def _until(e: Endpoint, now_of: Callable[[int], int]) -> int:
    """Until when a member might have called on it: it, or its process, has ended, unix ns."""
    ends = (end.t for end in (e.end, e.process.end) if end is not None)
    return min([now_of(e.process.source), *ends])


def _last_call(e: Endpoint, sides: Mapping[At, Side]) -> int:
    """When a member called on it last, or made it, unix ns."""
    side = sides.get((e.info.source, e.info.id))
    return max(e.info.t, e.last_t, 0 if side is None else side.last_t)
