"""What the analyzer says of a case, beside what is true."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, cast

from support.analysis import Run
from support.tracegen import Job

from model.case import Case
from model.witness import Witness, allows

#: The cause is told: with its ranks, or without where that is right as well.
FOUND = ("exact", "unnamed")
DELAY = "delayed_collective_enter"


@dataclass
class Verdict:
    """``status``:

    exact, unnamed: right; undecided: the analyzer says that it cannot tell;
    missed: nothing of an allowed kind; kind: the right ranks for another
    reason; partial: not all of them; wrong: an innocent rank is blamed;
    quiet: no finding of severity error where nothing is broken; false: one;
    unseen: nothing is open at the API, or the call that differs was lost, and
    nothing wrong was said; either: it is none of exact and unnamed, but the
    trace allows another fault as well (``witness``), and nobody is blamed, or
    exactly whom that one is right to blame, not as observed.
    """

    status: str
    blamed: list[int]
    #: A wrong verdict that is said to be observed.
    sure: bool = False
    findings: list[dict[str, Any]] = field(default_factory=list)
    witness: Witness | None = None

    def brief(self) -> list[str]:
        """Findings, one line each."""
        lines = []
        for f in self.findings:
            d = f["details"]
            who = [c["rank"] for c in f["culprits"]]
            lines.append(
                f"{f['hang_type']} {f['state']} {f['severity']} {f['role']} "
                f"culprits={who} conf={d.get('confidence')} reason={d.get('reason')} "
                f"comm={f['comm_uid_hash']} seq={f['comm_seq']} api={d.get('api')} "
                f"missing={d.get('missing_comm_ranks')}"
            )
        return lines


def findings(case: Case, rate: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Findings at the end of the traces, and all that were written on the way.

    Every third case is watched live: read in steps, a scan after each.
    """
    traces = case.traces(rate)
    run = Run(cast(Job, traces))
    rng = random.Random(f"steps {case.seed} {rate}")
    steps = sorted(rng.uniform(1.0, case.horizon) for _ in range(rng.choice([0, 0, 6])))
    written: list[dict[str, Any]] = []
    for step in steps:
        for i, n in enumerate(traces.written(step)):
            if n > run.at[i]:
                run.feed(i, n - run.at[i])
        written += [f.to_json() for f in run.scan()]
    run.all()
    written += [f.to_json() for f in run.scan()]
    last = {f["id"]: f for f in written}
    return list(last.values()), written


def causes(case: Case, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Findings that blame somebody for what is broken: open root causes.

    That a slow rank came late is true, and beside the point; for a late rank
    the finding is over when the rank has come.
    """
    late = case.truth is not None and case.truth.kind == "late"
    slow = case.slow - (case.truth.culprits if case.truth is not None else frozenset())
    return [
        f
        for f in found
        if f["role"] == "root_cause"
        and (late or f["state"] == "open")
        and not (f["hang_type"] == DELAY and {c["rank"] for c in f["culprits"]} <= slow)
    ]


def ranks(found: list[dict[str, Any]]) -> set[int]:
    """Ranks that findings point at."""
    return {c["rank"] for f in found for c in f["culprits"]}


def judge(case: Case, rate: float = 0.0) -> Verdict:
    """Analyses the case's traces with this loss."""
    found, written = findings(case, rate)
    truth = case.truth
    if truth is None:
        errors = [f for f in written if f["severity"] == "error"]
        status = "false" if errors else "quiet"
        sure = any(f["details"].get("confidence") == "observed" for f in errors)
        return Verdict(status, sorted(ranks(causes(case, errors))), sure, errors or found)

    roots = causes(case, found)
    who = ranks(roots)
    right = [truth.culprits, *truth.also, *([frozenset[int]()] if truth.unnamed else [])]
    guilty = frozenset[int]().union(truth.culprits, *truth.also)
    wrong = [f for f in roots if ranks([f]) - guilty]
    told = [f for f in roots if f["hang_type"] in truth.types]
    if truth.missing is not None:
        told = [f for f in told if set(f["details"]["missing_comm_ranks"]) == truth.missing]
    sure = any(f["details"].get("confidence") == "observed" for f in wrong)
    if wrong:
        status = "wrong"
    elif told and who in right:
        status = "exact" if who == truth.culprits else "unnamed"
    elif not case.visible or (not who and case.hidden(rate)):
        status = "unseen"
    elif who and who in right:
        status = "kind"
    elif who:
        status = "partial"
    elif any(f["role"] == "unknown" for f in found):
        status = "undecided"
    else:
        status = "missed"
    verdict = Verdict(status, sorted(who), sure, found)
    if status not in (*FOUND, "unseen"):
        blaming = [f for f in roots if f["culprits"]]
        if all(f["details"].get("confidence") != "observed" for f in blaming):
            types = {f["hang_type"] for f in blaming}
            told_of = {f["hang_type"] for f in found if f["state"] == "open"}
            verdict.witness = allows(case, frozenset(who), types, told_of, rate)
    if verdict.witness is not None:
        verdict.status = "either"
    return verdict
