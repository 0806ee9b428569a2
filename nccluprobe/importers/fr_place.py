"""Where ranks stand in groups of which their dumps show no call, as the status of these tells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nccluprobe.importers.fr_calls import Calls
from nccluprobe.importers.fr_groups import Group, Part
from nccluprobe.importers.fr_job import GroupKey

#: Group name -> numbers of the newest call and of the newest that is complete.
_Told = Mapping[str, tuple[int, int]]


def add_untold(
    groups: dict[GroupKey, Group], calls: Mapping[int, Calls], told: Mapping[int, _Told]
) -> None:
    """Add groups of which no dump shows a call, where it does of others of their kind.

    Whether a call is one too many shows by those who run the same program.  ``told``: by rank.
    """
    kinds = {_kind(g) for g in groups.values()} - {_kind(g) for g in groups.values() if g.has_p2p}
    shown = set(groups)
    for rank, status in told.items():
        for known in calls[rank].dump.groups.values():
            key = (known.name, known.ranks)
            last = status.get(known.name)
            if last is None or key in shown or rank not in known.ranks or not known.desc:
                continue
            if (known.desc, len(known.ranks)) in kinds:
                group = groups.setdefault(key, Group(key, desc=known.desc))
                group.newest = max(group.newest, last[0])


def _kind(group: Group) -> tuple[str, int]:
    return group.desc, len(group.key[1])


def place(groups: Iterable[Group], rank: int, status: _Told) -> None:
    """Where a rank stands in groups of which its dump shows nothing."""
    for group in groups:
        name, ranks = group.key
        if rank not in ranks or rank in group.parts:
            continue
        part = group.parts[rank] = Part(ranks.index(rank), 0)
        last = status.get(name)
        # Where sends are counted in the same place the number may be theirs.
        if last is not None and not group.has_p2p and last[0] <= group.newest:
            # The first call has number 1; -1: none was made.
            part.position = max(last[0], 0) + 1
