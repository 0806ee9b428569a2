"""The dumps of one job: which file is which rank, and what they know together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from nccluprobe.importers.fr_dump import Dump, Group
from nccluprobe.importers.fr_remade import forget_remade

_RANK = re.compile(r"rank[_-]?(\d{1,7})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"(\d{1,7})(?!.*\d)")

_DEFAULT = "default_pg"
#: What PyTorch writes of a group that was given no description.
UNDEFINED = "undefined"

#: What stands for the file of a rank that left none.
NO_FILE = "no dump"

#: A process group: its name and members, the same on all its ranks.
GroupKey = tuple[str, tuple[int, ...]]


@dataclass
class Member:
    """One rank of the job.  ``dump`` is None when its file is broken or missing."""

    rank: int
    name: str
    dump: Dump | None
    #: Whether it has a file, be it a broken one.
    in_file: bool = True


@dataclass
class Job:
    """All ranks of a job.  ``members``: by global rank; ``desc``: of groups.

    ``assumed``: no dump describes the groups, and the default group is taken to have all ranks.
    """

    label: str
    members: dict[int, Member] = field(default_factory=dict)
    desc: dict[GroupKey, str] = field(default_factory=dict)
    assumed: bool = False

    def add_missing(self) -> None:
        """Ranks that the groups of others name, and that left no file."""
        for m in list(self.members.values()):
            for g in m.dump.groups.values() if m.dump is not None else ():
                self.desc.setdefault((g.name, g.ranks), g.desc)
        named = {r for _, ranks in self.desc for r in ranks}
        for rank in sorted(named - self.members.keys()):
            self.members[rank] = Member(rank, NO_FILE, None, False)


def rank_in_name(path: str) -> int | None:
    """The rank that a file's name tells: after "rank", else its last number."""
    name = Path(path).name
    found = _RANK.findall(name)
    if found:
        return int(found[-1])
    last = _NUMBER.search(name)
    return None if last is None else int(last[1])


def rank_of(path: str, dump: Dump | None) -> int | None:
    """Global rank of a dump: by its file's name, unless its groups say otherwise."""
    told = rank_in_name(path)
    if dump is None or not dump.groups:
        return told
    common: set[int] | None = None
    for g in dump.groups.values():
        common = set(g.ranks) if common is None else common & set(g.ranks)
    if not common or told in common:
        return told
    return next(iter(common)) if len(common) == 1 else None


def jobs_of(files: Iterable[tuple[str, Dump | None]]) -> tuple[list[Job], list[str]]:
    """Files (path, dump) to jobs, and what could not be placed.

    A folder is a job; where it has a rank twice, each set of alike names is one.
    """
    problems: list[str] = []
    folders: dict[str, list[Member]] = {}
    for path, dump in files:
        if dump is not None:
            forget_remade(dump)
        rank = rank_of(path, dump)
        if rank is None:
            told = rank_in_name(path)
            why = (
                "neither its name nor its groups tell whose rank it is"
                if told is None
                else f"its name says rank {told}, and its groups contradict it: not read"
            )
            problems.append(f"{path}: {why}")
            continue
        folders.setdefault(str(Path(path).parent), []).append(Member(rank, path, dump))
    jobs: list[Job] = []
    for folder, members in sorted(folders.items()):
        sets: dict[str, list[Member]] = {"": members}
        if len({m.rank for m in members}) < len(members):
            sets = {}
            for m in members:
                sets.setdefault(_stem(m), []).append(m)
        alike = [(stem, one) for stem, some in sorted(sets.items()) for one in _worlds(some)]
        for i, (stem, some) in enumerate(alike):
            again = any(stem == other for other, _ in alike[:i])
            job = Job(f"{folder}/{stem}" + f"#{i}" * again)
            for m in some:
                if m.rank in job.members:
                    problems.append(f"{m.name}: a second dump of rank {m.rank}, not read")
                    continue
                job.members[m.rank] = m
            job.add_missing()
            jobs.append(job)
    return jobs, problems


def _worlds(members: list[Member]) -> list[list[Member]]:
    """Dumps by the ranks of the default group, the newest first: all ranks of a job are in it.

    What a larger job left in the folder where a smaller one has written over the rest.  What does
    not tell, as a broken file, is of the newest that has the rank.
    """
    worlds: dict[tuple[int, ...], list[Member]] = {}
    rest: list[Member] = []
    for m in members:
        told = {g.ranks for g in m.dump.groups.values() if g.desc == _DEFAULT} if m.dump else set()
        if len(told) == 1:
            worlds.setdefault(told.pop(), []).append(m)
        else:
            rest.append(m)
    if len(worlds) < 2:
        return [members]
    some = sorted(worlds.items(), key=lambda w: -max(m.dump.newest for m in w[1] if m.dump))
    for m in rest:
        next((w for ranks, w in some if m.rank in ranks), some[0][1]).append(m)
    return [w for _, w in some]


def _stem(m: Member) -> str:
    name = Path(m.name).name
    if _RANK.search(name):
        return _RANK.sub("", name)
    return _NUMBER.sub("", name)


def group_of(dump: Dump, name: str, desc: str) -> Group | None:
    """The group of an entry in the dump's own configuration."""
    found = dump.groups.get(name)
    if found is None or found.name != name:
        found = next((g for g in dump.groups.values() if g.name == name), found)
    if found is not None and desc and not found.desc:
        found.desc = desc
    return found
