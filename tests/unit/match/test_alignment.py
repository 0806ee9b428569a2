"""Late attach: ranks placed among the calls of the others, or said to be a guess."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from support.analysis import Run
from support.lateattach import World, make, trace
from support.lateoracle import decidable, unknowable

SURE = ("exact", "aligned")


@dataclass
class Score:
    """How many ranks were placed how."""

    worlds: int = 0
    decidable: int = 0
    right: int = 0
    undecided: list[tuple[int, int, str]] = field(default_factory=list)
    wrong: list[tuple[int, int, str]] = field(default_factory=list)
    bases: Counter[str] = field(default_factory=Counter)
    #: Off by a call that was lost, and said to have lost calls.
    lost: int = 0
    #: Of the ranks that nobody can place.
    others: Counter[str] = field(default_factory=Counter)


def truth(world: World, rank: int) -> int:
    """Slots entered in truth, up to the last call seen."""
    r = world.ranks[rank]
    return 1 + max((x.slot for i in r.seen if (x := r.made[i]).slot is not None), default=-1)


def judge(seed: int, score: Score) -> None:
    """One world through the matcher, compared with the oracle."""
    world = make(seed)
    run = Run(trace(world))
    run.all()
    run.scan()
    (comm,) = run.analysis.matcher.comms.values()
    placed: dict[int, tuple[str, int | None]] = {}
    for rank, e in comm.endpoints.items():
        off = e.entered - truth(world, rank) if e.slotted else None
        placed[rank] = (e.base, off)
        score.bases[e.base] += 1
    score.worlds += 1
    sure = {r: off for r, (base, off) in placed.items() if base in SURE}
    sets = decidable(world)
    offs = Counter(o for o in sure.values() if o is not None)
    agreed = offs.most_common(1)[0][0] if offs else None
    for rank, off in sure.items():
        if off == agreed:
            continue
        if unknowable(world, world.ranks[rank]):
            assert comm.endpoints[rank].lost
            score.lost += 1
        else:
            score.wrong.append((seed, rank, why(comm.endpoints[rank].placement)))
    known = set().union(*sets) if sets else set()
    for rank in placed:
        if rank not in known:
            score.others[placed[rank][0]] += 1
    for group in sets:
        for rank in group:
            score.decidable += 1
            if sure.get(rank, "no") == agreed:
                score.right += 1
            else:
                score.undecided.append((seed, rank, why(comm.endpoints[rank].placement)))


def why(placement: object) -> str:
    return str(placement)


def check(seeds: range) -> Score:
    score = Score()
    for seed in seeds:
        judge(seed, score)
    return score


def _assert(score: Score) -> None:
    assert not score.wrong, score.wrong
    assert score.right >= 0.99 * score.decidable, (score.right, score.decidable, score.undecided)


def test_random_late_attaches() -> None:
    _assert(check(range(150)))


@pytest.mark.slow
def test_a_thousand_random_late_attaches() -> None:
    score = check(range(1000, 2000))
    print(score.worlds, score.decidable, score.right, score.bases, score.others)
    _assert(score)
