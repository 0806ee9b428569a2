"""A made-up training: steps of several operations, in which faults can be planted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from nccluprobe.canary import arrival
from nccluprobe.canary.backend import NcclBackend
from nccluprobe.canary.cases import Case
from nccluprobe.canary.faults import Fault
from nccluprobe.canary.gather import gather_objects, gather_values
from nccluprobe.canary.measure import Tick, cases_of
from nccluprobe.canary.plant import Planter
from nccluprobe.canary.settings import Settings


class Worker:
    """All cases of a run, made together step by step, every result checked."""

    def __init__(self, backend: NcclBackend, settings: Settings, faults: Sequence[Fault]) -> None:
        self.backend = backend
        self.settings = settings
        # Twice the room: a planted fault may pass twice the count.
        self.cases: list[Case] = cases_of(settings, room=2)
        self.checked = 0
        self.wrong = 0
        self.first_wrong: str | None = None
        self.arrived: list[int] = []
        for case in self.cases:
            case.open(backend)
        # A served step begins with the command, a broadcast.
        paired = not settings.serve and self.cases[0].paired(backend.world)
        self.planter = Planter(faults, backend, settings, paired)

    def close(self) -> None:
        for case in self.cases:
            case.close()

    def step(self, number: int, *, faults_before: bool = True) -> None:
        """Queues all operations, waits for them together, checks what they gave."""
        for case in self.cases:
            case.fill(number)
        if faults_before:
            self.planter.before(number)
        self.arrived.append(time.monotonic_ns())
        for index in range(len(self.cases)):
            self.planter.call(number, index, self.cases)
        self.backend.synchronize(self.settings.deadline)
        for case in self.cases:
            self.checked += 1
            if wrong := case.check():
                self.wrong += 1
                self.first_wrong = self.first_wrong or f"step {number}, {case.label}: {wrong.first}"


def run_steps(
    backend: NcclBackend, settings: Settings, faults: Sequence[Fault], tick: Tick
) -> dict[str, Any]:
    """Collective: `settings.steps` steps; every rank gets the same report."""
    offsets = arrival.estimate(backend)
    worker = Worker(backend, settings, faults)
    for number in range(settings.steps or 0):
        time.sleep(settings.pause)
        worker.step(number)
        tick(f"step {number}")
    worker.close()
    return report(worker, offsets)


def report(worker: Worker, offsets: arrival.Offsets) -> dict[str, Any]:
    """Collective: what all ranks checked, and when they arrived."""
    backend = worker.backend
    mine = {
        "checked": worker.checked,
        "wrong": worker.wrong,
        "first_wrong": worker.first_wrong,
        "reconnects": backend.reconnects,
    }
    everyone = gather_objects(backend, mine)
    times = gather_values(backend, np.array(worker.arrived, np.int64))
    bad = [rank for rank, r in enumerate(everyone) if r["wrong"]]
    return {
        "steps": len(worker.arrived),
        "checked": sum(r["checked"] for r in everyone),
        "wrong": sum(r["wrong"] for r in everyone),
        "wrong_ranks": bad,
        "first_wrong": everyone[bad[0]]["first_wrong"] if bad else None,
        "reconnects": backend.reconnects,
        "arrival": arrival.summary(times, offsets),
    }
