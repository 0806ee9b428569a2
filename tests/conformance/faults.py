"""Collectives: one program per kind of fault, and what has to be said of it.

Three schedules: ``sync``, where every host waits for the device after each
call; ``ahead``, where the hosts run on to the end of the program while the
device stands; ``pass``, where NCCL does not mind the difference and goes on
with wrong data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from conformance.edits import BEFORE, LENGTH, Break, Edit, body, paired, program
from conformance.program import OTHER, WORLD, End, Exit, Program, Step, Stop, call
from conformance.truth import CROSSED, ENDED, MISMATCH, MISSING, NOBODY, SHIFT, STUCK, Case, Truth
from nccluprobe.nccl.api import API_TABLE, Api, Kind, Role

COLLECTIVES = tuple(a for a in API_TABLE if a.kind is Kind.COLLECTIVE)
SIZES = (2, 4, 8)

#: An argument of each role and a wrong value of it.
WRONG = {
    Role.COUNT: ("count", 999),
    Role.DATATYPE: ("datatype", "bfloat16"),
    Role.OP: ("op", "max"),
    Role.ROOT: ("root", 1),
}
DIFFERS = (MISMATCH, SHIFT)
EXITS = ("rank_exit_or_crash_suspected", "rank_exited")


def cases(api: Api, n: int) -> Iterator[Case]:
    """All faulty programs of a collective with ``n`` ranks."""
    b = Break(api, n)
    who = frozenset({b.rank})
    odd = who if n > 2 else NOBODY
    others = frozenset(range(n)) - who
    absent = Truth(who, (MISSING,), WORLD, b.seq, entered=others, why="it alone did not come")
    away = replace(
        absent,
        kinds=(MISSING, CROSSED),
        entered=None,
        or_blamed=(NOBODY,) if n == 2 else (),
        why="it is away, or waits for what it queued: its fault both times; of two ranks it may"
        " be either's",
    )
    minority = Truth(
        odd,
        DIFFERS,
        WORLD,
        b.seq,
        why="its call is not that of the others; of two ranks either may be wrong",
    )

    def case(
        fault: str,
        variant: str,
        truth: Truth,
        edit: Edit | dict[int, Edit],
        steps: list[Step] | None = None,
    ) -> Case:
        broken = edit if isinstance(edit, dict) else {b.rank: edit}
        base = body(api) if steps is None else steps
        sync, passes = variant.endswith("sync"), variant.endswith("pass")

        def build() -> Program:
            return program(api, n, base, broken, sync)

        return Case(api.name, fault, variant, n, build, truth, passes)

    for how in ("sync", "ahead"):
        yield case("missing call", f"stop {how}", absent, b.until(Stop()))
        yield case("missing call", f"stop in open group {how}", absent, b.open_group)
        for name, inside, truth in (("reads", "read", absent), ("may wait", "futex", away)):
            steps = [*body(api), call(api.name, OTHER, count=3000)]
            edit = b.queued(inside)
            yield case(
                "missing call", f"queued elsewhere, then stop, {name} {how}", truth, edit, steps
            )
        for name, exit_ in (
            ("code 1", Exit(1)),
            ("signal 9", Exit(None, 9)),
            ("code 0", Exit(0)),
        ):
            truth = replace(absent, reasons=EXITS, why="it left while the others waited for it")
            yield case("early exit", f"{name} {how}", truth, b.until(exit_))
        for end in ("abort", "destroy"):
            truth = replace(absent, kinds=(ENDED,), why="it ended the communicator under them")
            yield case("early exit", f"{end} {how}", truth, b.until(End(WORLD, end)))
        yield from _wrong_comm(case, b, odd, how)
        yield case("wrong count", f"zero {how}", minority, b.change(count=0))
    if api.has(Role.ROOT):
        undecided = replace(
            absent,
            blamed=frozenset({0}),
            entered=frozenset(range(1, n)),
            or_blamed=(NOBODY,),
            severity="any",
            why="followers may wait for an idle root for hours: the cause may be left open",
        )
        yield case("missing call", "stop of the root sync", undecided, {0: b.until(Stop())})
    yield case("missing call", "stop, computes sync", absent, b.until(Stop(None)))
    yield Case(api.name, "missing call", "stop at the first", n, lambda: b.first(),
               replace(absent, seq=0))  # fmt: skip
    if n == 2:
        yield Case(api.name, "missing call", "stop, others run into the launch depth", n,
                   lambda: b.deep(), absent)  # fmt: skip
    uniform = body(api, uniform=True)
    last = replace(absent, kinds=(MISSING, SHIFT), seq=BEFORE + LENGTH - 1)
    yield case("missing call", "skip in a uniform stream ahead", last, b.skip, uniform)
    one_more = Truth(
        NOBODY,
        (MISSING, SHIFT, STUCK),
        WORLD,
        decidable=False,
        severity="any",
        why="one call more by it, one less by all others, or a device that stands: equal traces",
    )
    yield case("extra call", "in a uniform stream ahead", one_more, lambda s: [*s, s[-1]], uniform)
    for how in ("sync", "ahead", "pass"):
        exact = how != "sync"  # behind the sync there is no further call to tell by
        shifted = replace(minority, kinds=(SHIFT,) if exact else DIFFERS)
        skipped = replace(shifted, reasons=("call_skipped",) if exact and n > 2 else ())
        yield case("missing call", f"skip {how}", skipped, b.skip)
        extra = replace(shifted, reasons=("call_extra",) if exact and n > 2 else ())
        yield case("extra call", how, extra, b.extra)
        swapped = replace(minority, kinds=(MISMATCH,) if exact else DIFFERS, seq=b.seq + 1)
        yield case("swapped order", how, swapped, b.swap)
        yield from _wrong_arguments(case, b, minority, how)
    for how in ("sync", "ahead"):
        grouped = paired(body(api))
        yield case(
            "missing call", f"skip in a group {how}", minority, b.in_group(drop=True), grouped
        )
        yield case("swapped order", f"in a group {how}", minority, b.in_group(drop=False), grouped)
    yield from _crossed(b, odd)


def _wrong_arguments(
    case: Callable[..., Case], b: Break, minority: Truth, how: str
) -> Iterator[Case]:
    for role, (name, value) in WRONG.items():
        # A wrong root is never harmless.
        if b.api.has(role) and not (role is Role.ROOT and how == "pass"):
            truth = replace(minority, kinds=(MISMATCH,), differs=name)
            steps = body(b.api, uniform=how == "pass")
            yield case(f"wrong {name}", how, truth, b.change(**{name: value}), steps)
    if b.n > 2:
        two = frozenset({b.rank, b.second})
        truth = replace(minority, kinds=(MISMATCH,), differs="count")
        truth = replace(truth, blamed=two if b.n > 4 else NOBODY)
        edit = b.change(count=999)
        yield case("wrong count", f"two ranks {how}", truth, dict.fromkeys(two, edit))


def _wrong_comm(
    case: Callable[..., Case], b: Break, odd: frozenset[int], how: str
) -> Iterator[Case]:
    kinds = DIFFERS if how == "ahead" else (*DIFFERS, CROSSED, MISSING)
    truth = Truth(
        odd,
        kinds,
        causes=2,
        why="it alone is on the other communicator; of two either may be wrong",
    )
    steps = [*body(b.api), call(b.api.name, OTHER, count=3000)]
    yield case("wrong communicator", how, truth, b.elsewhere, steps)


def _crossed(b: Break, odd: frozenset[int]) -> Iterator[Case]:
    """Two communicators in orders that exclude each other."""
    kinds, fault, n = (CROSSED, MISSING), "deadlock across communicators", b.n
    one = Truth(odd, kinds, causes=2, why="one rank against all others; of two either may be wrong")
    tie = Truth(NOBODY, kinds, causes=2, why="the two sides are equal")

    def case(variant: str, build: Callable[[], Program], truth: Truth) -> Case:
        return Case(b.api.name, fault, variant, n, build, truth)

    yield case("one rank sync", lambda: b.crossed({b.rank}, True), one)
    if n > 2:
        half = set(range(n // 2))
        yield case("half of the ranks sync", lambda: b.crossed(half, True), tie)
        circle = replace(tie, causes=n, why="each waits for the next one: all are equal")
        yield case("ring of pairs sync", b.ring, circle)
    same_stream = replace(
        one,
        blamed=NOBODY,
        kinds=(CROSSED,),
        required=False,
        or_blamed=(odd,),
        why="all have entered both calls; only the order on one stream tells that it cannot end",
    )
    yield case("one rank ahead", lambda: b.crossed({b.rank}, False), same_stream)
