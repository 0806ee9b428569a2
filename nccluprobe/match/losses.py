"""Which records of a process were lost: most losses leave a hole at a known place.

Calls have an ordinal on their communicator that is given before anything can be
lost, so a lost one is a hole among those that are seen.  What a process lost in
all, less its holes, is all that can be missing after the last calls seen: none
for nearly all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nccluprobe.match import model as m

#: So many rows are put together before they are looked at.
_TOGETHER = 4096
#: A communicator with more holes than this is given up: its losses have no place.
_MOST = 4096


class Holes:
    """Ordinals on one communicator that no line tells of."""

    __slots__ = ("_fresh", "_held", "broken", "gaps", "top")

    def __init__(self) -> None:
        #: Newest ordinal seen.
        self.top = -1
        #: (first, last, entry of the call that showed it), lowest first.
        self.gaps: list[tuple[int, int, int]] = []
        self.broken = False
        self._fresh: list[tuple[m.Int64, m.Int64]] = []
        self._held = 0

    def take(self, idx: m.Int64, t: m.Int64) -> None:
        """Take calls by their ordinals and entries, in any order."""
        n = len(idx)
        if n == 0 or self.broken:
            return
        in_order = idx[0] == self.top + 1 and idx[-1] == self.top + n
        if not self._fresh and in_order and (n < 3 or bool((idx[1:] - idx[:-1] == 1).all())):
            self.top += n
            return
        self._fresh.append((idx, t))
        self._held += n
        if self._held > _TOGETHER:
            self.settle()

    def settle(self) -> None:
        """Find the holes in what has been taken."""
        if not self._fresh:
            return
        idx = np.concatenate([i for i, _ in self._fresh])
        t = np.concatenate([x for _, x in self._fresh])
        self._fresh.clear()
        self._held = 0
        order = np.argsort(idx, kind="stable")
        idx, t = idx[order], t[order]
        at = int(np.searchsorted(idx, self.top, side="right"))
        self._fill(idx[:at])
        idx, t = idx[at:], t[at:]
        if not len(idx):
            return
        steps = np.diff(idx, prepend=self.top)
        for i in np.flatnonzero(steps > 1).tolist():
            last = int(idx[i])
            self.gaps.append((last - int(steps[i]) + 1, last - 1, int(t[i])))
        self.top = int(idx[-1])
        if len(self.gaps) > _MOST:
            self.broken = True
            self.gaps.clear()

    def _fill(self, idx: m.Int64) -> None:
        if not len(idx) or not self.gaps:
            return
        left: list[tuple[int, int, int]] = []
        for first, last, t in self.gaps:
            a, b = np.searchsorted(idx, (first, last + 1)).tolist()
            at = first
            for i in np.unique(idx[a:b]).tolist():
                if i > at:
                    left.append((at, i - 1, t))
                at = i + 1
            if at <= last:
                left.append((at, last, t))
        self.gaps = left

    def known(self, through: int) -> int:
        """How many calls are missing of which others tell that entered before ``through``."""
        return sum(last - first + 1 for first, last, t in self.gaps if t < through)

    def after(self, idx: int) -> int:
        """How many calls are missing after an ordinal."""
        return sum(last - max(first, idx + 1) + 1 for first, last, _ in self.gaps if last > idx)


@dataclass
class Losses:
    """What one process lost, by place."""

    holes: dict[int, Holes] = field(default_factory=dict)
    #: Newest word on what is shown otherwise.
    _told: m.Accounted | None = None
    #: Of it, losses that are counted by now.
    _known: int = 0
    #: Lines that were deleted with the oldest parts of the trace.
    _dropped: int = 0
    #: Holes on communicators that are forgotten.
    _gone: int = 0
    #: Communicator -> holes of which others tell what was made there.
    filled: dict[int, set[int]] = field(default_factory=dict)
    #: Communicator -> holes that are sends or receives, by the calls beside them.
    transfers: dict[int, set[int]] = field(default_factory=dict)

    def take(self, comm: int, idx: m.Int64, t: m.Int64) -> None:
        """Take calls on a communicator."""
        holes = self.holes.get(comm)
        if holes is None:
            holes = self.holes[comm] = Holes()
        holes.take(idx, t)

    def one(self, comm: int, idx: int, t: int) -> None:
        """Take one call."""
        self.take(comm, np.array([idx], np.int64), np.array([t], np.int64))

    def told(self, a: m.Accounted) -> None:
        """Take what the trace shows besides holes."""
        self._told = a

    def covered(self, c: m.Coverage) -> None:
        """What entered before its ``through`` is in the trace, or counted as lost."""
        self._dropped = c.dropped
        if self._told is not None and self._told.t < c.through:
            self._known = self._told.known
        for holes in self.holes.values():
            holes.settle()

    def forget(self, comm: int, through: int) -> None:
        """Drop a communicator that has ended."""
        holes = self.holes.pop(comm, None)
        self.filled.pop(comm, None)
        self.transfers.pop(comm, None)
        if holes is not None:
            holes.settle()
            self._gone += holes.known(through)

    def without_place(self, lost: int, through: int) -> int:
        """How many of all ``lost`` records are not among those whose place is known."""
        holes = self._gone + sum(h.known(through) for h in self.holes.values())
        no_loss = self._dropped + (0 if self._told is None else self._told.unplaced)
        return max(0, lost - self._known - max(0, holes - no_loss))

    def newest(self, comm: int) -> int:
        """Entry of the call that showed the newest hole on a communicator; 0: there is none."""
        holes = self.holes.get(comm)
        return max((t for _, _, t in holes.gaps), default=0) if holes is not None else 0

    def after(self, comm: int, idx: int) -> int:
        """Calls on a communicator that are missing after an ordinal, nobody knows which."""
        return self._after(comm, idx, self.filled.get(comm, set()))

    def between(self, comm: int, low: int, high: int) -> int:
        """Of these, those before another ordinal."""
        return self.after(comm, low) - self.after(comm, high - 1)

    def calls_after(self, comm: int, idx: int) -> int:
        """Of these, those that may be collectives."""
        others = self.filled.get(comm, set()) | self.transfers.get(comm, set())
        return self._after(comm, idx, others)

    def _after(self, comm: int, idx: int, known: set[int]) -> int:
        holes = self.holes.get(comm)
        if holes is None:
            return 0
        late = (i for i in known if i > idx)
        return holes.after(idx) - sum(any(a <= i <= b for a, b, _ in holes.gaps) for i in late)
