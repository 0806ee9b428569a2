"""docs/conformance.md: what is tried, and what has to be said of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from conformance import faults, pairs
from conformance.cases import by_id
from conformance.known import reason
from conformance.truth import (
    CROSSED,
    ENDED,
    MISMATCH,
    MISSING,
    P2P_INVERTED,
    P2P_MISMATCH,
    P2P_UNMATCHED,
    SHIFT,
    STUCK,
    Case,
)

TITLE = "Conformance"
LETTERS = {
    MISSING: "A",
    MISMATCH: "M",
    SHIFT: "S",
    ENDED: "E",
    CROSSED: "X",
    STUCK: "K",
    P2P_UNMATCHED: "U",
    P2P_MISMATCH: "D",
    P2P_INVERTED: "O",
}
INTRO = """\
Programs with one fault each, in the spirit of the benchmarks for checkers of MPI programs, and
correct twins that look like them. A model of NCCL (`tests/conformance/model.py`), which knows
nothing of the matcher, runs each of them on 2, 4 and 8 ranks and tells when every host called what
and where it stopped; of that the traces are made. What has to be said is argued from NCCL's
semantics: the finding, its communicator and number, and exactly who is blamed. Everything comes
from the API table, so a new function is covered by itself. `tests/conformance/test_traces.py`
runs all of it, `test_simnccl.py` a part on real processes under both fronts.

Schedules: `sync`: the hosts wait for the device after each call; `ahead`: they run on to the end
of the program while the device stands; `pass`: NCCL does not mind and goes on with wrong data.
"""
BLAMED = """\
"the culprit": the findings of role root_cause name exactly the rank that was made to break it.
"nobody": two sides cannot be told apart, and naming one would be a guess; the finding is there
all the same. Where both stand, either is right, for the reason given.
"""


def _cell(found: list[Case]) -> str:
    if not found:
        return "-"
    letters = sorted({LETTERS[k] for c in found for k in c.truth.kinds}, key="AMSEXKUDO".index)
    failing = sum(1 for c in found if reason(c.id))
    return "".join(letters) + f" {len(found)}" + (f" ({failing} open)" if failing else "")


def matrix() -> tuple[list[str], list[list[object]]]:
    """Head and rows: operation x kind of fault."""
    kinds = list(dict.fromkeys(c.fault for c in by_id().values() if c.fault))
    rows: list[list[object]] = []
    for api in (*faults.COLLECTIVES, *pairs.P2P):
        own = [c for c in by_id().values() if c.op == api.name]
        cells = [_cell([c for c in own if c.fault == kind]) for kind in kinds]
        rows.append([f"`{api.name}`", *cells, sum(1 for c in own if not c.fault)])
    return ["operation", *kinds, "twins"], rows


def _who(found: Iterable[Case]) -> str:
    """Whom the findings may blame in these cases."""
    answers: dict[str, None] = {}
    for c in found:
        if not c.truth.decidable:
            answers["not decidable"] = None
            continue
        for ranks in (c.truth.blamed, *c.truth.or_blamed):
            word = "the culprit" if len(ranks) == 1 else f"all {len(ranks)} culprits"
            answers[word if ranks else "nobody"] = None
    return " or ".join(answers) or "-"


def verdicts(ops: Iterable[str]) -> tuple[list[str], list[list[object]]]:
    """Head and rows: kind of fault and its variant, and the verdict."""
    names = set(ops)
    found: dict[tuple[str, str], list[Case]] = {}
    for c in by_id().values():
        if c.fault and c.op in names:
            found.setdefault((c.fault, c.variant), []).append(c)
    rows: list[list[object]] = []
    for (fault, variant), cases in found.items():
        kinds = dict.fromkeys(k for c in cases for k in c.truth.kinds)
        optional = "" if cases[0].truth.required else " or nothing"
        rows.append(
            [
                fault,
                variant,
                ", ".join(f"`{k}`" for k in kinds) + optional,
                _who(c for c in cases if c.n == 2),
                _who(c for c in cases if c.n > 2),
                cases[-1].truth.why,
            ]
        )
    head = ["fault", "variant", "finding", "blamed of 2", "blamed of 4 and 8", "why"]
    return head, rows


def twins() -> tuple[list[str], list[list[object]]]:
    """Head and rows: the correct programs."""
    counts: Counter[str] = Counter(c.variant for c in by_id().values() if not c.fault)
    return ["correct program", "cases"], [[variant, n] for variant, n in counts.items()]
