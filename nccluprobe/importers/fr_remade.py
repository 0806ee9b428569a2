"""Groups that were made again in one process: what its dump tells of a restart by itself.

PyTorch numbers communicators (``pg_id``) and groups (``name``) in the order in which a
process makes them, the default group first.  When a job is restarted inside its processes
the numbers of communicators go on, and those of groups begin anew, or go on, too.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from nccluprobe.importers.fr_dump import Dump
from nccluprobe.numerals import whole

_DEFAULT = "default_pg"


def forget_remade(dump: Dump) -> None:
    """Take out of a dump what is of groups from before the last restart, and note until when."""
    names = _default_made_again(dump)
    first = _names_begin_anew(dump) or _status_begins_anew(dump)
    groups = zip(dump.pg_ids, dump.groups_seen, strict=True)
    seen = [(number(i), number(name)) for i, (name, _) in groups]
    former = {g for g, (i, name) in enumerate(seen) if i < first or -1 < name < names}
    if not former and not first and not names:
        return
    rows = np.isin(dump.group, list(former))
    if not _came_before(dump, rows):
        return
    dump.restarted = True
    first = max([first, *(seen[g][0] + 1 for g in former)])
    ids = sorted(n for i in dump.status if (n := number(i)) >= 0)
    kept = {k: g for k, g in dump.groups.items() if not -1 < number(g.name) < names}
    if names and len(ids) == len(dump.groups) and kept:
        first = max(first, ids[-len(kept)])
    dump.groups = kept
    dump.status = {i: s for i, s in dump.status.items() if number(i) >= first}
    if rows.any():
        dump.former_until = int(dump.created[rows].max())
        dump.keep(~rows)


def _came_before(dump: Dump, rows: np.ndarray[Any, np.dtype[np.bool_]]) -> bool:
    """Whether all these calls came before all others: what is of before a restart did.

    Where they did not, groups were taken down and others made while the job went on.
    """
    if not rows.any() or rows.all():
        return True
    return int(dump.record[rows].max()) < int(dump.record[~rows].min())


def number(text: str) -> int:
    """The number that PyTorch wrote; -1: it is none."""
    found = whole(text)
    return found if found is not None and found >= 0 and str(found) == text else -1


def _default_made_again(dump: Dump) -> int:
    """Name of the newest default group, where there were several; 0: there were not."""
    names = {number(g.name) for g in dump.groups.values() if g.desc == _DEFAULT} - {-1}
    return max(names) if len(names) > 1 else 0


def _names_begin_anew(dump: Dump) -> int:
    """The first communicator after names of groups have begun anew; 0: they never did."""
    seen = {number(i): number(n) for i, (n, _) in zip(dump.pg_ids, dump.groups_seen, strict=True)}
    known = sorted((i, name) for i, name in seen.items() if i >= 0 and name >= 0)
    return max((i for (_, before), (i, name) in pairwise(known) if name <= before), default=0)


def _status_begins_anew(dump: Dump) -> int:
    """The first communicator after a restart, where more have a status than there are groups.

    0: there are not more.  The same program makes as many again, or so far some of them.
    """
    ids = sorted(n for i in dump.status if (n := number(i)) >= 0)
    names = sorted({n for g in dump.groups.values() if (n := number(g.name)) >= 0})
    if not names or len(names) < len(dump.groups) or len(ids) <= len(names):
        return 0
    seen = {number(i): number(n) for i, (n, _) in zip(dump.pg_ids, dump.groups_seen, strict=True)}
    # Where the configuration tells of groups that were never used, fewer have a status.
    least = len(names) // 2
    sizes = [len(names), *(n for n in range(len(names), least, -1) if len(ids) % n == 0)]
    for size in sizes:
        first = (len(ids) - 1) // size * size
        blocks = (ids[at : at + size] for at in range(0, len(ids), size))
        shifts = [{b - a for a, b in zip(ids, block, strict=False)} for block in blocks]
        if all(len(s) == 1 for s in shifts) and _fits(ids[first:], names, seen, size):
            return ids[first]
    return 0


def _fits(ids: list[int], names: list[int], seen: dict[int, int], size: int) -> bool:
    """Whether communicators can be those of the groups that their calls name."""
    at = [(ids.index(i), name) for i, name in sorted(seen.items()) if i in ids]
    if any(name not in names for _, name in at):
        return False
    if size == len(names):
        return all(names[place] == name for place, name in at)
    return all(names.index(name) >= place for place, name in at)
