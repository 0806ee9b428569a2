"""The model does what NCCL does: truths rest on it."""

from __future__ import annotations

import pytest

from conformance.cases import by_id
from conformance.edits import Break, program
from conformance.model import BUFFERS, DEPTH, Model
from conformance.pairs import BIG, SMALL
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
    Work,
    call,
    group,
    recv,
    send,
    synced,
)
from nccluprobe.nccl.api import BY_NAME

AR = call("ncclAllReduce")


def run(*ranks: list[Step], passes: bool = False) -> Model:
    return Model(Program(list(ranks)), passes).run()


def hung(model: Model) -> list[bool]:
    return [model.hung(r) for r in range(model.program.size)]


def made(model: Model, rank: int) -> list[str]:
    """Calls that have returned."""
    return [s.name for s in model.hosts[rank].calls if s.left is not None]


def test_the_first_collective_waits_in_the_call_and_later_ones_do_not() -> None:
    model = run([AR, AR, AR, Sync()], [Work(0.5), AR, Work(0.5), AR, AR, Sync()])
    first, second, _ = model.hosts[0].calls
    assert first.left is not None and second.left is not None
    assert first.left - first.at > 0.4 and second.left - second.at < 0.001
    assert hung(model) == [False, False]


def test_a_host_runs_on_to_the_launch_depth_and_stands_inside_the_next_call() -> None:
    model = run([AR, Sync(), *[AR] * (DEPTH + 5)], [AR, Sync(), Stop()])
    assert len(made(model, 0)) == 1 + DEPTH
    assert model.hosts[0].calls[-1].left is None and model.hosts[0].state(1e9) == "nccl"


def test_different_calls_never_end_or_pass() -> None:
    ranks: list[list[Step]] = [[AR, Sync(), AR.but(count=n), Sync(), AR, Sync()] for n in (5, 6)]
    assert hung(run(*ranks)) == [True, True]
    assert hung(run(*ranks, passes=True)) == [False, False]
    assert made(run(*ranks), 0) == ["ncclAllReduce"] * 2


def test_a_count_of_zero_is_no_call() -> None:
    zero = AR.but(count=0)
    assert hung(run([AR, Sync(), zero, Sync()], [AR, Sync()])) == [False, False]


def test_one_stream_keeps_the_order_of_two_communicators() -> None:
    def ranks(stream: int) -> list[list[Step]]:
        one, two = call("ncclAllReduce"), call("ncclAllReduce", OTHER, stream=stream)
        warm = synced([one, two])
        return [[*warm, one, two, Sync()], [*warm, two, one, Sync()]]

    assert hung(run(*ranks(0))) == [True, True]
    assert hung(run(*ranks(1))) == [False, False]


@pytest.mark.parametrize(("count", "expected"), [(SMALL, [False, True]), (BIG, [True, True])])
def test_small_sends_are_buffered(count: int, expected: list[bool]) -> None:
    warm: tuple[list[Step], list[Step]] = (
        [group(send(1), recv(1)), Sync()],
        [group(send(0), recv(0)), Sync()],
    )
    a: list[Step] = [*warm[0], send(1, count=count), Sync()]
    assert hung(run(a, [*warm[1], Stop()])) == [expected[0], False]
    b: list[Step] = [*warm[1], recv(0, count=count), recv(0, count=count), Sync()]
    assert hung(run(a, b)) == [False, True]


def test_buffers_come_back_when_they_are_read() -> None:
    warm: tuple[list[Step], list[Step]] = (
        [group(send(1), recv(1)), Sync()],
        [group(send(0), recv(0)), Sync()],
    )
    a: list[Step] = [*warm[0], *[send(1)] * (BUFFERS + 1), Sync()]
    assert hung(run(a, [*warm[1], Stop()])) == [True, False]
    assert hung(run(a, [*warm[1], recv(0), Stop()])) == [False, False]


def test_a_group_moves_together() -> None:
    both: list[Step] = [group(send(1, count=BIG), recv(1, count=BIG)), Sync()]
    other: list[Step] = [group(send(0, count=BIG), recv(0, count=BIG)), Sync()]
    assert hung(run(both, other)) == [False, False]
    apart: list[Step] = [send(0, count=BIG), recv(0, count=BIG), Sync()]
    one: list[Step] = [send(1, count=BIG), recv(1, count=BIG), Sync()]
    assert hung(run([*both, *one], [*other, *apart])) == [True, True]


def test_nobody_is_told_of_an_exit_or_an_abort() -> None:
    for end in (Exit(1), End(WORLD, "abort")):
        model = run([AR, Sync(), AR, Sync()], [AR, Sync(), end])
        assert hung(model) == [True, False]


def test_an_open_group_has_done_nothing() -> None:
    model = run([AR, Sync(), AR, Sync()], [AR, Sync(), Group((AR,), ended=False)])
    assert hung(model) == [True, False]
    assert made(model, 1)[-2:] == ["ncclGroupStart", "ncclAllReduce"]


def test_faults_that_hang_do() -> None:
    """What a fault does to the job is what its schedule says."""
    for case in by_id().values():
        if case.fault and case.n == 4 and case.op in ("ncclReduce", "ncclAllGather"):
            model = Model(case.build(), case.passes).run()
            stands = any(hung(model))
            passed = case.passes and case.fault.startswith(("wrong", "swapped"))
            assert stands != passed, case.id


def test_edits_change_the_broken_rank_alone() -> None:
    b = Break(BY_NAME["ncclReduce"], 4)
    steps: list[Step] = [call("ncclReduce", count=i + 1) for i in range(16)]
    healthy = program(b.api, 4, steps, {}, False).ranks
    broken = program(b.api, 4, steps, {b.rank: b.change(count=99)}, False).ranks
    assert [r for r in range(4) if healthy[r] != broken[r]] == [b.rank]
    differing = [x for x, y in zip(broken[b.rank], healthy[b.rank], strict=True) if x != y]
    assert len(differing) == 1 and isinstance(differing[0], Call)
