"""Faults that the canary can plant: their names, their text form, what they need.

``KIND:rank=R,at=N[,key=value...]``: rank R does KIND in step N (a request, with
``--serve``), counted from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nccluprobe import numerals
from nccluprobe.canary.errors import ArgumentError

DEFAULT_AT = 10


@dataclass(frozen=True)
class Kind:
    """One kind of fault: what it does and which values it takes beside rank and at."""

    does: str
    #: Further keys with their defaults; None: the next rank.
    values: dict[str, float | int | None] = field(default_factory=dict)
    #: What the planted call must be: any, a collective, one with a root, a reduction.
    target: str | None = None
    at: bool = True
    ranks: int = 2


KINDS: dict[str, Kind] = {
    "never": Kind("never enters the collective, and sleeps"),
    "late": Kind("enters the collective s seconds late", {"s": 2.0}),
    "api": Kind("calls another collective", target="collective"),
    "count": Kind("passes twice the count", target="collective"),
    "dtype": Kind("passes another datatype of the same width", target="collective"),
    "op": Kind("passes another reduction", target="reduction"),
    "root": Kind("passes another root", target="rooted"),
    "skip": Kind("leaves out one collective", target="collective"),
    "extra": Kind("makes one collective more", target="collective"),
    "unmatched_send": Kind("sends to a peer that does not receive", {"peer": None}),
    "order": Kind("uses two communicators in the other order"),
    "exit": Kind("leaves the process", {"code": 3}),
    "kill": Kind("is killed (SIGKILL)"),
    "stop": Kind("is stopped (SIGSTOP)"),
    "busy": Kind("computes for ever and makes no call"),
    "abort": Kind("aborts its communicator, and sleeps"),
    "wrong_rank": Kind("passes another's rank to the initialisation", {"as": None}, at=False),
    "subset_split": Kind("does not come to a split of the communicator"),
    "reconnect": Kind("aborts and reconnects, as all ranks do: no fault", ranks=1),
    "no_reconnect": Kind("takes part in a reconnect and never initialises"),
}


@dataclass(frozen=True)
class Fault:
    """Rank `rank` does `kind` in step `at`."""

    kind: str
    rank: int
    at: int
    values: dict[str, float | int]

    @property
    def target(self) -> str | None:
        return KINDS[self.kind].target

    def hits(self, rank: int, step: int) -> bool:
        return self.rank == rank and self.at == step


def parse(text: str, world: int) -> Fault:
    """A Fault of `text`; ArgumentError in one line for anything that makes no sense."""
    name, _, rest = text.partition(":")
    kind = KINDS.get(name)
    if kind is None:
        raise ArgumentError(f"--inject {text!r}: no kind {name!r}; give one of {', '.join(KINDS)}")
    allowed = ["rank", *(["at"] if kind.at else []), *kind.values]
    given: dict[str, float | int] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in allowed:
            raise ArgumentError(
                f"--inject {text!r}: {name} has no {key!r}; it takes {', '.join(allowed)}"
            )
        if key in given:
            raise ArgumentError(f"--inject {text!r}: {key} is given twice")
        given[key] = _number(text, key, value, isinstance(kind.values.get(key), float))
    if "rank" not in given and name != "reconnect":
        raise ArgumentError(f"--inject {text!r}: which rank? give {name}:rank=R,at=N")
    rank = int(given.pop("rank", 0))
    at = int(given.pop("at", DEFAULT_AT if kind.at else 0))
    for key, default in kind.values.items():
        given.setdefault(key, (rank + 1) % world if default is None else default)
    if given.get("code", 0) > 255:
        raise ArgumentError(f"--inject {text!r}: code={given['code']}: an exit code is 0 to 255")
    if world < kind.ranks:
        raise ArgumentError(
            f"--inject {text!r}: {name} needs {kind.ranks} ranks, there are {world}"
        )
    for key in ("rank", "peer", "as"):
        who = rank if key == "rank" else given.get(key, 0)
        if not 0 <= who < world:
            raise ArgumentError(f"--inject {text!r}: {key} {who}: ranks are 0 to {world - 1}")
    if rank in (given.get("peer"), given.get("as")):
        raise ArgumentError(f"--inject {text!r}: rank {rank} cannot do that with itself")
    return Fault(name, rank, at, given)


def parse_all(texts: Sequence[str], world: int) -> tuple[Fault, ...]:
    """All faults of a run."""
    return tuple(parse(text, world) for text in texts)


def _number(text: str, key: str, value: str, fraction: bool) -> float | int:
    number = numerals.decimal(value) if fraction else numerals.whole(value)
    if number is None or not 0 <= number < 1 << 31:
        what = "seconds" if fraction else "a whole number"
        raise ArgumentError(f"--inject {text!r}: {key}={value}: give {what}, 0 or more")
    return number
