"""Steps in which a rank has made too little, even if it made all that it lost.

The operations that pair with those of one group belong to the group of a step of
each peer.  A rank that has ended its group of a step, and lost fewer calls there
than its peers wait for, has left at least one of them out: which, nobody knows.
Calls that were lost inside of that group are those that its peers wait for in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nccluprobe.match import model as m
from nccluprobe.match import p2p_queue as q
from nccluprobe.match import tail
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.p2p_queue import Op, Side
from nccluprobe.match.p2p_steps import Steps


@dataclass
class Step:
    """One group of a rank, in a step.  ``after``, ``before``: calls around it; -1: none."""

    first: int
    last: int
    after: int
    before: int

    def room(self, places: Iterable[int], unplaced: int) -> int:
        """How many calls of the group were lost, at most; ``places``: of lost calls."""
        found = sum(self.after < p and (self.before < 0 or p < self.before) for p in places)
        # Beyond the newest call of the communicator a lost one leaves no hole.
        return found + (unplaced if self.before < 0 else 0)

    def inside(self, places: Iterable[int]) -> list[int]:
        """Places that lie between two calls of the group."""
        return [p for p in places if self.first < p < self.last]


def group_of(steps: Steps, op: Op, peer: int, e: Endpoint) -> int | None:
    """The group that a rank has ended, in the step of a peer's operation; None: not known."""
    if not op.group or e.comm_rank is None:
        return None
    mine = {g for rank, g in steps.groups(peer, op.group) if rank == e.comm_rank}
    if len(mine) != 1:
        return None
    group = mine.pop()
    end = e.process.groups.get(group)
    return None if end is None or m.not_run(end.rc) else group


def step_of(e: Endpoint, side: Side, group: int) -> Step | None:
    """Where a group stands among the calls on a communicator; None: not all is remembered."""
    calls, rows = e.tail.rows(), side.recent()
    idx = [*zip(calls[:, tail.IDX].tolist(), calls[:, tail.GROUP].tolist(), strict=True)]
    idx += zip(rows[:, q.IDX].tolist(), rows[:, q.GROUP].tolist(), strict=True)
    mine = [i for i, g in idx if g == group and i >= 0]
    if not mine or -1 in (i for i, _ in idx):
        return None
    first, last = min(mine), max(mine)
    oldest = [
        int(kept[:, at].min()) if len(kept) >= most else -1
        for kept, at, most in ((calls, tail.IDX, tail.Tail.KEPT), (rows, q.IDX, q.TAIL))
    ]
    if first <= max(oldest):
        return None
    after = max((i for i, _ in idx if i < first), default=-1)
    before = min((i for i, _ in idx if i > last), default=-1)
    return Step(first, last, after, before)
