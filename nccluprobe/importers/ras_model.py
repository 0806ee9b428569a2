"""What a report of RAS tells, text and JSON alike, and how much of it is looked at."""

from __future__ import annotations

from dataclasses import dataclass, field

from nccluprobe.plural import counted, verb

#: Ranks of one communicator, and processes of one report: more are not looked at.
MOST_RANKS = 200_000
#: Ranks of all communicators together, of one report and of all.
MOST_TOLD = 1_000_000


@dataclass
class Rank:
    """A rank of a communicator; ``counts``: None when it does not answer."""

    rank: int
    host: str
    pid: int
    counts: tuple[int, ...] | None
    alive: bool = True
    answers: bool = True


@dataclass
class Comm:
    """A communicator."""

    hash: str
    nranks: int
    ranks: list[Rank] = field(default_factory=list)


@dataclass
class Report:
    """One answer of RAS.  ``t``: when it was made, unix ns."""

    t: int
    comms: list[Comm] = field(default_factory=list)
    is_text: bool = False
    path: str = ""
    #: What of it is not compared, and why.
    problems: list[str] = field(default_factory=list)

    @property
    def told(self) -> int:
        """Ranks that it speaks of, one for each communicator."""
        return sum(len(c.ranks) for c in self.comms)

    @property
    def total(self) -> int:
        """All its counts together: they only rise."""
        return sum(sum(r.counts) for c in self.comms for r in c.ranks if r.counts is not None)


def check(comm: Comm, report: Report) -> None:
    """Leave out what cannot be, and say so."""
    beyond = [r for r in comm.ranks if not 0 <= r.rank < comm.nranks]
    if beyond:
        comm.ranks = [r for r in comm.ranks if 0 <= r.rank < comm.nranks]
        report.problems.append(
            f"{counted(len(beyond), 'rank')} of communicator {comm.hash} "
            f"{verb(len(beyond), 'is')} beyond its size of {comm.nranks}, and passed over"
        )
    if len({r.rank for r in comm.ranks}) < len(comm.ranks):
        comm.ranks.clear()
        report.problems.append(
            f"a rank of communicator {comm.hash} is told twice: the communicator is not compared"
        )


def check_size(ranks: int, all_ranks: int) -> None:
    """Refuse a report that speaks of more than any job has."""
    if ranks > MOST_RANKS:
        raise ValueError(
            f"it has a communicator of {ranks:,} ranks: up to {MOST_RANKS:,} are compared"
        )
    if all_ranks > MOST_TOLD:
        raise ValueError(f"its communicators have more than {MOST_TOLD:,} ranks together")
