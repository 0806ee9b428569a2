"""Several reports of RAS: which is the newer, where they contradict each other, how many are read.

Counters of a rank only rise.  The time of a JSON report is a clock's, that of a text its
file's, and a copy may have lost it: where counts fall from one report to the next, the times
are not those of the reports.
"""

from __future__ import annotations

from collections.abc import Sequence

from nccluprobe.importers.ras_model import MOST_RANKS, MOST_TOLD, Report


def together(reports: Sequence[Report]) -> tuple[list[Report], list[str]]:
    """The reports in the order in which they were made, and what is wrong with them."""
    problems = [f"{r.path}: {text}" for r in reports for text in r.problems]
    kept, left = _newest(reports)
    problems += left
    processes = {(r.host, r.pid) for report in kept for c in report.comms for r in c.ranks}
    if (more := len(processes) - MOST_RANKS) > 0:
        problems.append(f"{more:,} of {len(processes):,} processes in RAS reports are not compared")
    ordered = sorted(kept, key=lambda r: (r.t, r.total))
    if (falls := _first_fall(ordered)) is None:
        return ordered, problems
    before, after, where = falls
    by_count = sorted(kept, key=lambda r: (r.total, r.t))
    if _first_fall(by_count) is None:
        newest = ordered[-1].t
        for r in by_count:
            r.t = newest
        problems.append(
            f"{after.path}: its counts of {where} are below those of {before.path}, which is the "
            "older by its time: the reports are taken in the order of their counts, and for how "
            "long ranks have stood is not known"
        )
        return by_count, problems
    while falls is not None:
        before, after, where = falls
        problems.append(
            f"{after.path} and {before.path} contradict each other: {where} is behind in one and "
            "ahead in the other; that communicator is not compared"
        )
        hash_ = where.rpartition(" ")[2]
        for r in ordered:
            r.comms = [c for c in r.comms if c.hash != hash_]
        falls = _first_fall(ordered)
    return ordered, problems


def _newest(reports: Sequence[Report]) -> tuple[list[Report], list[str]]:
    """Of too many the newest ones."""
    kept: list[Report] = []
    left: list[str] = []
    told = 0
    for r in sorted(reports, key=lambda r: -r.t):
        told += r.told
        if told <= MOST_TOLD:
            kept.append(r)
        else:
            left.append(r.path)
    if not left:
        return kept, []
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return kept, [
        f"{left[0]}{more}: not compared: newer reports speak of as many ranks as are compared "
        f"({MOST_TOLD:,})"
    ]


def _first_fall(reports: Sequence[Report]) -> tuple[Report, Report, str] | None:
    """Two reports of which the later has a lower count, and whose count that is."""
    newest: dict[tuple[str, int, str, int], tuple[tuple[int, ...], Report]] = {}
    for report in reports:
        for comm in report.comms:
            for r in comm.ranks:
                if r.counts is None:
                    continue
                key = (comm.hash, r.rank, r.host, r.pid)
                known = newest.get(key)
                # A text does not tell counts in which all agree: they are 0.
                if known is not None and any(
                    0 < now < then for now, then in zip(r.counts, known[0], strict=True)
                ):
                    return known[1], report, f"rank {r.rank} of communicator {comm.hash}"
                newest[key] = (r.counts, report)
    return None
