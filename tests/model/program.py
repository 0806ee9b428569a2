"""Random programs that are valid by construction."""

from __future__ import annotations

import random

from model.builder import Builder
from model.ops import Call, End, Group, Instruction, Leave, Program, Sync
from model.steps import STEPS, Step

SIZES = (2, 2, 3, 4, 4, 5, 6, 8, 8, 8, 12, 16, 16, 24, 32, 64)
SMALL_SIZES = (2, 3, 3, 4)
#: About how many calls all ranks of a program make together, at most.
BUDGET = 12_000


def generate(seed: int, small: bool = False) -> Program:
    """A random valid program.  ``small``: few ranks and calls, to be read by people."""
    rng = random.Random(f"program {seed} {small}")
    b = Builder(rng, rng.choice(SMALL_SIZES if small else SIZES))
    b.streams = rng.choice([1, 2, 2, 3])
    b.world()
    for _ in range(rng.choice([0, 1, 2] if small else [0, 1, 2, 3, 4])):
        b.split()
    for chosen in b.sets:
        smallest = min(len(p) for p in chosen.parts)
        chosen.habit = b.op(chosen.name, smallest, chosen.stream)
    target = max(20, min(rng.choice([50, 100, 200, 400]), BUDGET // b.n))
    if small:
        target = rng.choice([4, 8, 16])
    weights = [w for w, _ in STEPS]
    loop: list[Step] = []
    while max(calls(code) for code in b.main) < target:
        if not loop or rng.random() < 0.3:
            loop = rng.choices([s for _, s in STEPS], weights, k=rng.choice([1, 3, 6]))
        for step in loop:
            step(b)
    finish(b)
    return Program(
        b.n,
        [[m, a] if a else [m] for m, a in zip(b.main, b.aux, strict=True)],
        depth=rng.choice([1022, 1022, 256, 32]),
        lazy_connect=rng.random() < 0.8,
        counters=rng.random() < 0.6,
        per_host=rng.choice([4, 8, 8]),
        sync_state=rng.choice(
            [("running", None), ("running", None), ("syscall", "poll"), ("syscall", "ioctl")]
        ),
        mismatch_hangs=rng.random() < 0.7,
        host_state=rng.random() < 0.92,
    )


def calls(code: list[Instruction]) -> int:
    """How many operations a thread makes."""
    return sum(len(i.ops) if isinstance(i, Group) else isinstance(i, Call) for i in code)


def finish(b: Builder) -> None:
    """The end of the job: all work is waited for; with destroy or without; exit."""
    destroy = b.rng.random() < 0.6
    stagger = b.rng.choice([0.001, 0.1, 3.0])
    leaves = b.rng.random() < 0.8
    for r in range(b.n):
        b.main[r] += [Sync(s) for s in range(b.streams)]
    for chosen in b.sets[::-1]:
        if destroy:
            for part in chosen.parts:
                for r in part:
                    b.main[r].append(End(chosen.name))
    for r in range(b.n):
        b.main[r].append(b.jitter(stagger))
        if leaves:
            b.main[r].append(Leave(0))
