"""Hosts that may queue so many operations ahead and no more: where they stop says nothing."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest

from importers.frgen import Job
from importers.reading import Result

STAGES, DEPTH = 6, 24
TENSOR, PIPE = "TENSOR_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP"
#: What a rank queues: ("c", group) or ("p", group, sender, receiver, how many before it).
_Op = tuple[str, str, int, int, int]


def _program(rank: int) -> list[_Op]:
    """Batches go up the stages, and then all come back: two ranks share a stage."""
    stage, tensor, pipe = rank // 2, str(1 + rank // 2), str(1 + STAGES + rank % 2)
    found: list[_Op] = []
    for back in (False, True):
        for n in range(24):
            before, after = (stage + 1, stage - 1) if back else (stage - 1, stage + 1)
            if 0 <= before < STAGES:
                found.append(("p", pipe, before, stage, n))
            found += [("c", tensor, 0, 0, len(found))] * 2
            if 0 <= after < STAGES:
                found.append(("p", pipe, stage, after, n))
    return found


def _run(folder: Path, stopped: int, at: int) -> Path:
    """The dumps: a rank stops before its operation ``at``, all others do what they can."""
    groups = {"0": ("default_pg", list(range(2 * STAGES)))}
    groups |= {str(1 + s): (TENSOR, [2 * s, 2 * s + 1]) for s in range(STAGES)}
    pipes = {str(1 + STAGES + x): (PIPE, list(range(x, 2 * STAGES, 2))) for x in (0, 1)}
    job = Job(groups | pipes)
    programs = {r: deque(_program(r)) for r in job.ranks}
    left = dict.fromkeys(job.ranks, -1) | {stopped: at}
    queues: dict[int, deque[tuple[_Op, dict[str, object]]]] = {r: deque() for r in job.ranks}
    t, moved = 0.0, True
    while moved:
        moved, t = False, t + 0.01
        for r, rank in job.ranks.items():
            while programs[r] and left[r] and len(queues[r]) < DEPTH:
                op = programs[r].popleft()
                left[r] -= 1
                moved, t = True, t + 1e-5
                if op[0] == "c":
                    entry = rank.call(op[1], t, done=False)
                else:
                    mine = r // 2
                    send = op[2] == mine
                    entry = rank.transfer(op[1], t, send, op[3] if send else op[2], done=False)
                queues[r].append((op, entry))
        for queue in list(queues.values()):
            if not queue:
                continue
            kind, group, sender, receiver, _ = queue[0][0]
            ranks = job.groups[group][1]
            needed = ranks if kind == "c" else [ranks[sender], ranks[receiver]]
            heads = [queues[r][0] if queues[r] else None for r in needed]
            if any(h is None or h[0][:2] != (kind, group) for h in heads):
                continue
            if kind == "p" and any(h and h[0] != queue[0][0] for h in heads):
                continue
            moved = True
            for r in needed:
                _, entry = queues[r].popleft()
                entry.update(state="completed", retired=True, time_discovered_completed_ns=None)
    return job.write(folder)


@pytest.mark.parametrize(("stopped", "at"), [(5, 79), (7, 79), (8, 79), (9, 79), (7, 61)])
def test_who_may_queue_no_more_is_not_to_blame(stopped: int, at: int, tmp_path: Path) -> None:
    """Its peer, held by the same queue, came one call further: it is not missed there."""
    assert Result(_run(tmp_path, stopped, at)).blamed == {stopped}
