"""Which late attaches can be decided at all: brute force, on the made-up truth."""

from __future__ import annotations

from support.lateattach import COUNTED, Rank, World

Key = tuple[str, int, int | None]

#: Calls that must agree without counters, and how many make another fit a rival.
ENOUGH, RIVAL = 16, 3


def visible(world: World, rank: Rank) -> list[Key | None]:
    """The calls that a trace shows as run, a lost one as None."""
    shown: list[Key | None] = []
    seen = rank.seen
    last = seen[-1] if seen else -1
    for i in range(rank.first, last + 1):
        x = rank.made[i]
        if i in rank.lost:
            shown.append(None)
        elif x.slot is not None:
            shown.append(x.op.key)
    return shown


def by_counters(world: World, a: Rank, b: Rank) -> bool:
    """Whether both show, in three calls of one function on end, the true and same numbers."""
    if not world.counters:
        return False
    runs = [_shown_runs(world, r) for r in (a, b)]
    return bool(runs[0] & runs[1])


def _shown_runs(world: World, rank: Rank) -> set[tuple[str, int]]:
    first_group = rank.made[rank.first].group
    unseen = rank.first and rank.made[rank.first - 1].group == first_group
    found: set[tuple[str, int]] = set()
    for api in COUNTED:
        mine = [
            x
            for i in rank.seen
            if (x := rank.made[i]).op.api == api and x.slot is not None and not x.op.quiet
        ]
        for one, two, three in zip(mine, mine[1:], mine[2:], strict=False):
            plain = all(
                (not x.group or (bool(unseen) and x.group == first_group))
                for x in (one, two, three)
            )
            right = [x.number for x in (one, two, three)]
            if plain and right == [one.true_number + i for i in range(3)]:
                found.add((api, one.number))
    return found


def unknowable(world: World, rank: Rank) -> bool:
    """Whether a lost call did not run and nothing seen later gives that away.

    It has an ordinal like any other: what follows seems to be one call further.
    The verdicts say that events were lost.
    """
    late = [i for i in rank.lost if rank.made[i].slot is None and i < max(rank.seen, default=0)]
    if not late:
        return False
    shown = [
        i
        for i in rank.seen
        if i > max(late) and not rank.made[i].group and rank.made[i].op.api in COUNTED
    ]
    return not world.counters or not shown


def by_calls(a: list[Key | None], b: list[Key | None]) -> bool:
    """Whether the calls fit in exactly one way, and well."""
    fits = []
    for shift in range(-len(b) + RIVAL, len(a) - RIVAL + 1):
        pairs = 0
        for i in range(max(0, shift), min(len(a), shift + len(b))):
            x, y = a[i], b[i - shift]
            if x is None or y is None:
                continue
            if x != y:
                break
            pairs += 1
        else:
            if pairs >= RIVAL:
                fits.append(pairs)
    return len(fits) == 1 and fits[0] >= ENOUGH


def decidable(world: World) -> list[set[int]]:
    """Sets of ranks whose places to each other can be known."""
    sets = [{r.rank} for r in world.ranks]
    shown = [visible(world, r) for r in world.ranks]
    for a in world.ranks:
        for b in world.ranks:
            if a.rank >= b.rank:
                continue
            if unknowable(world, a) or unknowable(world, b):
                continue
            both = a.from_init and b.from_init
            if not (both or by_counters(world, a, b) or by_calls(shown[a.rank], shown[b.rank])):
                continue
            one = next(s for s in sets if a.rank in s)
            two = next(s for s in sets if b.rank in s)
            if one is not two:
                one |= two
                sets.remove(two)
    return [s for s in sets if len(s) > 1]
