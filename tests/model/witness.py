"""Whether the trace of a broken program allows another fault as well, with a proof.

A witness is another program that runs to its end, and a fault in it, that
together leave the same trace: of each thread the same calls with the same
arguments in the same order and at the same times (but for 0.25 s), the same of
them still inside, the same seen of each main thread once a second, the same
ends of processes.  Where the right answers to the two differ, no analyzer can
give both of them.  Instead of a fault one rank may have no work for the others
(``workless``).  Nothing of the analyzer is used here.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from model.breaker import Truth
from model.case import Case, idle
from model.engine import Engine
from model.hidden import others
from model.ops import Program
from model.replay import Diverged, Lost, Replay, difference
from model.rivals import Rival, faults_of, rivals, say
from model.stem import Base, Stem, Tails, agreed, look, operations, stances, stem_of
from model.tails import complete
from model.workless import workless


@dataclass
class Witness:
    """Another program, the fault in it, and their run."""

    rival: Rival
    healthy: Program
    broken: Program
    run: Engine
    #: What is left to do after the trace, without the fault.
    tails: Tails

    @property
    def right(self) -> set[frozenset[int]]:
        return self.rival.right

    def words(self) -> list[str]:
        """What a sceptic needs to check it by hand."""
        who = [str(sorted(x)) if x else "nobody" for x in sorted(self.right, key=len)]
        calls = sum(len(p.records) for p in self.run.procs)
        lines = [
            f"{self.rival.kind}: {self.rival.words}",
            f"to blame then: {' or '.join(who)}; the same are {calls} calls",
            "without the fault that program goes on from here:",
        ]
        for (rank, _), what in sorted(self.tails.of.items()):
            todo = [say(op) for x in what for op in operations(x)]
            if todo:
                more = f", and {len(todo) - 4} more" if len(todo) > 4 else ""
                lines.append(f"  rank {rank}: {', '.join(todo[:4])}{more}")
        return lines if len(lines) > 3 else lines[:2]


def answers(truth: Truth) -> set[frozenset[int]]:
    """Whom it is right to blame: any of these sets."""
    return {truth.culprits, *truth.also} | ({frozenset[int]()} if truth.unnamed else set())


def witnesses(
    case: Case, wanted: frozenset[int] | None = None, rate: float = 0.0
) -> Iterator[Witness]:
    """One of each kind and right answer.

    ``wanted``: only with these ranks to blame.  ``rate``: part of the records
    that was lost; in place of one of these there may have been another call.
    """
    assert case.truth is not None
    base = look(case.engine.program, case.seed)
    lost = case.lost(rate)
    ranks = set(range(base.program.nranks)) if not wanted else set(wanted)
    found: set[tuple[str, frozenset[int]]] = set()
    done = stem_of(base)
    tried = [(base, workless(base, done, case.horizon))]
    tried += [
        (known, itertools.chain(rivals(known, stem, ranks), _supposing(known, stem, ranks, lost)))
        for known, stem in stances(base, done)
    ]
    for known, every in tried:
        prover = Prover(case, known, lost)
        for rival in every:
            if prover.calls > BUDGET:
                return
            key = (rival.kind, rival.culprits)
            if key in found or not other(rival.right, case.truth):
                continue
            proof = prover.prove(rival)
            if isinstance(proof, Witness) and other(proof.right, case.truth):
                found.add(key)
                yield proof


def _supposing(base: Base, stem: Stem, ranks: set[int], lost: Lost) -> Iterator[Rival]:
    """Faults of these ranks, if one of the lost calls was another one."""
    for rank in sorted(lost):
        for made in others(base, stem, rank, lost, rank in ranks):
            for r in sorted(ranks):
                yield from faults_of(base, made, r)


def allows(
    case: Case, blamed: frozenset[int], types: set[str], told: set[str], rate: float = 0.0
) -> Witness | None:
    """A witness that makes this a fair verdict: nobody is blamed, or who is to blame there.

    ``types``: kinds of the findings that blame somebody; ``told``: of all that are open.
    That nothing is told is fair only where nothing need be broken.
    """
    kinds = frozenset[str]() if case.truth is None else case.truth.types
    for witness in witnesses(case, blamed, rate):
        rival = witness.rival
        if rival.kind != "none" and not told & (rival.types | kinds):
            continue
        if not blamed or (blamed in witness.right and types <= rival.types):
            return witness
    return None


def other(right: set[frozenset[int]], truth: Truth) -> bool:
    """Whether no answer is right for both, be it that nobody is named."""
    return not right & answers(truth)


#: As long as anything moves, in seconds.
LONG = 1e7
#: Calls that are run for one case before it is given up, in all programs that are tried.
BUDGET = 300_000


class Prover:
    """Runs what may be a witness.  Many faults leave the same calls: these run once."""

    def __init__(self, case: Case, base: Base, lost: Lost | None = None) -> None:
        self.case = case
        self.lost = lost
        self.base = base
        self.runs: dict[Hashable, tuple[Engine, str | None]] = {}
        self.ends: dict[Hashable, str | None] = {}
        #: So that none is taken for another one that came to lie in its place.
        self.kept: list[Stem] = []
        self.calls = 0
        self.size = sum(len(p.records) for p in case.engine.procs)

    def prove(self, rival: Rival) -> Witness | str:
        """A witness, or why this fault leaves another trace."""
        self.kept += [rival.healthy, rival.broken]
        why = "the calls do not agree"
        for grouped in (True, False):
            # To look through all calls costs about a tenth of a run of them.
            self.calls += self.size // 10
            away = rival.culprits if rival.kind == "stall" else frozenset[int]()
            tails = complete(self.base, rival.healthy, grouped, away)
            if tails is None:
                return "the calls do not agree"
            if rival.first is not None and tails.first(rival.first[0]) != rival.first[1]:
                why = "what it makes next is another call"
                continue
            if away and not any(tails.work(r) for r in away):
                return "nobody waits by that"
            broken = rival.broken.program(self.base, tails, rival.hang)
            healthy = rival.healthy.program(self.base, tails)
            # Most often refused, and known already, is what many of them have in common.
            alike = rival.kind in ("none", "device_hang", "stall")
            said = self._ends(rival, tails, healthy) if alike else None
            if said is None:
                run, said = self._run(rival, tails, broken)
            said = said or self._ends(rival, tails, healthy)
            if said is not None:
                why = said
                continue
            if rival.kind == "device_hang" and len(alone := idle(run)) == 1:
                rival.also.append(frozenset(alone))
            waiting = {p.rank for p in run.procs if not p.finished} - rival.culprits
            if not waiting and rival.kind != "none":
                return "nobody waits by that"
            return Witness(rival, healthy, broken, run, tails)
        return why

    def _run(self, rival: Rival, tails: Tails, broken: Program) -> tuple[Engine, str | None]:
        key = (id(rival.broken), tails.key(), rival.hang)
        if key not in self.runs:
            run = Replay(broken, self.case.engine, self.lost)
            try:
                run.run(self.case.horizon if rival.kind == "none" else LONG)
                said = difference(self.case.engine, run, self.case.horizon, self.lost)
            except Diverged as e:
                said = str(e)
            except KeyError:
                said = "a communicator is used that is not there"
            self.calls += sum(len(p.records) for p in run.procs)
            self.runs[key] = (run, said)
        return self.runs[key]

    def _ends(self, rival: Rival, tails: Tails, healthy: Program) -> str | None:
        key = (id(rival.healthy), tails.key())
        if key not in self.ends:
            said = None
            for seed in (self.case.seed, self.case.seed + 1):
                if said is None:
                    run = Engine(healthy, seed)
                    said = ends(run)
                    self.calls += sum(len(p.records) for p in run.procs)
            self.ends[key] = said
        return self.ends[key]


def ends(run: Engine) -> str | None:
    """Why a program, which is run here, is not one without a fault; None: it is."""
    try:
        run.run()
    except KeyError:
        return "without the fault a communicator is used that is not there"
    stuck = [p.rank for p in run.procs if not p.finished]
    if stuck:
        return f"without the fault ranks {stuck} hang as well"
    return None if agreed(run) else "without the fault calls differ"
