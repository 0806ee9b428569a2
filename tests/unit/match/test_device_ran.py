"""What is left out of the device run as ended changes nothing that is found."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.analysis import Run, cover
from support.tracegen import Job

from nccluprobe.match import device, device_ran
from nccluprobe.match.device_ops import Ran
from nccluprobe.match.options import SECOND, Options
from nccluprobe.match.signature import SignatureTable

AR, SEND, RECV = "ncclAllReduce", "ncclSend", "ncclRecv"


def job_with(seed: int, every: float = 20.0) -> Job:
    """Two communicators, rings of sends and receives; one rank stops, dies or swaps two calls."""
    rng = random.Random(seed)
    n, steps, fault = rng.randint(3, 6), rng.randint(8, 24), rng.choice(("stop", "swap", "end"))
    job = Job()
    one = job.world(n)
    two = [c.proc.comm(f"{0xAB:016x}", r, n) for r, c in enumerate(one)]
    odd, when = rng.randrange(n), rng.randint(3, steps - 2)
    streams = rng.choice(((0, 0), (0, 1)))
    for step in range(steps):
        kind = rng.random()
        count = rng.choice((8, 1 << 22))
        for r, (a, b) in enumerate(zip(one, two, strict=True)):
            t = 1 + step + rng.random() * 0.1
            if r == odd and step >= when and fault != "swap":
                continue
            if kind < 0.4:
                ring: list[Any] = [(SEND, (r + 1) % n), (RECV, (r - 1) % n)]
                a.proc.group([(a, api, {"peer": p, "count": count}) for api, p in ring], t)
                continue
            pair = [(a, streams[0]), (b, streams[1])]
            if r == odd and step == when:
                pair.reverse()
            for i, (c, stream) in enumerate(pair):
                c.proc.call(c, AR, t + 0.3 * i, stream=stream)
    cover(job.procs, steps + 20 * every, step=every)
    return job


def told(job: Job) -> list[tuple[Any, ...]]:
    run = Run(job)
    run.all()
    run.scan()
    return sorted(
        (f.hang_type, f.role, f.state, sorted(w["rank"] for w in f.named), f.id)
        for f in run.analysis.matcher.book.all()
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_findings_are_those_of_the_whole_run(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int | None] = []

    def noted(*args: Any) -> Ran:
        left.append((made := device_ran.ran(*args)).left)
        return made

    monkeypatch.setattr(device, "ran", noted)
    monkeypatch.setattr(device_ran, "_FEW", 1 << 30)
    whole = told(job_with(seed))
    assert all(n is None for n in left)
    left.clear()
    monkeypatch.setattr(device_ran, "_FEW", 0)
    assert told(job_with(seed)) == whole
    assert all(n is not None for n in left)


def test_nothing_is_left_of_a_job_in_which_all_came() -> None:
    job = Job()
    comms = job.world(64)
    for step in range(20):
        for r, c in enumerate(comms):
            c.proc.call(c, AR, 1 + step + r / 1000)
    cover(job.procs, 30)
    found = ran(job)
    assert found.left == 0
    assert not found.ends


def ran(job: Job) -> Ran:
    """What the devices have left at the end of a trace."""
    run = Run(job)
    run.all()
    matcher = run.analysis.matcher
    matcher.settle()
    p2p = matcher.p2p
    return device_ran.ran(
        matcher.comms.values(), p2p.sides, p2p.pairs.wires.size, {}, matcher.table, frozenset()
    )


def test_a_group_does_not_run_while_a_host_is_at_its_end() -> None:
    job = Job()
    comms = job.world(64)
    for r, c in enumerate(comms):
        c.proc.call(c, AR, 1 + r / 1000)
        c.proc.group([(c, AR, {})], 2, **({"state": "inside"} if r == 5 else {}))
    cover(job.procs, 30)
    assert ran(job).left == 64


@pytest.mark.parametrize("seed", range(12))
def test_what_ended_long_ago_is_left_out_of_later_runs_and_changes_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a job that is judged while it goes on, every 2 s."""
    looked_at: list[int] = []

    def noted(parts: Any, *rest: Any) -> Any:
        looked_at.append(len(parts.end))
        return run(parts, *rest)

    run, sure = device_ran._run, device_ran._SURE
    monkeypatch.setattr(device_ran, "_FEW", 0)
    monkeypatch.setattr(device_ran, "_run", noted)
    found = {}
    for margin in (1 << 60, sure):  # nothing is remembered; as it is
        monkeypatch.setattr(device_ran, "_SURE", margin)
        looked_at.clear()
        found[margin] = [*follow(job_with(seed, every=2.0)), tuple(looked_at)]
    (*whole, all_rows), (*short, fewer_rows) = found.values()
    assert short == whole
    assert len(all_rows) > 10
    assert sum(fewer_rows) < sum(all_rows)


@pytest.mark.parametrize("lost", [0, 1])
def test_where_events_were_lost_nothing_is_remembered(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that are supposed of who lost them are taken back."""
    monkeypatch.setattr(device_ran, "_FEW", 0)
    job = Job()
    comms = job.world(3)
    for step in range(10):
        for c in comms:
            c.proc.call(c, AR, 1.0 + step)
    cover(job.procs[:2], 60)
    cover(job.procs[2:], 60, lost_kernel=lost)
    run = Run(job)
    run.all()
    run.scan()
    matcher = run.analysis.matcher
    device_ran.ran(
        matcher.comms.values(), matcher.p2p.sides, lambda sig: sig, {}, matcher.table, frozenset()
    )
    over = [e.tail.over for e in matcher.endpoints.values()]
    assert over == ([0] * 3 if lost else [10] * 3)


def follow(job: Job) -> list[Any]:
    """What every scan finds, all of which run the devices."""
    run, found = Run(job, Options(missing_after=2 * SECOND)), list[Any]()
    for t in range(2, 60, 2):
        run.until(t + 0.1)
        found.append([(f.hang_type, f.role, f.state, f.culprits) for f in run.scan()])
        matcher = run.analysis.matcher
        stalls = matcher.p2p.run_devices(matcher.comms, matcher._context, matcher.waits)
        found.append([(s.endpoint.comm_rank, s.node.idx) for s in stalls.stalls])
    return found


def test_calls_as_written_are_not_remembered_for_ever() -> None:
    table = SignatureTable()
    first = table.intern_call(AR, 1, "float32", "sum", None)
    for count in range(2, 150_000):
        table.intern_call(AR, count, "float32", "sum", None)
    assert len(table._by_call) <= 1 << 16
    assert table.intern_call(AR, 1, "float32", "sum", None) == first
