"""The model itself: valid programs end, and its traces are valid."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

import nccluprobe.trace
from model.breaker import NoPlace
from model.case import Case, broken, healthy, visible
from model.faults import FAULTS

SCHEMA = json.loads((Path(nccluprobe.trace.__file__).parent / "trace.schema.json").read_text())


@pytest.mark.parametrize("seed", range(16))
def test_programs_without_a_fault_end(seed: int) -> None:
    assert all(p.finished for p in healthy(seed).engine.procs)


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_take_effect_and_traces_are_valid(kind: str) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for seed in range(3, 40):
        try:
            case = broken(seed, kind)
        except NoPlace:
            continue
        break
    else:
        pytest.fail(f"no program in which {kind} takes effect")
    for trace in case.traces(0.01).procs[:2]:
        lines = [json.loads(line) for line in trace.data().splitlines()]
        assert lines[0]["kind"] == "process"
        for line in [x for x in lines if x["kind"] != "coverage"][:300] + lines[-10:]:
            validator.validate(line)


def test_a_trace_counts_its_losses() -> None:
    case = healthy(5)
    full, part = case.traces().procs[0], case.traces(0.05).procs[0]
    missing = len(full.data().splitlines()) - len(part.data().splitlines())
    last = [json.loads(x) for x in part.data().splitlines() if b'"coverage"' in x][-1]
    assert 0 < missing == last["lost_kernel"]


@pytest.mark.parametrize("kind", ["datatype", "p2p_size", "zero"])
def test_a_difference_is_hidden_when_one_of_its_sides_was_lost(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(c for seed in range(40) if (c := some(seed, kind)) is not None)
    assert not case.hidden(0.0)
    assert case.truth is not None
    (culprit,) = case.truth.culprits
    for who, hidden in ((culprit, True), (None, False)):
        lost = {
            p.rank: {i for i, r in enumerate(p.records) if r.op is case.truth.call}
            if p.rank == who
            else set[int]()
            for p in case.engine.procs
        }
        monkeypatch.setattr(case, "lost", lambda rate, lost=lost: lost)
        assert case.hidden(0.01) == hidden
    others = {
        p.rank: set[int]() if p.rank == culprit else set(range(len(p.records)))
        for p in case.engine.procs
    }
    monkeypatch.setattr(case, "lost", lambda rate: others)
    assert case.hidden(0.01)


def test_only_a_call_that_differs_can_be_hidden() -> None:
    assert not healthy(3).hidden(0.01)
    case = next(c for seed in range(40) if (c := some(seed, "stall")) is not None)
    assert not case.hidden(0.01)


@pytest.mark.parametrize(
    ("count", "there", "shown"), [(8, True, True), (0, True, False), (8, False, False)]
)
def test_nobody_waits_in_a_call_of_count_0_or_when_it_has_ended(
    count: int, there: bool, shown: bool
) -> None:
    engine = healthy(5).engine
    assert not visible(engine)
    proc = engine.procs[1]
    record = next(r for r in proc.records if r.op is not None and not r.op.p2p)
    assert record.op is not None
    proc.endpoints[record.fields["comm"]].ords += 1
    proc.records.append(replace(record, op=replace(record.op, count=count)))
    proc.ended = None if there else proc.ended
    assert visible(engine) == shown


def some(seed: int, kind: str) -> Case | None:
    try:
        return broken(seed, kind)
    except NoPlace:
        return None
