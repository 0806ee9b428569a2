"""Made-up incidents of training jobs: the culprits are named, and nobody else.

A short form of what the table in docs/importers.md counts: a few seeds of each kind.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from importers.fr_incidents import FORMS, Incident, make
from importers.reading import Result

#: Kinds of which every incident is decided, in all forms.
DECIDED = ("hang-one", "hang-any", "hang-tensor", "hang-pipe", "crash-one", "stop-one")


def made(kind: str, seed: int) -> Incident:
    incident = make(kind, seed)
    if incident is None:
        pytest.skip("the fault of this seed hits nothing")
    return incident


def blamed(incident: Incident, form: str, folder: Path) -> set[int]:
    return Result(incident.write(folder / form, FORMS[form]())).blamed


@pytest.mark.parametrize("seed", [3, 5])
@pytest.mark.parametrize("kind", DECIDED)
def test_exactly_the_culprits(kind: str, seed: int, tmp_path: Path) -> None:
    incident = made(kind, seed)
    for form in ("active", "ring", "bare"):
        found = blamed(incident, form, tmp_path)
        assert incident.culprits <= found <= incident.culprits | incident.masked, form


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
