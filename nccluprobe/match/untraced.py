"""Ranks of a communicator of which nothing was read."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nccluprobe.match.communicator import CommKey, Communicator


class Untraced(NamedTuple):
    """What is told of them."""

    nranks: int
    #: Ranks in the communicator, ascending.
    ranks: list[int]
    label: str
    #: How long no member had called on it at last, or when the last of them ended, ns.
    quiet: int


def untraced(comm: Communicator, now_of: Callable[[int], int]) -> Untraced | None:
    """The ranks without a trace; None: all have one, or who has one is not known.

    ``now_of``: source -> the moment of judging, unix ns.
    """
    seen = {e.comm_rank for e in comm.endpoints.values()}
    lacking = sorted(set(range(comm.key.nranks)) - seen)
    if not lacking or None in seen:
        return None
    ends = [(e, e.process.end, now_of(e.process.source)) for e in comm.members()]
    quiet = [(now if end is None else min(now, end.t)) - e.last_t for e, end, now in ends]
    return Untraced(comm.key.nranks, lacking, comm.label, min(quiet, default=0))


def note(
    found: dict[CommKey, Untraced],
    comm: Communicator,
    now_of: Callable[[int], int],
    least: int,
) -> None:
    """Remember those of a communicator whose members had called nothing so long, ns."""
    u = untraced(comm, now_of)
    if u is not None and u.quiet >= least:
        found[comm.key] = u
