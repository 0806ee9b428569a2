"""Which pairs of communicators are looked at for calls in opposite orders."""

from __future__ import annotations

import random
from typing import Any

from nccluprobe.match import order
from nccluprobe.match.communicator import CommKey


def made(comms: int, actors: int, seed: int) -> tuple[dict[CommKey, Any], ...]:
    """Communicators in any order, their members, and the communicators of each actor."""
    rng = random.Random(seed)
    keys = [CommKey(f"{rng.randrange(1 << 32):x}", 0, 2) for _ in range(comms)]
    members = {k: {(a, 0): None for a in rng.sample(range(actors), 2)} for k in keys}
    of_actor: dict[Any, list[CommKey]] = {}
    for k, mine in members.items():
        for a in mine:
            of_actor.setdefault(a, []).append(k)
    return {k: object() for k in keys}, members, of_actor


def test_all_pairs_that_two_actors_use_both() -> None:
    for seed in range(20):
        chosen, members, of_actor = made(12, 4, seed)
        keys = list(chosen)
        expected = {
            tuple(sorted((a, b))): None
            for i, a in enumerate(keys)
            for b in keys[i + 1 :]
            if members[a].keys() == members[b].keys()
        }
        found, complete = order._pairs(chosen, members, of_actor)
        assert found == {(a, b): (chosen[a], chosen[b]) for a, b in expected}
        assert list(found) == sorted(expected)
        assert complete


def test_of_too_many_the_first_ones() -> None:
    chosen, members, of_actor = made(400, 2, 1)
    found, complete = order._pairs(chosen, members, of_actor)
    keys = list(chosen)
    every = sorted(tuple(sorted((a, b))) for i, a in enumerate(keys) for b in keys[i + 1 :])
    assert list(found) == every[: order._MOST]
    assert not complete


def test_pairs_are_looked_for_in_bounded_time() -> None:
    """One rank in thousands of communicators of two: no two ranks share two of these."""
    keys = [CommKey(f"{i:x}", 0, 2) for i in range(3000)]
    members: dict[CommKey, Any] = {k: {("hub", 0): None, (i, 0): None} for i, k in enumerate(keys)}
    of_actor: dict[Any, list[CommKey]] = {("hub", 0): keys}
    of_actor |= {(i, 0): [k] for i, k in enumerate(keys)}
    found, complete = order._pairs(dict.fromkeys(keys), members, of_actor)  # type: ignore[arg-type]
    assert found == {}
    assert not complete
