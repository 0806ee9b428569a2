"""Correct programs of sends and receives: nothing is to be said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from conformance.pairs import BIG, SMALL, all_to_all, chain, ends, program, ring
from conformance.program import Exit, Program, Step, Sync, Work, call, group, recv, send, synced
from conformance.truth import SILENCE, Case
from nccluprobe.nccl.api import Api


def twins(api: Api, n: int) -> Iterator[Case]:
    """They hold both calls, so ncclSend stands for both."""
    if api.direction != "send":
        return

    def case(variant: str, build: Callable[[], Program]) -> Case:
        return Case(api.name, "", variant, n, build, SILENCE)

    for shape in (chain, ring, all_to_all):
        for sync in (True, False):
            for size, count in (("small", SMALL), ("big", BIG)):
                name = f"{shape.__name__.replace('_', ' ')} {size} {'sync' if sync else 'ahead'}"
                yield case(name, partial(program, n, sync, {}, shape, count))
    yield case("exits after the last", lambda: program(n, False, {}, last=Exit(0)))
    yield case("head to head, small", lambda: _both(n, [[send, recv], [send, recv]]))
    yield case("send and receive in order", lambda: _both(n, [[send, recv], [recv, send]]))
    yield case("two sends in a group, two receives", lambda: _asymmetric(n))
    yield case("late receiver", lambda: _late(n))


def _warm(n: int) -> tuple[Program, int, int]:
    made = program(n, True, {})
    a, b = ends(n)
    made.ranks[a] += [group(send(b), recv(b)), Sync()]
    made.ranks[b] += [group(send(a), recv(a)), Sync()]
    return made, a, b


def _meet(made: Program) -> Program:
    for steps in made.ranks:
        steps += synced([call("ncclAllReduce")])
    return made


def _both(n: int, orders: list[list[Callable[..., Step]]]) -> Program:
    made, a, b = _warm(n)
    made.ranks[a] += synced(c(b, count=SMALL) for c in orders[0])
    made.ranks[b] += synced(c(a, count=SMALL) for c in orders[1])
    return _meet(made)


def _asymmetric(n: int) -> Program:
    """Only what is sent and received counts, not how it is grouped."""
    made, a, b = _warm(n)
    made.ranks[a] += synced([group(send(b, count=BIG), send(b, count=BIG + 1))])
    made.ranks[b] += [recv(a, count=BIG), recv(a, count=BIG + 1), Sync()]
    return _meet(made)


def _late(n: int) -> Program:
    """A stage of a pipeline that computes for longer than others wait."""
    made, a, b = _warm(n)
    made.ranks[a] += synced([send(b, count=BIG)])
    made.ranks[b] += [Work(1.5), *synced([recv(a, count=BIG)])]
    return _meet(made)
