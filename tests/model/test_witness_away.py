"""Proofs that a rank may be away, or without work, where another fault leaves the same trace."""

from __future__ import annotations

import copy

import pytest

from model.breaker import NoPlace
from model.case import Case, broken
from model.engine import Engine
from model.ops import Host, Program
from model.process import Process
from model.replay import difference
from model.stem import Base, look, stem_of
from model.test_witness import lines
from model.witness import Prover, Witness, ends, witnesses
from model.workless import only_data_of, workless

#: The root of a Broadcast is away in ``read``; so is the thread that was to make it, of which
#: nothing is seen; the first stage of a pipeline is away.
IDLE = [("stall", 8330, 1), ("stall", 8829, 2), ("stall", 7362, 0)]
#: Kind, seed, who is to blame, who may be away instead: it waits on another stream than the call
#: to which its peer has gone on; on one that nobody knows, as it has not used the communicator;
#: it has to make what the peer made first before what both have to make.
AWAY = [("missing_send", 2509, 2, 0), ("missing_recv", 3625, 5, 6), ("missing_recv", 7350, 0, 1)]


@pytest.mark.parametrize(("kind", "seed", "rank"), IDLE)
def test_all_wait_for_data_of_one_that_may_have_none(kind: str, seed: int, rank: int) -> None:
    here = broken(seed, kind)
    found = next(iter(witnesses(here)))
    assert (found.rival.kind, found.right) == ("none", {frozenset()})
    assert here.truth is not None
    assert here.truth.culprits == {rank}
    # The same until the horizon, and then it goes on to its end.
    assert lines(found.run, here.horizon) == lines(here.engine, here.horizon)
    assert not all(p.finished for p in found.run.procs)
    good = Engine(found.healthy, 77)
    assert ends(good) is None
    assert all(p.finished for p in good.procs)


@pytest.mark.parametrize(("kind", "seed", "culprit", "rank"), AWAY)
def test_one_that_seems_to_wait_for_its_device_may_be_away(
    kind: str, seed: int, culprit: int, rank: int
) -> None:
    here = broken(seed, kind)
    found = next(w for w in witnesses(here) if w.rival.kind == "stall")
    assert here.truth is not None
    assert (found.right, here.truth.culprits) == ({frozenset({rank})}, frozenset({culprit}))
    assert lines(found.run, here.horizon) == lines(here.engine, here.horizon)
    good = Engine(found.healthy, 77)
    assert ends(good) is None
    # The fault is that this rank is away, and nothing else.
    for r, (one, two) in enumerate(zip(found.healthy.code, found.broken.code, strict=True)):
        more = [what for code in two for what in code]
        for what in [what for code in one for what in code]:
            more.remove(what)
        assert all(isinstance(x, Host) and x.dt is None for x in more)
        assert len(more) == (r == rank)


def traced(kind: str, seed: int) -> tuple[Case, Base]:
    here = broken(seed, kind)
    return here, look(here.engine.program, here.seed)


@pytest.mark.parametrize("how", [("uninterruptible", None), ("syscall", "write")])
def test_who_works_for_nobody_does_not_wait_for_work(how: tuple[str, str | None]) -> None:
    program = _with(broken(8330, "stall").engine.program, Host(None, *how))
    base = look(program, 8330)
    assert only_data_of(base.run, 1)
    assert list(workless(base, stem_of(base), 400.0)) == []


def _with(program: Program, away: Host) -> Program:
    made = copy.copy(program)
    made.code = [
        [[away if isinstance(x, Host) and x.dt is None else x for x in code] for code in threads]
        for threads in program.code
    ]
    return made


def test_who_is_missed_in_more_than_data_has_no_idle_life() -> None:
    seen = 0
    for seed in range(40):
        try:
            here, base = traced("stall", seed)
        except NoPlace:
            continue
        assert here.truth is not None
        (rank,) = here.truth.culprits
        if any(_inside(p) == "ncclCommSplit" for p in here.engine.procs if p.rank != rank):
            seen += 1
            assert not only_data_of(base.run, rank)
    assert seen


def _inside(p: Process) -> str | None:
    return next((t.inside.api for t in p.threads if t.inside is not None), None)


def test_an_idle_life_that_leaves_another_trace_is_refused() -> None:
    here, base = traced("stall", 8330)
    (rival,) = workless(base, stem_of(base), here.horizon)
    assert isinstance(Prover(here, base).prove(rival), Witness)
    # It has work too early: before the trace is over.
    (early,) = workless(base, stem_of(base), here.horizon - 200.0)
    said = Prover(here, base).prove(early)
    assert isinstance(said, str)
    again = look(here.engine.program, here.seed).run
    assert difference(here.engine, again, here.horizon) is None
