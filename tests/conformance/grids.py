"""Tensor- and data-parallel groups: a fault in one communicator, and who waits behind it.

Each rank is in one group of each kind.  All members of the broken group wait in
it, and their partners of the other groups wait for them: only the one that
broke it is to be named, whatever waits where.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from conformance.edits import Edit
from conformance.program import Call, Exit, Program, Step, Stop, Sync, call, synced
from conformance.truth import MISMATCH, MISSING, NOBODY, SHIFT, SILENCE, Case, Truth
from nccluprobe.nccl.api import Api

ROUNDS, BROKEN = 6, 3
#: Ranks of a tensor-parallel group.
WIDTH = {4: 2, 8: 4}


def groups(n: int) -> tuple[dict[str, tuple[int, ...]], list[tuple[str, str]]]:
    """Communicators, and each rank's two."""
    width = WIDTH[n]
    tp: dict[str, tuple[int, ...]] = {
        f"tp{g}": tuple(range(g * width, (g + 1) * width)) for g in range(n // width)
    }
    dp: dict[str, tuple[int, ...]] = {f"dp{k}": tuple(range(k, n, width)) for k in range(width)}
    return {**tp, **dp}, [(f"tp{r // width}", f"dp{r % width}") for r in range(n)]


def program(api: Api, n: int, sync: bool, broken: dict[int, Edit]) -> Program:
    """Two calls in the tensor-parallel group, one in the data-parallel one, in each round."""
    comms, own = groups(n)
    ranks: list[list[Step]] = []
    for rank, (tp, dp) in enumerate(own):
        steps = synced([call(api.name, tp), call(api.name, dp)])
        todo: list[Step] = []
        for i in range(ROUNDS):
            calls: list[Step] = [
                call(api.name, tp, count=1000 + i),
                call(api.name, tp, count=2000 + i),
                call(api.name, dp, count=3000 + i),
            ]
            todo += broken[rank](calls) if i == BROKEN and rank in broken else calls
        todo = synced(todo) if sync else [*todo, Sync()]
        gone = next((i for i, s in enumerate(todo) if isinstance(s, Stop | Exit)), len(todo))
        ranks.append([*steps, *todo[: gone + 1]])
    return Program(ranks, comms)


def _wrong(s: list[Step]) -> list[Step]:
    first = s[0]
    assert isinstance(first, Call)
    return [first.but(count=999), *s[1:]]


def cases(api: Api, n: int) -> Iterator[Case]:
    """Faults in a group of a grid of ``n`` ranks, and a twin that only looks like one."""
    if n not in WIDTH:
        return
    width = WIDTH[n]
    r = n - width + 1  # not the root of its groups
    tp, dp = groups(n)[1][r]
    who = frozenset({r})
    odd = who if width > 2 else NOBODY
    in_tp = Truth(who, (MISSING,), tp, 1 + 2 * BROKEN, why="the others of its group wait for it")
    in_dp = replace(in_tp, comm=dp, seq=1 + BROKEN)
    differs = replace(
        in_tp, blamed=odd, kinds=(MISMATCH, SHIFT), why="of two ranks either may be wrong"
    )

    def case(fault: str, variant: str, truth: Truth, edit: Edit) -> Case:
        def build(sync: bool = variant.endswith("sync")) -> Program:
            return program(api, n, sync, {r: edit})

        return Case(api.name, fault, variant, n, build, truth)

    def ends(stop: Step, at: int) -> Edit:
        return lambda s: [*s[:at], Sync(), stop]

    stops: tuple[tuple[str, str, Step], ...] = (
        ("missing call", "stop", Stop()),
        ("early exit", "code 1", Exit(1)),
    )
    for how in ("sync", "ahead"):
        for fault, name, stop in stops:
            yield case(fault, f"grid, {name} {how}", in_tp, ends(stop, 0))
            late = f"grid, {name} before the second group {how}"
            yield case(fault, late, in_dp, ends(stop, 2))
        yield case("missing call", f"grid, skip {how}", differs, lambda s: s[1:])
        yield case("extra call", f"grid, {how}", differs, lambda s: [_wrong(s)[0], *s])
        yield case("wrong count", f"grid, {how}", differs, _wrong)
        swapped = case("", f"grid, groups in another order, no deadlock {how}", SILENCE, _turned)
        yield swapped


def _turned(s: list[Step]) -> list[Step]:
    """Only this rank is in both groups, and nobody waits for it there meanwhile."""
    return [s[2], *s[:2]]
