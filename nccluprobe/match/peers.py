"""Ranks that run one program: where one has stopped, others went on.

Ranks that share a communicator run one program, and wait for their devices at one
place in it.  Who made calls beyond the place where another stands, from the same
waits, was not held there by these: nor is that other one.  Asked only where
completion is seen: else a rank may have to wait for the device where its peers
need not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.process import Actor
from nccluprobe.match.waits import Wait, entry_of

#: Hosts are a little apart as long as they run, ns: of a job that nobody has stopped, too.
_APART = 1_000_000
#: Ranks whose calls are so many numbers apart do not run one program.
_OTHER_PROGRAM = 100
#: id of a collective that is waited in -> actor -> who of it has come.
_Sits = Mapping[int, Mapping[Actor, Endpoint]]


def passed(
    w: Wait, e: Endpoint, waits: Sequence[Wait], blockers: Mapping[Actor, Sequence[Wait]]
) -> bool:
    """Whether somebody came to ``w`` from such ``waits`` as an absent member sits in.

    Such waits are the same ones, or those of the peer's own communicator of that name.
    ``blockers``: actor -> all waits that it sits in.
    """
    # Thousands may have come to each: who sits in one is looked up.
    sits = {id(x): {p.actor: p for p in x.entered} for x in waits if x.seq is not None}
    return any(
        _went_on(p, e, waits, sits) and all(_before(x, w, p, e, sits, blockers) for x in waits)
        for p in w.entered
    )


def is_alone(w: Wait, comms: Collection[Communicator]) -> bool:
    """Whether one rank made a call that none made of those who run its program, and went on.

    They have its place in other communicators of that name, have made as many calls there
    but for this one, and others after it: they leave it out, or it has made one too many.
    """
    if w.seq is None or w.comm.name is None or len(w.entered) != 1:
        return False
    one = w.entered[0]
    t = entry_of(w, one)
    left_out, met = False, None
    for comm in comms:
        e = _counterpart(w, comm, one)
        if e is None or abs(comm.seq(e.entered) - w.seq) > _OTHER_PROGRAM:
            continue
        if e.completed is None or comm.seq(e.entered) != w.seq:
            return False
        # Looked up once: there are as many counterparts as communicators of that name.
        met = _met(one, t, comms) if met is None else met
        if e.actor not in met:
            return False
        left_out = True
    return left_out


def _met(one: Endpoint, t: int, comms: Iterable[Communicator]) -> set[Actor]:
    """Who has come to one call with a rank that this one made after ``t``."""
    met: set[Actor] = set()
    for comm in comms:
        ends = {x.actor: x for x in comm.endpoints.values()}
        mine = ends.get(one.actor)
        if mine is not None and mine.last_t > t:
            met |= {actor for actor, x in ends.items() if x.entered == mine.entered}
    return met


def _counterpart(w: Wait, comm: Communicator, e: Endpoint) -> Endpoint | None:
    """Who has a member's place in another communicator of the same name and size."""
    alike = (comm.name, comm.key.nranks) == (w.comm.name, w.comm.key.nranks)
    if comm is w.comm or not alike or e.comm_rank is None:
        return None
    return comm.endpoints.get(e.comm_rank)


def _went_on(peer: Endpoint, e: Endpoint, waits: Sequence[Wait], sits: _Sits) -> bool:
    """Whether a peer made calls when a member had long made its last one."""
    lag = 0
    for x in waits:
        here = sits.get(id(x), {})
        a, b = here.get(peer.actor), here.get(e.actor)
        if a is not None and b is not None:
            lag = max(lag, abs(entry_of(x, a) - entry_of(x, b)))
    return peer.process.last_call - e.process.last_call > _APART + 2 * lag


def _before(
    x: Wait,
    w: Wait,
    peer: Endpoint,
    e: Endpoint,
    sits: _Sits,
    blockers: Mapping[Actor, Sequence[Wait]],
) -> bool:
    """Whether a peer sat in one wait, or one like it, already when it came to the other."""
    if x.seq is not None and x is not w:
        sat = sits[id(x)].get(peer.actor)
        if sat is not None and entry_of(x, sat) <= entry_of(w, peer):
            return True
    return any(
        y is not w and _alike(x, e, y, peer) and _since(y, _in(y, peer)) <= entry_of(w, peer)
        for y in blockers.get(peer.actor, ())
    )


def _in(w: Wait, e: Endpoint) -> Endpoint:
    return next(p for p in w.entered if p.actor == e.actor)


def _since(w: Wait, e: Endpoint) -> int:
    """When an endpoint came to a wait; of sends and receives, to the oldest it waits in."""
    if w.seq is not None:
        return entry_of(w, e)
    return min((t for lane in e.posted.values() for t in lane.values()), default=e.last_t)


def _alike(x: Wait, e: Endpoint, y: Wait, peer: Endpoint) -> bool:
    """Whether two ranks that run one program sit in one operation of it.

    Then they have made as many calls on two communicators of one name, or have one place
    in these; or their sends and receives reach as far in the communicator that they share.
    """
    shared = x.comm is y.comm
    if not shared and (x.comm.name is None or x.comm.name != y.comm.name):
        return False
    if x.comm.key.nranks != y.comm.key.nranks or (x.seq is None) != (y.seq is None):
        return False
    if x.seq is not None:
        return not shared and (x.seq, x.api) == (y.seq, y.api)
    a, b = _in(x, e), _in(y, peer)
    if not shared and a.comm_rank != b.comm_rank:
        return False
    mine, theirs = (_lanes(end, x.comm.key.nranks) for end in (a, b))
    return bool(mine) and mine <= theirs


def _lanes(e: Endpoint, nranks: int) -> set[tuple[bool, int]]:
    """(is a send, how far on its peer is) of sends and receives that are not complete."""
    own = e.comm_rank or 0
    return {(send, (peer - own) % nranks) for (send, peer), lane in e.posted.items() if lane}
