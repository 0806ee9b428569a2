"""Two communicators used on one stream in orders that differ between ranks.

NCCL's operations on one stream run in the order of the calls.  When one rank
calls on X before Y and another on Y before X, each device waits for the other:
all have entered everything, and nothing ends.  Compared are the newest calls of
each endpoint, of communicators on which nobody calls any more (or of all, as a
lint).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match import tense
from nccluprobe.match.absence import Context
from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.details import on_communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding, seconds
from nccluprobe.match.names import named
from nccluprobe.match.process import Actor
from nccluprobe.match.status import coverage_of, unseen
from nccluprobe.match.waits import Wait

#: So many pairs of communicators are compared in one scan at most.
_MOST = 4096
#: Steps in which pairs are looked for: 4,096 ranks of 10 communicators each take 410,000.
_STEPS = 1 << 20


_Members = dict[Actor, Endpoint]
_Streams = Callable[[Endpoint], frozenset[int]]


class _Orders(NamedTuple):
    """How one actor ordered its calls on two communicators: slot of X -> Y's slots before it.

    Slots of which that is not known, as records of Y were lost there, are left out.
    """

    actor: Actor
    x: Endpoint
    y: Endpoint
    before: dict[int, int]
    times: dict[int, int]  # slot of X -> entry

    def after(self) -> dict[int, int]:
        """Slot of Y -> first slot of X that was called after it, where one is known to be."""
        found: dict[int, int] = {}
        last: int | None = None
        for slot, before in sorted(self.before.items()):
            for n in range(before if last is None else last, before):
                found[n] = slot
            last = before
        return found


@dataclass
class Inversion:
    """Two sides that ordered the calls on two communicators differently."""

    x: Communicator
    y: Communicator
    slot: int  # of x
    other: int  # first slot of y that is on different sides of it
    sides: list[list[_Orders]]  # the larger first
    unknown: int = 0  # others, whose order is not known


def _slots(e: Endpoint, ords: m.Int64) -> m.Int64:
    return ords + (e.entered - e.next_ord)


def _streams_of(e: Endpoint) -> frozenset[int]:
    return frozenset(e.tail.stream.tolist())


def _orders(x: Endpoint, y: Endpoint, streams_of: _Streams) -> _Orders | None:
    """None: the two share no stream, or their place is not sure."""
    a, b = x.tail, y.tail
    streams = {s for s in streams_of(x) & streams_of(y) if s >= 0}
    if len(streams) != 1 or x.base != "exact" or y.base != "exact":
        return None
    (stream,) = streams
    at, bt = a.stream == stream, b.stream == stream
    slots, t = _slots(x, a.ord)[at], a.t[at]
    others, u = _slots(y, b.ord)[bt], b.t[bt]
    order = np.argsort(u, kind="stable")
    others, u = others[order], u[order]
    # Before the first call that is held, unless it is the first of all, nothing is known.
    known = (t > u[0]) | (b.ord[0] == 0)
    if y.process.lost:
        known &= ~_among_lost(y, t)
    n = np.searchsorted(u, t[known])
    before = np.where(n > 0, np.maximum.accumulate(others)[n - 1] + 1, others[0])
    pairs = dict(zip(slots[known].tolist(), before.tolist(), strict=True))
    return _Orders(x.actor, x, y, pairs, dict(zip(slots.tolist(), t.tolist(), strict=True)))


def _among_lost(e: Endpoint, t: m.Int64) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which times lie where an endpoint may have made a call whose record is lost.

    Ordinals are given before anything is lost: it was between its neighbours.
    """
    tail = e.tail
    by_ord = np.argsort(tail.ord, kind="stable")
    order, times = tail.ord[by_ord], tail.t[by_ord]
    holes = np.flatnonzero(np.diff(order) > 1)
    first, last = times[holes], times[holes + 1]
    if order[-1] + 1 < e.next_ord or unseen(e):
        first, last = np.append(first, times[-1]), np.append(last, np.iinfo(np.int64).max)
    inside = (t[:, None] > first) & (t[:, None] < last)
    return np.asarray(inside.any(axis=1), np.bool_)


def _aligned(a: _Orders, b: _Orders, slot: int) -> bool:
    """Whether two have made as many calls of both again, later or at their ends.

    Else one has made a call less on X or Y: all that follows is shifted, not swapped.
    """
    of_y = a.y.entered == b.y.entered or any(
        n == b.before.get(s) for s, n in a.before.items() if s > slot
    )
    if not of_y or a.x.entered == b.x.entered:
        return of_y
    other = max(a.before[slot], b.before[slot])
    mine, theirs = a.after(), b.after()
    return any(s == theirs.get(n) for n, s in mine.items() if n >= other)


def _compare(
    x: Communicator, of_x: _Members, y: Communicator, of_y: _Members, streams_of: _Streams
) -> Inversion | None:
    """The first slot at which the members of both differ in order, if any."""
    # A pair of communicators costs what the smaller one has: there are many pairs with
    # the one of all ranks.
    few, many = (of_x, of_y) if len(of_x) <= len(of_y) else (of_y, of_x)
    both = sorted((a for a in few if a in many), key=lambda a: of_x[a].comm_rank or 0)
    shared = [o for a in both if (o := _orders(of_x[a], of_y[a], streams_of)) is not None]
    if len(shared) < 2:
        return None
    known = Counter(slot for o in shared for slot in o.before)
    for slot in sorted(s for s, n in known.items() if n > 1):
        sides: dict[int, list[_Orders]] = {}
        for o in shared:
            if slot in o.before:
                sides.setdefault(o.before[slot], []).append(o)
        if len(sides) == 1:
            continue
        if any(o.y.entered <= min(sides) for side in sides.values() for o in side):
            return None  # who has not come to it at all is absent, not in another order
        large, *others = (s for _, s in sorted(sides.items(), key=lambda s: (-len(s[1]), s[0])))
        others = [s for s in others if any(_aligned(a, b, slot) for a in large for b in s)]
        if not others:
            return None
        ranked = [large, *others]
        unknown = len(shared) - sum(map(len, ranked))
        return Inversion(x, y, slot, min(s[0].before[slot] for s in ranked), ranked, unknown)
    return None


def _silent_since(comm: Communicator) -> int:
    return max((e.last_t for e in comm.endpoints.values()), default=0)


def _pairs(
    chosen: dict[CommKey, Communicator],
    members: dict[CommKey, _Members],
    of_actor: dict[Actor, list[CommKey]],
) -> tuple[dict[tuple[CommKey, CommKey], tuple[Communicator, Communicator]], bool]:
    """Pairs of communicators that two actors or more use both, the first ones by their keys,
    and whether that is all of them.

    Ranks of thousands of communicators have millions of pairs: no more are made than looked at.
    """
    place = {key: i for i, key in enumerate(sorted(chosen))}
    pairs: dict[tuple[CommKey, CommKey], tuple[Communicator, Communicator]] = {}
    steps = 0
    for key in place:
        steps += sum(len(of_actor[a]) for a in members[key])
        if steps > _STEPS:
            return pairs, False
        shared = Counter(k for a in members[key] for k in of_actor[a] if place[k] > place[key])
        for other in sorted(k for k, n in shared.items() if n > 1):
            if len(pairs) == _MOST:
                return pairs, False
            pairs[key, other] = (chosen[key], chosen[other])
    return pairs, True


class Orders:
    """Inversions among the communicators that stand still."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, Any], tuple[tuple[int, int], Inversion | None]] = {}
        #: How many pairs were compared at the last scan, and whether that is all of them.
        self.compared = 0
        self.complete = True

    def findings(
        self,
        comms: Iterable[Communicator],
        context: Callable[[Communicator], Context],
        lint: bool,
        disputed: Collection[CommKey] = (),
    ) -> list[Finding]:
        """One finding per pair of communicators; without ``lint`` only where all is silent.

        ``disputed``: communicators whose members differ in their calls, so that
        the numbers of these say nothing of an order.
        """
        members: dict[CommKey, _Members] = {}
        silent: dict[CommKey, int] = {}
        chosen: dict[CommKey, Communicator] = {}
        of_actor: dict[Actor, list[CommKey]] = {}
        for comm in comms:
            if comm.ambiguous or len(comm.endpoints) < 2 or comm.key in disputed:
                continue
            if len({e.entered - e.next_ord for e in comm.endpoints.values()}) > 1:
                continue  # so do calls that NCCL did not run on some ranks
            ctx = context(comm)
            if comm.over and not lint:
                continue
            since = _silent_since(comm)
            if lint or ctx.now - since >= ctx.options.missing_after:
                silent[comm.key] = since
                chosen[comm.key] = comm
                members[comm.key] = mine = {e.actor: e for e in comm.members()}
                for actor in mine:
                    of_actor.setdefault(actor, []).append(comm.key)
        pairs, self.complete = _pairs(chosen, members, of_actor)
        self.compared = len(pairs)
        found: list[Finding] = []
        streams_of = cache(_streams_of)  # an endpoint is compared with many
        for key, (a, b) in pairs.items():
            times = (silent[a.key], silent[b.key])
            known = self._seen.get(key)
            if known is None or known[0] != times:
                inversion = _compare(a, members[a.key], b, members[b.key], streams_of)
                known = self._seen[key] = (times, inversion)
            if known[1] is not None:
                found.append(_finding(known[1], context(a)))
        self._seen = {k: v for k, v in self._seen.items() if k in pairs}
        return found


def excludes(waits: Iterable[Wait], orders: Iterable[Finding]) -> Finding | None:
    """The inversion of two calls that both are among what waits in a circle."""
    at = {(w.comm.key.hash, w.comm.key.instance, w.seq) for w in waits}
    for f in orders:
        d = f.details
        x = (f.comm_uid_hash, d["instance"], f.comm_seq)
        y = (d["other_comm_uid_hash"], d["other_instance"], d["other_comm_seq"])
        if {x, y} <= at and f.role == "root_cause":
            return f
    return None


def locked(waits: Collection[Wait]) -> bool:
    """Whether whoever lacks a collective of a circle could only make it behind the circle itself.

    The call would stand in the stream, of all that a rank is known to use for that
    communicator, at the head of which there is another call of the circle.
    """
    heads: dict[Actor, set[int]] = {}
    for w in waits:
        for e in w.entered:
            if e.actor in (w.heads or ()) and w.seq is not None:
                heads.setdefault(e.actor, set()).update(_streams_of(e))
    lacking = [e for w in waits for e in w.absent]
    ends = [*lacking, *(e for w in waits for e in w.entered)]
    if any(w.seq is None for w in waits) or any(e.process.lost for e in ends):
        return False
    streams = {id(e): set(_streams_of(e)) for e in lacking}
    return all(len(s) == 1 and min(s) >= 0 for s in (*heads.values(), *streams.values())) and all(
        heads.get(e.actor) == streams[id(e)] for e in lacking
    )


def exclude(waits: Iterable[Wait], sits_in: Mapping[Actor, Iterable[Wait]]) -> bool:
    """Whether two collectives hold up each other in streams, whoever goes on.

    Each stands at the head of a stream and lacks one who, as far as is known, makes it on that
    stream only at the head of which the other one stands.  ``sits_in``: actor -> its waits.
    """
    for w in waits:
        for e in w.absent if w.seq is not None else ():
            for x in sits_in.get(e.actor, ()):
                if x.seq is not None and e.actor in (x.heads or ()) and _behind(w, e, x):
                    return True
    return False


def _behind(w: Wait, e: Endpoint, x: Wait) -> bool:
    """Whether ``e`` could make ``w`` only behind ``x``, and who lacks that only behind ``w``."""
    if not _on_one_stream(e, x):
        return False
    return any(o.actor in (w.heads or ()) and _on_one_stream(o, w) for o in x.absent)


def _on_one_stream(e: Endpoint, w: Wait) -> bool:
    """Whether an endpoint uses one stream, which is that of its actor's call ``w``."""
    own = [x for x in w.entered if x.actor == e.actor]
    streams = {s for x in (e, *own) for s in _streams_of(x)}
    return bool(own) and not e.process.lost and len(streams) == 1 and min(streams) >= 0


def _calls(side: list[_Orders], i: Inversion, first_x: bool) -> str:
    x = f"#{i.x.seq(i.slot)} of {i.x.label}"
    y = f"#{i.y.seq(i.other)} of {i.y.label}"
    one, two = (x, y) if first_x else (y, x)
    return f"{named(o.x for o in side)} called {one} before {two}"


def _finding(i: Inversion, ctx: Context) -> Finding:
    since = max(_silent_since(i.x), _silent_since(i.y))
    waited = max(0, ctx.now - since)
    large, small = i.sides[0], i.sides[1]
    clear = len(large) > len(small) + i.unknown
    minority = [o for side in i.sides[1:] for o in side] if clear else []
    lossy = any(e.process.lost for c in (i.x, i.y) for e in c.members())
    hangs = waited >= ctx.options.missing_after
    members = {e.process.who for c in (i.x, i.y) for e in c.members()}
    they = tense.of(e for c in (i.x, i.y) for e in c.members())
    text = "; ".join(_calls(s, i, s[0].before[i.slot] <= i.other) for s in i.sides[:3])
    details: dict[str, Any] = {
        **on_communicator(
            i.x,
            None,
            [e.comm_rank for e in i.x.members()],
            "orders_exclude",
            "reduced" if lossy else "inferred",
            waited_s=seconds(waited) if hangs else 0.0,
            lossy=lossy,
        ),
        "other_comm_uid_hash": i.y.key.hash,
        "other_instance": i.y.key.instance,
        "other_comm_seq": i.y.seq(i.other),
        "minority_comm_ranks": sorted(o.x.comm_rank for o in minority if o.x.comm_rank is not None),
        "summary": (
            f"The orders of the calls on one stream exclude each other: {text}."
            + (
                f" Nobody {they.one.have} called on either for {seconds(waited):.1f} s{they.until}."
                if hangs
                else " The job went on all the same."
            )
        ),
    }
    return Finding(
        key=("order", *i.x.key, *i.y.key, i.slot),
        hang_type="cross_comm_order_inversion",
        run_id=ctx.run_id,
        comm_uid_hash=i.x.key.hash,
        comm_seq=i.x.seq(i.slot),
        detected_at=ctx.now,
        details=details,
        severity="error" if hangs and waited >= ctx.options.error_after else "notice",
        role="root_cause" if hangs else "unknown",
        job=ctx.job,
        coverage=coverage_of(i.x, ctx.now, ctx.options.silent_after),
        since=since,
        culprits=tuple(dict.fromkeys(o.x.process.who for o in minority)) if hangs else (),
        waiters=tuple(members) if hangs else (),
    )
