"""Finding places for faults in a program, and what is true of a fault."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from model.ops import Call, Host, Instruction, Op, Program


@dataclass
class Truth:
    """What is broken.

    ``unnamed``: naming nobody is right as well (two ranks disagree).
    ``missing``: ranks of the new communicator that have to be told where no
    process may be blamed.  ``blocks``: somebody must hang by it.
    """

    kind: str
    types: frozenset[str]
    culprits: frozenset[int]
    unnamed: bool = False
    blocks: bool = True
    missing: frozenset[int] | None = None
    #: The calls show it, even when none is open.
    shown: bool = False
    #: Names that are right, too (each a whole set).
    also: list[frozenset[int]] = field(default_factory=list)
    note: str = ""
    #: The one call that shows it, where it is not made a second time.
    call: Op | None = None


class NoPlace(Exception):
    """The program has no place for this fault."""


Place = tuple[int, int, int]  # rank, thread, index


@dataclass
class Breaker:
    """Helps to find places in a program."""

    program: Program
    rng: random.Random
    #: (rank, name) -> members, as global ranks.
    members: dict[tuple[int, str], list[int]]
    #: Collectives that were run: (hash, number), and how many ranks they had.
    slots: list[tuple[int, int, int]]

    def code(self, place: Place) -> list[Instruction]:
        return self.program.code[place[0]][place[1]]

    def places(self, fit: Callable[[int, Instruction], bool]) -> list[Place]:
        return [
            (r, t, i)
            for r, threads in enumerate(self.program.code)
            for t, code in enumerate(threads)
            for i, what in enumerate(code)
            if fit(r, what)
        ]

    def place(self, fit: Callable[[int, Instruction], bool]) -> Place:
        found = self.places(fit)
        if not found:
            raise NoPlace
        return self.rng.choice(found)

    def size(self, rank: int, op: Op) -> int:
        return len(self.members[rank, op.comm])

    def collective(self, at_least: int = 2) -> tuple[Place, Op, list[int]]:
        """A single collective that is run by several ranks."""
        place = self.place(
            lambda r, what: (
                isinstance(what, Call)
                and not what.op.p2p
                and what.op.count > 0
                and self.size(r, what.op) >= at_least
            )
        )
        what = self.code(place)[place[2]]
        assert isinstance(what, Call)
        return place, what.op, self.members[place[0], what.op.comm]

    def put(self, place: Place, *what: Instruction) -> None:
        self.code(place)[place[2] : place[2] + 1] = what

    def away(self) -> Host:
        """A thread that never comes back, as seen from outside."""
        return self.rng.choice(
            [
                Host(None, "syscall", "futex"),
                Host(None, "syscall", "read"),
                Host(None, "syscall", "poll"),
                Host(None, "running"),
                Host(None, "uninterruptible"),
            ]
        )
