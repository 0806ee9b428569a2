"""Calls of a job before it was restarted inside its processes.

PyTorch's ring and its list of groups live as long as the process.  After a restart the
groups of before are still in a dump, under the same names and other ids, with calls that
were never complete: they say nothing of what holds the job up now.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nccluprobe.importers.fr_dump import Dump
from nccluprobe.importers.fr_entries import COMPLETED
from nccluprobe.importers.fr_remade import number

#: PyTorch ends a process so soon after an operation has timed out, ns.
_GRACE = 60_000_000_000


def forget_former(dumps: Sequence[Dump], waited: int) -> bool:
    """Take out of all dumps what is of before the last restart; whether there was any.

    ``waited``: after so many ns an operation times out.
    """
    end = _last_end(dumps, waited)
    if end is None:
        return False
    found = False
    for dump in dumps:
        newest = {int(g): int(dump.created[dump.group == g].max()) for g in np.unique(dump.group)}
        former = {g for g, t in newest.items() if t <= end}
        if former:
            found = True
            _forget_status(dump, {dump.pg_ids[g] for g in former})
            dump.keep(~np.isin(dump.group, list(former)))
    return found


def _last_end(dumps: Sequence[Dump], waited: int) -> int | None:
    """What was made until then is of before the last restart; None: there was none."""
    ends = _between_told(dumps)
    newest = sorted(int(d.created.max()) for d in dumps if len(d))
    if not newest:
        return None
    # One that comes late goes on when others have given up: most do so after a restart only.
    most = newest[(len(newest) - 1) // 2]
    before = most - waited - _GRACE
    old = [t[(t > 0) & (t < before)] for d in dumps for t in [d.created[d.state != COMPLETED]]]
    ends += [int(t.max()) + waited for t in old if len(t)]
    return min(max(ends), most - 1) if ends else None


def _between_told(dumps: Sequence[Dump]) -> list[int]:
    """The middle between what is of before, as some dumps tell, and what came after it."""
    former = max((d.former_until for d in dumps), default=0)
    now = [int(d.created.min()) for d in dumps if d.former_until and len(d)]
    return [(former + max(former, min(now, default=0))) // 2] if former else []


def _forget_status(dump: Dump, former: set[str]) -> None:
    """Leave the status of the groups that there are now: ids rise as groups are made.

    The same program makes as many groups again, whose ids are shifted by as much.
    """
    ids = sorted({n for i in dump.status if (n := number(i)) >= 0})
    newest = max(map(number, former))
    half = len(ids) // 2
    shifts = {b - a for a, b in zip(ids[:half], ids[half:], strict=False)}
    if len(ids) % 2 == 0 and len(shifts) == 1 and newest < ids[half]:
        newest = ids[half] - 1
    for i in [i for i in dump.status if number(i) <= newest]:
        del dump.status[i]
