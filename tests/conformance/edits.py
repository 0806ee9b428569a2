"""Programs of collectives and what can be broken in them.

A ``Break`` says who breaks it and at which call of the body; its methods are
edits, which make a broken rank's calls from the healthy ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from conformance.program import (
    OTHER,
    Call,
    Group,
    Program,
    Step,
    Stop,
    Sync,
    call,
    same,
    synced,
)
from nccluprobe.nccl.api import Api

#: Calls of the body, and calls on each communicator before the body.
LENGTH, BEFORE = 16, 2
#: Calls of the body that are broken, in turn; all of them of the operation itself.
PLACES = (4, 6, 10)

Edit = Callable[[list[Step]], list[Step]]


def prefix(api: Api) -> list[Step]:
    """A healthy beginning: nothing of the body is a first call."""
    return synced(
        [
            call("ncclAllReduce"),
            call("ncclAllReduce", OTHER),
            call(api.name, count=500),
            call(api.name, OTHER, count=501),
        ]
    )


def body(api: Api, uniform: bool = False) -> list[Step]:
    """Calls that can be told apart, or all the same."""
    if uniform:
        return [call(api.name) for _ in range(LENGTH)]
    return [
        call("ncclAllGather", count=2000 + i) if i % 3 == 2 else call(api.name, count=1000 + i)
        for i in range(LENGTH)
    ]


def paired(steps: list[Step]) -> list[Step]:
    """The same calls, two to a group."""
    calls = [s for s in steps if isinstance(s, Call)]
    return [Group(tuple(calls[i : i + 2])) for i in range(0, len(calls), 2)]


def program(api: Api, n: int, steps: list[Step], broken: dict[int, Edit], sync: bool) -> Program:
    """All ranks do ``steps``, the broken ones what their edit makes of them."""
    ranks = []
    for rank in range(n):
        own = broken[rank](list(steps)) if rank in broken else list(steps)
        own = synced(own) if sync else [*own, Sync()]
        ranks.append(prefix(api) + own)
    return Program(ranks)


@dataclass(frozen=True)
class Break:
    """Who breaks a program of ``api`` on ``n`` ranks, and at which call of the body."""

    api: Api
    n: int

    @property
    def rank(self) -> int:
        """Not always the same one; never 0, which is the root."""
        return 1 + self.api.id % (self.n - 1)

    @property
    def second(self) -> int:
        """Another one."""
        return 1 + self.rank % (self.n - 1)

    @property
    def at(self) -> int:
        return PLACES[self.api.id % len(PLACES)]

    @property
    def seq(self) -> int:
        """Number of the broken call on its communicator."""
        return BEFORE + self.at

    def _call(self, s: list[Step]) -> Call:
        found = s[self.at]
        assert isinstance(found, Call)
        return found

    def until(self, stop: Step) -> Edit:
        """Does what is before the broken call, waits for it, and then this."""
        return lambda s: [*s[: self.at], Sync(), stop]

    def skip(self, s: list[Step]) -> list[Step]:
        return s[: self.at] + s[self.at + 1 :]

    def swap(self, s: list[Step]) -> list[Step]:
        """The two calls after the place."""
        i = self.at
        return [*s[: i + 1], s[i + 2], s[i + 1], *s[i + 3 :]]

    def change(self, **args: object) -> Edit:
        return lambda s: [*s[: self.at], self._call(s).but(**args), *s[self.at + 1 :]]

    def elsewhere(self, s: list[Step]) -> list[Step]:
        """On the other communicator."""
        return [*s[: self.at], replace(self._call(s), comm=OTHER), *s[self.at + 1 :]]

    def open_group(self, s: list[Step]) -> list[Step]:
        return [*s[: self.at], Sync(), Group((self._call(s),), ended=False)]

    def queued(self, inside: str) -> Edit:
        """It goes away with a call on the device that the others come to later."""
        later = call(self.api.name, OTHER, count=3000)
        return lambda s: [*s[: self.at], Sync(), later, Stop(inside)]

    def extra(self, s: list[Step]) -> list[Step]:
        return [*s[: self.at], call(self.api.name, count=777), *s[self.at :]]

    def in_group(self, drop: bool) -> Edit:
        """The first call of a group left out, or the calls turned round."""

        def edit(s: list[Step]) -> list[Step]:
            at = s[self.at // 2]
            assert isinstance(at, Group)
            calls = at.calls[1:] if drop else at.calls[::-1]
            return [*s[: self.at // 2], Group(calls), *s[self.at // 2 + 1 :]]

        return edit

    def first(self) -> Program:
        """It stops before its first call."""
        ranks = same(self.n, synced(body(self.api)))
        ranks[self.rank] = [Stop()]
        return Program(ranks)

    def deep(self) -> Program:
        """It stops, and the others make more calls than the device takes."""
        steps = prefix(self.api) + [call(self.api.name) for _ in range(self.at)]
        ranks = same(self.n, [*steps, *(call(self.api.name) for _ in range(1100)), Sync()])
        ranks[self.rank] = [*steps, Sync(), Stop()]
        return Program(ranks)

    def crossed(self, inverted: set[int], sync: bool) -> Program:
        """These ranks use the two communicators in the other order."""
        name = self.api.name
        order: list[Step] = [call(name, count=70), call(name, OTHER, count=71)]
        ranks = []
        for rank in range(self.n):
            own = order[::-1] if rank in inverted else order
            ranks.append(prefix(self.api) + (synced(own) if sync else [*own, Sync()]))
        return Program(ranks)

    def ring(self) -> Program:
        """Communicators of two ranks in a ring; each waits for the next one."""
        n, name = self.n, self.api.name
        comms: dict[str, tuple[int, ...]] = {f"ring{k}": (k, (k + 1) % n) for k in range(n)}
        ranks: list[list[Step]] = []
        for k in range(n):
            before, mine = (k - 1) % n, k
            warm = [call(name, f"ring{i}") for i in sorted((before, mine))]
            order = [call(name, f"ring{i}", count=70) for i in (mine, before)]
            ranks.append(synced([*warm, *order]))
        return Program(ranks, comms)
