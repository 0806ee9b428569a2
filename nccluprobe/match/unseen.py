"""Ends that nobody saw: whoever came later found the process gone.

Such a process ended at some time between its last sign of life and then.  What is
said of it is counted to the last sign of life of its job, of those that went so: more
is not known, and neither is which of them ended first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace

from nccluprobe.match.process import Process


def settle(processes: Iterable[Process], job: Callable[[int], Hashable]) -> None:
    """Set the time of the end of each process that was found gone."""
    gone = [p for p in processes if p.found_gone]
    last: dict[Hashable, int] = {}
    for p in gone:
        last[job(p.source)] = max(last.get(job(p.source), 0), p.alive_until)
    for p in gone:
        t = min(last[job(p.source)], p.found_gone)
        if p.end is not None and t:
            p.end = replace(p.end, t=t)
            p.newest = max(p.newest, t)


def adopt(speaker: Process, witness: Process) -> None:
    """Take what another tracer of the same process, which saw no call of it, tells of its end.

    A collector that goes on where a killed one has stopped finds nothing to read of who
    makes no calls any more: it tells only that there were none, and what became of it.
    """
    theirs = witness.coverage
    if speaker.ended or theirs is None or theirs.through <= speaker.through:
        return
    speaker.alive_until = max(speaker.alive_until, witness.alive_until)
    lost = max(theirs.lost, speaker.lost)
    speaker.note_coverage(replace(theirs, source=speaker.source, lost=lost))
    if witness.end is not None:
        t = witness.found_gone or witness.end.t
        speaker.note_end(replace(witness.end, source=speaker.source, t=t))
