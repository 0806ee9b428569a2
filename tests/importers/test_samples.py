"""The samples in docs/samples: as they are written, and what docs/importers.md says they show."""

from __future__ import annotations

from pathlib import Path

import pytest

from importers import samples
from importers.reading import Result


def test_they_are_as_written(tmp_path: Path) -> None:
    samples.write(tmp_path)
    expected = {str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*.*")}
    found = {
        str(p.relative_to(samples.FOLDER)): p.read_bytes() for p in samples.FOLDER.rglob("*.*")
    }
    assert found == expected
    assert sum(map(len, found.values())) < 64 << 10


@pytest.mark.parametrize("name", sorted(samples.CULPRITS))
def test_who_is_named(name: str) -> None:
    result = Result(samples.FOLDER / name)
    assert result.blamed == {samples.CULPRITS[name]}
    assert list(result.imported.files) == [name]
