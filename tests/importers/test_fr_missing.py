"""Dumps that are missing, that came later, or whose rings are too short: nobody innocent."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from importers.fr_incidents import FORMS, make
from importers.fr_real import load, write
from importers.frgen import Job
from importers.reading import Result
from nccluprobe.importers.fr_dump import Dump
from nccluprobe.importers.fr_missing import is_hollow

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


@pytest.mark.parametrize(
    ("kind", "seed"),
    [("crash-one", 8), ("crash-one", 10), ("crash-one", 14), ("crash-any", 5), ("stop-one", 13)],
)
def test_one_of_several_without_a_dump_may_wait_for_another_where_no_dump_tells(
    kind: str, seed: int, tmp_path: Path
) -> None:
    """In sends and receives of the two, or in a group that they are all of."""
    culprits, named = blamed(kind, seed, "lost", tmp_path)
    assert named <= culprits


@pytest.mark.parametrize("seed", [4, 9, 11])
def test_one_without_a_dump_may_stand_where_those_do_that_run_its_program(
    seed: int, tmp_path: Path
) -> None:
    """In a call with them, or in a send or receive as they do in theirs."""
    culprits, named = blamed("crash-one", seed, "lost", tmp_path)
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


@pytest.mark.parametrize("made_by_all", [False, True])
def test_a_call_that_none_made_of_those_who_run_the_same_program(
    made_by_all: bool, tmp_path: Path
) -> None:
    """Where the others stand only the status of their group tells: no dump shows a call of it."""
    job = Job(
        {"1": ("dp", [0, 1]), "2": ("dp", [2, 3]), "3": ("mp", [0, 2]), "4": ("mp", [1, 3])}, 70
    )
    for i in range(5):
        for group in "1234":
            job.all(group, float(i))
    if made_by_all:
        job.all("1", 9.0)
    job.ranks[3].call("2", 9.0, done=False)
    job.all("4", 9.5, done=False)
    job.all("3", 9.5)
    named = Result(job.write(tmp_path, active_only=True)).blamed
    assert named == ({2} if made_by_all else set())


def test_each_of_two_missing_ranks_would_do(tmp_path: Path) -> None:
    """A third one is missing whom nobody waits for: so dumps are missing for other reasons."""
    job = Job({"0": ("world", [0, 1, 2, 3]), "1": ("tp", [0, 1]), "2": ("x", [4, 3])})
    for i in range(5):
        job.all("0", float(i))
        job.all("2", float(i))
    job.all("0", 9.0, 1, 2, done=False)
    folder = job.write(tmp_path)
    for rank in (1, 2, 4):
        (folder / f"nccl_trace_rank_{rank}").unlink()
    assert Result(folder).blamed == set()
    (folder / "nccl_trace_rank_1").write_bytes(pickle.dumps(job.ranks[1].dump(), 2))
    assert Result(folder).blamed == {1}


@pytest.mark.parametrize(
    ("status", "hollow"),
    [
        ({"0": (5, 5), "1": (7, 7)}, False),
        ({"0": (5, 4), "1": (7, 7)}, False),
        ({"0": (5, 4), "1": (9, 7)}, True),
    ],
)
def test_a_dump_without_calls_whose_status_has_some_as_open(
    status: dict[str, tuple[int, int]], hollow: bool
) -> None:
    assert is_hollow(Dump("2.9", None, {}, status)) == hollow


@pytest.mark.skipif(not _DATA.is_dir(), reason=f"no incidents in {_DATA.name} beside the project")
def test_such_a_dump_says_no_more_than_one_that_is_cut_short(tmp_path: Path) -> None:
    dumps = load(_DATA / "gpu_error_1st")
    for rank in (12, 14):
        dumps[rank]["entries"] = []
    assert Result(write(dumps, tmp_path)).blamed == {12, 14}
