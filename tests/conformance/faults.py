"""Collectives: one program per kind of fault, and the correct twins.

Rank ``culprit(n)`` breaks it.  Three schedules: ``sync``, where every host waits
for the device after each call; ``ahead``, where the hosts run on to the end of
the program while the device stands; ``pass``, where NCCL does not mind the
difference and goes on with wrong data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from conformance.program import (
    OTHER,
    WORLD,
    Call,
    End,
    Exit,
    Group,
    Program,
    Step,
    Stop,
    Sync,
    call,
    same,
    synced,
)
from conformance.truth import CROSSED, ENDED, MISMATCH, MISSING, NOBODY, SHIFT, Case, Truth
from nccluprobe.nccl.api import API_TABLE, Api, Kind, Role

COLLECTIVES = tuple(a for a in API_TABLE if a.kind is Kind.COLLECTIVE)
SIZES = (2, 4, 8)
#: Calls of the body, the one that is broken, and calls on each communicator before the body.
LENGTH, AT, BEFORE = 16, 6, 2

#: An argument of each role and a wrong value of it.
WRONG = {
    Role.COUNT: ("count", 999),
    Role.DATATYPE: ("datatype", "bfloat16"),
    Role.OP: ("op", "max"),
    Role.ROOT: ("root", 1),
}
DIFFERS = (MISMATCH, SHIFT)
EXITS = ("rank_exit_or_crash_suspected", "rank_exited")

Edit = Callable[[list[Step]], list[Step]]


def culprit(n: int) -> int:
    return {2: 1, 4: 2, 8: 5}[n]


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


def until(stop: Step) -> Edit:
    """Does what is before the broken call, waits for it, and then this."""
    return lambda s: [*s[:AT], Sync(), stop]


def skip(s: list[Step]) -> list[Step]:
    return s[:AT] + s[AT + 1 :]


def swap(s: list[Step]) -> list[Step]:
    return [*s[: AT + 1], s[AT + 2], s[AT + 1], *s[AT + 3 :]]


def change(**args: object) -> Edit:
    def edit(s: list[Step]) -> list[Step]:
        at = s[AT]
        assert isinstance(at, Call)
        return [*s[:AT], at.but(**args), *s[AT + 1 :]]

    return edit


def cases(api: Api, n: int) -> Iterator[Case]:
    """All faulty programs of a collective with ``n`` ranks."""
    r = culprit(n)
    who = frozenset({r})
    odd = who if n > 2 else NOBODY
    absent = Truth(who, (MISSING,), WORLD, BEFORE + AT, why="it alone did not come")
    away = replace(
        absent,
        kinds=(MISSING, CROSSED),
        or_blamed=(NOBODY,) if n == 2 else (),
        why="it is away, or waits for what it queued: its fault both times; of two ranks it may"
        " be either's",
    )
    minority = Truth(
        odd,
        DIFFERS,
        WORLD,
        BEFORE + AT,
        why="its call is not that of the others; of two ranks either may be wrong",
    )

    def case(
        fault: str,
        variant: str,
        truth: Truth,
        edit: Edit | dict[int, Edit],
        steps: list[Step] | None = None,
    ) -> Case:
        broken = edit if isinstance(edit, dict) else {r: edit}
        base = body(api) if steps is None else steps
        sync, passes = variant.endswith("sync"), variant.endswith("pass")

        def build() -> Program:
            return program(api, n, base, broken, sync)

        return Case(api.name, fault, variant, n, build, truth, passes)

    for how in ("sync", "ahead"):
        yield case("missing call", f"stop {how}", absent, until(Stop()))
        yield case("missing call", f"stop in open group {how}", absent, _open_group)
        for name, inside, truth in (("reads", "read", absent), ("may wait", "futex", away)):
            steps = [*body(api), call(api.name, OTHER, count=3000)]
            edit = _queued(api, inside)
            yield case(
                "missing call", f"queued elsewhere, then stop, {name} {how}", truth, edit, steps
            )
        for name, exit_ in (
            ("code 1", Exit(1)),
            ("signal 9", Exit(None, 9)),
            ("code 0", Exit(0)),
        ):
            truth = replace(absent, reasons=EXITS, why="it left while the others waited for it")
            yield case("early exit", f"{name} {how}", truth, until(exit_))
        for end in ("abort", "destroy"):
            truth = replace(absent, kinds=(ENDED,), why="it ended the communicator under them")
            yield case("early exit", f"{end} {how}", truth, until(End(WORLD, end)))
        yield from _wrong_comm(case, api, odd, how)
        yield case("wrong count", f"zero {how}", minority, change(count=0))
    if api.has(Role.ROOT):
        undecided = replace(
            absent,
            blamed=frozenset({0}),
            or_blamed=(NOBODY,),
            severity="any",
            why="followers may wait for an idle root for hours: the cause may be left open",
        )
        yield case("missing call", "stop of the root sync", undecided, {0: until(Stop())})
    yield case("missing call", "stop, computes sync", absent, until(Stop(None)))
    yield Case(api.name, "missing call", "stop at the first", n, lambda: _first(api, n),
               replace(absent, seq=0))  # fmt: skip
    if n == 2:
        yield Case(api.name, "missing call", "stop, others run into the launch depth", n,
                   lambda: _deep(api, n), absent)  # fmt: skip
    uniform = body(api, uniform=True)
    last = replace(absent, kinds=(MISSING, SHIFT), seq=BEFORE + LENGTH - 1)
    yield case("missing call", "skip in a uniform stream ahead", last, skip, uniform)
    yield case("extra call", "in a uniform stream ahead", Truth(
        NOBODY, (MISSING, SHIFT), WORLD, BEFORE + LENGTH, entered=who, decidable=False,
        severity="any", why="one call more by it or one less by all others: equal traces",
    ), lambda s: [*s, s[-1]], uniform)  # fmt: skip
    for how in ("sync", "ahead", "pass"):
        exact = how != "sync"  # behind the sync there is no further call to tell by
        shifted = replace(minority, kinds=(SHIFT,) if exact else DIFFERS)
        skipped = replace(shifted, reasons=("call_skipped",) if exact and n > 2 else ())
        yield case("missing call", f"skip {how}", skipped, skip)
        extra = replace(shifted, reasons=("call_extra",) if exact and n > 2 else ())
        yield case("extra call", how, extra, _extra(api))
        swapped = replace(minority, kinds=(MISMATCH,) if exact else DIFFERS, seq=BEFORE + AT + 1)
        yield case("swapped order", how, swapped, swap)
        yield from _wrong_arguments(case, api, n, minority, how)
    for how in ("sync", "ahead"):
        grouped = paired(body(api))
        yield case("missing call", f"skip in a group {how}", minority, _group(drop=True), grouped)
        yield case("swapped order", f"in a group {how}", minority, _group(drop=False), grouped)
    yield from _crossed(api, n, odd)


def _wrong_arguments(
    case: Callable[..., Case], api: Api, n: int, minority: Truth, how: str
) -> Iterator[Case]:
    for role, (name, value) in WRONG.items():
        # A wrong root is never harmless.
        if api.has(role) and not (role is Role.ROOT and how == "pass"):
            truth = replace(minority, kinds=(MISMATCH,), differs=name)
            steps = body(api, uniform=how == "pass")
            yield case(f"wrong {name}", how, truth, change(**{name: value}), steps)
    if n > 2:
        two = frozenset({1, culprit(n)})
        truth = replace(minority, kinds=(MISMATCH,), differs="count")
        truth = replace(truth, blamed=two if n > 4 else NOBODY)
        edit = change(count=999)
        yield case("wrong count", f"two ranks {how}", truth, dict.fromkeys(two, edit))


def _wrong_comm(
    case: Callable[..., Case], api: Api, odd: frozenset[int], how: str
) -> Iterator[Case]:
    kinds = DIFFERS if how == "ahead" else (*DIFFERS, CROSSED, MISSING)
    truth = Truth(
        odd,
        kinds,
        causes=2,
        why="it alone is on the other communicator; of two either may be wrong",
    )
    steps = [*body(api), call(api.name, OTHER, count=3000)]

    def edit(s: list[Step]) -> list[Step]:
        at = s[AT]
        assert isinstance(at, Call)
        return [*s[:AT], replace(at, comm=OTHER), *s[AT + 1 :]]

    yield case("wrong communicator", how, truth, edit, steps)


def _open_group(s: list[Step]) -> list[Step]:
    at = s[AT]
    assert isinstance(at, Call)
    return [*s[:AT], Sync(), Group((at,), ended=False)]


def _queued(api: Api, inside: str) -> Edit:
    def edit(s: list[Step]) -> list[Step]:
        # No sync: it goes away with a call on the device that the others come to later.
        return [*s[:AT], Sync(), call(api.name, OTHER, count=3000), Stop(inside)]

    return edit


def _extra(api: Api) -> Edit:
    return lambda s: [*s[:AT], call(api.name, count=777), *s[AT:]]


def _group(drop: bool) -> Edit:
    def edit(s: list[Step]) -> list[Step]:
        at = s[AT // 2]
        assert isinstance(at, Group)
        calls = at.calls[1:] if drop else at.calls[::-1]
        return [*s[: AT // 2], Group(calls), *s[AT // 2 + 1 :]]

    return edit


def _first(api: Api, n: int) -> Program:
    ranks = same(n, synced(body(api)))
    ranks[culprit(n)] = [Stop()]
    return Program(ranks)


def _deep(api: Api, n: int) -> Program:
    steps = prefix(api) + [call(api.name) for _ in range(AT)]
    ranks = same(n, [*steps, *(call(api.name) for _ in range(1100)), Sync()])
    ranks[culprit(n)] = [*steps, Sync(), Stop()]
    return Program(ranks)


def _crossed(api: Api, n: int, odd: frozenset[int]) -> Iterator[Case]:
    """Two communicators in orders that exclude each other."""

    def build(inverted: set[int], sync: bool) -> Program:
        order: list[Step] = [call(api.name, WORLD, count=70), call(api.name, OTHER, count=71)]
        ranks = []
        for rank in range(n):
            own = order[::-1] if rank in inverted else order
            ranks.append(prefix(api) + (synced(own) if sync else [*own, Sync()]))
        return Program(ranks)

    def ring() -> Program:
        comms: dict[str, tuple[int, ...]] = {f"ring{k}": (k, (k + 1) % n) for k in range(n)}
        ranks: list[list[Step]] = []
        for k in range(n):
            mine, before = f"ring{k}", f"ring{(k - 1) % n}"
            warm = sorted([mine, before], key=lambda name: int(name[4:]))
            ranks.append(
                [
                    *synced(call(api.name, name) for name in warm),
                    *synced([call(api.name, mine, count=70), call(api.name, before, count=70)]),
                ]
            )
        return Program(ranks, comms)

    kinds = (CROSSED, MISSING)
    fault = "deadlock across communicators"
    one = Truth(odd, kinds, causes=2, why="one rank against all others; of two either may be wrong")
    tie = Truth(NOBODY, kinds, causes=2, why="the two sides are equal")
    r = culprit(n)
    yield Case(api.name, fault, "one rank sync", n, lambda: build({r}, True), one)
    if n > 2:
        half = set(range(n // 2))
        yield Case(api.name, fault, "half of the ranks sync", n, lambda: build(half, True), tie)
        circle = replace(tie, causes=n, why="each waits for the next one: all are equal")
        yield Case(api.name, fault, "ring of pairs sync", n, ring, circle)
    same_stream = Truth(
        NOBODY, (CROSSED,), required=False, or_blamed=(odd,),
        why="all have entered both calls; only the order on one stream tells that it cannot end",
    )  # fmt: skip
    yield Case(api.name, fault, "one rank ahead", n, lambda: build({r}, False), same_stream)
