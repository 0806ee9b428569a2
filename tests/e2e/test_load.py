"""Under load: none lost at the rate promised, the exact number where some are.

A call is one record.  The figures are printed; run with ``-s`` to see them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.daemon import Daemon
from support.e2e import Stage
from support.puppets import Load
from support.traces import trace_paths
from support.waiting import wait_for

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(280)]

PROCESSES = 4
RATE = 160_000  # records per second, of all processes together
TOTAL = 2_000_000
#: The calls of nccl_load --op mix, in turn.
MIX = (
    "ncclAllReduce",
    "ncclBroadcast",
    "ncclReduce",
    "ncclAllGather",
    "ncclReduceScatter",
    "ncclBcast",
)
#: A step of --op group is a group of three: five records for each wake-up of the generator.
#: (Waking for every call alone costs this kind of machine more than all the rest.)
GROUP_STEP = 5


@dataclass
class Kept:
    """What a process's file holds, without keeping its lines."""

    calls: int
    idx: list[int]
    apis: Counter[str]
    coverage: dict[str, Any]
    misplaced: int
    size: int


def kept(path: Path) -> tuple[int, Kept]:
    """By pid."""
    found = Kept(0, [], Counter(), {}, 0, path.stat().st_size)
    pid = -1
    with path.open("rb") as f:
        for raw in f:
            line = orjson.loads(raw)
            kind = line["kind"]
            if kind == "call":
                found.calls += 1
                api = line["api"]
                found.apis[api] += 1
                if api in MIX:
                    idx = line["idx"]
                    found.idx.append(idx)
                    if "gpos" in line:  # --op group
                        found.misplaced += line["gpos"] != idx % 3
                    else:
                        found.misplaced += MIX[idx % len(MIX)] != api
            elif kind == "coverage":
                found.coverage = line
            elif kind == "process":
                pid = line["pid"]
    return pid, found


def written(daemon: Daemon, load: Load) -> dict[int, Kept]:
    """What is on disk once the daemon has written all ends and has gone."""

    def ended() -> bool:
        paths = trace_paths(daemon.out)
        return len(paths) == len(load.pids) and all(last_kind(p) for p in paths)

    wait_for(ended, "the ends", timeout=120, context=lambda: daemon.stderr.text, poll=0.3)
    daemon.stop()
    found = dict(map(kept, trace_paths(daemon.out)))
    assert set(found) == set(load.pids)
    return found


def last_kind(path: Path) -> bool:
    with path.open("rb") as f:
        f.seek(max(0, path.stat().st_size - 8192))
        return b'"kind":"process_end"' in f.read()


def check_exact(kept: dict[int, Kept], truth: dict[int, dict[str, Any]]) -> int:
    """Captured and lost add up to what was made, per process; the number lost."""
    total = 0
    for pid, have in kept.items():
        made = {k: v for k, v in truth[pid]["calls"].items() if k != "ncclGetUniqueId"}
        lost = have.coverage["lost_kernel"] + have.coverage["lost_queue"]
        assert have.calls + lost == sum(made.values()), f"process {pid}: {have.coverage}"
        # Each call has the ordinal that it was made with: its api or place in the group tells.
        data = sum(made.get(api, 0) for api in MIX)
        assert have.misplaced == 0
        assert len(set(have.idx)) == len(have.idx)
        assert not have.idx or max(have.idx) < data
        others = sum(n for api, n in have.apis.items() if api not in MIX)
        lost_others = sum(n for api, n in made.items() if api not in MIX) - others
        assert data - len(have.idx) == lost - lost_others
        assert have.coverage["blind"] == have.coverage["skipped_disk"] == 0
        total += lost
    return total


@dataclass
class Paced:
    offered: float
    reached: float
    lost: int
    made: int
    rss_start: int
    rss_end: int
    rss_peak: int


def run_paced(stage: Stage, nccl_load: Path, rate: float, total: int, name: str) -> Paced:
    """``total`` calls at ``rate``, in four processes; the daemon's memory all along."""
    daemon = stage.attach_glob(out=stage.tmp / name)
    steps = total // PROCESSES // GROUP_STEP
    pace = rate / PROCESSES / GROUP_STEP
    load = stage.load(
        nccl_load, PROCESSES, "--op", "group", "--calls", str(steps), "--rate", str(pace)
    ).go()
    samples: list[int] = []

    def sample() -> bool:
        samples.append(daemon.rss())
        return load.done()

    wait_for(sample, "the load's end", timeout=200, poll=0.1)
    truth = load.truth()
    load.end(daemon)
    have = written(daemon, load)
    lost = check_exact(have, truth)
    warm = len(samples) // 4
    return Paced(
        offered=rate,
        reached=total / load.seconds,
        lost=lost,
        made=total,
        rss_start=samples[warm],
        rss_end=samples[-1],
        rss_peak=max(samples[warm:]),
    )


@pytest.fixture(scope="module")
def paced(
    tmp_path_factory: pytest.TempPathFactory,
    nccluprobe_command: list[str],
    simnccl: Path,
    nccl_load: Path,
) -> Iterator[Paced]:
    """One run of 2,000,000 calls for the two tests below."""
    stage = Stage(tmp_path_factory.mktemp("paced"), nccluprobe_command, simnccl)
    try:
        yield run_paced(stage, nccl_load, RATE, TOTAL, "out")
    finally:
        stage.close()


def show(what: str, run: Paced) -> None:
    print(
        f"\n{what}: offered {run.offered:,.0f}/s, reached {run.reached:,.0f}/s, "
        f"{run.made:,} made, {run.lost:,} lost, daemon {run.rss_start / 1e6:.1f} MB "
        f"-> {run.rss_end / 1e6:.1f} MB (peak {run.rss_peak / 1e6:.1f})"
    )


def test_none_lost_at_160000_a_second(stage: Stage, nccl_load: Path, paced: Paced) -> None:
    show("paced", paced)
    if paced.reached < 0.95 * RATE:
        # This machine cannot make so many beside the daemon: the most it can, less a tenth.
        paced = run_paced(stage, nccl_load, 0.9 * paced.reached, TOTAL // 4, "slower")
        show("paced, as fast as this machine can", paced)
    assert paced.lost == 0


def test_memory_is_flat_over_two_million_calls(paced: Paced) -> None:
    show("memory", paced)
    assert paced.made >= 2_000_000
    assert paced.rss_peak - paced.rss_start < 10e6


def test_saturated_half_is_kept_and_the_loss_exact(stage: Stage, nccl_load: Path) -> None:
    daemon = stage.attach_glob()
    load = stage.load(nccl_load, PROCESSES, "--op", "mix", "--calls", "600000").go()
    truth = load.truth()
    load.end(daemon)
    have = written(daemon, load)
    made = sum(sum(t["calls"].values()) for t in truth.values())
    lost = check_exact(have, truth)
    rate = made / load.seconds
    print(f"\nsaturated: {made:,} made at {rate:,.0f}/s, {lost:,} lost ({lost / made:.1%})")
    assert lost <= made / 2


def test_loss_is_exact_with_a_small_ring(stage: Stage, nccl_load: Path) -> None:
    """Loss is certain here: a ring of 1 MiB against a burst."""
    daemon = stage.attach_glob("--ring-mb", "1")
    load = stage.load(nccl_load, PROCESSES, "--op", "mix", "--calls", "150000").go()
    truth = load.truth()
    load.end(daemon)
    have = written(daemon, load)
    made = sum(sum(t["calls"].values()) for t in truth.values())
    lost = check_exact(have, truth)
    print(f"\nsmall ring: {made:,} made, {lost:,} lost ({lost / made:.1%})")
    assert lost > 0
