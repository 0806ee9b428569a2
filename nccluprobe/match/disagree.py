"""Several calls in one slot: a mismatch, or a shift of one rank's calls.

Pure functions on the members' next calls, beginning with the slot in which
they differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nccluprobe.match.model import SIG_LOST
from nccluprobe.match.signature import SignatureTable

#: Longest shift that is tried.
MAX_SHIFT = 8
#: So many calls at least show a period.
_SHORTEST = 8
#: So many calls in a row show that a rank has come back to it.
_BACK = 2


class ZeroCall(NamedTuple):
    """A call of count 0: its slot, signature and call_idx."""

    slot: int
    sig: int
    idx: int | None


@dataclass(frozen=True)
class Shift:
    """``skip``: the rank left out ``by`` calls; else it made ``by`` more."""

    skip: bool
    by: int


@dataclass
class Verdict:
    """What a set of ranks did differently, all in the same way."""

    ranks: tuple[int, ...]
    shift: Shift | None  # None: a mismatch
    several_fit: bool = False  # a periodic stream: other shifts explain as much
    #: The call and the one so many further have changed places; 0: they have not.
    swapped: int = 0
    #: Only calls that NCCL discards lie between: that is no fault.
    legal: bool = False
    #: Of such calls: the other side, of two equal ones, makes the same one a few calls later.
    shared: bool = False


@dataclass
class Decision:
    """All of a disagreement.  ``named`` is False when nothing tells which side is wrong."""

    groups: dict[int, list[int]]  # signature -> ranks, those who are right first
    reference: tuple[int, ...]
    named: bool
    verdicts: list[Verdict] = field(default_factory=list)
    #: Named, but by less than a majority of the calls of this slot.
    inferred: bool = False


def decide(
    streams: Mapping[int, Sequence[int]],
    table: SignatureTable,
    calls: int,
    history: Sequence[int] = (),
    discards: bool = False,
) -> Decision:
    """Judge a slot.

    ``streams``: comm rank -> signatures from that slot on.  ``history``: the
    signatures of the slots before, for cases that numbers do not settle.
    ``discards``: calls of count 0 take no part.
    """
    groups = _groups(streams, table)
    sizes = [len(ranks) for ranks in groups.values()]
    named = len(sizes) > 1 and sizes[0] > sizes[1] and sum(sizes) > 2
    inferred = named and 2 * sizes[0] <= sum(sizes)
    if not named and (voted := _by_later_calls(groups, streams, table, calls)):
        named = inferred = True
        groups = voted
    if not named and len(sizes) > 1 and (kept := keeps_to_period(history, streams, table)):
        named = inferred = True
        groups = dict(sorted(groups.items(), key=lambda item: item[1][0] not in kept))
    reference = tuple(next(iter(groups.values())))
    decision = Decision(groups, reference, named, inferred=inferred)
    model = max((streams[r] for r in reference), key=len)
    found: dict[tuple[Shift | None, bool, int, int], list[int]] = {}
    legal: list[Verdict] = []
    for sig, ranks in list(groups.items())[1:]:
        for rank in ranks:
            zeros = _zeros(streams[rank], model, table, calls) if discards else None
            if zeros is not None:
                both = not named and _both_make(streams[rank], model, table)
                legal.append(Verdict((rank,), zeros, legal=True, shared=both))
                continue
            shift, several, swapped = _explain(streams[rank], model, table, calls)
            # Ranks with different calls are one fault only when a shift says so.
            kind = sig if shift is None else -1
            found.setdefault((shift, several, swapped, kind), []).append(rank)
    if not named and len(found) > 1:
        # Nobody knows who is right: that is one fault, not one per side.
        ranks = sorted(r for part in found.values() for r in part)
        decision.verdicts = [Verdict(tuple(ranks), None), *legal]
        return decision
    decision.verdicts = [
        Verdict(tuple(sorted(ranks)), shift, several, swapped)
        for (shift, several, swapped, _), ranks in found.items()
    ]
    decision.verdicts += legal
    return decision


def period_of(history: Sequence[int]) -> int:
    """The shortest period that the newest calls repeat at least three times; 0: none."""
    n = len(history)
    for p in range(1, n // 3 + 1):
        window = max(3 * p, _SHORTEST)
        if window > n:
            break
        if all(history[n - 1 - i] == history[n - 1 - i - p] for i in range(window - p)):
            return p
    return 0


def keeps_to_period(
    history: Sequence[int], streams: Mapping[int, Sequence[int]], table: SignatureTable
) -> set[int]:
    """Ranks that go on as all did before, when all others left that once and came back.

    Empty when that is not so: a program that goes on to something else leaves its
    period for good, and who does so first is not wrong.  Nor is one call that does
    not belong to the period: who knows who should have made it?
    """
    period = period_of(history)
    if period < 2:
        return set()
    cycle = list(history[len(history) - period :])
    kept: set[int] = set()
    for rank, stream in streams.items():
        n = len(stream)
        if n < _BACK + 1:
            return set()
        expected = [cycle[i % period] for i in range(n + MAX_SHIFT)]

        def fits(a: Sequence[int], b: Sequence[int]) -> bool:
            return all(table.compatible(x, y) for x, y in zip(a, b, strict=False))

        if fits(stream, expected):
            kept.add(rank)
            continue
        back = fits(stream[1:], expected[1:])
        for by in range(1, MAX_SHIFT + 1):
            back = back or (by < period and fits(stream, expected[by:]))
            again = n - by >= _BACK and all(s in cycle for s in stream[:by])
            back = back or (again and fits(stream[by:], expected))
        if not back:
            return set()
    return kept if len(kept) < len(streams) else set()


def _by_later_calls(
    groups: Mapping[int, list[int]],
    streams: Mapping[int, Sequence[int]],
    table: SignatureTable,
    calls: int,
) -> dict[int, list[int]]:
    """The sides, the larger one first, where ranks whose call was lost go on as one of them.

    Empty when that makes none of them larger.
    """
    sizes = {sig: len(ranks) for sig, ranks in groups.items()}
    # Who has gone on further does not agree in more calls by that.
    shown = min((max(len(streams[r]) for r in ranks) for ranks in groups.values()), default=0)
    n = max(0, min(calls, shown - 1))
    # Nearly all of a side go on alike: each way to go on is compared once.
    later = {sig: {tuple(streams[r][1 : 1 + n]) for r in ranks} for sig, ranks in groups.items()}
    for stream in streams.values() if len(groups) > 1 else ():
        if stream[0] != SIG_LOST:
            continue
        fits = {
            sig: max(_matches(stream[1:], known, n, table) for known in later[sig])
            for sig in groups
        }
        if (best := _single_most(fits)) is not None:
            sizes[best] += 1
    if _single_most(sizes) is None:
        return {}
    return dict(sorted(groups.items(), key=lambda item: (-sizes[item[0]], item[1][0])))


def _single_most(counts: Mapping[int, int]) -> int | None:
    """The key of the greatest of several counts; None: two are equal, or there is one only."""
    if len(counts) < 2:
        return None
    first, second = sorted(counts, key=lambda key: counts[key], reverse=True)[:2]
    return first if counts[first] > counts[second] else None


def _groups(streams: Mapping[int, Sequence[int]], table: SignatureTable) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for rank, stream in sorted(streams.items()):
        sig = stream[0]
        if sig == SIG_LOST:
            continue
        same = next((s for s in groups if table.compatible(s, sig)), sig)
        groups.setdefault(same, []).append(rank)
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[1][0])))


def _matches(a: Sequence[int], b: Sequence[int], n: int, table: SignatureTable) -> int:
    """How many of the first ``n`` pairs agree; 0 when the first pair does not."""
    pairs = list(zip(a[:n], b[:n], strict=False))
    if not pairs or not table.compatible(*pairs[0]):
        return 0
    return sum(1 for x, y in pairs if table.compatible(x, y))


def _zeros(
    mine: Sequence[int], model: Sequence[int], table: SignatureTable, calls: int
) -> Shift | None:
    """The calls of count 0 that one side made and the other did not need to.

    A rank whose last calls are such calls may still come to those of the others.
    """
    skip = table.is_zero(model[0])
    if skip == table.is_zero(mine[0]):
        return None
    a, b = (model, mine) if skip else (mine, model)
    run = next((i for i, sig in enumerate(a) if not table.is_zero(sig)), len(a))
    straight = _matches(mine[1:], model[1:], calls, table)
    score = _matches(a[run:], b, calls, table)
    if score < straight or (score == 0 and (skip or run < len(a) or straight)):
        return None
    return Shift(skip, run)


def _both_make(mine: Sequence[int], model: Sequence[int], table: SignatureTable) -> bool:
    """Whether the call of count 0 with which one of two begins comes in the other one, too."""
    zero, other = (mine[0], model) if table.is_zero(mine[0]) else (model[0], mine)
    return any(table.compatible(zero, sig) for sig in other[1 : MAX_SHIFT + 1] if sig != SIG_LOST)


def _explain(
    mine: Sequence[int], model: Sequence[int], table: SignatureTable, calls: int
) -> tuple[Shift | None, bool, int]:
    """(shift, whether several fit, how far two calls were swapped): the best explanation."""
    shift, several, score = _best_shift(mine, model, table, calls)
    for by in range(1, min(MAX_SHIFT, len(mine) - 1, len(model) - 1) + 1):
        order = list(mine)
        order[0], order[by] = order[by], order[0]
        same = _matches(order, model, calls, table)
        if same > score and all(
            table.compatible(x, y) for x, y in zip(order[: by + 1], model, strict=False)
        ):
            return None, False, by
    return shift, several, 0


def _best_shift(
    mine: Sequence[int], model: Sequence[int], table: SignatureTable, calls: int
) -> tuple[Shift | None, bool, int]:
    """The shift that explains at least as many following calls as none, if any, and how many."""
    straight = sum(
        1
        for x, y in zip(mine[1 : 1 + calls], model[1 : 1 + calls], strict=False)
        if table.compatible(x, y)
    )
    # Same function with other arguments in a uniform stream: an argument is
    # the simpler explanation unless the shift explains more.
    same_api = table[mine[0]].api == table[model[0]].api
    least = max(1, straight + 1 if same_api else straight)
    # All calls agree as they stand, and one side has gone on further: a shift fits more calls
    # only because it reaches into these.  It counts if it is by one call, and levels both.
    all_agree = same_api and straight == min(calls, len(mine) - 1, len(model) - 1)
    best: list[tuple[int, Shift]] = []
    for by in range(1, MAX_SHIFT + 1):
        for skip in (True, False):
            a, b = (mine, model[by:]) if skip else (model, mine[by:])
            score = _matches(a, b, calls, table)
            ahead = len(model) - len(mine) if skip else len(mine) - len(model)
            if score >= least and not (all_agree and max(by, ahead) > 1):
                best.append((score, Shift(skip, by)))
    if not best:
        return None, False, straight
    top = max(score for score, _ in best)
    fitting = [shift for score, shift in best if score == top]
    return fitting[0], len(fitting) > 1, top
