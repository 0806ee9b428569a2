"""How two ranks' streams of calls on one communicator lie to each other.

Pure functions on columns.  The shift of a stream is the position, in the other
stream, of its first call.  The library's counters decide where they can be
relied on; else the calls themselves must fit in one way only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match.counters import (
    Stream,
    counted_anchors,
    origin,
    seen_anchors,
    votes,
)

#: So many equal numbers of one function are as good as two functions.
LONG = 8
#: Calls that must agree before a fit without counters is believed ...
ENOUGH = 16
#: ... and so few that agree elsewhere make it ambiguous.
RIVAL = 3

EXACT, ALIGNED, AMBIGUOUS, UNKNOWN = "exact", "aligned", "ambiguous", "unknown"
#: Worst first.
BASES = (UNKNOWN, AMBIGUOUS, ALIGNED, EXACT)


@dataclass(frozen=True)
class Alignment:
    """Where a stream begins in another; ``shift`` None: nowhere that is known."""

    shift: int | None
    base: str
    why: str
    #: Other shifts that fit as well.
    others: int = 0


def fit(ref: Stream, mine: Stream, shift: int) -> tuple[int, int]:
    """(pairs of known calls, those that differ) when ``mine`` begins at ``shift``."""
    start, end = max(0, shift), min(len(ref), shift + len(mine))
    if end <= start:
        return 0, 0
    a, b = ref.shape[start:end], mine.shape[start - shift : end - shift]
    known = (a != 0) & (b != 0)
    return int(known.sum()), int((known & (a != b)).sum())


def align(ref: Stream, mine: Stream, floor: int | None = None) -> Alignment:
    """Place ``mine`` in ``ref``; ``floor``: it cannot begin before this."""
    if len(mine) == 0:
        return Alignment(None, UNKNOWN, "no calls are held")
    hint: int | None = None
    seen = _by_seen_counters(ref, mine)
    if seen is not None:
        if seen.base != AMBIGUOUS:
            return seen
        hint = seen.shift
    told = _by_told_counters(ref, mine)
    if told is not None:
        if told.base != AMBIGUOUS:
            return told
        hint = told.shift if hint is None else hint
    return _by_calls(ref, mine, hint, floor)


def _vote(shifts: m.Int64) -> tuple[int, float]:
    """The shift with most votes, and its share."""
    values, counts = np.unique(shifts, return_counts=True)
    best = int(np.argmax(counts))
    return int(values[best]), float(counts[best]) / len(shifts)


def _by_seen_counters(ref: Stream, mine: Stream) -> Alignment | None:
    """By counters that both sides read; base AMBIGUOUS: only a hint."""
    a, b = seen_anchors(ref), seen_anchors(mine)
    if not len(a) or not len(b):
        return None
    shifts, functions = votes(a, b)
    if not len(shifts):
        return _apart(ref, mine)
    shift, share = _vote(shifts)
    agree = shifts == shift
    pairs, differ = fit(ref, mine, shift)
    kinds = len(np.unique(functions[agree]))
    if share == 1.0 and (kinds > 1 or len(shifts) >= LONG):
        return Alignment(shift, EXACT, f"counters of {_functions(kinds)} agree")
    if share == 1.0 and differ == 0:
        return Alignment(shift, ALIGNED, f"counters of {_functions(kinds)}, few calls")
    if share > 0.75 and int(agree.sum()) >= LONG and differ == 0 and pairs >= ENOUGH:
        return Alignment(shift, ALIGNED, "most counters and all calls agree")
    return Alignment(shift, AMBIGUOUS, "the counters do not agree")


def _functions(n: int) -> str:
    return "one function" if n == 1 else f"{n} functions"


def _apart(ref: Stream, mine: Stream) -> Alignment | None:
    """Streams whose counters have no number in common: one ends before the other begins."""
    first, second = origin(ref), origin(mine)
    if first is None or second is None:
        return None
    shift = sum(second) - sum(first)
    pairs, differ = fit(ref, mine, shift)
    why = "counters; the streams do not overlap"
    if differ or pairs > LONG:
        return Alignment(shift, AMBIGUOUS, "the counters do not agree")
    between = -shift - len(mine)
    if not (ref.all_counted and mine.all_counted) or (ref.clean_before < between):
        why = "counters; calls that are not counted may lie between"
        return Alignment(shift, AMBIGUOUS, why)
    return Alignment(shift, ALIGNED, why)


def _by_told_counters(ref: Stream, mine: Stream) -> Alignment | None:
    """By counting on from counters that were read before the first call."""
    a, b = counted_anchors(ref), counted_anchors(mine)
    seen_a, seen_b = seen_anchors(ref), seen_anchors(mine)
    sure = (ref.before_sure or len(seen_a)) and (mine.before_sure or len(seen_b))
    a, b = (seen_a if len(seen_a) else a), (seen_b if len(seen_b) else b)
    shifts, _ = votes(a, b)
    if not len(shifts):
        return _apart(ref, mine) if sure else None
    shift, share = _vote(shifts)
    _, differ = fit(ref, mine, shift)
    if sure and share == 1.0 and differ == 0 and len(shifts) >= 2:
        return Alignment(shift, ALIGNED, "counted on from the counters at the first call")
    return Alignment(shift, AMBIGUOUS, "counters that nothing confirms")


def _by_calls(ref: Stream, mine: Stream, hint: int | None, floor: int | None) -> Alignment:
    """By the calls alone: one way to fit, or several."""
    shifts = fitting(ref.shape, mine.shape)
    if floor is not None:
        shifts = shifts[shifts >= floor]
    if len(shifts) == 0:
        return Alignment(None, UNKNOWN, "the calls fit nowhere, or too few do")
    pairs = {s: fit(ref, mine, s)[0] for s in shifts[:64].tolist()}
    rivals = len(shifts) - 1
    best = max(pairs, key=lambda s: (s == hint, -_skew(ref, mine, s)[0], pairs[s]))
    if rivals:
        return Alignment(best, AMBIGUOUS, "the calls repeat: several shifts fit", rivals)
    skew, span = _skew(ref, mine, best)
    if pairs[best] < ENOUGH:
        return Alignment(best, AMBIGUOUS, "few calls overlap")
    if skew * 2 > span:
        return Alignment(best, AMBIGUOUS, "the calls fit only at very different times")
    return Alignment(best, ALIGNED, "the calls fit in one way only")


def _skew(ref: Stream, mine: Stream, shift: int) -> tuple[int, int]:
    """(how far apart the ranks entered, how long the overlap is), ns."""
    start, end = max(0, shift), min(len(ref), shift + len(mine))
    a, b = ref.t[start:end], mine.t[start - shift : end - shift]
    return abs(int(np.median(a - b))), int(a[-1] - a[0])


def fitting(ref: m.Int32, mine: m.Int32, least: int = RIVAL) -> m.Int64:
    """All shifts at which every known pair of calls agrees, and at least ``least`` do."""
    n, k = len(ref), len(mine)
    shifts = np.arange(-(k - least), n - least + 1, dtype=np.int64)
    if len(shifts) == 0:
        return shifts
    # Lost calls agree with everything, and so does what lies beyond the ends.
    padded = np.concatenate([np.zeros(k, ref.dtype), ref, np.zeros(k, ref.dtype)])
    for at in _spread(k):
        value = mine[at]
        if value == 0:
            continue
        there = padded[shifts + (at + k)]
        shifts = shifts[(there == 0) | (there == value)]
        if len(shifts) == 0:
            break
    known = [_known_pairs(ref, mine, s) >= least for s in shifts[:256].tolist()]
    return np.concatenate([shifts[:256][known], shifts[256:]]) if known else shifts


def _known_pairs(ref: m.Int32, mine: m.Int32, shift: int) -> int:
    start, end = max(0, shift), min(len(ref), shift + len(mine))
    return int(((ref[start:end] != 0) & (mine[start - shift : end - shift] != 0)).sum())


def _spread(n: int) -> list[int]:
    """All positions, far apart ones first: so that wrong shifts go soon."""
    step = max(1, n // 64)
    return [at for start in range(step) for at in range(start, n, step)]
