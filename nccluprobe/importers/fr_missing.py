"""Ranks of which nobody knows where they were, and who of them holds up the others.

A dump may be missing because its rank died, or because nobody copied it.  Each is tried:
were it away, and the others without a dump with their peers, would all that is open wait?
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from nccluprobe.importers.fr_dump import Dump
from nccluprobe.importers.fr_groups import Group, Part, blind, by_peer
from nccluprobe.importers.fr_job import UNDEFINED, GroupKey
from nccluprobe.match.model import SIG_LOST

_Key = tuple[Hashable, ...]
#: Kind and size of groups that run one program.
_Program = tuple[Hashable, int]


@dataclass
class _Call:
    """The oldest call that is open in one lane: a group's collectives, or sends of a pair."""

    group: GroupKey
    #: The same of groups that run one program.
    program: _Program
    #: Of a collective its number; of sends and receives the places of the two in the group.
    place: tuple[int, ...]
    members: set[int]
    came: set[int] = field(default_factory=set)
    #: What those that came take it for.
    signatures: set[int] = field(default_factory=set)

    @property
    def key(self) -> _Key:
        return (self.group, *self.place)

    @property
    def kind(self) -> _Key:
        """The same in groups that run one program."""
        return (self.program, *self.place)

    @property
    def is_collective(self) -> bool:
        return len(self.place) == 1


class Standing:
    """Where all ranks stand: the oldest call of each that is not complete.

    ``unknown``: ranks of which nobody knows; ``short``: those whose rings begin with what is
    open, so that they may wait for something older.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        unknown: set[int],
        short: set[int],
        described: Mapping[GroupKey, str] = MappingProxyType({}),
    ) -> None:
        groups = list(groups)
        self.unknown = unknown
        self.short = short
        self.calls: dict[_Key, _Call] = {}
        self.oldest: dict[int, _Key] = {}
        records: dict[int, int] = {}
        for group in groups:
            for rank, part in group.parts.items():
                for record, call in _open_calls(group, part):
                    known = self.calls.setdefault(call.key, call)
                    known.came.add(rank)
                    known.signatures |= call.signatures
                    if record < records.get(rank, record + 1):
                        records[rank], self.oldest[rank] = record, call.key
        self.waiting = self.oldest.keys() - unknown - short
        #: Ranks that may wait for each other in what no dump tells of.
        self.hidden, self.whole = _hidden(groups, unknown, described)
        self._passed = _passed(groups)
        #: Of those that nobody knows the calls that they may stand in, with others.
        self.may_stand = {
            r: {k for k in {*self.oldest.values()} if self._may(r, k)} for r in unknown
        }
        #: And whom they may wait for in sends and receives, as those of their place do elsewhere.
        self.partners = {r: self._partners(r, groups) for r in unknown}

    def _may(self, rank: int, key: _Key) -> bool:
        """Whether a rank may stand in a call with one that does, and that runs the same program.

        All that this one has completed the rank has, too: nothing of that is open.
        """
        call = self.calls[key]
        if not call.is_collective or rank not in call.members or rank in call.came:
            return False
        open_ = [c for c in self.calls.values() if rank in c.members and c.is_collective]
        with_ = [r for r in call.came if self.oldest.get(r) == key]
        return any(
            all(self._passed.get((r, c.program), 0) <= c.place[0] for c in open_) for r in with_
        )

    def _partners(self, rank: int, groups: Iterable[Group]) -> set[int]:
        found: set[int] = set()
        standing = [(r, self.calls[key]) for r, key in self.oldest.items()]
        for g in groups:
            ranks = g.key[1]
            if not g.has_p2p or rank not in ranks:
                continue
            mine = ranks.index(rank)
            for other, call in standing:
                if call.is_collective or call.program != _program(g):
                    continue
                if call.group[1][mine] == other:
                    peer = ranks[sum(call.place) - mine]
                    if self.oldest.get(peer) != (g.key, *call.place):
                        found.add(peer)
        return found

    @property
    def away(self) -> set[int]:
        """Ranks that have not come to what is open, and wait for nothing themselves."""
        lacks = {r for c in self.calls.values() for r in c.members - c.came}
        return lacks - self.oldest.keys() - self.unknown

    @property
    def disagree(self) -> bool:
        """Whether some take what is open for another call than others do."""
        return any(len(c.signatures - {SIG_LOST}) > 1 for c in self.calls.values())

    @property
    def lacked(self) -> set[int]:
        """Who has not come to the oldest call of another one, where alike groups lack somebody."""
        calls = [self.calls[self.oldest[r]] for r in self.oldest.keys() - self.unknown]
        full = {c.kind for c in calls if c.members == c.came}
        return {r for c in calls if c.kind not in full for r in c.members - c.came}

    def gone_together(self, ranks: set[int]) -> bool:
        """Whether these are what one call lacks, or all ranks of a group."""
        calls = [self.calls[key] for key in self.oldest.values()]
        return ranks in self.whole or any(c.members - c.came == ranks for c in calls)

    def explains(self, away: set[int], seen: bool = False) -> bool:
        """Whether all that is open waits for these ranks, be it through others.

        Those that left no dump may stand wherever some do that run the same program; ``seen``:
        in calls that dumps tell of only.
        """
        at = {r: key for r, key in self.oldest.items() if r not in away}
        held = away | self.short
        while True:
            stuck = {k for k, c in self.calls.items() if _waits(k, c, held, at)}
            found = held | {r for r, key in at.items() if key in stuck}
            found |= {r for r, keys in self.may_stand.items() if keys & stuck}
            if not seen:
                found |= {r for r, peers in self.partners.items() if peers & held}
                found = found.union(*(some for some in self.hidden if some & held))
            if found == held:
                return self.waiting <= held
            held = found


def _waits(key: _Key, call: _Call, held: set[int], at: dict[int, _Key]) -> bool:
    """Whether a call waits for somebody who is held up, and not by this call."""
    return any(r not in call.came or at.get(r) != key for r in call.members & held)


def _hidden(
    groups: Iterable[Group], unknown: set[int], described: Mapping[GroupKey, str]
) -> tuple[list[set[int]], list[set[int]]]:
    """Of the unknown those that may wait for each other in what no dump tells of.

    In sends and receives; or in a group of a kind in which they are in none that dumps tell of,
    as all others are.  And those that are all of such a group.
    """
    lanes = {(_program(g), *pair) for g in groups for pair in _pairs(g)}
    found = [
        {g.key[1][a], g.key[1][b]} & unknown
        for g in groups
        for program, a, b in lanes
        if g.has_p2p and program == _program(g)
    ]
    kinds: dict[tuple[str, int], set[int]] = {}
    for (_, ranks), desc in described.items():
        if desc not in ("", UNDEFINED) and len(ranks) > 1:
            kinds.setdefault((desc, len(ranks)), set()).update(ranks)
    known = set().union(*kinds.values()) - unknown
    rest = [(size, unknown - some) for (_, size), some in kinds.items() if known <= some]
    found += [some for _, some in rest]
    return [some for some in found if len(some) > 1], [x for size, x in rest if len(x) == size]


def _program(group: Group) -> _Program:
    return group.desc or group.key, len(group.key[1])


def _pairs(group: Group) -> Iterator[tuple[int, int]]:
    """Places of those that send to each other in a group."""
    for part in group.parts.values():
        if part.transfers is not None:
            yield from ((part.rank, peer) for peer in {*part.transfers.peer.tolist()})


def _passed(groups: Iterable[Group]) -> dict[tuple[int, _Program], int]:
    """Number of a rank's first collective in groups of a kind that is not complete."""
    found: dict[tuple[int, _Program], int] = {}
    for g in groups:
        for rank, part in g.parts.items():
            c = part.collectives
            at = part.position if c is None else c.pending
            if at is not None:
                kind = (rank, _program(g))
                found[kind] = max(found.get(kind, 0), at)
    return found


def suspects(
    groups: Iterable[Group],
    missing: set[int],
    telling: set[int],
    short: set[int],
    described: Mapping[GroupKey, str] = MappingProxyType({}),
) -> set[int]:
    """Of the ranks of which nobody knows where they were, those that explain what others wait in.

    ``missing``: they left no dump; ``telling``: something says by itself that they are odd,
    as they came late, or their file is cut short.
    """
    groups = list(groups)
    standing = Standing(groups, missing | telling, short, described)
    others = blind(groups) | standing.away
    odd = standing.lacked & telling
    if odd and (missing or standing.explains(odd | others)):
        return odd
    if others or standing.disagree:
        return set()
    return _dead(standing, standing.lacked & missing, missing)


def _dead(standing: Standing, lacked: set[int], missing: set[int]) -> set[int]:
    """Of those that left no dump and are waited for, who must have died.

    The dumps of others may be missing because nobody copied them: such a rank is named where
    without it nothing explains the rest.  Where one of several would do, nobody knows which, or
    whether it was all.  They are named where all that left no dump are waited for, and are gone
    together, or one or two of them would do: no dump is missing for other reasons then.
    """
    if not standing.explains(lacked, seen=True):
        return set()
    needed = {r for r in lacked if not standing.explains(lacked - {r})}
    suffice = standing.explains(needed)
    spare = len(lacked - needed)
    few = spare < 2 or (spare == 2 and not suffice)
    if lacked == missing and (standing.gone_together(missing) or few):
        return lacked
    return needed if suffice else set()


def is_hollow(dump: Dump) -> bool:
    """Whether a dump holds no call, while its status has calls of several groups as open.

    It says no more than a file that is cut short.
    """
    return len(dump) == 0 and sum(made > done for made, done in dump.status.values()) > 1


def _open_calls(group: Group, part: Part) -> Iterator[tuple[int, _Call]]:
    """Calls that are not complete, and their record numbers."""
    ranks, program = group.key[1], _program(group)
    c = part.collectives
    # What another has completed holds nobody up.
    first = max(group.complete, 0 if c is None else c.pending)
    if c is not None and first < c.end:
        at = first - c.base
        came = {ranks[p.rank] for p in group.parts.values() if (p.position or 0) > first}
        call = _Call(group.key, program, (first,), set(ranks), came, {int(c.sig[at])})
        yield int(c.record[at]), call
    if part.transfers is None:
        return
    for send, peer, rows, done in by_peer(part.transfers):
        if done < len(rows):
            pair = (part.rank, peer) if send else (peer, part.rank)
            call = _Call(group.key, program, pair, {ranks[part.rank], ranks[peer]})
            yield int(part.transfers.record[rows[done]]), call
