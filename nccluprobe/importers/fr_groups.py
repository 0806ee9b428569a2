"""What the ranks of one process group show together."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from nccluprobe.importers.fr_calls import Collectives, Transfers
from nccluprobe.importers.fr_dump import Dump
from nccluprobe.importers.fr_job import GroupKey
from nccluprobe.match.model import Int64
from nccluprobe.numerals import whole


@dataclass
class Part:
    """One rank in one group."""

    rank: int  # in the group
    comm: int  # number in its source
    collectives: Collectives | None = None
    transfers: Transfers | None = None
    #: The number that its next collective gets; None: not known.
    position: int | None = None
    #: That number is not larger than this; None: nothing is known of it.
    at_most: int | None = None
    #: Whether all is complete that is older than what its dump shows.
    whole: bool = True

    @property
    def waits(self) -> bool:
        """Whether it shows anything that is not complete."""
        c, t = self.collectives, self.transfers
        return (c is not None and c.pending < c.end) or (t is not None and not t.done.all())

    def forget(self) -> None:
        """Leave out what its dump shows: nobody knows when that was."""
        self.collectives = self.transfers = self.position = None


@dataclass
class Group:
    key: GroupKey
    parts: dict[int, Part] = field(default_factory=dict)
    desc: str = ""
    has_p2p: bool = False
    newest: int = 0  # largest number of a collective that anyone shows

    @property
    def complete(self) -> int:
        """Below this, somebody has completed every collective."""
        found: list[int] = []
        unknown: list[int] = []
        for p in self.parts.values():
            at = p.position if p.collectives is None else p.collectives.pending
            if at is not None:
                (found if p.whole else unknown).append(at)
        return max(found, default=min(unknown, default=0))

    @property
    def waiting(self) -> set[int]:
        """Ranks of the job that show a collective that is not complete."""
        shown = [(r, p.collectives) for r, p in self.parts.items() if p.collectives is not None]
        return {r for r, c in shown if c.pending < c.end}

    def settle(self) -> None:
        """Ranks that cannot have gone further than what others have completed are there."""
        done = self.complete
        for p in self.parts.values():
            if p.at_most is not None and p.at_most <= done:
                p.position = p.at_most


def blind(groups: Iterable[Group]) -> set[int]:
    """Ranks that do not see what is complete: their devices have failed, or do not report."""
    worst: dict[int, int] = {}
    for group in groups:
        done = group.complete
        for rank, part in group.parts.items():
            if part.collectives is not None and part.collectives.pending < done:
                # One call in one place may be what another rank died in the midst of.
                worst[rank] = worst.get(rank, 0) + part.collectives.unseen(done)
    return {rank for rank, calls in worst.items() if calls > 1}


def explained(groups: Iterable[Group]) -> bool:
    """Whether some rank explains what others wait in: it does not come, or does not see."""
    groups = list(groups)
    lacked: set[int] = set()
    waiting: set[int] = set()
    for group in groups:
        for rank, part in group.parts.items():
            for absent in _absent(group, part):
                waiting.add(rank)
                lacked |= {group.key[1][x] for x in absent}
    return bool(blind(groups) or lacked - waiting)


def is_ahead(groups: Iterable[Group], rank: int, idle: set[int], dump: Dump) -> bool:
    """Whether a rank that waits for nothing has completed what nobody else has.

    Then its dump was made later than theirs.  ``idle``: all that wait for nothing, of whom
    others may have dumped later, too.
    """
    found = False
    last = status_by_name(dump)
    for group in groups:
        name, ranks = group.key
        others = [p.collectives for r, p in group.parts.items() if r not in idle]
        shown = [c for c in others if c is not None]
        done = max((c.pending for c in shown), default=0)
        if any(c.pending < done for c in shown):
            return False  # another one has completed more, too
        if group.has_p2p or rank not in ranks or name not in last:
            continue
        entered, completed = last[name]
        found |= entered == completed and any(c.waits_for_all(completed) for c in shown)
    return found


def _absent(group: Group, part: Part) -> Iterator[set[int]]:
    """Of each call that is not complete the group ranks that have not come to it."""
    c = part.collectives
    # What another has completed holds nobody up.
    first = max(group.complete, 0 if c is None else c.pending)
    if c is not None and first < c.end:
        ranks = range(len(group.key[1]))
        came = {p.rank for p in group.parts.values() if p.collectives and p.collectives.end > first}
        came |= {p.rank for p in group.parts.values() if (p.position or 0) > first}
        yield set(ranks) - came
    t = part.transfers
    if t is None:
        return
    for send, peer, rows, done in by_peer(t):
        if done < len(rows):
            other = next((p for p in group.parts.values() if p.rank == peer), None)
            back = () if other is None or other.transfers is None else by_peer(other.transfers)
            came_ = any(s != send and x == part.rank and n < len(r) for s, x, r, n in back)
            yield set() if came_ else {peer}


def status_by_name(dump: Dump) -> dict[str, tuple[int, int]]:
    """Group name -> numbers of the newest call and of the newest that is complete.

    Names and ids both rise as groups are made.
    """
    by_id = {i: name for i, (name, _) in zip(dump.pg_ids, dump.groups_seen, strict=True)}
    names = {g.name for g in dump.groups.values()}
    known = {i: name for i, name in by_id.items() if i in dump.status}
    if all(map(_is_number, (*names, *dump.status, *known, *known.values()))):
        if {"0"} <= names & dump.status.keys():
            known.setdefault("0", "0")  # the default group is the first
        known |= _between(sorted(map(int, dump.status)), sorted(map(int, names)), known)
    return {name: dump.status[i] for i, name in known.items()}


def _is_number(text: str) -> bool:
    """Whether it is a number as PyTorch writes it, and the same when written again."""
    number = whole(text)
    return number is not None and number >= 0 and str(number) == text


def _between(ids: list[int], names: list[int], known: dict[str, str]) -> dict[str, str]:
    """Pairs between those that are known, where there are as many of both."""
    found: dict[str, str] = {}
    pairs = sorted((int(i), int(name)) for i, name in known.items())
    edges = [(-1, -1), *pairs, (max(ids, default=0) + 1, max(names, default=0) + 1)]
    for (i, name), (next_i, next_name) in pairwise(edges):
        some = ids[bisect_right(ids, i) : bisect_left(ids, next_i)]
        called = names[bisect_right(names, name) : bisect_left(names, next_name)]
        if len(some) == len(called):
            found |= zip(map(str, some), map(str, called), strict=True)
    return found


def forget_unplaced(groups: Iterable[Group], short: set[int]) -> None:
    """Leave out sends and receives of which nobody knows which ones of the other side they meet.

    ``short``: ranks whose rings begin with what is open.  Where such a ring shows nothing of
    a pair, or those of both sides nothing that is complete, older ones have left it.  So they
    may have where it shows more that is open, and nothing that is complete, than the other
    side, which waits, too: who does not see what is complete looks like that.
    """
    groups = list(groups)
    waiting = {rank for g in groups for rank, p in g.parts.items() if p.waits}
    for group in groups:
        mine = {p.rank for rank, p in group.parts.items() if rank in short}
        held = {p.rank for rank, p in group.parts.items() if rank in waiting}
        #: (sender, receiver) -> by member, (rows, how many of them are complete)
        lanes: dict[tuple[int, int], dict[int, tuple[Int64, int]]] = {}
        for p in group.parts.values() if mine else ():
            for send, peer, rows, done in () if p.transfers is None else by_peer(p.transfers):
                pair = (p.rank, peer) if send else (peer, p.rank)
                lanes.setdefault(pair, {})[p.rank] = (rows, done)
        left_out: dict[int, list[int]] = {}
        for pair, sides in lanes.items():
            for rank, rows in _unplaced(pair, sides, mine, held):
                left_out.setdefault(rank, []).extend(rows.tolist())
        for p in group.parts.values():
            if p.rank in left_out and (t := p.transfers) is not None:
                p.transfers = t.only(~np.isin(np.arange(len(t.sig)), left_out[p.rank]))


def _unplaced(
    pair: tuple[int, int],
    sides: dict[int, tuple[Int64, int]],
    short: set[int],
    waiting: set[int],
) -> list[tuple[int, Int64]]:
    """Rows of members that cannot be placed."""
    none = [x for x in pair if x in short and not (x in sides and sides[x][1])]
    if len(none) == 2 or any(x not in sides for x in none):
        return [(x, rows) for x, (rows, _) in sides.items()]
    found = []
    for x in none:
        other = pair[1] if x == pair[0] else pair[0]
        rows, done = sides.get(other, (np.empty(0, np.int64), 0))
        if other in waiting:
            found.append((x, sides[x][0][len(rows) - done :]))
    return found


def by_peer(t: Transfers) -> Iterator[tuple[bool, int, Int64, int]]:
    """(is a send, peer, rows in order, how many at the front are complete)."""
    key = t.peer.astype(np.int64) * 2 + t.send
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        rows = order[start:end]
        waiting = np.flatnonzero(~t.done[rows])
        done = int(waiting[0]) if len(waiting) else len(rows)
        yield bool(t.send[rows[0]]), int(t.peer[rows[0]]), rows, done


def trust_peers(group: Group, part: Part) -> None:
    """Of a rank that does not see completion: complete is what is so for the other side.

    Where it is not known which ones meet, all are, and what the other side waits in comes later.
    """
    if part.transfers is None:
        return
    for send, peer, rows, done in by_peer(part.transfers):
        if from_first(group, part, peer):
            other = next(p.transfers for p in group.parts.values() if p.rank == peer)
            lanes = () if other is None else by_peer(other)
            done = max([done, *(n for s, x, _, n in lanes if s != send and x == part.rank)])
            part.transfers.done[rows[:done]] = True
        else:
            part.transfers.done[rows] = True


def from_first(group: Group, part: Part, peer: int) -> bool:
    """Whether both dumps show all that the two have sent and received in the group."""
    sides = [p.transfers for p in group.parts.values() if p.rank in (part.rank, peer)]
    return all(t is not None and t.from_first for t in sides) and len(sides) == 2
