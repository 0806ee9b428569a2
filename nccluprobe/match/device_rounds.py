"""Streams in columns: run in rounds, all heads at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
#: The time of what does not end.
NEVER = int(np.iinfo(np.int64).max)
#: More rounds than this are not made: few operations are left to each.
_ROUNDS = 3000


def _distinct(numbers: Ints) -> Ints:
    """Each number once; many times faster here than ``np.unique``, which hashes."""
    ordered = np.sort(numbers)
    new = np.ones(len(ordered), np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    found: Ints = ordered[new]
    return found


class Lists:
    """Lists of numbers, one after the other."""

    def __init__(self, key: Ints, value: Ints, n: int) -> None:
        """``key`` says in whose list a value is; the order within a list stays."""
        order = np.argsort(key, kind="stable")
        self.value = value[order]
        self.n = np.bincount(key, minlength=n)
        self.start = np.concatenate(([0], np.cumsum(self.n)[:-1]))

    def of(self, keys: Ints) -> tuple[Ints, Ints]:
        """All values of some lists, and how many are of each."""
        n = self.n[keys]
        total = int(n.sum())
        at = np.repeat(self.start[keys] - np.cumsum(n) + n, n) + np.arange(total)
        return self.value[at], n


@dataclass
class Rounds:
    """Nodes (operations and groups) in their streams; a part of a node is of one meeting."""

    #: Nodes of each stream, in order; streams and parts of each node; parts of each meeting.
    queues: Lists
    streams: Lists
    parts: Lists
    members: Lists
    #: Of each part.
    node: Ints
    meeting: Ints
    #: Parts that need nobody.
    free: Bools
    #: Nodes that do not begin, and times (ns) after which one does not.
    barred: Bools
    limit: Ints

    def run(self, t: Ints, blocked: Bools) -> Ints:
        """When each node ended (NEVER); ``t``: when it was called, ``blocked``: of meetings."""
        missing = self.members.n + blocked
        met = np.zeros(len(blocked), np.int64)
        lacks = np.bincount(self.node, weights=~self.free, minlength=len(t)).astype(np.int64)
        need = self.streams.n.copy()
        begin, begun = t.copy(), np.zeros(len(t), np.bool_)
        over = np.full(len(t), NEVER)
        at = self.queues.start.copy()
        stop = self.queues.start + self.queues.n
        heads = self.queues.value[at]
        for _ in range(_ROUNDS):
            np.subtract.at(need, heads, 1)
            new = _distinct(heads[(need[heads] == 0) & ~self.barred[heads]])
            new = new[begin[new] <= self.limit[new]]
            if not len(new):
                break
            begun[new] = True
            mine, count = self.parts.of(new)
            meetings = self.meeting[mine]
            np.subtract.at(missing, meetings, 1)
            np.maximum.at(met, meetings, np.repeat(begin[new], count))
            full = _distinct(meetings[missing[meetings] == 0])
            came, _ = self.members.of(full)
            came = came[~self.free[came]]
            np.subtract.at(lacks, self.node[came], 1)
            ready = _distinct(np.concatenate((new, self.node[came])))
            ready = ready[begun[ready] & (lacks[ready] <= 0)]
            theirs, count = self.parts.of(ready)
            until = np.where(self.free[theirs], 0, met[self.meeting[theirs]])
            end_t = begin[ready].copy()
            if len(ready):
                np.maximum(end_t, np.maximum.reduceat(until, np.cumsum(count) - count), out=end_t)
            fine = end_t <= self.limit[ready]
            ready, end_t = ready[fine], end_t[fine]
            over[ready] = end_t
            go, count = self.streams.of(ready)
            at[go] += 1
            end_t = np.repeat(end_t, count)
            more = at[go] < stop[go]
            go, end_t = go[more], end_t[more]
            heads = self.queues.value[at[go]]
            np.maximum.at(begin, heads, end_t)
        return over
