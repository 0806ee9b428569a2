"""The default group of dumps that describe no group, as those of versions 1.x.

Ranks that lie in groups of which nobody knows the members cannot be compared.  Only
where all that is seen is of the group that has every rank, and every rank left a dump,
are they known.
"""

from __future__ import annotations

import numpy as np

from nccluprobe.importers.fr_dump import Dump, Group
from nccluprobe.importers.fr_entries import COMPLETED
from nccluprobe.importers.fr_job import UNDEFINED, Job
from nccluprobe.importers.fr_names import COALESCED, operation

#: PyTorch numbers groups as they are made: the default group is the first.
_NAME = "0"
_DESCRIPTIONS = ("", UNDEFINED, "default_pg")


def describe_default(job: Job) -> bool:
    """Describe the default group in all dumps of a job that lack it; whether it was safe to."""
    ranks = tuple(sorted(job.members))
    dumps = [x.dump for x in job.members.values() if x.dump is not None]
    if len(ranks) < 2 or ranks != tuple(range(len(dumps))):
        return False
    if not all(map(_is_of_default, dumps)) or not _is_one(dumps):
        return False
    for dump in dumps:
        name, desc = dump.groups_seen[0]
        dump.groups[name] = Group(name, desc, ranks)
        job.desc.setdefault((name, ranks), desc)
    job.assumed = True
    return True


def _is_of_default(dump: Dump) -> bool:
    """Whether it describes no group, and has only collectives of the default one.

    A rank that has not come may wait in another group: then nothing is sure.
    """
    if dump.groups or len(dump.groups_seen) != 1:
        return False
    name, desc = dump.groups_seen[0]
    if name != _NAME or desc not in _DESCRIPTIONS:
        return False
    return all(o.send is None and o.api != COALESCED for o in map(operation, dump.names))


def _is_one(dumps: list[Dump]) -> bool:
    """Whether nothing speaks against their ranks being all the ranks of one group."""
    entered = [int(d.seq.max()) for d in dumps]
    complete = 0
    for dump in dumps:
        all_come = np.array([operation(n).needs_all for n in dump.names], np.bool_)
        ended = dump.seq[(dump.state == COMPLETED) & all_come[dump.name]]
        complete = max(complete, int(ended.max(initial=0)))
    if complete > min(entered):
        return False  # one has completed what needs all, and another has not come to it
    # Where all have come and wait, it may be for a rank whose dump nobody has brought.
    waits = any((d.state != COMPLETED).any() for d in dumps)
    return not (waits and len(set(entered)) == 1)
