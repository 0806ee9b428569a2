"""Communicators over all processes looked at: who is behind, by how much, in what.

Works on ``inspect`` lines, so that those of other nodes can be put in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from nccluprobe.nccl.enums import SEQ_NAMES

Line = dict[str, Any]


@dataclass(frozen=True)
class Member:
    """A rank of a communicator, and where it runs."""

    rank: int
    pid: int
    host: str
    seqs: tuple[int, ...] | None
    moving: bool
    async_error: int | None
    process: Line
    comm: Line


@dataclass(frozen=True)
class Lag:
    """A member that is behind the others in one function."""

    member: Member
    api: str
    calls: int
    by: int


@dataclass
class Group:
    """A communicator: all members that were seen."""

    hash: str
    nranks: int
    members: list[Member] = field(default_factory=list)

    @property
    def name(self) -> str | None:
        """The first name that a member has for it."""
        return next((m.comm["name"] for m in self.members if m.comm.get("name")), None)

    @property
    def missing(self) -> list[int]:
        """Ranks that no process looked at has."""
        seen = {m.rank for m in self.members}
        return [r for r in range(self.nranks) if r not in seen]

    @property
    def doubled(self) -> list[int]:
        """Ranks that several communicators with this hash have: they cannot be told apart."""
        return sorted(r for r, n in Counter(m.rank for m in self.members).items() if n > 1)

    @property
    def moving(self) -> bool:
        """Whether a counter moved while we looked."""
        return any(m.moving for m in self.members)

    @property
    def counted(self) -> list[Member]:
        """Members whose counters are known."""
        return [m for m in self.members if m.seqs is not None]

    def most(self) -> tuple[int, ...]:
        """The highest count of each function."""
        known = [m.seqs for m in self.counted if m.seqs is not None]
        return tuple(map(max, zip(*known, strict=True))) if known else ()

    def lags(self) -> list[Lag]:
        """Who is behind, the furthest first."""
        if self.doubled:
            return []
        most = self.most()
        found = []
        for member in self.counted:
            for api, mine, top in zip(SEQ_NAMES, member.seqs or (), most, strict=True):
                if mine < top:
                    found.append(Lag(member, f"nccl{api}", mine, top - mine))
        return sorted(found, key=lambda lag: (-lag.by, lag.member.rank))


def groups(lines: Iterable[Line]) -> list[Group]:
    """All communicators with a hash, those with a rank behind first."""
    found: dict[tuple[str, int], Group] = {}
    for line in lines:
        for comm in line.get("comms", ()):
            if comm.get("hash") is None:
                continue
            key = (comm["hash"], comm["nranks"])
            group = found.setdefault(key, Group(*key))
            seqs = comm.get("seqs")
            group.members.append(
                Member(
                    rank=comm["comm_rank"],
                    pid=line["pid"],
                    host=line["host"],
                    seqs=None if seqs is None else tuple(seqs),
                    moving=bool(comm.get("moving")),
                    async_error=comm.get("async_error"),
                    process=line,
                    comm=comm,
                )
            )
    for group in found.values():
        group.members.sort(key=lambda m: (m.rank, m.host, m.pid))
    return sorted(found.values(), key=lambda g: (not g.lags(), -g.nranks, g.hash))
