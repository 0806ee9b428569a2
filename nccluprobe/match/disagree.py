"""Several calls in one slot: a mismatch, or a shift of one rank's calls.

Pure functions on the members' next calls, beginning with the slot in which
they differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nccluprobe.match.model import SIG_LOST
from nccluprobe.match.signature import SignatureTable

#: Longest shift that is tried.
MAX_SHIFT = 8


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


@dataclass
class Decision:
    """All of a disagreement.  ``named`` is False when there is no majority."""

    groups: dict[int, list[int]]  # signature -> ranks, the largest group first
    reference: tuple[int, ...]
    named: bool
    verdicts: list[Verdict] = field(default_factory=list)


def decide(streams: Mapping[int, Sequence[int]], table: SignatureTable, calls: int) -> Decision:
    """Judge a slot; ``streams``: comm rank -> signatures from that slot on."""
    groups = _groups(streams, table)
    sizes = [len(ranks) for ranks in groups.values()]
    named = len(sizes) > 1 and sizes[0] > sizes[1] and sum(sizes) > 2
    reference = tuple(next(iter(groups.values())))
    decision = Decision(groups, reference, named)
    model = max((streams[r] for r in reference), key=len)
    found: dict[tuple[Shift | None, bool, int], list[int]] = {}
    for sig, ranks in list(groups.items())[1:]:
        for rank in ranks:
            shift, several = _best_shift(streams[rank], model, table, calls)
            # Ranks with different calls are one fault only when a shift says so.
            kind = sig if shift is None else -1
            found.setdefault((shift, several, kind), []).append(rank)
    decision.verdicts = [
        Verdict(tuple(sorted(ranks)), shift, several)
        for (shift, several, _), ranks in found.items()
    ]
    return decision


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


def _best_shift(
    mine: Sequence[int], model: Sequence[int], table: SignatureTable, calls: int
) -> tuple[Shift | None, bool]:
    """The shift that explains at least as many following calls as none, if any."""
    straight = sum(
        1
        for x, y in zip(mine[1 : 1 + calls], model[1 : 1 + calls], strict=False)
        if table.compatible(x, y)
    )
    # Same function with other arguments in a uniform stream: an argument is
    # the simpler explanation unless the shift explains more.
    same_api = table[mine[0]].api == table[model[0]].api
    least = max(1, straight + 1 if same_api else straight)
    best: list[tuple[int, Shift]] = []
    for by in range(1, MAX_SHIFT + 1):
        for skip in (True, False):
            a, b = (mine, model[by:]) if skip else (model, mine[by:])
            score = _matches(a, b, calls, table)
            if score >= least:
                best.append((score, Shift(skip, by)))
    if not best:
        return None, False
    top = max(score for score, _ in best)
    fitting = [shift for score, shift in best if score == top]
    return fitting[0], len(fitting) > 1
