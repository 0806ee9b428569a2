"""PyTorch flight recorder dumps of a job to the matcher's items.

Slots are PyTorch's own numbers (collective_seq_id), so rings that begin at
different calls align exactly.  A dump does not say when it was made: PyTorch
makes it when an operation has timed out, so the ranks are taken to have waited
for that timeout, unless the files' times say that it was sooner.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nccluprobe.importers.fr_begun import hold_back
from nccluprobe.importers.fr_calls import Calls, Collectives, Transfers
from nccluprobe.importers.fr_entries import COMPLETED
from nccluprobe.importers.fr_former import forget_former
from nccluprobe.importers.fr_groups import (
    Group,
    Part,
    blind,
    by_peer,
    explained,
    forget_unplaced,
    from_first,
    is_ahead,
    status_by_name,
    trust_peers,
)
from nccluprobe.importers.fr_job import UNDEFINED, GroupKey, Job, Member, group_of
from nccluprobe.importers.fr_missing import is_hollow, suspects
from nccluprobe.importers.fr_place import add_untold, place
from nccluprobe.importers.fr_rings import open_below
from nccluprobe.match import model as m
from nccluprobe.match.doubt import ASSUMED
from nccluprobe.match.signature import SignatureTable
from nccluprobe.match.status import NO_DUMP, NOT_BEGUN, UNKNOWN_CLOCK
from nccluprobe.match.untimed import TIMEOUT

SECOND = 1_000_000_000
#: PyTorch's own default.
_TIMEOUT_MS = 600_000


class FlightRecorder:
    """One job's dumps."""

    def __init__(self, job: Job, first_source: int, table: SignatureTable) -> None:
        self.job = job
        self.table = table
        self.sources = {r: first_source + i for i, r in enumerate(sorted(job.members))}
        for member in job.members.values():
            if member.dump is not None and is_hollow(member.dump):
                member.dump = None
        dumps = [x.dump for x in job.members.values() if x.dump is not None]
        #: Whether there was something of before a restart.
        self.restarted = any(d.restarted for d in dumps)
        while forget_former(dumps, _shortest_timeout(job)):
            self.restarted = True
        self.newest = max((x.dump.newest for x in job.members.values() if x.dump), default=0)
        #: How long the ranks are taken to have waited, ns.
        self.waited = _shortest_timeout(job)
        self.calls = 0
        #: Calls of those that are in no group that the dumps describe, and so are not compared.
        self.unplaced = 0
        #: Whether the time of the dumps is not known, and the timeout stands for it.
        self.assumed = False
        #: Ranks of which nobody knows where they were, and that others wait for.
        self.suspects: set[int] = set()
        #: Ranks whose dumps show only what came after the others had dumped.
        self._later: set[int] = set()
        #: Ranks whose devices have begun nothing of what others wait for.
        self._not_begun: set[int] = set()
        self._groups: dict[GroupKey, Group] = {}
        # The same however the path is spelled: explain finds what analyze has named.
        where = os.path.realpath(job.label).encode("utf-8", "replace")
        self._id = hashlib.blake2s(where, digest_size=3).hexdigest()

    def through(self) -> int:
        """When the dumps were made, as far as it can be told."""
        latest = self.newest + self.waited
        times = []
        for member in self.job.members.values():
            if member.dump is not None:
                try:
                    times.append(Path(member.name).stat().st_mtime_ns)
                except OSError:
                    continue
        written = max(times, default=0)
        self.assumed = not self.newest <= written < latest
        return latest if self.assumed else written

    @property
    def compares(self) -> bool:
        """Whether there is anything that can be compared; after ``read``."""
        return bool(self._groups)

    def read(self) -> None:
        """Find the calls of all groups, and where the ranks stand."""
        calls: dict[int, Calls] = {}
        for rank, member in sorted(self.job.members.items()):
            if member.dump is not None:
                calls[rank] = Calls(member.dump, self.table)
        late = self._cut(calls)
        is_ring = any((c.dump.state == COMPLETED).any() for c in calls.values())
        begins_open = self._short(calls)
        may_lack = begins_open | (late if is_ring else set())
        for rank, c in calls.items():
            self._read(rank, c, rank in late, rank in may_lack)
        self._later = self._find_later(calls, late)
        for group in self._groups.values():
            for rank in self._later & group.parts.keys():
                group.parts[rank].forget()
        told = {r: status_by_name(c.dump) for r, c in calls.items() if r not in late | self._later}
        add_untold(self._groups, calls, told)
        for rank in self.job.members:
            place(self._groups.values(), rank, told.get(rank, {}))
        for group in self._groups.values():
            group.settle()
        groups = self._groups.values()
        open_below(groups, {r: c.oldest for r, c in calls.items()})
        short = begins_open - late - self._later
        forget_unplaced(groups, short)
        timed = {r for r, c in calls.items() if c.dump.timed}
        if timed and not explained(groups):
            self._not_begun = hold_back(groups, timed)
        missing = {r for r, x in self.job.members.items() if x.dump is None}
        if missing or self._later:
            broken = {r for r in missing if self.job.members[r].in_file}
            odd = broken | self._later
            self.suspects = suspects(groups, missing - broken, odd, short, self.job.desc)
        self._trust_partners()

    def items(self) -> Iterator[list[m.Item]]:
        """Items of what was read, a list for each rank."""
        frontier = self._frontiers()
        through = self.through()
        for rank, member in sorted(self.job.members.items()):
            yield list(self._rank_items(rank, member, frontier, through))

    # -- reading -----------------------------------------------------------

    def _cut(self, calls: dict[int, Calls]) -> set[int]:
        """Bring all dumps to one moment: when the first call timed out, and dumps were made.

        A rank that comes after that dumps last, and shows what the others could not.
        Returns the ranks of which something was cut.
        """
        oldest = [t for c in calls.values() if (t := c.oldest_open) is not None]
        if not oldest:
            return set()
        end = min(oldest) + self.waited
        late = {rank for rank, c in calls.items() if c.cut(end)}
        if late:
            self.newest = max(int(c.dump.created[c.kept].max(initial=0)) for c in calls.values())
        return late

    def _find_later(self, calls: dict[int, Calls], late: set[int]) -> set[int]:
        """Ranks whose dumps show nothing of the time when the others dumped."""
        idle = {r for r, c in calls.items() if c.oldest_open is None and c.forgets}
        groups = self._groups.values()
        return {r for r in idle if r in late or is_ahead(groups, r, idle, calls[r].dump)}

    def _short(self, calls: dict[int, Calls]) -> set[int]:
        """Ranks whose rings begin with what is open: what is older has left them.

        A dump of active entries begins so, too.  It shows nothing that is complete, and all
        that the status of the groups has as open.
        """
        is_ring = any((c.dump.state == COMPLETED).any() for c in calls.values())
        begins = {r: c for r, c in calls.items() if len(c.state) and c.state[0] != COMPLETED}
        may_lose = {r: c for r, c in begins.items() if not c.dump.from_first}
        return {r for r, c in may_lose.items() if is_ring or c.has_lost()}

    def _read(self, rank: int, calls: Calls, was_cut: bool, may_lack: bool) -> None:
        dump = calls.dump
        self.calls += len(dump)
        for g, (name, desc) in enumerate(dump.groups_seen):
            known = group_of(dump, name, desc)
            if known is None or rank not in known.ranks:
                self.unplaced += int((dump.group == g).sum())
                continue
            group = self._group((known.name, known.ranks))
            self.job.desc.setdefault(group.key, desc)
            group.desc = "" if desc == UNDEFINED else desc
            has_p2p = calls.has_p2p(g)
            group.has_p2p |= has_p2p
            status = None if was_cut else dump.status.get(dump.pg_ids[g])
            part = group.parts[rank] = Part(known.ranks.index(rank), 0)
            part.collectives = calls.collectives(g, None if has_p2p else status)
            part.transfers = calls.transfers(g, len(known.ranks), status) if has_p2p else None
            # What is older was made; where a ring begins with what is open, or its dump is a late
            # one, nobody knows whether that had ended.
            c = part.collectives
            part.whole = not may_lack or (c is not None and c.pending > c.base)
            newest = calls.entered(g)
            if was_cut and calls.forgets and part.collectives is None:
                part.at_most = newest + 1
                continue
            if part.collectives is None:
                # A send says after which collective it was queued.
                part.position = newest + 1
            group.newest = max(group.newest, newest)

    def _group(self, key: GroupKey) -> Group:
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = Group(key)
        return found

    def _trust_partners(self) -> None:
        """What ranks that do not see completion tell, and nobody else, is old."""
        not_seeing = blind(self._groups.values())
        for group in self._groups.values():
            for rank in not_seeing & group.parts.keys():
                trust_peers(group, group.parts[rank])
            if not_seeing and group.waiting <= not_seeing:
                for part in group.parts.values():
                    if part.collectives is None and part.position is None:
                        part.position = group.newest + 1

    def _frontiers(self) -> dict[tuple[GroupKey, int, int], int]:
        """(group, sender, receiver) -> transfers that one side has completed, as numbered here."""
        found: dict[tuple[GroupKey, int, int], int] = {}
        for key, group in self._groups.items():
            for part in group.parts.values():
                if part.transfers is None:
                    continue
                for send, peer, _, done in by_peer(part.transfers):
                    if from_first(group, part, peer):
                        continue
                    pair = (key, part.rank, peer) if send else (key, peer, part.rank)
                    found[pair] = max(found.get(pair, 0), done)
        return found

    # -- items -------------------------------------------------------------

    def _rank_items(
        self,
        rank: int,
        member: Member,
        frontier: dict[tuple[GroupKey, int, int], int],
        through: int,
    ) -> Iterator[m.Item]:
        source = self.sources[rank]
        yield m.SourceOpened(source, member.name)
        dump = member.dump
        yield m.ProcessInfo(
            source=source,
            key=m.ProcessKey(f"flight-recorder-{self._id}-{rank}", 0, rank),
            run_id=f"flight-recorder-{self._id}",
            host="",
            rank=rank,
            world_size=len(self.job.members),
            front="flight recorder",
            untimed=TIMEOUT if self.assumed else "",
            nccl_versions=(dump.nccl_version,) if dump and dump.nccl_version else (),
        )
        yield m.ClockState(source, UNKNOWN_CLOCK)
        mine = [g for g in self._groups.values() if rank in g.parts]
        for comm, group in enumerate(mine, 1):
            yield self._comm(source, comm, group, group.parts[rank])
        for comm, group in enumerate(mine, 1):
            part = group.parts[rank]
            if part.collectives is not None:
                yield _batch(source, comm, part.collectives)
            p2p: list[tuple[bool, int, int]] = []
            if part.transfers is not None:
                yield _p2p_batch(source, comm, group, part, frontier, p2p)
                yield _batch_ends(source, part.transfers)
            c = part.collectives
            yield m.Completed(source, comm, 0 if c is None else c.pending - c.base, tuple(p2p))
        if (dump is not None and rank not in self._later) or rank in self.suspects:
            if dump is not None and dump.whole:
                times = np.sort(dump.created[dump.created <= self.newest])
                yield m.Activity(source, times, times)
            yield m.Coverage(
                source=source,
                t=through,
                through=through,
                lost=0,
                blind=0,
                in_flight=0,
                alive=None,
                main=self._state(rank),
            )
        yield m.Progress(source, through, caught_up=True)

    def _state(self, rank: int) -> str:
        """Of a rank's main thread, as far as a dump tells of it."""
        if self.job.members[rank].dump is None:
            return NO_DUMP
        return NOT_BEGUN if rank in self._not_begun else "unknown"

    def _comm(self, source: int, comm: int, group: Group, part: Part) -> m.CommInfo:
        name, ranks = group.key
        members = hashlib.blake2s(repr(ranks).encode(), digest_size=4).hexdigest()
        if part.collectives is not None:
            base = part.collectives.base
        else:
            # Of a rank that shows nothing: it has taken part in what is complete.
            base = group.complete if part.position is None else part.position
        return m.CommInfo(
            source=source,
            id=comm,
            t=self.newest,
            hash=f"pg{name}-{members}-{self._id}",
            instance=0,
            comm_rank=part.rank,
            nranks=len(ranks),
            learnt=ASSUMED if self.job.assumed else "flight_recorder",
            name=self.job.desc.get(group.key) or None,
            base=base,
            counted=False,  # a dump has one number for all its entries
        )


def _shortest_timeout(job: Job) -> int:
    """Of what is not complete, ns."""
    timeouts = [x.dump.timeout_ms for x in job.members.values() if x.dump and x.dump.timeout_ms]
    return min(timeouts, default=_TIMEOUT_MS) * 1_000_000


def _batch(source: int, comm: int, c: Collectives) -> m.Batch:
    n = len(c.sig)
    return m.Batch(
        source=source,
        comm=comm,
        ord=np.arange(n, dtype=np.int64),
        idx=c.record,
        sig=c.sig,
        t_enter=c.t,
        t_exit=c.t,
        rc=np.zeros(n, np.int32),
        group=np.zeros(n, np.int64),
        thread=np.zeros(n, np.int64),
    )


def _p2p_batch(
    source: int,
    comm: int,
    group: Group,
    part: Part,
    frontier: dict[tuple[GroupKey, int, int], int],
    completed: list[tuple[bool, int, int]],
) -> m.P2PBatch:
    """Transfers, numbered as they were made, or else from the first that is not complete."""
    t = part.transfers
    assert t is not None
    n = len(t.sig)
    order = np.zeros(n, np.int64)
    for send, peer, rows, done in by_peer(t):
        pair = (group.key, part.rank, peer) if send else (group.key, peer, part.rank)
        # Where rings begin later, it is the same one on both sides.
        common = frontier.get(pair, done)
        order[rows] = np.arange(len(rows)) + (common - done)
        completed.append((send, peer, common))
    return m.P2PBatch(
        source=source,
        comm=comm,
        send=t.send,
        peer=t.peer,
        ord=order,
        idx=t.record,
        sig=t.sig,
        t_enter=t.t,
        t_exit=t.t,
        rc=np.zeros(n, np.int32),
        group=t.batch,
        thread=np.zeros(n, np.int64),
    )


def _batch_ends(source: int, t: Transfers) -> m.GroupEnds:
    """The ends of what was put together."""
    batch, first = np.unique(t.batch, return_index=True)
    first, batch = first[batch > 0], batch[batch > 0]
    return m.GroupEnds(
        source=source,
        group=batch,
        t_enter=t.t[first],
        t_exit=t.t[first],
        rc=np.zeros(len(batch), np.int32),
    )
