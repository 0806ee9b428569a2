"""Candidates that may wait for the device, though nothing shows it.

The API does not show completion: a collective that all have entered may still
wait for a member whose stream is held up elsewhere.  A rank that is outside NCCL
after such a call is perhaps no cause but one more victim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.graph import Cause, Graph
from nccluprobe.match.hosts import Host, host_of
from nccluprobe.match.process import Actor


@dataclass
class Stall:
    """A communicator whose newest call all have entered, and after which all are silent."""

    comm: Communicator
    members: tuple[Endpoint, ...]
    candidates: tuple[Actor, ...]

    @property
    def since(self) -> int:
        """Entry of its last member."""
        return max(e.last_t for e in self.members)


def level_slot(comm: Communicator) -> int | None:
    """The newest slot, when every member is seen and has entered it and none is known complete."""
    members = comm.members()
    if comm.ambiguous or comm.disagreement is not None or not comm.complete_view:
        return None
    entered = {e.entered for e in members}
    if len(entered) != 1 or 0 in entered:
        return None
    if any(e.done is not None and e.done >= e.entered for e in members):
        return None
    return entered.pop() - 1


class Excuses:
    """Which candidates may wait behind which others."""

    def __init__(self, graph: Graph, comms: Iterable[Communicator]) -> None:
        self.graph = graph
        self._of: dict[Actor, list[Endpoint]] = {}
        self._comm_of: dict[int, Communicator] = {}
        candidates = {c.key for cs in graph.causes.values() for c in cs if c.kind == "rank"}
        self._comms = []
        for comm in comms:
            members = comm.members()
            actors = {e.actor for e in members}
            if actors & candidates:
                self._comms.append(comm)

    def _waits(self, actor: Actor) -> bool:
        return actor in self.graph.endpoint_of and bool(self.graph.waits_of(actor))

    def stalls(self, causes: Iterable[Cause]) -> list[Stall]:
        """Communicators that explain their candidates better than these themselves do.

        All members made their newest call on it, the same one, and none has called
        anything since: it is the device that does not go on.
        """
        waits = [w for w in self.graph.waits if not w.weak] or self.graph.waits
        stay = {e.actor for w in waits for e in w.absent if not self.graph.left(w, e)}
        # In their order; thousands of ranks may wait at one moment of a healthy job.
        left = dict.fromkeys(c.key for c in causes if c.kind == "rank" and c.key in stay)
        place = {a: i for i, a in enumerate(left)}
        found: list[Stall] = []
        for comm in sorted(self._comms, key=lambda c: (len(c.endpoints), c.key)):
            if level_slot(comm) is None:
                continue
            members = tuple(comm.members())
            mine = left.keys() & {e.actor for e in members}
            if not mine or len(members) < 2:
                continue
            if all(self._is_quiet(comm, e) and not self._waits(e.actor) for e in members):
                for a in mine:
                    del left[a]
                found.append(Stall(comm, members, tuple(sorted(mine, key=place.__getitem__))))
        return found + self._together(left)

    def _is_quiet(self, comm: Communicator, e: Endpoint) -> bool:
        """Whether it may wait in its newest call: who made it just now goes on."""
        now = self.graph.now.get(e.process.source, 0)
        return _idle_since_then(e) and now - e.last_t >= self.graph.silent_after

    def _together(self, left: dict[Actor, None]) -> list[Stall]:
        """Several candidates whose newest call is one slot, which all have entered.

        Either it does not end on their devices, or all of them left at one point:
        no one of them stands out.
        """
        found: list[Stall] = []
        everyone = frozenset(left)
        for comm in sorted(self._comms, key=lambda c: (len(c.endpoints), c.key)):
            if comm.disagreement is not None or not comm.complete_view or not comm.closed:
                continue
            level = min(e.entered for e in comm.members())
            at = [
                e
                for e in comm.members()
                if e.actor in everyone
                and e.entered == level
                and _is_free(e)
                and (e.done is None or e.done < e.entered)
            ]
            mine = tuple(e.actor for e in at if e.actor in left)
            if len(at) >= 2 and mine:
                for a in mine:
                    left.pop(a, None)
                found.append(Stall(comm, tuple(at), mine))
        return found


def _idle_since_then(e: Endpoint) -> bool:
    return _is_free(e) and e.last_t >= e.process.last_call


def _is_free(e: Endpoint) -> bool:
    """Whether it may wait for its device."""
    return not e.process.ended and e.end is None and host_of(e) is not Host.AWAY
