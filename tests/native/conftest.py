"""The stand-in, built once, and swept after every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .sim import (
    Nccl,
    native_build,
)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return native_build.build(tmp_path_factory.mktemp("native"), strict=True)


@pytest.fixture(autouse=True)
def nothing_left(built: dict[str, Path]) -> Iterator[None]:
    """Every test leaves no segment that the sweep would not remove."""
    yield
    Nccl(built["libsimnccl.so"]).simCleanup()
