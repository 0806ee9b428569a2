"""findings.jsonl, written by several analyses at once."""

from __future__ import annotations

import fcntl
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from nccluprobe.errors import ExitCode, NccluprobeError
from nccluprobe.match.finding import Finding
from nccluprobe.report import writer
from nccluprobe.report.writer import FINDINGS, FindingWriter


def finding(n: int, **more: Any) -> Finding:
    fields: dict[str, Any] = {"severity": "notice", "details": {}}
    return Finding(
        ("k", n), "collective_missing_enter", "run", "00000000000000aa", n, 5, **(fields | more)
    )


def ids(folder: Path) -> list[str]:
    return [json.loads(line)["id"] for line in (folder / FINDINGS).read_text().splitlines()]


def test_what_another_has_written_is_not_written_again(tmp_path: Path) -> None:
    with FindingWriter(tmp_path) as a, FindingWriter(tmp_path) as b:
        a.write([finding(1)])
        b.write([finding(1), finding(2)])
        a.write([finding(2), finding(1)])
        assert ids(tmp_path) == [finding(1).id, finding(2).id]
        b.write([finding(1, severity="error")])
        a.write([finding(1, severity="error")])
        assert ids(tmp_path)[2:] == [finding(1).id]


def test_a_finding_by_other_limits_has_a_line_of_its_own(tmp_path: Path) -> None:
    """The file is a log: what an earlier analysis found stays, and says by which limits."""
    for limits in ({"missing_after_s": 60.0}, {"missing_after_s": 5.0}, {"missing_after_s": 5.0}):
        with FindingWriter(tmp_path) as mine:
            mine.write([finding(1, limits=limits)])
    lines = [json.loads(line) for line in (tmp_path / FINDINGS).read_text().splitlines()]
    assert [line["limits"]["missing_after_s"] for line in lines] == [60, 5]


def test_many_at_once_write_each_finding_once(tmp_path: Path) -> None:
    start = threading.Barrier(8)

    def run() -> None:
        with FindingWriter(tmp_path) as mine:
            start.wait(20)
            for n in range(20):
                mine.write([finding(n), finding(n + 1)])

    threads = [threading.Thread(target=run) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(ids(tmp_path)) == sorted(finding(n).id for n in range(21))


def test_a_file_that_was_cut_is_written_again(tmp_path: Path) -> None:
    with FindingWriter(tmp_path) as mine:
        mine.write([finding(1)])
        (tmp_path / FINDINGS).write_text("")
        mine.write([finding(1)])
        assert ids(tmp_path) == [finding(1).id]


def test_a_file_that_was_deleted_is_made_again_and_its_folder_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with FindingWriter(folder) as mine:
        mine.write([finding(1)])
        (folder / FINDINGS).unlink()
        mine.write([finding(2)])
        assert ids(folder) == [finding(2).id]
        shutil.rmtree(folder)
        with pytest.raises(NccluprobeError, match=f"{FINDINGS} is not written") as caught:
            mine.write([finding(3)])
        assert caught.value.code is ExitCode.OUTPUT
        assert not folder.exists()


def test_a_lock_that_is_never_given_back_does_not_hold_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_PATIENCE_S", 0.05)
    (tmp_path / FINDINGS).touch()
    with (tmp_path / FINDINGS).open("rb") as other, FindingWriter(tmp_path) as mine:
        fcntl.flock(other, fcntl.LOCK_EX)
        mine.write([finding(1)])
        assert ids(tmp_path) == [finding(1).id]


def test_after_a_line_that_was_cut_a_finding_has_a_line_of_its_own(tmp_path: Path) -> None:
    with FindingWriter(tmp_path) as a:
        a.write([finding(1)])
    whole = (tmp_path / FINDINGS).read_bytes()
    (tmp_path / FINDINGS).write_bytes(whole[:-20])  # its writer was killed
    with FindingWriter(tmp_path) as b:
        b.write([finding(1), finding(2)])
        b.write([finding(2)])
    first, *rest = (tmp_path / FINDINGS).read_bytes().splitlines(keepends=True)
    assert first == whole[:-20] + b"\n"
    assert [json.loads(line)["id"] for line in rest] == [finding(1).id, finding(2).id]


def test_what_a_full_disk_refused_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FindingWriter(tmp_path) as a:
        with monkeypatch.context() as full:

            def refuse(fd: int, data: bytes) -> int:
                raise OSError(28, "No space left on device")

            full.setattr(writer.os, "write", refuse)
            a.write([finding(1)])
        assert ids(tmp_path) == []
        a.write([])
        assert ids(tmp_path) == [finding(1).id]
        a.write([finding(1)])
        assert ids(tmp_path) == [finding(1).id]
