"""Files of the preload library that are found while they are being made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nccluprobe.capture import preload_layout, preload_source
from nccluprobe.capture.preload_source import PreloadSource

NAME = "414.1.ring"


def attempts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, magic_comes: bool
) -> tuple[int, list[str]]:
    """How often a file that cannot be read is tried in a few seconds, and what is said."""
    tried = 0
    said: list[str] = []

    def ring_file(path: str, epoch: int) -> object:
        nonlocal tried
        tried += 1
        if magic_comes:  # just after we looked
            Path(path).write_bytes(preload_layout.MAGIC.ljust(4096, b"\0"))
        raise preload_layout.LayoutError("no ring of the preload library")

    monkeypatch.setattr(preload_source, "RingFile", ring_file)
    source = PreloadSource(folder, say=said.append)
    for i in range(40):
        source.poll(1_000_000_000 + i * 100_000_000)
    return tried, said


def test_a_file_that_is_finished_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME).write_bytes(b"")
    tried, said = attempts(tmp_path, monkeypatch, magic_comes=True)
    assert tried == 2  # the second time it is whole, and still no ring
    assert len(said) == 1 and "left alone" in said[0]


def test_a_file_that_is_not_finished_is_tried_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME).write_bytes(b"")
    tried, said = attempts(tmp_path, monkeypatch, magic_comes=False)
    assert tried > 5
    assert said == []


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", ["fifo", "link", "folder"])
def test_what_is_no_file_is_left_alone_and_not_waited_for(tmp_path: Path, what: str) -> None:
    path = tmp_path / NAME
    if what == "fifo":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    said: list[str] = []
    source = PreloadSource(tmp_path, say=said.append)
    for i in range(40):
        source.poll(1_000_000_000 + i * 100_000_000)
    assert len(said) == (1 if what == "fifo" else 0)
    source.close()
