"""The stand-ins, built once for these tests."""

from __future__ import annotations

import pytest

from nccluprobe.canary import libraries


@pytest.fixture(scope="session", autouse=True)
def simulated() -> tuple[str, str]:
    return libraries.simulated(build=True)
