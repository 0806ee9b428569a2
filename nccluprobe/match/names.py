"""Ranks in the sentences of findings: by their number in the job, where that is another one.

A communicator numbers its members anew.  Who reads a report knows ranks of the job, and
must not take one for the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.model import Looked
from nccluprobe.match.process import Process
from nccluprobe.match.status import ranks_text
from nccluprobe.plural import counted, verb


def identities(
    processes: Iterable[Process], looks: Iterable[Looked]
) -> dict[Hashable, dict[str, Any]]:
    """Host, pid and rank in the job of each process that was traced or looked at."""
    known: dict[Hashable, dict[str, Any]] = {
        look.key: {"host": look.host, "pid": look.key.pid, "rank": look.rank} for look in looks
    }
    for p in processes:
        if p.info is not None:
            known[p.who] = {"host": p.info.host, "pid": p.info.pid, "rank": p.rank}
    return known


def numbers(ranks: Iterable[int]) -> str:
    """``rank 5`` or ``ranks 0-2,5``."""
    found = sorted(set(ranks))
    return f"rank{'' if len(found) == 1 else 's'} {ranks_text(found)}"


def renumbered(members: Iterable[Endpoint]) -> bool:
    """Whether members of a communicator have other numbers in the job, as far as all are known."""
    known = [(e.comm_rank, e.process.rank) for e in members if e.comm_rank is not None]
    return all(job is not None for _, job in known) and any(rank != job for rank, job in known)


def named(members: Iterable[Endpoint], of: str = "") -> str:
    """Members of a communicator, as ``rank 1``, or ``rank 5 of the job (rank 1 of ...)``.

    ``of``: the communicator's name for people, said also where both numbers are one.
    """
    known = [e for e in members if e.comm_rank is not None]
    here = numbers(e.comm_rank for e in known if e.comm_rank is not None)
    if not renumbered(known):
        return f"{here} of {of}" if of else here
    there = numbers(e.process.rank for e in known if e.process.rank is not None)
    return f"{there} of the job ({here} of {of or 'the communicator'})"


def in_job(members: Iterable[Endpoint]) -> str:
    """Members by their ranks in the job alone: ``ranks 0-2``, or ``rank 5 of the job``."""
    known = [e for e in members if e.comm_rank is not None]
    if not renumbered(known):
        return numbers(e.comm_rank for e in known if e.comm_rank is not None)
    return f"{numbers(e.process.rank for e in known if e.process.rank is not None)} of the job"


def job_ranks(members: Iterable[Endpoint]) -> dict[int, int]:
    """Rank in the communicator -> rank in the job; empty: they are the same, or not known."""
    found: dict[int, int] = {}
    for e in members:
        if e.comm_rank is not None and e.process.rank is not None:
            found[e.comm_rank] = e.process.rank
    return {} if all(a == b for a, b in found.items()) else found


def everyone(n: int, label: str, complete: bool) -> str:
    """All of a communicator, or all ``n`` that are observed; "one ..." takes a singular verb."""
    if n == 1 and not complete:
        return f"The one observed member of communicator {label}"
    return f"All {n} {'' if complete else 'observed '}members of communicator {label}"


def unobserved_text(n: int, nranks: int) -> str:
    """How many of a communicator nobody observes."""
    return f"{n} of {counted(nranks, 'rank')} {verb(n, 'is')} not observed"


def capital(text: str) -> str:
    """A text that begins a sentence."""
    return text[:1].upper() + text[1:]
