"""An inference group: rank 0 sends commands, the others wait for them in a broadcast."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nccluprobe import numerals
from nccluprobe.canary import arrival
from nccluprobe.canary.backend import NcclBackend
from nccluprobe.canary.faults import Fault
from nccluprobe.canary.settings import Settings
from nccluprobe.canary.steps import Worker, report

_WORDS = 8
_QUIT, _RUN = 0, 1

Say = Callable[[dict[str, Any]], None]


def requests_of(settings: Settings) -> Iterator[int]:
    """Rank 0's requests: one per line of standard input, or one every so many seconds.

    An empty line or "run" is one request, "run N" are N, "quit" or the end of the
    input ends the service.
    """
    if settings.every is not None:
        number = 0
        while settings.requests is None or number < settings.requests:
            time.sleep(settings.every)
            yield number
            number += 1
        return
    number = 0
    for line in sys.stdin:
        words = line.split() or ["run"]
        if words[0] == "quit":
            return
        times = words[1] if len(words) == 2 else "1"
        wanted = numerals.whole(times)
        if words[0] != "run" or len(words) > 2 or wanted is None or wanted < 0:
            print(f"nccluprobe: {line.strip()!r}: give run, run N or quit", file=sys.stderr)
            continue
        for _ in range(wanted):
            yield number
            number += 1
            if number == settings.requests:
                return


def serve(
    backend: NcclBackend, settings: Settings, faults: Sequence[Fault], say: Say
) -> dict[str, Any]:
    """Collective: until rank 0 ends it; every rank gets the same report."""
    offsets = arrival.estimate(backend)
    worker = Worker(backend, settings, faults)
    header = backend.alloc(8 * _WORDS)
    if backend.rank == 0:
        for number in requests_of(settings):
            worker.planter.before(number)
            start = time.monotonic_ns()
            _command(worker, header, _RUN, number)
            worker.step(number, faults_before=False)
            took = (time.monotonic_ns() - start) / 1000
            say({"request": number, "us": round(took, 1), "wrong": worker.wrong})
        _command(worker, header, _QUIT, 0)
    else:
        waited = 0
        while True:
            worker.planter.before(waited)
            backend.receive_command(header, _WORDS, "int64", 0)
            code, number = np.frombuffer(header.read(), "<i8")[:2]
            if code == _QUIT:
                break
            worker.step(int(number), faults_before=False)
            waited += 1
    worker.close()
    header.free()
    return report(worker, offsets)


def _command(worker: Worker, header: Any, code: int, number: int) -> None:
    words = np.zeros(_WORDS, "<i8")
    words[:2] = code, number
    header.write(words.tobytes())
    worker.backend.broadcast(header, _WORDS, "int64", 0)
