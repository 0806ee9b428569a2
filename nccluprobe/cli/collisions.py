"""Traces of several jobs whose communicators have one hash: who of them is who.

The hash comes from the unique id, which jobs share where it is set from outside (NCCL_COMM_ID),
where a job was started again with the same one, or where traces of two runs were put together.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import combinations

from nccluprobe.match.matcher import Matcher
from nccluprobe.match.names import numbers
from nccluprobe.match.pipeline import Analysis
from nccluprobe.match.process import Process
from nccluprobe.plural import counted

_LISTED = 5


@dataclass
class Collision:
    """Communicators in which several processes have one rank, and all who may be of them."""

    label: str
    runs: dict[str, list[Process]] = field(default_factory=dict)

    def apart(self) -> bool:
        """Whether each run is a job of its own: no rank is twice in it, and each two share one.

        Runs without a common rank may be the nodes of one job.
        """
        every: list[set[int]] = []
        for some in self.runs.values():
            ranks = [rank for _, rank in {(p.who, p.rank) for p in some}]
            known = {rank for rank in ranks if rank is not None}
            if len(known) < len(ranks):
                return False
            every.append(known)
        return len(every) > 1 and all(a & b for a, b in combinations(every, 2))


def collisions(matcher: Matcher) -> list[Collision]:
    """One for each set of processes that share such communicators."""
    found: dict[object, Collision] = {}
    for comm in matcher.comms.values():
        if comm.ambiguous and comm.key.hash is not None:
            job = matcher.jobs.same(comm.key.hash)
            found.setdefault(job, Collision(comm.label))
    for p in matcher.processes.values():
        one = found.get(matcher.jobs.same(p.source)) if found else None
        if one is not None and p.info is not None and not p.snapshot:
            one.runs.setdefault(p.info.run_id, []).append(p)
    return [found[job] for job in found]


def runs_apart(matcher: Matcher) -> list[str]:
    """The runs that are to be judged each by itself; empty: there is no need, or no way."""
    found = collisions(matcher)
    if not found or not all(c.apart() for c in found):
        return []
    of_job: dict[object, set[str]] = {}
    for p in matcher.processes.values():
        if p.info is not None and not p.snapshot:
            of_job.setdefault(matcher.jobs.same(p.source), set()).add(p.info.run_id)
    if sum(len(runs) > 1 for runs in of_job.values()) > len(found):
        return []  # of another job each node has a run of its own
    return sorted({run for runs in of_job.values() for run in runs})


def collision_notes(analysis: Analysis) -> list[str]:
    """What is not judged, whose traces they are, and what to do."""
    notes = []
    for c in collisions(analysis.matcher)[:_LISTED]:
        runs = "; ".join(
            _run(name, some, analysis) for name, some in list(c.runs.items())[:_LISTED]
        )
        do = "give `analyze` the files of one job only"
        if len(c.runs) > 1:
            do += ", or --run-id RUN where a run is a job"
        notes.append(
            f"several processes have one rank in communicator {c.label}, so it is not judged; the "
            f"traces are of {runs}. They may be of several jobs with one unique id, or of a job "
            f"that was started again: {do}"
        )
    return notes


def _run(name: str, some: list[Process], analysis: Analysis) -> str:
    """A run with its hosts, its ranks, and when its processes were started."""
    infos = {p.who: (p.source, p.info) for p in some if p.info is not None}
    hosts = sorted({info.host for _, info in infos.values()})
    began = {
        time.strftime("%H:%M:%S", time.gmtime(analysis.decoder.unix(s, info.key.start) // 10**9))
        for s, info in infos.values()
    }
    ranks = {p.rank for p in some if p.rank is not None}
    who = f", {numbers(ranks)}" if ranks else ""
    when = min(began) if len(began) == 1 else f"{min(began)} to {max(began)}"
    shown = ", ".join(hosts[:_LISTED]) + (", ..." if len(hosts) > _LISTED else "")
    return f"run {name} ({counted(len(infos), 'process')} on {shown}{who}, started {when} UTC)"
