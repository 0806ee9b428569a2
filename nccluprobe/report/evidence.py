"""The calls that a finding rests on, taken from the traces again.

``Evidence`` is told which endpoints matter and which of their calls; it is then
given every line of every trace and keeps what is to be shown, and no more.  What
importers have read comes as such lines, too (``report.imported``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from nccluprobe.report.calls import clock

#: Newest calls kept per endpoint, and per process on other communicators.
_NEWEST = 8
_ELSEWHERE = 4
#: Sends and receives kept per direction and peer, before and after one in question.
_BEFORE, _AFTER, _LAST = 3, 2, 2

#: A send or receive: whether it is a send, rank of its peer, its number among those.
Op = tuple[bool, int, int]


@dataclass
class Wanted:
    """An endpoint whose calls are shown.

    ``first``, ``last``: ordinals of the collectives around the finding;
    ``offset``: what makes a comm_seq of an ordinal.  ``shift``: unix minus
    monotonic time of its host, ns.
    """

    source: int
    comm: int
    rank: int
    first: int
    last: int
    offset: int
    shift: int
    #: Whether its source tells when calls were made.
    timed: bool = True
    #: comm_seq of its first collective that is at hand.
    oldest: int | None = None
    around: dict[int, dict[str, Any]] = field(default_factory=dict)
    newest: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_NEWEST))
    elsewhere: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_ELSEWHERE))
    #: (is a send, peer) -> numbers of the sends and receives in question, with this peer.
    asked: Mapping[tuple[bool, int], frozenset[int]] = field(default_factory=dict)
    #: The calls around those, and the newest with the same peer.
    transfers: dict[Op, dict[str, Any]] = field(default_factory=dict)

    def when(self, line: dict[str, Any]) -> str:
        """UTC time of day of a call."""
        return clock(int(line.get("t") or 0) + self.shift) if self.timed else "-" * len(clock(0))

    def seq(self, line: dict[str, Any]) -> int | None:
        """comm_seq of a collective's line."""
        order = line.get("ord")
        return order + self.offset if isinstance(order, int) and "peer" not in line else None

    def take(self, line: dict[str, Any]) -> None:
        """Take a call or enter line of its process."""
        if line.get("comm") != self.comm:
            self._keep(self.elsewhere, line)
            return
        order = line.get("ord")
        if "peer" not in line and isinstance(order, int):
            at = order + self.offset
            self.oldest = at if self.oldest is None else min(at, self.oldest)
            if self.first <= order <= self.last:
                self.around[order] = line
        if self.asked and (op := op_of(line)) is not None:
            self._transfer(op, line)
        self._keep(self.newest, line)

    def _transfer(self, op: Op, line: dict[str, Any]) -> None:
        """Keep what is near to one in question, and the newest."""
        send, peer, order = op
        asked = self.asked.get((send, peer))
        if asked is None:
            return
        self.transfers[op] = line
        old = (send, peer, order - _LAST)
        if not any(n - _BEFORE <= old[2] <= n + _AFTER for n in asked):
            self.transfers.pop(old, None)

    @staticmethod
    def _keep(into: deque[dict[str, Any]], line: dict[str, Any]) -> None:
        """A call replaces the enter line that told of it before."""
        at = (line.get("thread"), line.get("t"))
        for i, known in enumerate(into):
            if (known.get("thread"), known.get("t")) == at:
                into[i] = line
                return
        into.append(line)


def op_of(line: dict[str, Any]) -> Op | None:
    """Which send or receive a line tells of; None: it is none."""
    peer, order = line.get("peer"), line.get("ord")
    if isinstance(peer, int) and isinstance(order, int):
        return line.get("api") == "ncclSend", peer, order
    return None


def _sound(line: dict[str, Any]) -> bool:
    """Whether what is counted and sorted by is numbers, as in any trace that is not broken."""
    return all(
        isinstance(line.get(key), int | None) for key in ("t", "ord", "comm", "mono", "unix")
    )


class Evidence:
    """All endpoints of one communicator; made from the lines of their traces.

    ``places``: (source, communicator id) -> (rank, what makes a comm_seq of an
    ordinal), as an analysis has found them; who has no place is shown by its
    trace alone.  ``asked``: rank -> (is a send, peer) -> numbers of sends and
    receives in question.  ``untimed``: sources that do not tell when calls were made.
    """

    def __init__(
        self,
        comm_hash: str,
        instance: int,
        slots: tuple[int, int],
        places: Mapping[tuple[int, int], tuple[int, int]],
        asked: Mapping[int, Mapping[tuple[bool, int], frozenset[int]]] | None = None,
        untimed: Collection[int] = (),
    ) -> None:
        self._hash = comm_hash
        self._instance = instance
        self._slots = slots
        self._places = places
        self._asked = asked or {}
        self._untimed = untimed
        self._of: dict[int, dict[int, Wanted]] = {}
        self._shift: dict[int, int] = {}

    @property
    def wanted(self) -> list[Wanted]:
        """The endpoints, by rank."""
        found = [w for mine in self._of.values() for w in mine.values()]
        return sorted(found, key=lambda w: (w.rank, w.source))

    def of(self, source: int) -> dict[int, Wanted]:
        """The endpoints of a source, by id of the communicator."""
        return self._of.setdefault(source, {})

    def feed(self, source: int, lines: Iterable[bytes]) -> None:
        """Take lines of one trace, in file order; bad ones were counted by the analysis."""
        mine = self.of(source)
        for raw in lines:
            is_call = b'"kind":"call"' in raw or b'"kind":"enter"' in raw
            if (is_call and not mine) or b'"kind":"coverage"' in raw:
                continue
            try:
                line = orjson.loads(raw)
            except orjson.JSONDecodeError:
                continue
            if not isinstance(line, dict) or not _sound(line):
                continue
            self.take(source, line)

    def take(self, source: int, line: dict[str, Any]) -> None:
        """Take one line."""
        kind = line.get("kind")
        if kind in ("call", "enter"):
            for w in self.of(source).values():
                w.take(line)
        elif kind == "clock":
            self._clock(source, line)
        elif kind == "comm":
            self._comm(source, line)

    def _clock(self, source: int, line: dict[str, Any]) -> None:
        mono, unix = line.get("mono"), line.get("unix")
        if isinstance(mono, int) and isinstance(unix, int):
            self._shift.setdefault(source, unix - mono)

    def _comm(self, source: int, line: dict[str, Any]) -> None:
        number = line.get("id")
        if not isinstance(number, int) or number in self.of(source):
            return
        if line.get("hash") != self._hash or line.get("instance") != self._instance:
            return
        rank, offset = self._places.get((source, number), (line.get("comm_rank"), 0))
        if isinstance(rank, int):
            first, last = (seq - offset for seq in self._slots)
            w = Wanted(source, number, rank, first, last, offset, self._shift.get(source, 0))
            w.asked = self._asked.get(rank, {})
            w.timed = source not in self._untimed
            self.of(source)[number] = w
