"""Correct programs, each beside a fault that looks like it: nothing is to be said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from conformance.edits import body, paired, prefix, program
from conformance.program import OTHER, Call, End, Exit, Program, Step, Sync, Work, call, synced
from conformance.truth import SILENCE, Case
from nccluprobe.nccl.api import Api, Role


def twins(api: Api, n: int) -> Iterator[Case]:
    """Correct programs of a collective with ``n`` ranks."""

    def case(variant: str, build: Callable[[], Program]) -> Case:
        return Case(api.name, "", variant, n, build, SILENCE)

    for sync in (True, False):
        how = "sync" if sync else "ahead"
        yield case(f"plain {how}", partial(program, api, n, body(api), {}, sync))
        yield case(f"groups {how}", partial(program, api, n, paired(body(api)), {}, sync))
    yield case("exits one by one", lambda: _ending(api, n, destroy=False))
    yield case("destroys and exits", lambda: _ending(api, n, destroy=True))
    yield case("all pass count 0", lambda: _zeros(api, n))
    yield case("both communicators", lambda: _both(api, n))
    yield case("two streams in different order", lambda: _streams(api, n))
    if n == 2:
        yield case("a thousand calls ahead", lambda: _far_ahead(api, n))
    if api.has(Role.OP):
        # A handle that rank 1 made of the same reduction: NCCL sees no difference.
        yield replace(case("custom reductions", lambda: _other_op(api, n)), passes=True)
    if api.same_as is not None:
        yield case("two spellings", lambda: _spellings(api, n))


def _ending(api: Api, n: int, destroy: bool) -> Program:
    ranks: list[list[Step]] = []
    for rank in range(n):
        end: list[Step] = [End("world"), End("other")] if destroy else []
        ranks.append([*prefix(api), *body(api), Sync(), Work(0.3 * rank), *end, Exit(0)])
    return Program(ranks)


def _zeros(api: Api, n: int) -> Program:
    steps = body(api)
    steps[3:5] = [call(api.name, count=0)] * 2
    return program(api, n, steps, {}, True)


def _both(api: Api, n: int) -> Program:
    steps: list[Step] = []
    for i, step in enumerate(body(api)):
        assert isinstance(step, Call)
        steps.append(replace(step, comm=OTHER) if i % 2 else step)
    return program(api, n, steps, {}, True)


def _streams(api: Api, n: int) -> Program:
    """Nothing on the device or the host makes one wait for the other."""
    order = [call(api.name, count=70), call(api.name, OTHER, stream=1, count=71)]
    ranks = [
        [*prefix(api), *(order[::-1] if rank % 2 else order), Sync(), *synced(order)]
        for rank in range(n)
    ]
    return Program(ranks)


def _far_ahead(api: Api, n: int) -> Program:
    calls: list[Step] = [call(api.name) for _ in range(1100)]
    ranks = [[*prefix(api), *calls, Sync()] for _ in range(n)]
    ranks[1].insert(len(prefix(api)), Work(1.8))
    return Program(ranks)


def _other_op(api: Api, n: int) -> Program:
    """Handles of ncclRedOpCreatePreMulSum are numbers of one rank: not to be compared."""

    def custom(s: list[Step]) -> list[Step]:
        return [x.but(op="custom") if isinstance(x, Call) and "op" in x.args else x for x in s]

    made = program(api, n, body(api), {}, False)
    made.ranks[1] = custom(made.ranks[1])
    return made


def _spellings(api: Api, n: int) -> Program:
    made = program(api, n, body(api), {}, False)
    made.ranks[1] = [
        replace(x, name=api.canonical) if isinstance(x, Call) and x.name == api.name else x
        for x in made.ranks[1]
    ]
    return made
