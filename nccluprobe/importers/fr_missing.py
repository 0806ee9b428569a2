"""Ranks of which nobody knows where they were, and who of them holds up the others.

A dump may be missing because its rank died, or because nobody copied it.  Each is tried:
were it away, and the others without a dump with their peers, would all that is open wait?
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from nccluprobe.importers.fr_dump import Dump
from nccluprobe.importers.fr_groups import Group, Part, blind, by_peer
from nccluprobe.match.model import SIG_LOST

_Key = tuple[Hashable, ...]


@dataclass
class _Call:
    """The oldest call that is open in one lane: a group's collectives, or sends of a pair."""

    members: set[int]
    #: The same in groups that run one program.
    kind: _Key
    came: set[int] = field(default_factory=set)
    #: What those that came take it for.
    signatures: set[int] = field(default_factory=set)
    #: When the first of those that came made it, unix ns.
    t: int = 0


class Standing:
    """Where all ranks stand: the oldest call of each that is not complete.

    ``unknown``: ranks of which nobody knows; ``short``: those whose rings begin with what is
    open, so that they may wait for something older.
    """

    def __init__(self, groups: Iterable[Group], unknown: set[int], short: set[int]) -> None:
        self.unknown = unknown
        self.short = short
        self.calls: dict[_Key, _Call] = {}
        self.oldest: dict[int, _Key] = {}
        records: dict[int, int] = {}
        for group in groups:
            for rank, part in group.parts.items():
                for record, key, call in _open_calls(group, part):
                    known = self.calls.setdefault(key, call)
                    known.came.add(rank)
                    known.signatures |= call.signatures
                    known.t = min(known.t, call.t)
                    if record < records.get(rank, record + 1):
                        records[rank], self.oldest[rank] = record, key
        #: What each of those that nobody knows stands at, if it is with its peers.
        self.with_peers: dict[int, _Key] = {}
        for key, call in sorted(self.calls.items(), key=lambda x: x[1].t):
            for rank in call.members & unknown:
                self.with_peers.setdefault(rank, key)
        self.waiting = self.oldest.keys() - unknown - short

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

    def explains(self, away: set[int]) -> bool:
        """Whether all that is open waits for these ranks, be it through others."""
        at = {r: key for r, key in (self.with_peers | self.oldest).items() if r not in away}
        held = away | self.short
        while True:
            stuck = {k for k, c in self.calls.items() if _waits(k, c, held, at)}
            found = held | {r for r, key in at.items() if key in stuck}
            if found == held:
                return self.waiting <= held
            held = found


def _waits(key: _Key, call: _Call, held: set[int], at: dict[int, _Key]) -> bool:
    """Whether a call waits for somebody who is held up, and not by this call."""
    return any(r not in call.came or at.get(r) != key for r in call.members & held)


def suspects(
    groups: Iterable[Group], missing: set[int], telling: set[int], short: set[int]
) -> set[int]:
    """Of the ranks of which nobody knows where they were, those that explain what others wait in.

    ``missing``: they left no dump; ``telling``: something says by itself that they are odd,
    as they came late, or their file is cut short.
    """
    groups = list(groups)
    standing = Standing(groups, missing | telling, short)
    others = blind(groups) | standing.away
    odd = standing.lacked & telling
    if odd and (missing or standing.explains(odd | others)):
        return odd
    if others or standing.disagree:
        return set()
    lacked = standing.lacked & missing
    if lacked == missing and standing.explains(lacked):
        return lacked
    # Where some are missing whom nobody waits for, dumps are missing for other reasons.
    alone = {r for r in lacked if standing.explains({r})}
    if alone or not lacked or not standing.explains(lacked):
        # Each of several would do: one of them is at fault, and nobody knows which.
        return alone if len(alone) == 1 else set()
    return {r for r in lacked if not standing.explains(lacked - {r})}


def is_hollow(dump: Dump) -> bool:
    """Whether a dump holds no call, while its status has calls of several groups as open.

    It says no more than a file that is cut short.
    """
    return len(dump) == 0 and sum(made > done for made, done in dump.status.values()) > 1


def _open_calls(group: Group, part: Part) -> Iterator[tuple[int, _Key, _Call]]:
    """(record, place, call) of calls that are not complete."""
    ranks = group.key[1]
    like = (group.desc or group.key, len(ranks))
    c = part.collectives
    # What another has completed holds nobody up.
    first = max(group.complete, 0 if c is None else c.pending)
    if c is not None and first < c.end:
        at = first - c.base
        came = {ranks[p.rank] for p in group.parts.values() if (p.position or 0) > first}
        t = int(c.t[at])
        yield (
            int(c.record[at]),
            (group.key, first),
            _Call(set(ranks), (*like, first), came, {int(c.sig[at])}, t),
        )
    if part.transfers is None:
        return
    for send, peer, rows, done in by_peer(part.transfers):
        if done < len(rows):
            row = rows[done]
            pair = (part.rank, peer) if send else (peer, part.rank)
            t = int(part.transfers.t[row])
            call = _Call({ranks[part.rank], ranks[peer]}, (*like, *pair), t=t)
            yield int(part.transfers.record[row]), (group.key, *pair), call
