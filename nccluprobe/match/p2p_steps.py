"""Whether a peer has been through a step in which another rank still waits for it.

Operations of one group, and those that pair with them, belong to one step of a
program.  A peer that took part in the step and has begun another one will not
come back to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.p2p_pair import At
from nccluprobe.match.p2p_queue import GROUP, IDX, ORD, PEER, SEND, SIG, Side, Table
from nccluprobe.match.p2p_units import Unit

#: A peer takes part in a step directly, or through one other rank.
_HOPS = 2


class Steps:
    """The newest operations of a communicator's endpoints, linked by their pairs."""

    def __init__(
        self,
        comm: Communicator,
        sides: Mapping[At, Side],
        size: Callable[[m.Int64], m.Int64] | None = None,
    ) -> None:
        """``size``: bytes by signature; halves of other sizes do not belong together."""
        self._sides: dict[int, Side] = {}
        self._size = size
        for rank, e in comm.endpoints.items():
            side = sides.get((e.info.source, e.info.id))
            if side is not None and side.placed:
                self._sides[rank] = side
        self._recent: dict[int, Table] = {}
        self._nranks = comm.key.nranks
        self._whole: dict[tuple[int, int], dict[int, int]] = {}

    def _rows(self, rank: int) -> Table | None:
        found = self._recent.get(rank)
        if found is None and (side := self._sides.get(rank)) is not None:
            found = self._recent[rank] = side.recent()
        return found

    def left(self, unit: Unit, peer: Endpoint) -> bool:
        """Whether the peer took part in the unit's step and has gone on to another."""
        own, other = unit.endpoint.comm_rank, peer.comm_rank
        if not unit.group or own is None or other is None:
            return False
        theirs = self._rows(other)
        at = [n for rank, n in self._step(own, unit.group) if rank == other]
        if theirs is None or not at:
            return False
        last = max(at)
        group = int(theirs[theirs[:, IDX] == last][0, GROUP])
        later = theirs[theirs[:, IDX] > last]
        return bool((later[:, GROUP] != group).any() if group else len(later))

    def left_out(self, unit: Unit, peer: Endpoint) -> bool:
        """Whether the peer has ended its group of the unit's step without what the unit needs.

        A rank makes what it has to do in a step in one group, as it did the last time.
        """
        own, other = unit.endpoint.comm_rank, peer.comm_rank
        if not unit.group or own is None or other is None:
            return False
        mine = {g for rank, g in self.groups(own, unit.group) if rank == other}
        mine = mine or self._short_of_all(unit, own, other)
        if len(mine) != 1 or not self._in_one_group(unit, own, other):
            return False
        end = peer.process.groups.get(mine.pop())
        return end is not None and not m.not_run(end.rc)

    def _short_of_all(self, unit: Unit, own: int, other: int) -> set[int]:
        """The peer's group of a step of all ranks, if these made as much as each other but it.

        With what the unit needs it would have made as much, too.
        """
        of = self._of_all(own, unit.group)
        if other not in of:
            return set()
        made = {rank: self._made(rank, group) for rank, group in of.items()}
        sends, receives = made.pop(other)
        lacked = [o.op.send for o in unit.ops if o.op.peer == other]
        whole = (sends + lacked.count(0), receives + len(lacked) - lacked.count(0))
        return {of[other]} if set(made.values()) == {whole} else set()

    def _made(self, rank: int, group: int) -> tuple[int, int]:
        """How many sends and receives of a group are remembered."""
        rows = self._rows(rank)
        assert rows is not None
        sends = rows[rows[:, GROUP] == group][:, SEND]
        return int(sends.sum()), int(len(sends) - sends.sum())

    def _of_all(self, rank: int, group: int) -> dict[int, int]:
        """rank -> group of a step in which each rank of the communicator has one group.

        Such as a ring: its groups hang together through all ranks.  Empty: there is none.
        """
        if (known := self._whole.get((rank, group))) is not None:
            return known
        of, edge, single = {rank: group}, [(rank, group)], True
        while edge and single:
            for other, _, its_group in self._partners(*edge.pop()):
                if its_group and other not in of:
                    of[other] = its_group
                    edge.append((other, its_group))
                single = single and (not its_group or of[other] == its_group)
        whole = single and len(of) == self._nranks
        found = of if whole else {}
        self._whole.update(dict.fromkeys(of.items(), found))
        return found

    def _in_one_group(self, unit: Unit, own: int, other: int) -> bool:
        """Whether the peer made all of a step in one group when it last made what is needed."""
        rows = self._rows(own)
        assert rows is not None
        for o in unit.ops:
            if o.op.peer != other or not o.op.ord:
                continue
            same = (rows[:, PEER] == other) & (rows[:, SEND] == o.op.send)
            before = rows[same & (rows[:, ORD] == o.op.ord - 1)]
            group = int(before[-1, GROUP]) if len(before) else 0
            if group and sum(rank == other for rank, _ in self.groups(own, group)) > 1:
                return False
        return True

    def side(self, rank: int) -> Side | None:
        """Sends and receives of a rank."""
        return self._sides.get(rank)

    def groups(self, rank: int, group: int) -> set[tuple[int, int]]:
        """(rank, group) of the groups in the step of a group, itself among them."""
        found = {(rank, group)}
        for other, idx in self._step(rank, group):
            rows = self._rows(other)
            if rows is not None:
                found |= {(other, g) for g in rows[rows[:, IDX] == idx][:, GROUP].tolist() if g}
        return found

    def _step(self, rank: int, group: int) -> set[tuple[int, int]]:
        """(rank, call_idx) of operations in the step of a group."""
        found: set[tuple[int, int]] = set()
        seen: set[tuple[int, int]] = {(rank, group)}
        edge = [(rank, group)]
        for _ in range(_HOPS):
            ahead: list[tuple[int, int]] = []
            for at, g in edge:
                for other, idx, its_group in self._partners(at, g):
                    found.add((other, idx))
                    if its_group and (other, its_group) not in seen:
                        seen.add((other, its_group))
                        ahead.append((other, its_group))
            edge = ahead
        return found

    def _partners(self, rank: int, group: int) -> list[tuple[int, int, int]]:
        """Rank, call_idx and group of what pairs with the operations of a group."""
        rows = self._rows(rank)
        found: list[tuple[int, int, int]] = []
        if rows is None:
            return found
        for row in rows[rows[:, GROUP] == group].tolist():
            theirs = self._rows(row[PEER])
            if theirs is None:
                continue
            same = (
                (theirs[:, ORD] == row[ORD])
                & (theirs[:, PEER] == rank)
                & (theirs[:, SEND] != row[SEND])
            )
            fitting = theirs[same]
            if self._size is not None and len(fitting):
                mine = self._size(np.array([row[SIG]], np.int64))
                fitting = fitting[self._size(fitting[:, SIG]) == mine]
            found += [(row[PEER], r[IDX], r[GROUP]) for r in fitting.tolist()]
        return found
