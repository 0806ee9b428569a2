"""Open sends and receives, as the things that threads wait in.

A unit is one operation, or all open operations of one group: a group's
operations progress together, so it waits for all its peers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import TRANSFERS, Endpoint
from nccluprobe.match.p2p_pair import SMALL, At, Channel, Pairs, is_unplaced
from nccluprobe.match.p2p_queue import ORD, SIG, Op, Queue, Side
from nccluprobe.match.process import Actor

#: NCCL's buffer between two ranks holds 8 messages, or parts of them.
_STEPS = 8


@dataclass
class Open:
    """An operation without partner."""

    op: Op
    position: int
    peer: Endpoint | None
    #: Whether it is known how many the peer has made.
    counted: bool

    @property
    def text(self) -> str:
        """For people, such as ``ncclRecv #3 from rank 2``."""
        name, word = ("ncclSend", "to") if self.op.send else ("ncclRecv", "from")
        return f"{name} #{self.position} {word} rank {self.op.peer}"


@dataclass
class Unit:
    """Open operations that one thread of an endpoint waits in."""

    side: Side
    t: int
    thread: int
    group: int
    ops: list[Open] = field(default_factory=list)
    #: Entry of the call that the thread is inside of, or was when its process ended, if it is this.
    held: int | None = None

    @property
    def hard(self) -> int | None:
        """Entry of the call that the thread is inside of now, if it is this."""
        return None if self.endpoint.process.ended else self.held

    @property
    def endpoint(self) -> Endpoint:
        """Whose it is."""
        return self.side.endpoint

    @property
    def receives(self) -> bool:
        """Whether something is received: never buffered."""
        return any(not o.op.send for o in self.ops)

    @property
    def idx(self) -> int:
        """call_idx of its first operation."""
        return min(o.op.idx for o in self.ops)

    @property
    def api(self) -> str:
        """Of its first operation."""
        return TRANSFERS[0 if self.ops[0].op.send else 1]

    @property
    def label(self) -> str:
        """For people."""
        more = f" and {len(self.ops) - 1} more" if len(self.ops) > 1 else ""
        return self.ops[0].text + more + (" in a group" if self.group else "")

    def needs(self, e: Endpoint) -> bool:
        """Whether it waits for this endpoint."""
        return any(o.peer is e for o in self.ops)


@dataclass
class Peer:
    """One endpoint that a unit waits for."""

    endpoint: Endpoint
    reason: str
    #: How long both have stood still, ns.
    quiet: int
    proof: bool = False
    loss: bool = False
    #: It has lost something, though less than it is missed in: nobody knows whether this.
    maybe: bool = False
    #: It will not come: it has gone past, or has ended its group of the step without it.
    gone: bool = False
    #: What the unit needs would stand behind the unit itself.
    crossed: bool = False
    silent: bool = False


def units_of(
    comm: Communicator,
    channels: Iterable[Channel],
    pairs: Pairs,
    sides: Mapping[At, Side],
    heads: Mapping[At, frozenset[int]] | None,
    gone: Mapping[Actor, Collection[Hashable]],
) -> list[Unit]:
    """What the threads of a communicator's endpoints wait in: one unit of each.

    ``heads``: side -> call_idx of operations at the head of a stream.  Where
    that is not known: the first receive, as sends before it may have been buffered.
    ``gone``: actor -> processes that left before its stream came to what they had
    queued: what else is due from them stands behind that, and does not come either.
    """
    found: dict[tuple[At, int], list[Unit]] = {}
    for channel in channels:
        if channel in pairs.disputed:
            continue
        for send in (True, False):
            rank, peer = (channel.src, channel.dst) if send else (channel.dst, channel.src)
            e = comm.endpoints.get(rank)
            side = None if e is None else sides.get((e.info.source, e.info.id))
            queue = None if side is None else side.queues.get((send, peer))
            if side is None or queue is None or not queue.n:
                continue
            other = comm.endpoints.get(peer)
            one = _first(queue, other, counted=side.placed and not (other and is_unplaced(other)))
            if one is not None:
                _add(found, side, one)
    chosen = [u for units in found.values() if (u := _waits_in(units, heads, gone)) is not None]
    return sorted(chosen, key=lambda u: (u.t, u.endpoint.comm_rank or 0, u.thread))


def buffered(unit: Unit, o: Open, size: Callable[[m.Int64], m.Int64]) -> bool:
    """Whether all that is sent so far and not received fits into a buffer."""
    rows = unit.side.queue(True, o.op.peer).rows()
    sizes = size(rows[:, SIG])
    return len(rows) <= _STEPS and bool(((sizes >= 0) & (sizes <= SMALL)).all())


def _first(queue: Queue, peer: Endpoint | None, counted: bool) -> Open | None:
    at = 0
    if peer is None or not counted:
        at = queue.n - 1  # older ones may have been answered long ago
    elif queue.complete:
        at = int(np.searchsorted(queue.rows()[:, ORD], queue.complete))
    op = queue.at(queue.first + at)
    return None if op is None else Open(op, queue.first + at, peer, counted)


def _add(found: dict[tuple[At, int], list[Unit]], side: Side, one: Open) -> None:
    info, op = side.endpoint.info, one.op
    units = found.setdefault(((info.source, info.id), op.thread), [])
    if op.group:
        for unit in units:
            if unit.group == op.group:
                unit.ops.append(one)
                return
    units.append(Unit(side, op.t, op.thread, op.group, [one], _inside(side, op)))


def _inside(side: Side, op: Op) -> int | None:
    for call in side.endpoint.process.inside.values():
        if op.group:
            if call.api == "ncclGroupEnd" and call.group == op.group:
                return call.t
        elif (call.thread, call.t) == (op.thread, op.t):
            return call.t
    return None


def _waits_in(
    units: list[Unit],
    heads: Mapping[At, frozenset[int]] | None,
    gone: Mapping[Actor, Collection[Hashable]],
) -> Unit | None:
    units.sort(key=lambda u: (u.t, u.idx))
    for unit in units:
        unit.ops.sort(key=lambda o: o.op.idx)
    hard = next((u for u in units if u.hard is not None), None)
    if hard is not None:
        return hard
    if heads is not None and all(o.counted and o.peer is not None for u in units for o in u.ops):
        left = gone.get(units[0].endpoint.actor, ())
        behind = (u for u in units if any(o.peer and o.peer.process.who in left for o in u.ops))
        return next((u for u in units if _at_head(u, heads)), None) or next(behind, None)
    return next((u for u in units if u.receives), units[0])


def _at_head(unit: Unit, heads: Mapping[At, frozenset[int]]) -> bool:
    info = unit.endpoint.info
    mine = heads.get((info.source, info.id), frozenset())
    return any(o.op.idx in mine for o in unit.ops)
