"""Made-up incidents of training jobs: the culprits are named, and nobody else.

A short form of what the table in docs/importers.md counts: a few seeds of each kind.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from importers.fr_incidents import FORMS, Incident, make
from importers.fr_real import Dumps, after_restart, write
from importers.reading import Result

#: Kinds of which every incident is decided, in all forms.
DECIDED = ("hang-one", "hang-any", "hang-tensor", "hang-pipe", "crash-one", "stop-one")


def made(kind: str, seed: int) -> Incident:
    """The incident of this seed, or of the next whose fault hits anything."""
    return next(x for n in range(20) if (x := make(kind, seed + 100 * n)) is not None)


def blamed(incident: Incident, form: str, folder: Path) -> set[int]:
    return Result(incident.write(folder / form, FORMS[form]())).blamed


@pytest.mark.parametrize("seed", [3, 5])
@pytest.mark.parametrize("kind", DECIDED)
def test_exactly_the_culprits(kind: str, seed: int, tmp_path: Path) -> None:
    incident = made(kind, seed)
    for form in ("active", "ring", "bare"):
        found = blamed(incident, form, tmp_path)
        assert incident.culprits <= found <= incident.culprits | incident.masked, form


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("hang-any", 19),
        ("hang-tensor", 14),
        ("hang-stage", 35),
        ("hang-any", 21),
        ("hang-pipe", 28),
    ],
)
def test_a_second_one_that_has_stopped_where_its_peers_went_on(
    kind: str, seed: int, tmp_path: Path
) -> None:
    """It waits for the first as they do, or for nobody at all, and has not come as far."""
    incident = made(kind, seed)
    assert len(incident.culprits) > 1
    assert blamed(incident, "active", tmp_path) == incident.culprits


@pytest.mark.parametrize("seed", [35, 49])
def test_ranks_of_a_job_that_runs_are_a_little_apart(seed: int, tmp_path: Path) -> None:
    assert blamed(made("healthy", seed), "active", tmp_path) == set()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", ["gpu-one", "gpu-any", "gpu-pipe"])
def test_devices_that_fail(kind: str, seed: int, tmp_path: Path) -> None:
    incident = made(kind, seed)
    assert blamed(incident, "active", tmp_path) == incident.culprits


@pytest.mark.parametrize("kind", ["healthy", "cut", "sleep-one"])
def test_nobody_is_to_blame(kind: str, tmp_path: Path) -> None:
    """All goes on; a network that is cut; a device of which nothing tells."""
    assert blamed(made(kind, 6), "active", tmp_path) == set()


def test_a_rank_that_goes_on_when_others_have_dumped(tmp_path: Path) -> None:
    """Its dump is newer: what it shows of later does not count."""
    incident = made("late-one", 3)
    assert blamed(incident, "full", tmp_path) == incident.culprits


def test_batches_whose_end_has_left_the_dump(tmp_path: Path) -> None:
    """Parts of a batch have no state: in a dump of what is active they look open."""
    incident = made("hang-pipe", 9)
    assert any(e.name == "coalesced" for h in incident.sim.hosts.values() for e in h.entries)
    assert blamed(incident, "active", tmp_path) == incident.culprits


@pytest.mark.parametrize("kind", ["late-one", "late-gone"])
@pytest.mark.parametrize("seed", [0, 3, 8])
def test_a_dump_that_shows_only_what_came_later(kind: str, seed: int, tmp_path: Path) -> None:
    """What is complete, or what the ring has lost, does not tell where its rank was."""
    incident = made(kind, seed)
    for form in ("active", "ring"):
        assert blamed(incident, form, tmp_path) == incident.culprits, form


@pytest.mark.parametrize("seed", [3, 5, 8])
def test_several_dumps_that_show_only_what_came_later(seed: int, tmp_path: Path) -> None:
    incident = made("late-any", seed)
    found = blamed(incident, "active", tmp_path)
    assert found
    assert found <= incident.culprits


@pytest.mark.parametrize("seed", [0, 5, 6])
def test_a_device_that_begins_nothing(seed: int, tmp_path: Path) -> None:
    """Its host goes on; others have begun what waits for it, which dumps tell if they time it."""
    incident = made("sleep-one", seed)
    result = Result(incident.write(tmp_path, FORMS["timed"]()))
    assert result.blamed == incident.culprits
    reasons = {f.details.get("reason") for f in result.findings if f.role == "root_cause"}
    assert "rank_device_not_begun" in reasons


@pytest.mark.parametrize("kind", ["healthy", "cut"])
@pytest.mark.parametrize("seed", [6, 8, 9])
def test_devices_that_are_at_work_are_not_to_blame(kind: str, seed: int, tmp_path: Path) -> None:
    assert blamed(made(kind, seed), "timed", tmp_path) == set()


@pytest.mark.parametrize(
    ("kind", "seed"), [("skip-one", 14), ("extra-one", 4), ("extra-one", 8), ("extra-one", 22)]
)
def test_who_is_out_of_step_with_one_that_erred_is_not_to_blame(
    kind: str, seed: int, tmp_path: Path
) -> None:
    """A call that one rank alone made is not what all others, who went on, have left out."""
    incident = made(kind, seed)
    assert blamed(incident, "active", tmp_path) <= incident.culprits


def test_what_is_open_only_is_no_habit(tmp_path: Path) -> None:
    """Sends that are complete are not there: what is left has an order of its own."""
    incident = made("gpu-tensor", 8)
    assert blamed(incident, "active", tmp_path) <= incident.culprits


@pytest.mark.parametrize("form", ["bare", "eager"])
@pytest.mark.parametrize(("kind", "seed"), [("gpu-tensor", 0), ("gpu-pipe", 0)])
def test_what_only_failed_devices_show_as_open_is_old(
    kind: str, seed: int, form: str, tmp_path: Path
) -> None:
    incident = made(kind, seed)
    assert blamed(incident, form, tmp_path) == incident.culprits


def test_a_broadcast_that_its_root_has_completed_is_no_failed_device(tmp_path: Path) -> None:
    incident = made("crash-any", 1)
    assert blamed(incident, "active", tmp_path) == incident.culprits


def dumps_of(incident: Incident) -> Dumps:
    found = incident.dumps(FORMS["active"]()).items()
    return {int(name.removeprefix("_dump_")): pickle.loads(data) for name, data in found}


@pytest.mark.parametrize("seconds", [100.0, 900.0])
def test_what_an_incident_left_before_a_restart_does_not_count(
    seconds: float, tmp_path: Path
) -> None:
    now, before = made("hang-one", 3), made("gpu-one", 3)
    assert now.job.n == before.job.n
    assert now.culprits != before.culprits
    dumps = after_restart(dumps_of(now), dumps_of(before), seconds)
    assert Result(write(dumps, tmp_path)).blamed == now.culprits
