"""Many cases at once, and the table of what was found in them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from model.breaker import NoPlace
from model.case import Case, broken, healthy
from model.explain import explain
from model.faults import FAULTS
from model.judge import FOUND, judge

HEALTHY = "none"
RATES = (0.0, 0.001, 0.01)


@dataclass(frozen=True)
class Outcome:
    """One case with one rate of loss.

    ``brief``: findings, and what the model says; ``witness``: the other fault
    that the trace allows, in words.
    """

    kind: str
    seed: int
    rate: float
    status: str
    sure: bool
    blamed: tuple[int, ...]
    truth: tuple[int, ...]
    brief: tuple[str, ...]
    witness: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        sure = " (sure)" if self.sure else ""
        return (
            f"{self.kind} {self.seed} loss {self.rate:g}: {self.status}{sure},"
            f" blamed {list(self.blamed)}, right {list(self.truth)}"
        )


@dataclass
class Survey:
    """Counts: (kind, rate) -> status -> cases."""

    counts: dict[tuple[str, float], Counter[str]] = field(default_factory=dict)
    sure: Counter[tuple[str, float]] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)
    programs: int = 0

    def add(self, outcomes: list[Outcome]) -> None:
        self.programs += bool(outcomes)
        for o in outcomes:
            self.counts.setdefault((o.kind, o.rate), Counter())[o.status] += 1
            if o.sure and o.status in ("wrong", "false"):
                self.sure[o.kind, o.rate] += 1
            if o.status not in (*FOUND, "quiet", "unseen", "undecided", "either"):
                self.failures.append(o)

    def total(self, rate: float, statuses: Iterable[str], faults: bool = True) -> int:
        """Cases with this loss that ended in one of the statuses."""
        wanted = set(statuses)
        return sum(
            n
            for (kind, r), counter in self.counts.items()
            if r == rate and (kind == HEALTHY) is not faults
            for status, n in counter.items()
            if status in wanted
        )


def _waits(case: Case, blamed: list[int]) -> list[str]:
    """What the model says of ranks that are blamed, and of those that should be."""
    truth = sorted(case.truth.culprits) if case.truth is not None else []
    return ["model: " + line for line in explain(case.engine, [*blamed[:6], *truth])[:16]]


def examine(kind: str, seed: int, rates: tuple[float, ...], small: bool = False) -> list[Outcome]:
    """One program with all rates of loss; empty: it has no place for this fault."""
    try:
        case = healthy(seed, small) if kind == HEALTHY else broken(seed, kind, small)
    except NoPlace:
        return []
    outcomes = []
    for rate in rates:
        verdict = judge(case, rate)
        truth = case.truth.culprits if case.truth is not None else frozenset()
        outcomes.append(
            Outcome(
                kind,
                seed,
                rate,
                verdict.status,
                verdict.sure,
                tuple(verdict.blamed),
                tuple(sorted(truth)),
                (*verdict.brief()[:8], *_waits(case, verdict.blamed)),
                () if verdict.witness is None else tuple(verdict.witness.words()),
            )
        )
    return outcomes


def plan(programs: int, start: int, kinds: list[str] | None = None) -> Iterator[tuple[str, int]]:
    """Kind and seed of each program; every fourth has no fault."""
    faults = kinds or list(FAULTS)
    for i in range(programs):
        if kinds is None and i % 4 == 0:
            yield HEALTHY, start + i
        else:
            yield faults[(i - i // 4 if kinds is None else i) % len(faults)], start + i


def _examine(what: tuple[str, int, tuple[float, ...], bool]) -> list[Outcome]:
    return examine(*what)


def survey(
    programs: int,
    start: int = 0,
    kinds: list[str] | None = None,
    rates: tuple[float, ...] = RATES,
    processes: int = 1,
    small: bool = False,
    report_every_s: float | None = None,
) -> Survey:
    """Examines this many programs, from this seed on."""
    result = Survey()
    work = [(kind, seed, rates, small) for kind, seed in plan(programs, start, kinds)]
    began = said = time.monotonic()
    if processes == 1:
        results: Iterable[list[Outcome]] = map(_examine, work)
    else:
        pool = ProcessPoolExecutor(processes)
        results = pool.map(_examine, work, chunksize=8)
    for i, outcomes in enumerate(results):
        result.add(outcomes)
        now = time.monotonic()
        if report_every_s is not None and now - said >= report_every_s:
            said = now
            print(f"{i + 1} of {len(work)} programs, {now - began:.0f} s", flush=True)
    return result


def table(result: Survey) -> str:
    """The table of recall by fault and loss, as Markdown."""
    rates = sorted({rate for _, rate in result.counts})
    head = ["fault", "cases", *(f"found, {_percent(r)} lost" for r in rates)]
    head += ["the trace allows another fault too", "not decided", "not told", "other"]
    head += ["innocent blamed (sure)", "not to be seen"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    kinds = [k for k in FAULTS if any((k, r) in result.counts for r in rates)]
    total = [Counter[str]() for _ in rates]
    for kind in kinds:
        counters = [result.counts.get((kind, r), Counter[str]()) for r in rates]
        lines.append(_row(kind, counters, sum(result.sure[kind, r] for r in rates)))
        total = [one + more for one, more in zip(total, counters, strict=True)]
    every = sum(n for (kind, _), n in result.sure.items() if kind != HEALTHY)
    return "\n".join([*lines, _row("all", total, every)])


def _row(what: str, counters: list[Counter[str]], sure: int) -> str:
    shown = [sum(c.values()) - c["unseen"] for c in counters]
    row = [what, str(shown[0])]
    for counter, n in zip(counters, shown, strict=True):
        found = sum(counter[s] for s in FOUND)
        row.append(f"{100 * found / n:.1f} %" if n else "-")
    every = sum(counters, Counter[str]())
    row += [
        str(every["either"]),
        str(every["undecided"]),
        str(every["missed"]),
        str(every["kind"] + every["partial"]),
    ]
    row += [f"{every['wrong']} ({sure})", str(every["unseen"])]
    return "| " + " | ".join(row) + " |"


def healthy_table(result: Survey) -> str:
    """False errors where nothing is broken, as Markdown."""
    lines = ["| lost | programs without a fault | with a false error |", "|---|---|---|"]
    for rate in sorted({rate for kind, rate in result.counts if kind == HEALTHY}):
        counter = result.counts[HEALTHY, rate]
        lines.append(f"| {_percent(rate)} | {sum(counter.values())} | {counter['false']} |")
    return "\n".join(lines)


def _percent(rate: float) -> str:
    return f"{100 * rate:g} %"
