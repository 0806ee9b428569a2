"""Every program of the suite as a made-up trace: the fault exactly, and twins silent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.analysis import analyze_job

from conformance.cases import by_id
from conformance.known import reason
from conformance.model import Model
from conformance.traces import write
from conformance.truth import SILENCE, Case, faults_of, text
from nccluprobe.match.options import SECOND

#: Limits that fit the traces' horizon.
LIMITS = {"missing_after": 4 * SECOND, "late_after": 2 * SECOND, "error_after": 8 * SECOND}


def params() -> Iterator[Any]:
    for case in by_id().values():
        why = reason(case.id)
        marks = [pytest.mark.xfail(strict=True, reason=why)] if why else []
        yield pytest.param(case, id=case.id, marks=marks)


@pytest.mark.parametrize("case", list(params()))
def test_verdict(case: Case) -> None:
    model = Model(case.build(), passes=case.passes).run()
    if case.truth is SILENCE:
        hung = [r for r in range(case.n) if model.hung(r)]
        assert not hung, f"the program is not correct: ranks {hung} hang"
    findings = analyze_job(write(model), **LIMITS)
    wrong = faults_of(case.truth, findings)
    assert not wrong, "\n".join([*wrong, f"({case.truth.why})", "findings:", *map(text, findings)])
