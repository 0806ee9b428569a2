"""Dumps that show a job from its first call on: both sides number sends and receives alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from importers import fr_incidents
from importers.test_fr_incidents import blamed, made


@pytest.fixture(autouse=True)
def _from_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fr_incidents, "_offset", lambda *_: 0)


@pytest.mark.parametrize(
    ("kind", "seed"), [("gpu-one", 5002), ("gpu-pipe", 5002), ("gpu-tensor", 5002)]
)
def test_who_waits_for_a_send_of_a_failed_device_is_not_named(
    kind: str, seed: int, tmp_path: Path
) -> None:
    """It is posted, and open: the failed device sees no end of it, nor of those before it."""
    incident = made(kind, seed)
    assert blamed(incident, "active", tmp_path) == incident.culprits
