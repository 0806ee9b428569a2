"""Random programs, healthy and broken, against the analyzer: the short form.

``tools/property`` is the full one.
"""

from __future__ import annotations

import pytest

from model.faults import FAULTS
from model.survey import HEALTHY, Outcome, examine

pytestmark = pytest.mark.slow

#: First seed of the programs here; ``tools/property`` starts at 0.
FIRST = 500_000
#: Verdicts that blame nobody falsely, and hide nothing.
FAIR = ("exact", "unnamed", "undecided", "either", "unseen")


def outcomes(kind: str, wanted: int, rates: tuple[float, ...]) -> list[Outcome]:
    """Of the first programs that have a place for this fault."""
    found: list[Outcome] = []
    seed = FIRST
    while len(found) < wanted * len(rates):
        found += examine(kind, seed, rates)
        seed += 1
    return found


def describe(bad: list[Outcome]) -> str:
    return "\n".join(o.line + "".join("\n    " + line for line in o.brief) for o in bad)


@pytest.mark.parametrize("rate", [0.0, 0.01])
def test_nothing_is_reported_where_nothing_is_broken(rate: float) -> None:
    bad = [o for o in outcomes(HEALTHY, 12, (rate,)) if o.status != "quiet"]
    assert not bad, describe(bad)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_told_and_nobody_innocent_is_blamed(kind: str) -> None:
    found = outcomes(kind, 4, (0.0,))
    bad = [o for o in found if o.status not in FAIR]
    assert not bad, describe(bad)
    assert any(o.status in ("exact", "unnamed", "unseen") for o in found)


def test_with_loss_the_cause_is_told_and_never_a_sure_wrong_one() -> None:
    found = [o for kind in FAULTS for o in outcomes(kind, 1, (0.01,))]
    sure = [o for o in found if o.status == "wrong" and o.sure]
    assert not sure, describe(sure)
    told = [o for o in found if o.status in FAIR]
    assert len(told) >= 0.95 * len(found), describe([o for o in found if o not in told])
