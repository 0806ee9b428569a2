"""Groups that a restart inside the processes has made again: what is of before is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from importers.fr_real import after_restart, write
from importers.frgen import Job
from importers.reading import Result
from nccluprobe.importers.fr_dump import _COLUMNS, Dump, Group
from nccluprobe.importers.fr_remade import forget_remade


def dump(status: list[int], names: dict[str, str], seen: list[tuple[int, str]]) -> Dump:
    """A dump with these ids in its status, groups (name, description) and calls (id, group)."""
    found = Dump(
        "2.9",
        None,
        {n: Group(n, desc, (0, 1)) for n, desc in names.items()},
        {str(i): (5, 5) for i in status},
    )
    found.groups_seen = [(n, names[n]) for _, n in seen]
    found.pg_ids = [str(i) for i, _ in seen]
    return found


_THREE = {"0": "default_pg", "3": "tp", "8": "pp"}


def left(found: Dump) -> tuple[set[str], set[str]]:
    """(groups, ids that have a status) that a dump is left with."""
    forget_remade(found)
    return set(found.groups), set(found.status)


@pytest.mark.parametrize(
    ("status", "names", "seen", "kept"),
    [
        pytest.param([0, 1, 4], _THREE, [(1, "3"), (4, "8")], ([*_THREE], [0, 1, 4]), id="never"),
        pytest.param(
            [0, 1, 4, 5, 6, 9], _THREE, [(4, "8"), (6, "3")], ([*_THREE], [6, 9]), id="begin anew"
        ),
        pytest.param(
            [0, 1, 4, 5, 6, 9], _THREE, [(9, "8")], ([*_THREE], [5, 6, 9]), id="twice as many"
        ),
        pytest.param(
            [0, 1, 4, 5, 6, 9, 10, 11, 14], _THREE, [], ([*_THREE], [10, 11, 14]), id="thrice"
        ),
        pytest.param([0, 1, 4, 5, 6], _THREE, [], ([*_THREE], [5, 6]), id="so far some of them"),
        pytest.param(
            [0, 1, 4, 5, 6, 8], _THREE, [(6, "3")], ([*_THREE], [0, 1, 4, 5, 6, 8]), id="not alike"
        ),
        pytest.param(
            [0, 1, 4, 5, 6, 9],
            {**_THREE, "20": "default_pg", "23": "tp", "28": "pp"},
            [(4, "8")],
            (["20", "23", "28"], [5, 6, 9]),
            id="go on",
        ),
    ],
)
def test_what_is_left(
    status: list[int],
    names: dict[str, str],
    seen: list[tuple[int, str]],
    kept: tuple[list[str], list[int]],
) -> None:
    assert left(dump(status, names, seen)) == (set(kept[0]), set(map(str, kept[1])))


@pytest.mark.parametrize(("calls", "kept"), [([0, 1, 0, 1], [0, 1, 2, 3]), ([0, 0, 1, 1], [2, 3])])
def test_calls_of_before_a_restart_came_before_all_others(
    calls: list[int], kept: list[int]
) -> None:
    """A group that is taken down and made again, while the default group goes on."""
    found = dump([0, 1, 2, 3], {"0": "default_pg", "3": "tp"}, [(0, "0"), (3, "3")])
    for name in _COLUMNS:
        setattr(found, name, np.arange(4, dtype=np.int64))
    found.group = np.array(calls, np.int32)
    assert left(found) == ({"0", "3"}, set(map(str, kept)))
    assert found.restarted == (len(kept) == 2)
    assert len(found) == len(kept)


def stalled(culprit: int) -> dict[int, dict[str, Any]]:
    """Dumps of active entries of a job in which one rank does not come to a call of all."""
    job = Job(
        {"0": ("default_pg", [0, 1, 2, 3]), "1": ("tp", [0, 1]), "2": ("tp", [2, 3])}, start=70
    )
    for t in range(5):
        for group in "120":
            job.all(group, t + int(group) / 10)
    job.all("0", 9.0, culprit, done=False)
    return {r: x.dump(active_only=True) for r, x in job.ranks.items()}


@pytest.mark.parametrize("names", [0, 40])
@pytest.mark.parametrize("seconds", [20.0, 700.0, 5000.0])
@pytest.mark.parametrize("has_status", [True, False])
def test_only_what_came_after_a_restart_counts(
    names: int, seconds: float, has_status: bool, tmp_path: Path
) -> None:
    dumps = after_restart(stalled(3), stalled(1), seconds, names)
    if not has_status:
        for d in dumps.values():
            del d["pg_status"]
    result = Result(write(dumps, tmp_path))
    assert result.blamed == {3}
    assert any("restarted inside its processes" in n for n in result.imported.notes)
