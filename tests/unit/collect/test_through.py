"""``through``: every call that entered before it is in the file or counted as lost.

A front with all the delays that a real one may have: between the time of an
entry and its place in the table, between an exit and its record, between the
record and the table's entry going; a table that is read while it changes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.collecting import MS, T0, Bench, FakeClock, FakeSource, S, packed, rec

from nccluprobe.capture.source import Losses
from nccluprobe.collect import inflight
from nccluprobe.record import Record

FOREVER = 10**6 * S


@dataclass
class Call:
    rec: Record
    listed: int  # when the table has it
    seen: int  # when its record can be drained (or is counted as lost)
    unlisted: int  # when the table has it no more
    lost: bool
    taken: bool = False


class TimedSource(FakeSource):
    """A front whose calls follow a timetable, and whose reads take time."""

    def __init__(self, clock: FakeClock, calls: list[Call], random_: random.Random) -> None:
        super().__init__()
        self.clock = clock
        self.calls = calls
        self.random = random_
        self.slowest = 3 * MS

    def _pass(self) -> int:
        self.clock.now += self.random.randint(0, self.slowest)
        return self.clock.now

    def in_flight(self) -> bytes:
        found = []
        for call in self.random.sample(self.calls, len(self.calls)):
            now = self.clock.now
            if self.random.random() < 0.2:
                now = self._pass()
            if call.listed <= now < call.unlisted:
                found.append(call.rec._replace(t_exit=0))
        self._pass()
        return packed(found)

    def drain(self) -> Iterator[bytes]:
        now = self._pass()
        ready = [c for c in self.calls if c.seen <= now and not c.taken]
        ready.sort(key=lambda c: c.seen)
        for call in ready:
            call.taken = True
        yield packed(c.rec for c in ready if not c.lost)
        self._pass()

    def losses(self) -> Losses:
        now = self._pass()
        return Losses(by_process={(100, 1): sum(c.lost and c.seen <= now for c in self.calls)})


def timetable(
    random_: random.Random, threads: int, calls: int, longest_delay: int, loss: float
) -> list[Call]:
    """Calls of several threads, most short, some longer than a look, some without end."""
    found = []
    for tid in range(100, 100 + threads):
        t = T0 + random_.randint(0, 200 * MS)
        for index in range(calls):
            t += random_.choice([1000, 200_000, 5 * MS, 100 * MS])
            dur = random_.choice([100, 1000, 10_000, 40 * MS, 240 * MS, 260 * MS, 900 * MS])
            if random_.random() < 0.02:
                dur = FOREVER
            delays = [random_.choice([0, 1000, longest_delay]) for _ in range(3)]
            end = t + dur
            found.append(
                Call(
                    rec(t_enter=t, t_exit=end, tid=tid, call_idx=index, comm_gen=1),
                    listed=t + min(delays[0], dur),
                    seen=end + delays[1],
                    unlisted=end + delays[2],
                    lost=random_.random() < loss,
                )
            )
            # The thread goes on when its record is written and its entry gone.
            t = end + max(delays[1:]) + 1
            if dur == FOREVER:
                break
    return found


def play(folder: Path, seed: int, threads: int, loss: float, undecided: int) -> int:
    """Run it and check after each round; how many calls there were."""
    random_ = random.Random(seed)
    answers = itertools.chain([None] * undecided, itertools.repeat(True))
    bench = Bench(folder, lambda pid: next(answers))
    calls = timetable(random_, threads, 12, 45 * MS, loss)
    source = TimedSource(bench.clock, calls, random_)
    bench.collector.source = source
    bench.collector._admission._source = source
    present: set[tuple[int, int]] = set()
    coverage: dict[str, Any] | None = None
    at = 0
    for _ in range(250):
        bench.clock.now += random_.choice([1, 5, 10, 10, 10, 60, 300]) * MS
        bench.collector.step(bench.clock.now)
        for path in bench.files():
            data = path.read_bytes()
            for line in map(orjson.loads, data[at:].splitlines()):
                if line["kind"] in ("call", "enter"):
                    present.add((line["thread"], line["t"]))
                elif line["kind"] == "coverage":
                    coverage = line
                    check(coverage, calls, present)
            at = len(data)
    if coverage is not None:
        assert bench.clock.now - coverage["through"] < 3 * S
    bench.close()
    return len(present)


def check(coverage: dict[str, Any], calls: list[Call], present: set[tuple[int, int]]) -> None:
    through = coverage["through"]
    missing = [
        c for c in calls if c.rec.t_enter < through and (c.rec.tid, c.rec.t_enter) not in present
    ]
    counted = coverage["lost_kernel"] + coverage["lost_queue"]
    assert len(missing) <= counted, (through, missing, counted)
    if not coverage["lost_queue"]:
        assert all(c.lost for c in missing), (through, missing)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    threads=st.integers(1, 5),
    loss=st.sampled_from([0.0, 0.0, 0.2]),
    undecided=st.sampled_from([0, 0, 1, 4]),
)
def test_nothing_before_through_is_missing(
    tmp_path_factory: pytest.TempPathFactory, seed: int, threads: int, loss: float, undecided: int
) -> None:
    play(tmp_path_factory.mktemp("through"), seed, threads, loss, undecided)


@pytest.mark.parametrize("broken", ["GUARD_NS", "candidate", "confirmed"])
def test_the_property_has_teeth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Without the guard, the waiting for a drain, or the enter lines, it fails."""
    if broken == "GUARD_NS":
        monkeypatch.setattr(inflight, "GUARD_NS", 0)
    elif broken == "candidate":
        original = inflight.Through.candidate

        def hasty(self: inflight.Through, value: int, cycle: int, ready_at: int) -> None:
            original(self, value, cycle, 0)

        monkeypatch.setattr(inflight.Through, "candidate", hasty)
    else:
        monkeypatch.setattr(inflight.InFlight, "confirmed", lambda self: [])
    with pytest.raises(AssertionError):
        for seed in range(100):
            play(tmp_path / str(seed), seed, 4, 0.0, 0)
