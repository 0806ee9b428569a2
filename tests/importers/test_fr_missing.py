"""Dumps that are missing, that came later, or whose rings are too short: nobody innocent."""

from __future__ import annotations

from pathlib import Path

import pytest

from importers.fr_incidents import FORMS, make
from importers.fr_real import load, write
from importers.reading import Result

_DATA = Path(__file__).parents[3] / "shared" / "data" / "fr_nvrx"


def blamed(kind: str, seed: int, form: str, folder: Path) -> tuple[set[int], set[int]]:
    """Who is at fault, and who is named."""
    incident = make(kind, seed)
    assert incident is not None
    return incident.culprits, Result(incident.write(folder, FORMS[form]())).blamed


@pytest.mark.parametrize("seed", [3, 9])
def test_a_dump_that_came_later_tells_more_than_one_that_is_missing(
    seed: int, tmp_path: Path
) -> None:
    culprits, named = blamed("late-one", seed, "lost", tmp_path)
    assert named == culprits


@pytest.mark.parametrize("seed", [3, 5])
@pytest.mark.parametrize("kind", ["healthy", "cut"])
def test_what_runs_or_is_stuck_with_all_ranks_in_it_waits_for_none_that_is_missing(
    kind: str, seed: int, tmp_path: Path
) -> None:
    if make(kind, seed) is not None:
        assert blamed(kind, seed, "lost", tmp_path)[1] == set()


@pytest.mark.parametrize("seed", [2])
def test_a_call_of_another_size_explains_what_others_wait_in(seed: int, tmp_path: Path) -> None:
    culprits, named = blamed("size-one", seed, "lost", tmp_path)
    assert named <= culprits


def test_several_that_came_later_do_not_show_that_others_do_not_see(tmp_path: Path) -> None:
    """What they have completed since the others dumped is no sign of a failed device."""
    culprits, named = blamed("late-any", 13, "active", tmp_path)
    assert named
    assert named <= culprits


@pytest.mark.parametrize(("kind", "seed"), [("gpu-any", 8), ("unsent-one", 10)])
def test_what_has_left_a_short_ring_is_not_left_out(kind: str, seed: int, tmp_path: Path) -> None:
    """Rings that begin with what is open: older sends may wait, too."""
    culprits, named = blamed(kind, seed, "ring", tmp_path)
    assert named <= culprits


@pytest.mark.skipif(not _DATA.is_dir(), reason=f"no incidents in {_DATA.name} beside the project")
@pytest.mark.parametrize("missing", [{11, 13, 15}, {12, 13, 15}])
def test_peers_of_failed_devices_left_no_dump(missing: set[int], tmp_path: Path) -> None:
    dumps = {r: x for r, x in load(_DATA / "gpu_error_1st").items() if r not in missing}
    assert Result(write(dumps, tmp_path)).blamed <= {12, 14}
