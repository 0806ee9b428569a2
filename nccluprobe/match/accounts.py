"""What a trace shows of its own losses besides holes in the ordinals of calls.

Starts and ends of groups have no ordinal: a group of which calls are seen shows
that it had both.  A call whose exit was lost is known all the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match.callrows import OPENS, OTHER, UNKNOWN, Line
from nccluprobe.match.calls import Columns

#: What is seen of a group.
_START, _INSIDE, _END = 1, 2, 4
#: More groups in part than this are not remembered: their losses have no place.
_MOST = 4096


@dataclass
class Account:
    """Of one source.  ``known``: lost records that are shown otherwise.

    ``unplaced``: calls that are no items, so that their ordinals look like holes,
    and lines that cannot be read.
    """

    known: int = 0
    unplaced: int = 0
    #: Newest time at which a loss was shown.
    t: int = 0
    _groups: dict[int, int] = field(default_factory=dict)
    #: Some starts do not say of which group.
    _starts_unknown: bool = False

    def note(self, c: Columns, rows: list[Line], open_groups: Collection[int]) -> None:
        """Take calls.  ``open_groups``: groups that may still go on."""
        self.unplaced += int(((c.codes == OTHER) | (c.codes == UNKNOWN)).sum())
        lost = sum(1 for r in rows if r.get("rc") is None and r.get("end") == "lost")
        if self._groups or (c.grouped and not c.whole):
            lost += self._grouped(c, open_groups)
        if lost:
            self.known += lost
            self.t = int(c.t.max())

    def _grouped(self, c: Columns, open_groups: Collection[int]) -> int:
        at = c.group != 0
        opens, ends = c.codes == OPENS, c.ends
        self._starts_unknown |= bool((opens & ~at).any())
        started = np.unique(c.group[at & opens])
        ended = np.unique(c.group[at & ends])
        inside = np.unique(c.group[at & ~opens & ~ends])
        whole = np.intersect1d(started, ended, assume_unique=True)
        seen = self._groups
        for ids, what in ((started, _START), (inside, _INSIDE), (ended, _END)):
            known = np.isin(ids, whole, assume_unique=True) if len(whole) else None
            for g in (ids if known is None else ids[~known]).tolist():
                seen[g] = seen.get(g, 0) | what
        lost = 0
        for g, what in list(seen.items()):
            if what == _START or (not what & _END and g in open_groups):
                continue  # it may go on
            del seen[g]
            lost += (not what & _START and not self._starts_unknown) + (not what & _END)
        while len(seen) > _MOST:
            del seen[next(iter(seen))]
        return lost


class Accounts:
    """Of all sources."""

    def __init__(self) -> None:
        self._of: dict[int, Account] = {}

    def note(self, source: int, c: Columns, rows: list[Line], open_groups: Collection[int]) -> None:
        """Take calls of a source."""
        self._account(source).note(c, rows, open_groups)

    def bad(self, source: int, lines: int) -> None:
        """Lines of a source cannot be read."""
        self._account(source).unplaced += lines

    def _account(self, source: int) -> Account:
        found = self._of.get(source)
        if found is None:
            found = self._of[source] = Account()
        return found

    def items(self, source: int) -> list[m.Item]:
        """The account of a source as an item, when there is anything in it."""
        a = self._of.get(source)
        if a is None or not (a.known or a.unplaced):
            return []
        return [m.Accounted(source, a.known, a.unplaced, a.t)]
