"""A proof that a trace allows another fault holds, and nothing less is taken for one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from model import judge as judging
from model import witness as proofs
from model.breaker import NoPlace
from model.case import Case, broken
from model.emit import emit
from model.engine import Engine
from model.ops import Call, Host, Leave, Program
from model.process import Process
from model.replay import TOLERANCE, Diverged, Replay, difference
from model.rivals import rivals
from model.stem import look, stem_of
from model.witness import Prover, Witness, _supposing, allows, ends, other, witnesses

#: Rank 2 leaves out a collective before a receive; or rank 1 left out the send.
UNDECIDED = ("skipped", 1851)
#: Rank 5 lacks the one collective that the seven others made, and has gone past it.
DECIDED = ("skipped", 2643)


#: Rank 0 leaves out a receive, and one of its records was lost: it may have been that one.
LOST = ("missing_recv", 7350)
RATE = 0.01


@cache
def case(kind: str, seed: int) -> Case:
    return broken(seed, kind)


@cache
def witness() -> Witness:
    return next(w for w in witnesses(case(*UNDECIDED)) if w.rival.kind == "missing_send")


def lines(
    engine: Engine, horizon: float, lost: dict[int, set[int]] | None = None
) -> list[tuple[int, list[dict[str, Any]], dict[str, Any]]]:
    """Rank, its lines without times, and the last thing that is said of its process."""
    found = []
    for trace in emit(engine, horizon, lost).procs:
        said = [json.loads(line) for line in trace.data().splitlines()]
        calls = [x for x in said if x["kind"] not in ("coverage", "clock")]
        last = [x for x in said if x["kind"] == "coverage"][-1]
        calls = [{k: v for k, v in x.items() if k not in ("t", "dur")} for x in calls]
        known = ("captured", "lost_kernel", "in_flight", "alive", "main", "syscall")
        found.append((trace.rank, calls, {k: last.get(k) for k in known}))
    return found


def test_a_witness_leaves_the_same_trace_and_is_another_fault_of_a_good_program() -> None:
    here, found = case(*UNDECIDED), witness()
    assert lines(found.run, here.horizon) == lines(here.engine, here.horizon)
    good = Engine(found.healthy, 77)
    assert ends(good) is None
    assert all(p.finished for p in good.procs)
    assert here.truth is not None
    assert here.truth.culprits == {2}
    assert found.right == {frozenset({1}), frozenset()}
    # The fault is one send of rank 1 that the good program makes, and no more.
    for r, (one, two) in enumerate(zip(found.healthy.code, found.broken.code, strict=True)):
        more = [what for code in one for what in code]
        for what in [what for code in two for what in code]:
            more.remove(what)
        assert [x.op.api for x in more if isinstance(x, Call)] == ["ncclSend"] * (r == 1)
        assert len(more) == (r == 1)
    assert "rank 1 leaves out ncclSend to 2" in found.words()[0]


def test_where_the_trace_decides_there_is_no_witness() -> None:
    assert list(witnesses(case(*DECIDED))) == []


def test_in_place_of_a_lost_call_there_may_have_been_another() -> None:
    here = case(*LOST)
    lost = here.lost(RATE)
    base = look(here.engine.program, here.seed)
    prover = Prover(here, base, lost)
    proofs = map(prover.prove, _supposing(base, stem_of(base), {1}, lost))
    kinds = ("missing_send", "missing_recv")
    found = next(p for p in proofs if isinstance(p, Witness) and p.rival.kind in kinds)
    assert lines(found.run, here.horizon, lost) == lines(here.engine, here.horizon, lost)
    assert lines(found.run, here.horizon) != lines(here.engine, here.horizon)
    assert ends(Engine(found.healthy, 77)) is None
    assert here.truth is not None
    assert here.truth.culprits == {0}
    assert found.right == {frozenset({1}), frozenset()}
    assert "a lost call of rank 0 was ncclRecv" in found.words()[0]
    assert difference(here.engine, found.run, here.horizon, lost) is None
    assert difference(here.engine, found.run, here.horizon) is not None
    # To name nobody is right for both: one answer is, so that it is no excuse.
    assert here.truth.unnamed
    assert all(frozenset() not in w.right for w in witnesses(here, frozenset({1}), RATE))


@pytest.mark.parametrize(
    ("right", "unnamed", "excludes"),
    [([{1}], False, True), ([{1}, set()], False, True), ([{1}, set()], True, False),
     ([{0}], False, False), ([{0}, {1}], False, False)],
)  # fmt: skip
def test_only_what_no_answer_fits_both_of_is_another_one(
    right: list[set[int]], unnamed: bool, excludes: bool
) -> None:
    truth = case(*UNDECIDED).truth
    assert truth is not None
    truth = replace(truth, culprits=frozenset({0}), also=[], unnamed=unnamed)
    assert other(set(map(frozenset, right)), truth) == excludes


def test_to_say_nothing_is_not_fair_where_either_way_something_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judging, "findings", lambda case, rate: ([], []))
    verdict = judging.judge(case(*UNDECIDED))
    assert (verdict.status, verdict.witness) == ("missed", None)


def test_of_a_lost_call_it_is_told_that_there_was_one_and_when() -> None:
    here = case(*LOST)
    lost = here.lost(RATE)
    rank, i = next((r, max(indices)) for r, indices in lost.items() if indices)
    again = look(here.engine.program, here.seed).run
    p = again.procs[rank]
    was = p.records[i]
    p.records[i] = replace(was, api="ncclSend", fields={})
    assert difference(here.engine, again, here.horizon, lost) is None
    assert was.end is not None
    for record in (replace(was, end=None), replace(was, t=was.t - 1.0, end=was.end - 1.0)):
        p.records[i] = record
        assert difference(here.engine, again, here.horizon, lost) is not None
    del p.records[i]
    assert difference(here.engine, again, here.horizon, lost) is not None


def test_a_rank_that_was_away_for_too_long_is_no_good_program() -> None:
    here = next(c for seed in range(60) if (c := some(seed, "late")) is not None)
    assert list(witnesses(here)) == []


def some(seed: int, kind: str) -> Case | None:
    try:
        return broken(seed, kind, small=True)
    except NoPlace:
        return None


def _another_call(p: Process) -> None:
    last = p.records[-1]
    p.records[-1] = replace(last, fields=last.fields | {"count": 3})


def _one_less(p: Process) -> None:
    del p.records[-1]


def _another_return(p: Process) -> None:
    last = p.records[-1]
    p.records[-1] = replace(last, end=last.t + 0.001 if last.end is None else None)


def _another_end(p: Process) -> None:
    p.ended = (p.records[-1].t + 1.0, 0, None) if p.ended is None else None


def _another_time(p: Process) -> None:
    p.records[-1] = replace(p.records[-1], t=p.records[-1].t + 1.5 * TOLERANCE)


def _another_state(p: Process) -> None:
    p.states.append((p.states[-1][0] + 5.0, "uninterruptible", None))


TAMPERING = [
    _another_call,
    _one_less,
    _another_return,
    _another_end,
    _another_time,
    _another_state,
]


@pytest.mark.parametrize("tamper", TAMPERING, ids=lambda f: f.__name__)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_run_that_differs_anywhere_is_refused(
    tamper: Callable[[Process], None], rank: int
) -> None:
    here = case(*UNDECIDED)
    again = look(here.engine.program, here.seed).run
    assert difference(here.engine, again, here.horizon) is None
    tamper(again.procs[rank])
    said = difference(here.engine, again, here.horizon)
    assert said is not None
    assert said.startswith(f"rank {rank}: ")


def altered(change: Callable[[list[Any]], None], rank: int) -> Program:
    """The program of the witness with its fault, and one thing more."""
    program = copy.copy(witness().broken)
    program.code = [[list(code) for code in threads] for threads in program.code]
    change(program.code[rank][0])
    return program


def _changed(code: list[Any]) -> None:
    i = next(i for i, x in enumerate(code) if isinstance(x, Call))
    code[i] = Call(replace(code[i].op, count=code[i].op.count + 1))


def _left_out(code: list[Any]) -> None:
    del code[next(i for i, x in enumerate(code) if isinstance(x, Call))]


def _late(code: list[Any]) -> None:
    code.insert(next(i for i, x in enumerate(code) if isinstance(x, Call)), Host(1.0))


def _gone(code: list[Any]) -> None:
    code.insert(next(i for i, x in enumerate(code) if isinstance(x, Call)), Leave(0))


@pytest.mark.parametrize("change", [_changed, _left_out, _late, _gone], ids=lambda f: f.__name__)
def test_a_program_that_leaves_another_trace_is_refused(change: Callable[..., None]) -> None:
    here = case(*UNDECIDED)
    run = Replay(altered(change, 0), here.engine)
    try:
        run.run()
    except Diverged:
        return
    assert difference(here.engine, run, here.horizon) is not None


def test_a_program_that_hangs_or_disagrees_by_itself_is_refused() -> None:
    assert "hang as well" in str(ends(Engine(witness().broken, 1)))
    program = copy.copy(witness().healthy)
    program.mismatch_hangs = False
    program.code = [[list(code) for code in threads] for threads in program.code]
    _changed(program.code[0][0])
    assert ends(Engine(program, 1)) == "without the fault calls differ"


def test_one_that_does_not_explain_the_trace_is_refused_with_a_reason() -> None:
    here = case(*UNDECIDED)
    base = look(here.engine.program, here.seed)
    stem = stem_of(base)
    prover = Prover(here, base)
    said = {
        rival.kind: prover.prove(rival)
        for rival in rivals(base, stem, {0, 1})
        if rival.kind in ("none", "stall")
    }
    assert said.keys() == {"none", "stall"}
    for why in said.values():
        assert isinstance(why, str)
        assert "hang as well" in why


@pytest.mark.parametrize(
    ("blamed", "types", "fair"),
    [
        (set(), set(), True),
        ({1}, {"p2p_unmatched"}, True),
        ({1}, {"nccl_missing_exit"}, False),
        ({0}, {"p2p_unmatched"}, False),
        ({0, 1}, {"p2p_unmatched"}, False),
        ({1, 2}, {"p2p_unmatched"}, False),
    ],
)
def test_only_nobody_or_exactly_who_is_to_blame_there_is_fair(
    blamed: set[int], types: set[str], fair: bool
) -> None:
    found = allows(case(*UNDECIDED), frozenset(blamed), types, types or {"p2p_unmatched"})
    assert (found is not None) == fair


@pytest.mark.parametrize(
    ("who", "confidence", "status"),
    [
        ([1], "inferred", "either"),
        ([1], "observed", "wrong"),
        ([0], "inferred", "wrong"),
        ([], "inferred", "either"),
        ([2], "inferred", "exact"),
    ],
)
def test_the_verdict_counts_it_apart(
    who: list[int], confidence: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = {
        "hang_type": "p2p_unmatched" if who != [2] else "collective_missing_enter",
        "role": "root_cause" if who else "unknown",
        "state": "open",
        "severity": "error",
        "culprits": [{"rank": r} for r in who],
        "details": {"confidence": confidence},
    }
    monkeypatch.setattr(judging, "findings", lambda case, rate: ([finding], [finding]))
    verdict = judging.judge(case(*UNDECIDED))
    assert verdict.status == status
    assert (verdict.witness is not None) == (status == "either")


@pytest.mark.parametrize("proven", [True, False])
def test_what_is_wrong_where_the_trace_decides_stays_wrong(
    proven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two orders of rank 4 explain the trace, too; but that program hangs without a fault.

    ``proven``: that a program ends without its fault is looked at; else it would be fair.
    """
    finding = {
        "hang_type": "p2p_order_inversion",
        "role": "root_cause",
        "state": "open",
        "severity": "error",
        "culprits": [{"rank": 4}],
        "details": {"confidence": "inferred"},
    }
    monkeypatch.setattr(judging, "findings", lambda case, rate: ([finding], [finding]))
    if not proven:
        monkeypatch.setattr(proofs, "ends", lambda run: None)
    verdict = judging.judge(case(*DECIDED))
    assert verdict.status == ("wrong" if proven else "either")
    assert (verdict.witness is None) == proven
