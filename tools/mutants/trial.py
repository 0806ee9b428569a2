"""Runs the matcher's tests once, then for each mutant those that call its function.

A pytest plugin: pytest collects, and every run is a fork of the process that
collected, so nothing is imported twice and no run changes another.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from mutants.rules import Mutant
from mutants.switches import Switches

#: A test of a mutant ends after this much CPU time, s, and so many times what it takes.
_SPARE_S = 5.0
_TIMES = 20
#: The same for wall time, for what waits: other work may have the processors.
_SPARE_WALL_S = 60.0
#: So many tests in a row are run by one process.
_HAND = 20
_PR_SET_PDEATHSIG = 1


@dataclass
class Seen:
    """A test of the matcher as it is."""

    item: pytest.Item
    seconds: float
    calls: bytes


@dataclass
class Result:
    """A mutant, and the test that missed the rule."""

    mutant: Mutant
    test: str | None
    tried: int
    of: int
    seconds: float


@dataclass
class _Running:
    mutant: Mutant
    tests: list[Seen]
    folder: Path
    began: float = field(default_factory=time.monotonic)


class Trial:
    """``results``: one for each mutant; ``broken``: tests that fail with no rule disabled.

    ``missed``: ``Mutant.text`` -> test that missed the rule the last time, and is tried first.
    """

    def __init__(
        self,
        mutants: list[Mutant],
        switches: Switches,
        jobs: int,
        top: Path,
        tell: Callable[[Result], None],
        missed: dict[str, str],
    ) -> None:
        self.mutants = mutants
        self.switches = switches
        self.jobs = jobs
        self.top = top
        self.tell = tell
        self.missed = missed
        self.results: list[Result] = []
        self.broken: list[str] = []
        self.tests = 0
        #: module -> tests that missed one of its rules, newest last
        self._good: dict[str, list[str]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.collect()
        gc.freeze()
        self.tests = len(session.items)
        # Most are missed by the test that missed them the last time: no other has to be run.
        wanted = {self.missed.get(m.text) for m in self.mutants}
        left = self._round(self.mutants, [x for x in session.items if x.nodeid in wanted], True)
        if left:
            self._round(left, session.items, False)
        return True

    def _round(
        self, mutants: list[Mutant], items: list[pytest.Item], remembered: bool
    ) -> list[Mutant]:
        """Try mutants; returns those that no test missed.

        ``remembered``: of each only with the test that missed it the last time, and
        without a result where that passes.
        """
        seen = self._as_it_is(items)
        pending, running, left = list(mutants), dict[int, _Running](), list[Mutant]()
        while pending or running:
            while pending and len(running) < self.jobs:
                mutant = pending.pop(0)
                tests = self._tests_of(mutant, seen, remembered)
                if tests or not remembered:
                    self._start(mutant, tests, running)
                else:
                    left.append(mutant)
            if running:
                pid, status = os.wait()
                _end_children(pid)
                r = running.pop(pid)
                if status == 0:
                    left.append(r.mutant)
                if status != 0 or not remembered:
                    self._ended(r, status)
                shutil.rmtree(r.folder, ignore_errors=True)
        return left

    # -- with all rules ------------------------------------------------------

    def _as_it_is(self, items: list[pytest.Item]) -> list[Seen]:
        """All tests, some in each process; what passes, and which rules each calls."""
        # Dealt out in small hands: slow tests stand together.
        hands = [items[i : i + _HAND] for i in range(0, len(items), _HAND)]
        parts = [[x for hand in hands[i :: self.jobs] for x in hand] for i in range(self.jobs)]
        folders = [self._folder(f"as_it_is_{i}") for i in range(len(parts))]
        pids = [self._watch(part, f) for part, f in zip(parts, folders, strict=True)]
        for pid in pids:
            os.waitpid(pid, 0)
            _end_children(pid)
        items = [x for part in parts for x in part]
        found: list[tuple[str, float, bytes]] = []
        for folder in folders:
            found += pickle.loads((folder / "found").read_bytes())
            shutil.rmtree(folder, ignore_errors=True)
        self.broken = [x.nodeid for x, f in zip(items, found, strict=True) if f[0] == "failed"]
        seen = [
            Seen(item, seconds, calls)
            for item, (outcome, seconds, calls) in zip(items, found, strict=True)
            if outcome == "passed"
        ]
        return _promising_first(seen)

    def _watch(self, items: list[pytest.Item], folder: Path) -> int:
        """Run tests in a process of their own; returns its pid."""
        pid = os.fork()
        if pid != 0:
            return pid
        _alone(folder)
        self.switches.called()
        found = []
        for i, item in enumerate(items):
            began, wall = time.process_time(), time.monotonic()
            outcome = _run(item, items[i + 1] if i + 1 < len(items) else None)
            cost = max(time.process_time() - began, (time.monotonic() - wall) / 2)
            found.append((outcome, cost, self.switches.called()))
        (folder / "found").write_bytes(pickle.dumps(found))
        os._exit(0)

    # -- with one rule less --------------------------------------------------

    def _tests_of(self, mutant: Mutant, seen: list[Seen], remembered: bool) -> list[Seen]:
        """The tests that call its function, those first that missed a rule near by."""
        number, last = self.switches.numbers[mutant.text], self.missed.get(mutant.text)
        tests = [s for s in seen if s.calls[number] and (not remembered or s.item.nodeid == last)]
        good = self._good.get(mutant.module, [])
        tests.sort(key=lambda s: s.item.nodeid not in good)  # stable
        return tests

    def _start(self, mutant: Mutant, tests: list[Seen], running: dict[int, _Running]) -> None:
        number = self.switches.numbers[mutant.text]
        folder = self._folder(str(number))
        pid = os.fork()
        if pid == 0:
            _alone(folder)
            self.switches.off[0] = number
            for i, s in enumerate(tests):
                (folder / "at").write_text(str(i))
                _limit(s.seconds)
                if _run(s.item, tests[i + 1].item if i + 1 < len(tests) else None) != "passed":
                    os._exit(1)
            os._exit(0)
        running[pid] = _Running(mutant, tests, folder)

    def _ended(self, r: _Running, status: int) -> None:
        at = r.folder / "at"
        i = int(at.read_text() or 0) if at.exists() else 0
        test = None
        if status != 0:
            test = r.tests[i].item.nodeid if r.tests else "?"
            self.missed[r.mutant.text] = test
            good = self._good.setdefault(r.mutant.module, [])
            if test in good:
                good.remove(test)
            good.append(test)
            del good[:-12]
            if os.WIFSIGNALED(status):
                test += f" ({signal.Signals(os.WTERMSIG(status)).name})"
        tried = 0 if not r.tests else i + 1
        result = Result(r.mutant, test, tried, len(r.tests), time.monotonic() - r.began)
        self.results.append(result)
        self.tell(result)

    def _folder(self, name: str) -> Path:
        made = self.top / name
        made.mkdir()
        return made


def _promising_first(seen: list[Seen]) -> list[Seen]:
    """Fast ones first, and few of each grid of parameters, as these are alike."""
    shuffled = list(seen)
    random.Random(0).shuffle(shuffled)
    rank: Counter[str] = Counter()
    order: dict[str, float] = {}
    for s in shuffled:
        function = s.item.nodeid.partition("[")[0]
        order[s.item.nodeid] = s.seconds * (1 + rank[function])
        rank[function] += 1
    return sorted(seen, key=lambda s: order[s.item.nodeid])


def _alone(folder: Path) -> None:
    """In a forked process: let it disturb nobody, and not outlive who started it."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    # pytest makes tmp_path below this at its first use.
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)


def _end_children(pid: int) -> None:
    """Ends what a forked process has started, and left when its time was over."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _limit(seconds: float) -> None:
    """Ends this process when the test that begins takes much longer than it should."""
    for timer, number, spare in (
        (signal.ITIMER_PROF, signal.SIGPROF, _SPARE_S),
        (signal.ITIMER_REAL, signal.SIGALRM, _SPARE_WALL_S),
    ):
        signal.signal(number, signal.SIG_DFL)
        signal.setitimer(timer, spare + _TIMES * seconds)


def _run(item: pytest.Item, following: pytest.Item | None) -> str:
    """Outcome of a test with its fixtures: passed, skipped (or expected to fail), failed."""
    reports = runtestprotocol(item, nextitem=following, log=False)
    outcomes = [r.outcome for r in reports]
    for outcome in ("failed", "skipped"):
        if outcome in outcomes:
            return outcome
    return "skipped" if any(hasattr(r, "wasxfail") for r in reports) else "passed"
