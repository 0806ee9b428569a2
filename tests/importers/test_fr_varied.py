"""The published incidents with other ranks at fault: the verdict follows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from importers.fr_real import Dumps, after_restart, load, relabelled, with_culprits, write
from importers.reading import Result

_DATA = Path(__file__).parents[3] / "shared" / "data" / "fr_nvrx"
_REASON = f"no incidents in {_DATA.name} beside the project"
_THERE = all((_DATA / name).is_dir() for name in ("gpu_error_1st", "lock_gil_1st"))
pytestmark = pytest.mark.skipif(not _THERE, reason=_REASON)

#: name -> culprits, ranks of tensor and data parallel, and of the stage that they are in
_KNOWN = {"gpu_error_1st": ({12, 14}, 2, 2, 12), "lock_gil_1st": ({9, 14}, 4, 2, 8)}


def gil(culprits: set[int]) -> Dumps:
    """Hosts of the last of two stages of 8 ranks that stand still: they have nothing open."""
    dumps = load(_DATA / "lock_gil_1st")

    def of(rank: int, is_culprit: bool) -> int:
        pair = (9, 14) if is_culprit else (10, 13)
        return pair[rank >= 12]  # one of the same tensor-parallel group

    return with_culprits(dumps, range(8, 16), culprits, of)


def gpu(culprits: set[int]) -> Dumps:
    """Devices of the last of four stages of 4 ranks that fail: they do not see what is complete."""
    dumps = load(_DATA / "gpu_error_1st")

    def of(rank: int, is_culprit: bool) -> int:
        return (12 if rank < 14 else 14) + (not is_culprit)

    return with_culprits(dumps, range(12, 16), culprits, of)


@pytest.mark.parametrize("name", _KNOWN)
@pytest.mark.parametrize("seed", range(4))
def test_other_ranks_of_the_same_layout(name: str, seed: int, tmp_path: Path) -> None:
    culprits, t, d, _ = _KNOWN[name]
    rng = random.Random(seed)
    tensor, data = rng.sample(range(t), t), rng.sample(range(d), d)
    new = {r: tensor[r % t] + t * (data[r // t % d] + d * (r // (t * d))) for r in range(16)}
    dumps = relabelled(load(_DATA / name), new)
    assert Result(write(dumps, tmp_path)).blamed == {new[r] for r in culprits}


@pytest.mark.parametrize("name", _KNOWN)
def test_any_other_ranks(name: str, tmp_path: Path) -> None:
    ranks = list(range(16))
    new = dict(enumerate(random.Random(7).sample(ranks, 16)))
    dumps = relabelled(load(_DATA / name), new)
    assert Result(write(dumps, tmp_path)).blamed == {new[r] for r in _KNOWN[name][0]}


@pytest.mark.parametrize("culprits", [{8}, {15}, {8, 9}, {11, 12}, {8, 10, 13}, {12, 13, 14, 15}])
def test_other_hosts_that_stand_still(culprits: set[int], tmp_path: Path) -> None:
    assert Result(write(gil(culprits), tmp_path / "all")).blamed == culprits
    left = {r: x for r, x in gil(culprits).items() if r not in culprits}
    assert Result(write(left, tmp_path / "killed")).blamed == culprits


@pytest.mark.parametrize("culprits", [{12}, {15}, {12, 13}, {14, 15}, {13, 14}])
def test_other_devices_that_fail(culprits: set[int], tmp_path: Path) -> None:
    assert Result(write(gpu(culprits), tmp_path / "all")).blamed == culprits
    left = {r: x for r, x in gpu(culprits).items() if r not in culprits}
    assert Result(write(left, tmp_path / "killed")).blamed == culprits


@pytest.mark.parametrize("names", [0, 200])
@pytest.mark.parametrize("seconds", [30.0, 60.0, 200.0, 400.0])
def test_what_is_of_before_a_restart_does_not_count(
    seconds: float, names: int, tmp_path: Path
) -> None:
    """The ring lives as long as the process: calls that an earlier incident left stay open."""
    for name, make, now, before in (("gil", gil, {9, 14}, {10, 13}), ("gpu", gpu, {12}, {15})):
        dumps = after_restart(make(now), make(before), seconds, names)
        result = Result(write(dumps, tmp_path / name))
        assert result.blamed == now
        assert any("restarted inside its processes" in n for n in result.imported.notes)


def test_a_restart_that_some_processes_did_not_see(tmp_path: Path) -> None:
    """They are new, and were put in the place of others."""
    now = gil({9, 14})
    dumps = after_restart(now, gil({10, 13}), 400.0)
    for rank in (9, 10, 3):
        ids = 1 + max(map(int, now[rank]["pg_status"]))
        dumps[rank]["entries"] = [e for e in dumps[rank]["entries"] if e["pg_id"] >= ids]
        status = dumps[rank]["pg_status"]
        dumps[rank]["pg_status"] = {i: s for i, s in status.items() if int(i) >= ids}
    assert Result(write(dumps, tmp_path)).blamed == {9, 14}
