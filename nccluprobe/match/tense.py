"""Verbs for what ranks do now, or did until they ended.

A report is often read when the job is gone: who has ended waits for nobody.  A job
that ended, or gave up, as a whole is judged as of the moment before; what is said of it is past
all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.process import Process
from nccluprobe.match.status import inside_end
from nccluprobe.plural import verb

#: What became of a rank: its process ended, it aborted, or it ended the communicator in order.
ENDED, GAVE_UP, LEFT = "ended", "gave up", "ended the communicator"
#: What keeps a call that all have entered, where nothing else is seen, now and in the past;
#: and what is said in its place where a cause is known that may hold it up.
NOT_GOING_ON = {
    "the device or the network is not going on": "something else may hold up its devices",
    "the device or the network did not go on": "something else may have held up its devices",
}


def fate_of(process: Process) -> str | None:
    """What became of a process; None: it is there, as far as is known."""
    if process.has_given_up:
        return GAVE_UP
    return ENDED if process.over is not None else None


def fate(e: Endpoint) -> str | None:
    """What became of a member; None: it is there, as far as is known."""
    found = fate_of(e.process)
    if found is None and e.end is not None and inside_end(e) is None:
        return LEFT if e.end.orderly else GAVE_UP
    return found


@dataclass(frozen=True)
class Tense:
    """The tense, and the number, of what some ranks do."""

    n: int
    #: None: some of them do it now.
    fate: str | None = None

    @property
    def be(self) -> str:
        """is, are, was or were"""
        return verb(self.n, "is" if self.fate is None else "was")

    @property
    def wait(self) -> str:
        """waits, wait or waited"""
        return verb(self.n, "waits") if self.fate is None else "waited"

    @property
    def have(self) -> str:
        """has, have or had"""
        return verb(self.n, "has") if self.fate is None else "had"

    @property
    def does(self) -> str:
        """does, do or did"""
        return verb(self.n, "does") if self.fate is None else "did"

    @property
    def stand(self) -> str:
        """stands, stand or stood"""
        return verb(self.n, "stands") if self.fate is None else "stood"

    @property
    def gone(self) -> str:
        """What became of them, behind "has" or "have": ended, given up, ended the communicator."""
        return "given up" if self.fate == GAVE_UP else self.fate or ENDED

    @property
    def one(self) -> Tense:
        """The same tense, of one."""
        return replace(self, n=1)

    @property
    def not_going_on(self) -> str:
        """What keeps a call that all have entered, where nothing else is seen."""
        now, then = NOT_GOING_ON
        return now if self.fate is None else then

    @property
    def until_that(self) -> str:
        """Until when, in the past, of the one that was named last: ", until that one ended"."""
        return "" if self.fate is None else f", until that one {self.fate}"

    @property
    def until(self) -> str:
        """Until when, in the past: ", until it ended"."""
        if self.fate is None:
            return ""
        return f", until {'it' if self.n == 1 else 'they'} {self.fate}"


def of_fates(fates: Collection[str | None]) -> Tense:
    """The tense of what some ranks do, all of them, by what became of each."""
    if not fates or None in fates:
        return Tense(len(fates))
    if GAVE_UP in fates:
        return Tense(len(fates), GAVE_UP)
    return Tense(len(fates), ENDED if ENDED in fates else LEFT)


def of(members: Iterable[Endpoint]) -> Tense:
    """The tense of what members of a communicator do, all of them."""
    return of_fates([fate(e) for e in members])


def of_processes(processes: Iterable[Process]) -> Tense:
    """The tense of what processes do, all of them."""
    return of_fates([fate_of(p) for p in processes])


def fates(members: Iterable[Endpoint]) -> dict[int, str]:
    """Rank in the communicator -> what became of it, of those that are not there any more."""
    known = ((e.comm_rank, fate(e)) for e in members)
    return {rank: what for rank, what in known if rank is not None and what is not None}


def note_ended(findings: Collection[Finding], processes: Iterable[Process]) -> None:
    """Tell findings which of the processes that they name have ended."""
    if not findings:
        return
    over = (p.info for p in processes if p.over is not None)
    ended = frozenset((info.host, info.pid) for info in over if info is not None)
    for f in findings:
        f.gone = ended.intersection((x["host"], x["pid"]) for x in f.named)
