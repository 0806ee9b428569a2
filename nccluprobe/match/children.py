"""Ranks of split and shrunk communicators, worked out from all their members.

A child's size and ranks are in no argument: a split orders its members by key,
then by rank in the parent; a shrink keeps the parent's order.  They are known
when every member of the parent was seen to make the call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from nccluprobe.match import model as m
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.hosts import Host, host_of
from nccluprobe.match.process import Inside, Process
from nccluprobe.nccl.api import TRACED, Role
from nccluprobe.nccl.enums import IN_PROGRESS, SPLIT_NOCOLOR

_KEPT = 10_000
At = tuple[int, int]  # (source, communicator id)


#: Calls that all members of a communicator make to get a new one.
CHILD_CALLS = frozenset(a.name for a in TRACED if a.makes_comm and a.has(Role.COMM))


def inside_child(e: Endpoint) -> Inside | None:
    """The call that makes a child of this communicator, and that its process is inside of."""
    found = (c for c in e.process.all_inside() if c.api in CHILD_CALLS and c.comm == e.info.id)
    return next((c for c in found if c.ord is not None), None)


def in_child_without(e: Endpoint, other: Endpoint) -> bool:
    """Whether one is inside such a call, to which another that waits elsewhere has not come."""
    if inside_child(e) is None or inside_child(other) is not None:
        return False
    return host_of(other) is not Host.AWAY


class Made(NamedTuple):
    """A call that makes a child.  ``nranks``: ranks left out (shrink), new size (grow)."""

    api: str
    color: int | None
    nranks: int | None
    uid_hash: str | None
    t: int = 0
    thread: int = 0
    group: int = 0
    #: It came back, and not with an error.
    returned: bool = False
    nonblocking: bool = False


@dataclass
class Children:
    """Endpoints whose rank is not known yet, and what may tell it."""

    #: (source, parent id, ordinal of the child) -> (colour, key)
    _splits: OrderedDict[tuple[int, int, int], tuple[int, int]] = field(default_factory=OrderedDict)
    _made: OrderedDict[tuple[int, int, int], Made] = field(default_factory=OrderedDict)
    #: (source, parent id) -> ordinal of its newest child
    _newest: OrderedDict[At, int] = field(default_factory=OrderedDict)
    waiting: dict[At, Endpoint] = field(default_factory=dict)
    changed: bool = False

    @property
    def any_made(self) -> bool:
        """Whether any call that makes a child was seen."""
        return bool(self._made)

    def note(self, call: m.Call | m.Enter) -> None:
        """Take a call that makes a child of a communicator."""
        if call.comm is None or call.ord is None:
            return
        at = (call.source, call.comm, call.ord)
        back = isinstance(call, m.Call) and not m.not_run(call.rc)
        in_progress = isinstance(call, m.Call) and call.rc == IN_PROGRESS
        self._made[at] = Made(
            call.api,
            call.color,
            call.nranks,
            call.uid_hash,
            call.t,
            call.thread,
            call.group,
            back,
            call.nonblocking or in_progress,
        )
        self._newest[at[:2]] = max(call.ord, self._newest.get(at[:2], 0))
        if len(self._newest) > _KEPT * 16:
            self._newest.popitem(last=False)
        if len(self._made) > _KEPT * 16:
            self._made.popitem(last=False)
        if call.color is None:
            return
        self._splits[at] = (call.color, call.key or 0)
        self.changed = True
        if len(self._splits) > _KEPT * 16:
            self._splits.popitem(last=False)

    def made(self, e: Endpoint, child: int) -> Made | None:
        """The call by which this member of the parent came to the child of this ordinal."""
        return self._made.get((e.info.source, e.info.id, child))

    def newest(self, e: Endpoint) -> int | None:
        """Ordinal of the newest child that this member of the parent came to."""
        return self._newest.get((e.info.source, e.info.id))

    def others_inside(self, comm: Communicator, e: Endpoint, t: int) -> list[tuple[Process, int]]:
        """When all others came to the child to which this member came next after ``t``, unix ns.

        They waited for it in that call.  Nothing if that is not known of one of them.
        """
        child, due = self.newest(e) or 0, None
        while (call := self.made(e, child)) is not None and call.t >= t:
            child, due = child - 1, child
        if due is None or comm.ambiguous or len(comm.endpoints) != comm.key.nranks:
            return []
        others = [(x.process, self.made(x, due)) for x in comm.endpoints.values() if x is not e]
        waits = [(p, c.t) for p, c in others if c is not None and not c.nonblocking]
        return waits if len(waits) == len(others) else []

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
                e.tell(replace(e.info, comm_rank=place[0], nranks=place[1]))
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
