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


def test_all_pairs_that_somebody_uses_both() -> None:
    for seed in range(20):
        chosen, members, of_actor = made(12, 6, seed)
        keys = list(chosen)
        expected = {
            (a, b): (chosen[a], chosen[b])
            for i, a in enumerate(keys)
            for b in keys[i + 1 :]
            if members[a].keys() & members[b].keys()
        }
        found = order._pairs(chosen, members, of_actor)
        assert found == expected
        assert list(found) == sorted(expected)


def test_of_too_many_the_first_ones() -> None:
    chosen, members, of_actor = made(400, 2, 1)
    found = list(order._pairs(chosen, members, of_actor))
    keys = list(chosen)
    every = sorted((a, b) for i, a in enumerate(keys) for b in keys[i + 1 :])
    assert found == every[: order._MOST]
