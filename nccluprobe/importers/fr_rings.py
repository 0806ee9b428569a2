"""What has left the rings, and may be open all the same.

A ring holds the newest calls.  What is older is complete where a later one of the same
group is; where the oldest that a ring holds is open, or none is held, it was made, and
nobody knows more of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nccluprobe.importers.fr_calls import Collectives
from nccluprobe.importers.fr_groups import Group, Part
from nccluprobe.match.model import SIG_LOST

#: So many calls at most are supposed to be open that no ring holds.
_MOST = 10_000


def open_below(groups: Iterable[Group], oldest: dict[int, tuple[int, int]]) -> None:
    """Put in the calls that ranks have made, and of which nobody knows whether they ended.

    ``oldest``: rank -> number in its ring and time of the oldest call that it holds.
    """
    for group in groups:
        done = group.complete
        for rank, part in group.parts.items():
            if part.whole:
                continue
            first = part.position if part.collectives is None else part.collectives.base
            if first is not None and 0 < first - done <= _MOST:
                _put_in(part, done, first, *oldest[rank])


def _put_in(part: Part, done: int, first: int, record: int, t: int) -> None:
    """The calls from ``done`` to ``first`` are not complete as far as is known."""
    n = first - done
    sig = np.full(n, SIG_LOST, np.int32)
    times, records = np.full(n, t, np.int64), np.arange(record - n, record, dtype=np.int64)
    unknown = np.zeros(n, np.bool_)
    c = part.collectives
    if c is None:
        part.collectives = Collectives(done, sig, times, records, done, unknown, unknown)
        return
    part.collectives = Collectives(
        done,
        np.concatenate([sig, c.sig]),
        np.concatenate([times, c.t]),
        np.concatenate([records, c.record]),
        done,
        np.concatenate([unknown, c.needs_all]),
        np.concatenate([unknown, c.begun]),
    )
