"""Where paths of the wait-for graph end, and a call too many among what waits in a circle."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import permutations
from typing import NamedTuple

from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.process import Actor
from nccluprobe.match.status import unseen
from nccluprobe.match.waits import Wait, entry_of, seen_in

#: Of more waits in a circle than this, the others are not compared.
_MOST = 8


class Cause(NamedTuple):
    """Where a path ends.

    ``rank``: an actor that waits for nobody.  ``finding``: something else that is
    wrong with it (key: the finding's id).  ``inside``: an actor in a call that
    may wait for others.  ``silent``: an actor that is not observed.  ``phase``: an
    actor that has declared why it does not come.  ``cycle``:
    actors that wait for each other (key: number of the cycle).  ``stuck``: a call
    that lacks nobody and is not complete (key: its communicator).  ``zero``: a call of
    count 0 that put its rank ahead of the others (key: number of it).
    """

    kind: str
    key: Hashable


def extra_call(
    cycle: Iterable[Wait],
    waits: Sequence[Wait],
    outside: Collection[Cause],
    core: Collection[Actor] = (),
) -> tuple[Wait, ...] | None:
    """A collective of a cycle that one rank made alone, and what shows that it is one too many.

    ``outside``: causes that the cycle has besides: several ranks that are free, and have
    not come to it.  One of the others waits for that one, in a call of the same
    threads: one program has one order of calls, so either made the call too many, or left
    out the other; had the other one left it out, those that are free would have come to it.
    With one that is free the greater number tells: more ranks wait so than have made it,
    and these, ``core``, would wait on if the free one came.
    """
    if any(c.kind != "rank" for c in outside):
        return None
    found = []
    for w in cycle:
        few = 2 * len(w.entered) < w.comm.key.nranks
        free = {c.key for c in outside} - {e.actor for e in w.entered}
        if w.device or w.seq is None or not few or not free:
            continue
        # Of several, one fault would have made all of them do the same.
        if not free <= {e.actor for e in w.absent} or len(seen_in(w)) > 1:
            continue
        past = [(x, by) for x in waits if x is not w and (by := _who_went_past(w, x))]
        ranks = {a for _, by in past for a in by}
        if past and (len(free) > 1 or len(ranks & set(core)) > len(w.entered)):
            found.append((w, *(x for x, _ in past)))
    return found[0] if len(found) == 1 else None


def out_of_order(cycle: Iterable[Wait]) -> set[Actor]:
    """Who made a collective of a cycle without another that all others made before it.

    Others that have made both, in one thread, tell which comes first in the program.
    """
    calls = [w for w in cycle if w.seq is not None and not w.device and not _all_made(w)]
    found: set[Actor] = set()
    for x, y in permutations(calls[:_MOST], 2):
        made = {e.actor: e for e in y.entered}
        both = [(e, made[e.actor]) for e in x.entered if e.actor in made]
        if not both or not all(_one_thread(a, b) for a, b in both):
            continue
        if all(entry_of(x, a) < entry_of(y, b) for a, b in both):
            found |= {e.actor for e in x.absent if e.actor in made and not unseen(e)}
    return found


def _all_made(w: Wait) -> bool:
    """Whether all have made a call, and who is absent from it is held up elsewhere."""
    return all(e in w.entered for e in w.absent)


def _who_went_past(w: Wait, x: Wait) -> set[Actor]:
    """Who is absent from one wait and sits in another, for somebody of the first."""
    made = {e.actor: e for e in w.entered}
    behind = any(y is w for y in x.behind)
    # Who may have made it, unseen, is not shown to have left it out.
    held = {e.actor for e in x.absent if not unseen(e)}
    others = [a for a in made if a in held or (behind and _member(x.comm, a) is not None)]
    mine = {e.actor: e for e in w.absent}
    if not any(_one_thread(made[a], _member(x.comm, a)) for a in others):
        return set()
    return {e.actor for e in x.entered if e.actor in mine and _one_thread(mine[e.actor], e)}


def _member(comm: Communicator, actor: Actor) -> Endpoint | None:
    return next((e for e in comm.endpoints.values() if e.actor == actor), None)


def _one_thread(a: Endpoint, b: Endpoint | None) -> bool:
    """Whether an actor's calls on two communicators come from one thread, as far as is known."""
    return b is not None and (not a.thread or not b.thread or a.thread == b.thread)
