"""What endpoints wait in: the nodes that the wait-for graph is made of.

Every rule that finds ranks waiting for others (an open slot of collectives, an
unmatched send or receive, a split, an initialisation) gives one ``Wait``; the
graph (``roles``) then tells causes from consequences.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from nccluprobe.match import model as m
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import TRANSFERS, Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.process import Actor


@dataclass
class Wait:
    """Some endpoints wait in one operation until others come to it.

    ``entered`` wait for every one of ``absent`` (AND); ``first``: since when,
    unix ns.  ``finding`` is None while it is not due, or when another finding
    explains it: the edge is there all the same.
    """

    comm: Communicator
    #: For people, such as "ncclAllReduce #5" or "ncclRecv 3 from rank 2".
    label: str
    first: int
    entered: tuple[Endpoint, ...]
    absent: tuple[Endpoint, ...]
    finding: Finding | None = None
    #: Names it among the waits of its communicator, and orders them.
    at: tuple[int, ...] = ()
    #: comm_seq, when it is a collective.
    seq: int | None = None
    #: Of its first operation; None where that is not known.
    api: str | None = None
    #: Something else that is wrong explains that it does not end.
    cause: Finding | None = None
    #: Whether its one thread is inside the sends and receives that it is.
    hard: bool = False
    #: call_idx of the sends and receives that it is.
    calls: frozenset[int] = frozenset()
    #: Actors at the head of whose streams it stands; None: the streams are not known.
    heads: set[Hashable] | None = None
    #: Only the run of the devices knows of it.
    device: bool = False
    #: A part of it has not been made, by the run of the devices.
    missing: bool = False
    #: What other parts of it stand behind, in the streams of who entered.
    behind: list[Wait] = field(default_factory=list)
    #: Whoever is absent may have come: events of theirs were lost.
    weak: bool = False
    #: Some who are absent from a send or receive may have come: events of theirs were lost.
    #: Or it was lost itself, and put in by what its peer made.
    doubtful: bool = False
    #: All who are absent have come, unseen: what else is seen leaves no other way.
    over: bool = False
    #: Who entered, and cannot take part so far: inside the call, or gone.
    held: list[Endpoint] = field(default_factory=list)
    #: Of the absent from a send or receive: whose half is in a group whose end may have been lost.
    posted: tuple[Endpoint, ...] = ()
    #: Of the absent: who has left it out, and gone on.
    skipped: list[Endpoint] = field(default_factory=list)
    #: Of the absent: who stands, by what all others called before it, in what comes after it.
    strays: list[Endpoint] = field(default_factory=list)
    #: Who entered and has aborted this communicator since: actor -> when, unix ns.
    aborted: dict[Actor, int] = field(init=False)

    def __post_init__(self) -> None:
        self.aborted = {
            e.actor: e.end.t for e in self.entered if e.end is not None and not e.end.orderly
        }

    @property
    def until(self) -> int | None:
        """When all who entered had given it up, unix ns; None: somebody waits still."""
        everyone = self.aborted and len(self.aborted) == len(self.entered)
        return max(self.aborted.values()) if everyone else None

    @property
    def p2p(self) -> bool:
        """Whether it is of sends and receives."""
        return self.api in TRANSFERS

    @property
    def order(self) -> tuple[Hashable, ...]:
        """Oldest first; the same in every run."""
        return (self.first, self.comm.key, self.at)

    @property
    def gone_on(self) -> bool:
        """Whether all who entered had given it up, and some made other calls after that."""
        t = self.until
        return t is not None and any(e.process.last_call > t for e in self.entered)


def seen_in(w: Wait) -> tuple[Endpoint, ...]:
    """Of who entered a collective, those of whom that is seen; all, where nobody's record is left.

    Of others the record is lost, or that they made the call is only supposed.
    """
    seen = tuple(e for e in w.entered if e.sig_at(w.at[0]) != m.SIG_LOST)
    return seen or w.entered


def entry_of(w: Wait, e: Endpoint) -> int:
    """When an endpoint came to the wait that it sits in, unix ns."""
    if e.oldest is not None and w.at and e.oldest[0] == w.at[0]:
        return e.oldest[1]
    t = e.t_at(w.at[0]) if w.at and w.seq is not None else None
    return w.first if t is None else t


def came_to(w: Wait, actor: Actor) -> int:
    """When an actor came to a wait that it sits in, unix ns; others may have come before."""
    return max((entry_of(w, e) for e in w.entered if e.actor == actor), default=w.first)
