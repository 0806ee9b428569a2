"""Fixtures: the made-to-order library, and probes on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bpf.fakelib import FakeLib, build, functions
from nccluprobe.capture.bpf import Sizes
from nccluprobe.capture.ebpf_source import EbpfSource
from nccluprobe.capture.source import Library
from nccluprobe.record import STRUCT, Record


class Probed:
    """A source on the library, and what it captured."""

    def __init__(self, source: EbpfSource, lib: int = 1) -> None:
        self.source = source
        self.lib = lib

    def records(self, pid: int | None = None) -> list[Record]:
        """All records of a process (this one) since the last look."""
        pid = os.getpid() if pid is None else pid
        found = [Record(*row) for chunk in self.source.drain() for row in STRUCT.iter_unpack(chunk)]
        return [r for r in found if pid in (0, r.pid)]

    def epoch(self) -> int:
        """Epoch of this process."""
        return max(epoch for pid, epoch in self.source.captured() if pid == os.getpid())


Attach = Callable[..., Probed]


@pytest.fixture(scope="session")
def fake_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("fake") / "libfake.so")


@pytest.fixture(scope="session")
def _fake(fake_path: Path) -> FakeLib:
    return FakeLib(fake_path)


@pytest.fixture
def fake(_fake: FakeLib) -> FakeLib:
    _fake.reset()
    return _fake


@pytest.fixture(scope="session")
def _all_probed(fake_path: Path) -> Iterator[Probed]:
    source = EbpfSource(link="multi")
    source.add_library(Library(1, str(fake_path), "2.28.9", None))
    source.attach(1, str(fake_path), functions(fake_path))
    yield Probed(source)
    source.close()


@pytest.fixture
def probed(_all_probed: Probed) -> Probed:
    """All functions of the library, by uprobe_multi links; shared by the tests."""
    _all_probed.records(0)
    return _all_probed


@pytest.fixture
def attach(fake_path: Path) -> Iterator[Attach]:
    """A source of the test's own: attach(only={names}, exits=..., link=..., sizes=...)."""
    sources: list[EbpfSource] = []

    def make(
        only: set[str] | None = None,
        *,
        exits: bool = True,
        link: str = "multi",
        version: str = "2.28.9",
        sizes: Sizes | None = None,
    ) -> Probed:
        source = EbpfSource(sizes or Sizes(ring_bytes=1 << 20), exits=exits, link=link)
        sources.append(source)
        source.add_library(Library(1, str(fake_path), version, None))
        source.attach(1, str(fake_path), functions(fake_path, only))
        return Probed(source)

    yield make
    for source in sources:
        source.close()
