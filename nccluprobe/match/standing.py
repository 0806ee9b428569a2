"""Where ranks stand by NCCL's own counters, as ``inspect`` read them from memory.

A rank that hangs makes no call any more: a tracer that comes then sees nothing
of it.  Its counters still say how far it came on each communicator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match.absence import Context
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.process import Process
from nccluprobe.match.signature import UNSEEN, SignatureTable
from nccluprobe.match.standing_text import describe, describe_gone
from nccluprobe.nccl.enums import SEQ_NAMES

_KEPT = 200_000

Seqs = tuple[int, ...]


@dataclass(frozen=True)
class Stand:
    """How far one rank came on one communicator."""

    rank: int
    who: m.ProcessKey
    seqs: Seqs
    #: Known to stand there from ``since`` until ``until``.
    since: int
    until: int
    source: str  # inspect or trace
    look: m.Looked | None
    process: Process | None

    @property
    def calls(self) -> int:
        """Calls that are counted."""
        return sum(self.seqs)

    @property
    def still(self) -> int:
        """How long it is known not to have moved."""
        return max(0, self.until - self.since)

    @property
    def inside(self) -> tuple[str, ...]:
        """NCCL functions that it is inside of."""
        if self.look is not None and self.look.inside:
            return self.look.inside
        now = None if self.process is None else self.process.inside_now()
        return () if now is None else (now.api,)

    def behind(self, most: Seqs) -> dict[str, int]:
        """Function -> calls that the furthest rank is ahead.

        A counter moves within the call: who is inside has entered it.
        """
        lag = {
            f"nccl{name}": top - mine
            for name, mine, top in zip(SEQ_NAMES, self.seqs, most, strict=True)
            if mine < top
        }
        if len(lag) == 1 and sum(lag.values()) == 1 and next(iter(lag)) in self.inside:
            return {}
        return lag


@dataclass
class Group:
    """A communicator over all processes looked at."""

    hash: str
    nranks: int
    stands: dict[int, Stand] = field(default_factory=dict)
    #: Ranks whose process is gone, though they have not left the communicator.
    gone: dict[int, m.Looked] = field(default_factory=dict)
    name: str | None = None
    #: Nothing can be said of it: its counters move, or two have one rank.
    void: bool = False

    @property
    def most(self) -> Seqs:
        """The highest count of each function."""
        return tuple(map(max, zip(*(s.seqs for s in self.stands.values()), strict=True)))

    def lags(self) -> dict[int, dict[str, int]]:
        """Rank -> what it is behind in."""
        most = self.most
        found = {r: s.behind(most) for r, s in sorted(self.stands.items())}
        return {r: lag for r, lag in found.items() if lag}

    def least(self, ranks: Collection[int]) -> list[int]:
        """Of ranks that are behind those that lack the first call that is open.

        Who has made more of one function, and no less of any other, than another one that
        is behind has come to that call, and waits for the other one as those in front do.
        """
        by_seqs: dict[Seqs, list[int]] = {}
        for r in ranks:
            by_seqs.setdefault(self.stands[r].seqs, []).append(r)
        least = np.empty((0, len(SEQ_NAMES)), np.int64)
        found: list[int] = []
        for seqs in sorted(by_seqs, key=sum):
            at = np.array(seqs, np.int64)
            if not bool((least <= at).all(axis=1).any()):
                least = np.vstack((least, at))
                found += by_seqs[seqs]
        return sorted(found)


class Standing:
    """All looks of an analysis; the newest of each process counts."""

    def __init__(self) -> None:
        self.looks: dict[m.ProcessKey, m.Looked] = {}
        #: How often each process was looked at.
        self.times: Counter[m.ProcessKey] = Counter()
        #: (process, hash, rank) -> counters, and since when they are so
        self._since: dict[tuple[m.ProcessKey, str, int], tuple[Seqs, int]] = {}

    def note(self, look: m.Looked) -> None:
        """Take an ``inspect`` line."""
        before = self.looks.get(look.key)
        if before is None and len(self.looks) >= _KEPT:
            return
        self.times[look.key] += 1
        if before is not None and before.t > look.t:
            return
        self.looks[look.key] = look
        for comm in look.comms:
            if comm.seqs is None:
                continue
            at = (look.key, comm.hash, comm.comm_rank)
            known = self._since.get(at)
            if known is None or known[0] != comm.seqs:
                self._since[at] = (comm.seqs, look.t)

    def findings(
        self,
        comms: Iterable[Communicator],
        processes: Iterable[Process],
        context: Callable[[str], Context],
        table: SignatureTable,
        current: list[Finding],
    ) -> list[Finding]:
        """Communicators on which ranks stand behind others."""
        if not self.looks:
            return []
        by_key = {p.info.key: p for p in processes if p.info is not None}
        by_comm: dict[tuple[str, int], list[Communicator]] = {}
        for c in comms:
            by_comm.setdefault((c.key.hash, c.key.nranks), []).append(c)
        found: list[Finding] = []
        for group in self._groups(by_key):
            traced = by_comm.get((group.hash, group.nranks), [])
            if len(traced) == 1:
                if traced[0].complete_view:
                    continue  # the traces say more
                _add_traced(group, traced[0], table)
            elif traced:
                continue
            if _told(group, current):
                continue
            if group.gone and group.stands:
                found.append(describe_gone(group, context(group.hash)))
                continue
            if group.void or len(group.stands) < 2:
                continue
            lags = group.lags()
            if lags:
                found.append(describe(group, lags, context(group.hash)))
        _assign(found, current)
        return found

    def _groups(self, by_key: dict[m.ProcessKey, Process]) -> list[Group]:
        groups: dict[tuple[str, int], Group] = {}
        for look in self.looks.values():
            for comm in look.comms:
                group = groups.setdefault((comm.hash, comm.nranks), Group(comm.hash, comm.nranks))
                group.name = group.name or comm.name
                if comm.seqs is None:
                    if not look.alive:
                        group.gone[comm.comm_rank] = look
                    continue
                group.void |= comm.moving or comm.comm_rank in group.stands
                process = by_key.get(look.key)
                since = self._since[look.key, comm.hash, comm.comm_rank][1]
                group.stands[comm.comm_rank] = _stand(look, comm, comm.seqs, since, process)
        return [groups[key] for key in sorted(groups)]


def _stand(
    look: m.Looked, comm: m.LookedComm, seqs: Seqs, since: int, process: Process | None
) -> Stand:
    until = look.t
    if process is not None and process.first_coverage and process.last_activity <= look.t:
        # Traced, and no call since the look.
        since = min(since, max(process.first_coverage, process.last_activity))
        until = max(until, process.through)
    return Stand(comm.comm_rank, look.key, seqs, since, until, "inspect", look, process)


def position(comm: Communicator, e: Endpoint, table: SignatureTable) -> Seqs | None:
    """The five counters after the newest call that a trace shows; None: not known."""
    if comm.counters is None or not e.slotted or e.guessed or e.dropped != comm.closed:
        return None
    functions = table.functions(e.rows.sig)
    if bool((functions == UNSEEN).any()):
        return None
    counts = np.bincount(functions[functions >= 0], minlength=len(SEQ_NAMES)).tolist()
    return tuple(c + n for c, n in zip(comm.counters, counts, strict=True))


def _add_traced(group: Group, comm: Communicator, table: SignatureTable) -> None:
    """Members that a trace speaks for later than, or without, a look."""
    for rank, e in comm.endpoints.items():
        known = group.stands.get(rank)
        p = e.process
        if known is not None and (e.last_t <= known.until or p.info is None):
            continue
        seqs = position(comm, e, table)
        if p.info is None:
            continue
        if seqs is None:
            # It went on after the look, nobody knows how far.
            group.stands.pop(rank, None)
            continue
        look = None if known is None else known.look
        since = max(e.last_t, p.first_coverage)
        group.stands[rank] = Stand(rank, p.info.key, seqs, since, p.through, "trace", look, p)


def _told(group: Group, current: list[Finding]) -> bool:
    """Whether the traces say it already."""
    return any(
        f.comm_uid_hash == group.hash
        and (f.details.get("missing_comm_ranks") or f.details.get("calls"))
        for f in current
    )


def _assign(found: list[Finding], current: list[Finding]) -> None:
    """A rank that waits on one communicator is not to blame on another."""
    waits: dict[object, list[Finding]] = {}
    for f in [*current, *found]:
        for who in f.waiters:
            waits.setdefault(who, []).append(f)
    for f in found:
        for status, who in zip(f.details["missing_rank_status"], f.culprits, strict=True):
            elsewhere = [o for o in waits.get(who, []) if o is not f]
            if elsewhere:
                status["reason"] = "rank_waiting_elsewhere"
                status["waits_in_comm"] = elsewhere[0].comm_uid_hash
                status["waits_in_comm_seq"] = elsewhere[0].comm_seq
        reasons = [s["reason"] for s in f.details["missing_rank_status"]]
        if all(r == "rank_waiting_elsewhere" for r in reasons):
            f.details["reason"] = "rank_waiting_elsewhere"
            cause = next(o for o in waits[f.culprits[0]] if o is not f)
            f.role, f.downstream_of = "downstream", cause.id
    by_id = {f.id: f for f in found}
    for f in found:
        up = by_id.get(f.downstream_of or "")
        if up is not None and up.downstream_of == f.id:  # they wait for each other
            for one in (f, up):
                one.role, one.downstream_of = "unknown", None
