"""Random programs of sends and receives: silent when valid, exact when one operation is wrong."""

from __future__ import annotations

import random

import pytest
from support.analysis import analyze_job, cover
from support.tracegen import Comm, Job

from nccluprobe.match.finding import Finding

SEND, RECV = "ncclSend", "ncclRecv"
#: (source, destination, count)
Message = tuple[int, int, int]
Step = list[Message]


def program(rng: random.Random) -> tuple[int, list[Step]]:
    """Steps in one order for all ranks; those of several messages are groups."""
    n = rng.randint(2, 6)
    steps: list[Step] = []
    for _ in range(rng.randint(30, 60)):
        if rng.random() < 0.3:  # uneven exchange: some pairs have nothing
            step = [
                (a, b, rng.randint(1, 10**7))
                for a in range(n)
                for b in range(n)
                if rng.random() < 0.5
            ]
        else:
            a, b = rng.sample(range(n), 2)
            step = [(a, b, rng.randint(1, 10**7))]
        if step:
            steps.append(step)
    return n, steps


def build(
    n: int, steps: list[Step], rng: random.Random, wrong: tuple[int, int, str, int | None] | None
) -> Job:
    """``wrong``: step, message, side and the count of that side (None: left out)."""
    job = Job()
    comms = job.world(n)
    t = 1.0
    for i, step in enumerate(steps):
        t += 0.05
        for r, c in enumerate(comms):
            ops: list[tuple[Comm, str, dict[str, int]]] = []
            for k, (a, b, count) in enumerate(step):
                for api, rank, peer in ((SEND, a, b), (RECV, b, a)):
                    if rank != r:
                        continue
                    size: int | None = count
                    if wrong is not None and wrong[:3] == (i, k, api):
                        size = wrong[3]
                    if size is not None:
                        ops.append((c, api, {"peer": peer, "count": size}))
            at = t + rng.random() * 0.02
            if len(ops) > 1 or (len(step) > 1 and ops):
                c.proc.group(ops, at)
            elif ops:
                c.proc.call(ops[0][0], ops[0][1], at, **ops[0][2])
    cover(job.procs, t + 400, step=5.0)
    return job


def blamed(found: list[Finding]) -> set[int]:
    return {w["rank"] for f in found if f.role == "root_cause" for w in f.named}


@pytest.mark.parametrize("seed", range(25))
def test_a_valid_program_is_silent(seed: int) -> None:
    rng = random.Random(seed)
    n, steps = program(rng)
    assert analyze_job(build(n, steps, rng, None)) == []


def place(rng: random.Random, steps: list[Step]) -> tuple[int, int, str, int]:
    """A message between two ranks, one of its sides, and that rank."""
    while True:
        i = rng.randrange(len(steps))
        k = rng.randrange(len(steps[i]))
        a, b, _ = steps[i][k]
        if a != b:
            api = rng.choice((SEND, RECV))
            return i, k, api, a if api == SEND else b


@pytest.mark.parametrize("seed", range(25))
def test_a_wrong_size_is_found_at_its_pair(seed: int) -> None:
    rng = random.Random(1000 + seed)
    n, steps = program(rng)
    i, k, api, rank = place(rng, steps)
    a, b, count = steps[i][k]
    found = analyze_job(build(n, steps, rng, (i, k, api, count + 12345)))
    (f,) = [x for x in found if x.hang_type == "p2p_mismatch"]
    assert f.severity == "error" and f.role == "root_cause"
    assert [op["comm_rank"] for op in f.details["pair"]] == [a, b]
    assert {op["count"] for op in f.details["pair"]} == {count, count + 12345}
    before = sum(1 for step in steps[:i] for m in step if m[:2] == (a, b))
    before += sum(1 for m in steps[i][:k] if m[:2] == (a, b))
    assert f.details["position"] == before
    assert blamed(found) <= {rank}


@pytest.mark.parametrize("seed", range(25))
def test_an_operation_left_out_is_found_on_its_pair(seed: int) -> None:
    rng = random.Random(2000 + seed)
    n, steps = program(rng)
    i, k, api, _ = place(rng, steps)
    a, b, _ = steps[i][k]
    found = analyze_job(build(n, steps, rng, (i, k, api, None)))
    roots = [f for f in found if f.role == "root_cause"]
    assert roots, "nothing was found"
    pair = {a, b}
    assert all(
        set(f.details["entered_comm_ranks"]) | set(f.details["missing_comm_ranks"]) == pair
        for f in roots
    )
    assert blamed(found) <= pair
