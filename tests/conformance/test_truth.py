"""The judge of the suite: what it must not let pass."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.cases import by_id
from conformance.edits import Break
from conformance.traces import HASHES
from conformance.truth import MISSING, SILENCE, Truth, faults_of
from nccluprobe.match.finding import Finding
from nccluprobe.nccl.api import API_TABLE, BY_NAME, Kind

TRUTH = Truth(frozenset({2}), (MISSING,), "world", 7, entered=frozenset({0, 1, 3}))


def finding(*ranks: int, key: int = 1, **more: Any) -> Finding:
    made = Finding(
        key=(key,),
        hang_type=MISSING,
        run_id="run",
        comm_uid_hash=HASHES["world"],
        comm_seq=7,
        detected_at=0,
        details={"entered_comm_ranks": [0, 1, 3], "reason": "rank_alive_but_not_entered"},
        severity="error",
        role="root_cause",
        named=[{"host": "node0", "pid": 1000 + r, "rank": r} for r in ranks],
    )
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_the_right_finding_passes() -> None:
    assert faults_of(TRUTH, [finding(2)]) == []
    behind = finding(0, key=2, role="downstream", downstream_of=finding(2).id)
    assert faults_of(TRUTH, [finding(2), behind]) == []
    assert faults_of(SILENCE, []) == []


@pytest.mark.parametrize(
    ("wrong", "findings"),
    [
        ("blamed", []),
        ("blamed [1, 2]", [finding(1, 2)]),
        ("blamed [1]", [finding(1)]),
        ("blamed []", [finding(2, role="unknown")]),
        ("no collective_missing_enter", [finding(2, hang_type="collective_mismatch")]),
        ("comm_seq", [finding(2, comm_seq=8)]),
        ("communicator", [finding(2, comm_uid_hash=HASHES["other"])]),
        ("severity", [finding(2, severity="notice")]),
        ("entered", [finding(2, details={"entered_comm_ranks": [0, 1]})]),
        ("2 causes", [finding(2), finding(2, key=2)]),
        ("unknown beside", [finding(2), finding(0, key=2, role="unknown")]),
        ("not there", [finding(2), finding(key=2, role="downstream", downstream_of="f0")]),
        ("blamed [0, 2]", [finding(2), finding(0, key=2)]),
    ],
)
def test_a_wrong_verdict_does_not_pass(wrong: str, findings: list[Finding]) -> None:
    assert any(wrong in text for text in faults_of(TRUTH, findings)), faults_of(TRUTH, findings)


def test_a_correct_program_allows_no_finding_at_all() -> None:
    assert faults_of(SILENCE, [finding(severity="notice", role="unknown")])


def test_a_tie_allows_no_name_but_wants_the_finding() -> None:
    tie = Truth(frozenset(), (MISSING,))
    assert faults_of(tie, []) and faults_of(tie, [finding(0)])
    assert faults_of(tie, [finding()]) == []


def test_every_function_of_the_table_is_tried_with_every_fault_it_can_have() -> None:
    found: dict[str, set[str]] = {}
    for case in by_id().values():
        found.setdefault(case.op, set()).add(case.fault)
    wanted = {a.name for a in API_TABLE if a.kind in (Kind.COLLECTIVE, Kind.P2P)}
    assert set(found) == wanted
    always = {"missing call", "extra call", "swapped order", "wrong count", "wrong datatype"}
    always |= {"wrong communicator", "early exit", "deadlock across communicators"}
    for op, faults in found.items():
        args = {role.value for role in BY_NAME[op].args}
        assert always <= faults, op
        assert {x for x in ("op", "root") if x in args} == {
            x for x in ("op", "root") if f"wrong {x}" in faults
        }
        assert ("asymmetric pair" in faults) == (BY_NAME[op].kind is Kind.P2P)


def test_culprits_and_places_differ_among_the_operations() -> None:
    breaks = [Break(a, 8) for a in API_TABLE if a.kind is Kind.COLLECTIVE]
    assert {b.rank for b in breaks} == set(range(1, 8))
    assert all(b.rank != b.second and 0 < b.second < 8 for b in breaks)
    assert len({b.at for b in breaks}) == 3
