"""Call sites of a communicator's closed slots: where ranks came to one slot from different places.

Such differences are often legal (the root takes another branch), so only what is
rare is of interest, and only when something hangs after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from nccluprobe.match.endpoint import Endpoint

_KEPT = 512
#: Of one closing, no more differences than these are looked at one by one.
_NEWEST = 256


@dataclass
class Parting:
    """Ranks that came to one slot from another place than the greater part."""

    slot: int
    seq: int
    sites: dict[int, int]  # comm rank -> site
    count: int = 1


@dataclass
class SiteLog:
    """What the closed slots tell."""

    #: (comm rank, its site, site of the greater part) -> the newest slot of that kind
    partings: dict[tuple[int, int, int], Parting] = field(default_factory=dict)
    #: comm rank -> site in the newest closed slot
    last: dict[int, int] = field(default_factory=dict)

    def note(self, members: Sequence[Endpoint], slot: int, seq: int, n: int) -> None:
        """Take the next ``n`` slots, which all ``members`` have entered."""
        known = [e for e in members if e.rows.site is not None and e.comm_rank is not None]
        if len(known) < 2:
            return
        sites = np.stack([e.rows.site[:n] for e in known if e.rows.site is not None])
        ranks = [e.comm_rank for e in known if e.comm_rank is not None]
        high = sites.max(axis=0)
        low = np.where(sites == 0, high, sites).min(axis=0)
        for at in np.flatnonzero(low < high)[-_NEWEST:].tolist():
            self._part(slot + at, seq + at, dict(zip(ranks, sites[:, at].tolist(), strict=True)))
        self.last = dict(zip(ranks, sites[:, n - 1].tolist(), strict=True))

    def _part(self, slot: int, seq: int, sites: dict[int, int]) -> None:
        most = majority(sites)
        if most is None:
            return
        for rank, site in sites.items():
            if site in (0, most):
                continue
            known = self.partings.pop((rank, site, most), None)
            count = 1 if known is None else known.count + 1
            self.partings[rank, site, most] = Parting(slot, seq, sites, count)
        while len(self.partings) > _KEPT:
            del self.partings[next(iter(self.partings))]

    def rare(self, since: int) -> list[tuple[int, Parting]]:
        """(comm rank, slot in which it stood apart, as never else) from a slot on, oldest first."""
        found = [
            (rank, p)
            for (rank, _, _), p in self.partings.items()
            if p.count == 1 and p.slot >= since
        ]
        return sorted(found, key=lambda x: (x[1].slot, x[0]))


def majority(sites: dict[int, int]) -> int | None:
    """The site from which more than half came."""
    known = [s for s in sites.values() if s]
    if not known:
        return None
    site, n = Counter(known).most_common(1)[0]
    return site if 2 * n > len(sites) else None
