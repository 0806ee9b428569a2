"""The calls that a finding rests on, taken from the traces again.

``Evidence`` is told which endpoints matter and which of their calls; it is then
given every line of every trace and keeps what is to be shown, and no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

#: Newest calls kept per endpoint, and per process on other communicators.
_NEWEST = 8
_ELSEWHERE = 4


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
    around: dict[int, dict[str, Any]] = field(default_factory=dict)
    newest: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_NEWEST))
    elsewhere: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_ELSEWHERE))

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
        if "peer" not in line and isinstance(order, int) and self.first <= order <= self.last:
            self.around[order] = line
        self._keep(self.newest, line)

    @staticmethod
    def _keep(into: deque[dict[str, Any]], line: dict[str, Any]) -> None:
        """A call replaces the enter line that told of it before."""
        at = (line.get("thread"), line.get("t"))
        for i, known in enumerate(into):
            if (known.get("thread"), known.get("t")) == at:
                into[i] = line
                return
        into.append(line)


def _sound(line: dict[str, Any]) -> bool:
    """Whether what is counted and sorted by is numbers, as in any trace that is not broken."""
    return all(
        isinstance(line.get(key), int | None) for key in ("t", "ord", "comm", "mono", "unix")
    )


class Evidence:
    """All endpoints of one communicator; made from the lines of their traces.

    ``places``: (source, communicator id) -> (rank, what makes a comm_seq of an
    ordinal), as an analysis has found them; who has no place is shown by its
    trace alone.
    """

    def __init__(
        self,
        comm_hash: str,
        instance: int,
        slots: tuple[int, int],
        places: Mapping[tuple[int, int], tuple[int, int]],
    ) -> None:
        self._hash = comm_hash
        self._instance = instance
        self._slots = slots
        self._places = places
        self._of: dict[int, dict[int, Wanted]] = {}
        self._shift: dict[int, int] = {}

    @property
    def wanted(self) -> list[Wanted]:
        """The endpoints, by rank."""
        found = [w for mine in self._of.values() for w in mine.values()]
        return sorted(found, key=lambda w: (w.rank, w.source))

    def feed(self, source: int, lines: Iterable[bytes]) -> None:
        """Take lines of one trace, in file order; bad ones were counted by the analysis."""
        mine = self._of.setdefault(source, {})
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
            kind = line.get("kind")
            if kind in ("call", "enter"):
                for w in mine.values():
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
        if not isinstance(number, int) or number in self._of[source]:
            return
        if line.get("hash") != self._hash or line.get("instance") != self._instance:
            return
        rank, offset = self._places.get((source, number), (line.get("comm_rank"), 0))
        if isinstance(rank, int):
            first, last = (seq - offset for seq in self._slots)
            shift = self._shift.get(source, 0)
            self._of[source][number] = Wanted(source, number, rank, first, last, offset, shift)
