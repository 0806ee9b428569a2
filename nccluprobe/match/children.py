"""Ranks of split and shrunk communicators, worked out from all their members.

A child's size and ranks are in no argument: a split orders its members by key,
then by rank in the parent; a shrink keeps the parent's order.  They are known
when every member of the parent was seen to make the call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from nccluprobe.match import model as m
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.nccl.enums import SPLIT_NOCOLOR

_KEPT = 10_000
At = tuple[int, int]  # (source, communicator id)


@dataclass
class Children:
    """Endpoints whose rank is not known yet, and what may tell it."""

    #: (source, parent id, ordinal of the child) -> (colour, key)
    _splits: OrderedDict[tuple[int, int, int], tuple[int, int]] = field(default_factory=OrderedDict)
    waiting: dict[At, Endpoint] = field(default_factory=dict)
    changed: bool = False

    def note_split(self, call: m.Call | m.Enter) -> None:
        """Take a split call."""
        if call.comm is None or call.ord is None or call.color is None:
            return
        self._splits[call.source, call.comm, call.ord] = (call.color, call.key or 0)
        self.changed = True
        if len(self._splits) > _KEPT * 16:
            self._splits.popitem(last=False)

    def entered(self, e: Endpoint, child: int) -> bool:
        """Whether this member of the parent has entered the split of this ordinal."""
        return (e.info.source, e.info.id, child) in self._splits

    def wait(self, at: At, e: Endpoint) -> None:
        """Remember an endpoint whose rank is not known."""
        if e.info.parent is not None and len(self.waiting) < _KEPT:
            self.waiting[at] = e
            self.changed = True

    def resolve(
        self,
        home: Callable[[At], Communicator | None],
        join: Callable[[At, Endpoint], None],
    ) -> None:
        """Give ranks to those whose parents' members are all known."""
        if not self.changed or not self.waiting:
            return
        self.changed = False
        for at in [
            at
            for at, e in self.waiting.items()
            if e.info.comm_rank is not None and e.info.nranks is not None
        ]:
            del self.waiting[at]
        # All are worked out before one is taken away: members are counted here.
        found = {at: self._rank_of(at, e, home) for at, e in self.waiting.items()}
        for at, place in found.items():
            if place is not None:
                e = self.waiting.pop(at)
                e.info = replace(e.info, comm_rank=place[0], nranks=place[1])
                join(at, e)

    def _rank_of(
        self, at: At, e: Endpoint, home: Callable[[At], Communicator | None]
    ) -> tuple[int, int] | None:
        info = e.info
        if info.parent is None or info.hash is None:
            return None
        parent = home((at[0], info.parent))
        if parent is None or parent.ambiguous:
            return None
        own = next(
            (
                r
                for r, x in parent.endpoints.items()
                if (x.info.source, x.info.id) == (at[0], info.parent)
            ),
            None,
        )
        if own is None:
            return None
        if info.learnt == "shrink" and info.nranks is not None:
            return self._shrunk(parent, own, info)
        if info.learnt != "split" or info.child is None:
            return None
        return self._split(parent, own, info.child)

    def _split(self, parent: Communicator, own: int, child: int) -> tuple[int, int] | None:
        if len(parent.endpoints) != parent.key.nranks:
            return None
        calls: dict[int, tuple[int, int]] = {}
        for rank, x in parent.endpoints.items():
            call = self._splits.get((x.info.source, x.info.id, child))
            if call is None:
                return None
            calls[rank] = call
        color = calls[own][0]
        if color == SPLIT_NOCOLOR:
            return None
        members = sorted((key, rank) for rank, (c, key) in calls.items() if c == color)
        return [rank for _, rank in members].index(own), len(members)

    def _shrunk(self, parent: Communicator, own: int, info: m.CommInfo) -> tuple[int, int] | None:
        members = []
        for rank, x in parent.endpoints.items():
            for (source, _), e in self.waiting.items():
                if (
                    source == x.info.source
                    and e.info.parent == x.info.id
                    and (e.info.hash, e.info.instance) == (info.hash, info.instance)
                ):
                    members.append(rank)
        if info.nranks is None or len(members) != info.nranks:
            return None
        return sorted(members).index(own), info.nranks
