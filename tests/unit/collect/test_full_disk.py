"""Writing the trace where the disk is full or files go away: all is counted."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.collecting import Bench, calls, init, read, rec

from nccluprobe.cli.unwritten import refuse_unclosed, say_unwritten
from nccluprobe.collect import part_names, reserve, safedir, writer
from nccluprobe.collect.safedir import Owner
from nccluprobe.errors import ExitCode, NccluprobeError

pytestmark = pytest.mark.alone


class Disk:
    """os.write and os.ftruncate with a bound, as a full disk has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 10**9
        self.error = errno.ENOSPC
        self.calls = 0
        self._write = os.write
        monkeypatch.setattr(writer.os, "write", self.write)

    def write(self, fd: int, data: bytes) -> int:
        self.calls += 1
        if self.room <= 0:
            raise OSError(self.error, os.strerror(self.error))
        done = self._write(fd, data[: self.room])
        self.room -= done
        return done


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    yield Disk(monkeypatch)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_full_disk_is_counted_exactly(tmp_path: Path, disk: Disk, error: int) -> None:
    disk.error = error
    bench = Bench(tmp_path)
    bench.step(init(1))
    bench.step(*calls(bench, 10))
    disk.room = 1000  # five lines and a piece
    bench.step(*calls(bench, 50, 10))
    (path,) = bench.files()
    lines = read(path)
    kept = [x["idx"] for x in lines if x.get("api") == "ncclAllReduce"]
    assert kept == list(range(len(kept))) and 10 < len(kept) < 20
    size = path.stat().st_size
    bench.step(*calls(bench, 40, 60))
    before = disk.calls
    bench.steps(0.5)
    assert disk.calls == before  # one attempt a second
    bench.steps(2)
    assert disk.calls - before <= 3
    assert path.stat().st_size == size
    disk.room = 10**9
    bench.steps(1.5)
    bench.step(*calls(bench, 5, 100))
    bench.steps(1)
    lines = bench.lines()
    after = [x for x in lines if x["kind"] == "coverage"][-1]
    assert after["skipped_disk"] == 100 - len(kept)
    assert after["captured"] == 106
    states = [x["state"] for x in lines if x["kind"] == "state"]
    assert states == ["attached", "disk_full", "disk_ok"]
    resumed = lines[[x.get("state") for x in lines].index("disk_full") - 4 :]
    assert "comm" in [x["kind"] for x in resumed]
    assert [x["idx"] for x in lines if x.get("api") == "ncclAllReduce"][-5:] == list(
        range(100, 105)
    )
    assert [kind for kind, _ in bench.messages].count("problem") == 2


def test_disk_full_from_the_first_line_on(tmp_path: Path, disk: Disk) -> None:
    bench = Bench(tmp_path)
    disk.room = 100
    bench.step(init(1), *calls(bench, 3))
    (path,) = bench.files()
    assert path.read_bytes() == b""
    disk.room = 10**9
    bench.steps(3)
    lines = bench.lines()
    assert lines[0]["kind"] == "process"
    assert {x["id"] for x in lines if x["kind"] == "comm"} == {0}
    assert [x for x in lines if x["kind"] == "coverage"][-1]["skipped_disk"] >= 4


def test_resume_that_fails_halfway_leaves_nothing(tmp_path: Path, disk: Disk) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    disk.room = 0
    bench.step(*calls(bench, 5))
    (path,) = bench.files()
    size = path.stat().st_size
    for room in (30, 700, 1):
        disk.room = room
        bench.steps(1.1)
        assert path.stat().st_size == size
    disk.room = 10**9
    bench.steps(2)
    lines = bench.lines()
    assert [x["state"] for x in lines if x["kind"] == "state"] == [
        "attached", "disk_full", "disk_ok",
    ]  # fmt: skip
    assert [x for x in lines if x["kind"] == "coverage"][-1]["skipped_disk"] == 5


def test_a_stuck_call_is_written_again_after_a_full_disk(tmp_path: Path, disk: Disk) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    disk.room = 0
    bench.source.inside = [rec(comm_gen=1, t_enter=bench.clock.now, t_exit=0)]
    bench.steps(2)
    assert bench.of_kind("enter") == []
    disk.room = 10**9
    bench.steps(2)
    assert len(bench.of_kind("enter")) == 1


def test_torn_line_that_cannot_be_cut_is_closed(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))

    def refuse(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(writer.os, "ftruncate", refuse)
    disk.room = 50
    bench.step(*calls(bench, 5))
    disk.room = 10**9
    bench.steps(2)
    (path,) = bench.files()
    bad = 0
    for line in path.read_bytes().split(b"\n"):
        try:
            json.loads(line or b"{}")
        except ValueError:
            bad += 1
    assert bad == 1


def test_file_that_cannot_be_made_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    original = safedir.create_file

    def refuse(folder: int, name: str, owner: Owner | None) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(part_names, "create_file", refuse)
    bench.step(init(1), *calls(bench, 3))
    assert bench.files() == []
    monkeypatch.setattr(part_names, "create_file", original)
    bench.steps(3)
    assert bench.of_kind("comm")
    assert bench.of_kind("coverage")[-1]["captured"] == 4


@pytest.mark.parametrize("what", ["file", "folder"])
def test_deleted_files_are_said_and_made_anew(tmp_path: Path, what: str) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1), *calls(bench, 20))
    (first,) = bench.files()
    before = len(first.read_bytes().splitlines())
    if what == "file":
        first.unlink()
    else:
        shutil.rmtree(first.parent)
    bench.steps(2.5)
    bench.step(*calls(bench, 30, 20))
    bench.close()
    (second,) = bench.files()
    assert second.name == first.name.replace(".jsonl", ".part1.jsonl")
    found = read(second)
    assert found[0]["kind"] == "process" and found[0]["part"] == 1
    assert [x for x in found if x["kind"] == "comm"]
    assert next(x["state"] for x in found if x["kind"] == "state") == "dropped_part"
    assert [x["idx"] for x in found if x.get("api") == "ncclAllReduce"] == list(range(20, 50))
    assert bench.of_kind("coverage")[-1]["dropped"] >= before
    assert [text for _, text in bench.messages if "somebody deleted it" in text]


def test_deleted_while_the_disk_is_full(tmp_path: Path, disk: Disk) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1), *calls(bench, 20))
    disk.room = 0
    bench.step(*calls(bench, 20, 20))
    bench.files()[0].unlink()
    bench.steps(2.5)
    disk.room = 10**9
    bench.steps(2.5)
    bench.step(*calls(bench, 5, 40))
    bench.close()
    (second,) = bench.files()
    states = [x["state"] for x in read(second) if x["kind"] == "state"]
    assert states[:3] == ["dropped_part", "disk_full", "disk_ok"]
    assert [x["idx"] for x in read(second) if x.get("api") == "ncclAllReduce"][-5:] == [
        *range(40, 45)
    ]


@pytest.mark.root
def test_a_real_full_disk(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", mount], check=True)
    try:
        bench = Bench(mount)
        bench.step(init(1))
        for i in range(40):
            bench.step(*calls(bench, 50, i * 50))
        (path,) = bench.files()
        kept = [x["idx"] for x in read(path, check=False) if x.get("api") == "ncclAllReduce"]
        assert kept == list(range(len(kept))) and 0 < len(kept) < 2000
        subprocess.run(["mount", "-o", "remount,size=4m", mount], check=True)
        bench.steps(3)
        bench.step(*calls(bench, 50, 2000))
        bench.close()
        lines = read(path, check=False)
        last = [x for x in lines if x["kind"] == "coverage"][-1]
        got = [x["idx"] for x in lines if x.get("api") == "ncclAllReduce"]
        assert len(got) == len(kept) + 50
        # No coverage line was in a batch that failed but for the one in which it failed.
        assert 2000 - len(kept) <= last["skipped_disk"] <= 2001 - len(kept)
    finally:
        subprocess.run(["umount", mount], check=True)


@pytest.mark.root
def test_a_read_only_folder_is_refused_at_once(tmp_path: Path) -> None:
    mount = tmp_path / "ro"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", mount], check=True)
    try:
        with pytest.raises(NccluprobeError, match="cannot be written") as error:
            Bench(mount)
        assert error.value.code is ExitCode.OUTPUT
    finally:
        subprocess.run(["umount", mount], check=True)


def test_a_batch_is_one_write(tmp_path: Path, disk: Disk) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    before = disk.calls
    bench.step(*calls(bench, 500))
    assert disk.calls == before + 1


def test_long_drains_are_written_in_pieces(tmp_path: Path, disk: Disk) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    before = disk.calls
    bench.step(*calls(bench, 30_000))
    assert disk.calls - before == 4
    indices = [x["idx"] for x in bench.lines(check=False) if x.get("api") == "ncclAllReduce"]
    assert indices == list(range(30_000))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of a megabyte."""
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], check=True)
    yield mount
    subprocess.run(["umount", mount], check=True)


def fill(folder: Path) -> None:
    """Take all room that is left."""
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


@pytest.mark.root
@pytest.mark.parametrize("late", [0, 7, 100])
def test_the_count_is_in_the_trace_of_a_disk_that_stays_full(small: Path, late: int) -> None:
    """However long it stays full: the last coverage line has the count, and the end is told."""
    bench = Bench(small)
    bench.step(init(1))
    bench.step(*calls(bench, 50))
    fill(small)
    n = 50
    for _ in range(40):
        bench.step(*calls(bench, 200, n))
        n += 200
    bench.steps(late, ms=100)
    bench.step(*calls(bench, 30, n))
    n += 30
    bench.close()
    lines = bench.lines()
    got = [x["idx"] for x in lines if x.get("api") == "ncclAllReduce"]
    assert got == list(range(len(got))) and 50 <= len(got) < n
    last, end = lines[-2:]
    assert (last["kind"], end["kind"]) == ("coverage", "process_end")
    # A coverage line may be in the batch that failed, and the collector's last word.
    assert n - len(got) <= last["skipped_disk"] <= n - len(got) + 2
    assert last["skipped_disk"] == bench.collector.stats.skipped
    assert last["captured"] == n + 1
    assert bench.collector.stats.unclosed == 0
    assert [x["state"] for x in lines if x["kind"] == "state"].count("disk_full") == 1


@pytest.mark.root
def test_many_parts_on_a_full_disk_are_closed(small: Path) -> None:
    bench = Bench(small, limits=writer.Limits(part_bytes=60_000))
    bench.step(init(1))
    for i in range(60):
        bench.step(*calls(bench, 100, i * 100))
    bench.close()
    last = read(max(bench.files(), key=lambda p: p.stat().st_mtime_ns))
    got = sum(x.get("api") == "ncclAllReduce" for p in bench.files() for x in read(p))
    assert last[-1]["kind"] == "process_end" and got < 6000
    assert 6000 - got <= last[-2]["skipped_disk"] <= 6003 - got


@pytest.mark.root
def test_the_room_that_was_kept_is_given_back(small: Path) -> None:
    bench = Bench(small)
    bench.step(init(1), *calls(bench, 50))
    (path,) = bench.files()
    assert path.stat().st_blocks * 512 >= path.stat().st_size + reserve.ROOM
    bench.close()
    assert path.stat().st_blocks * 512 < path.stat().st_size + 8192


def test_a_trace_that_cannot_be_closed_is_told_of(tmp_path: Path, disk: Disk) -> None:
    """Where not even the reserve can be written: on the terminal, and by the exit code."""
    bench = Bench(tmp_path)
    bench.step(init(1))
    disk.room = 0
    bench.step(*calls(bench, 5))
    bench.close()
    stats = bench.collector.stats
    assert (stats.unclosed, stats.skipped) == (1, 5)
    assert any("5 lines were skipped" in text for _, text in bench.messages)
    said: list[str] = []
    say_unwritten(stats, said.append)
    assert "5 lines were not written" in said[0] and "1 trace has no closing lines" in said[1]
    with pytest.raises(NccluprobeError) as error:
        refuse_unclosed([stats])
    assert error.value.code is ExitCode.OUTPUT


def test_where_nothing_can_be_kept_free_all_is_written_while_it_can_be(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that does not allocate ahead, as NFS."""
    monkeypatch.setattr(reserve, "allocate", lambda fd, start, size: errno.EOPNOTSUPP)
    bench = Bench(tmp_path)
    bench.step(init(1), *calls(bench, 100))
    disk.room = 0
    bench.step(*calls(bench, 5, 100))
    disk.room = 10**9
    bench.close()
    lines = bench.lines()
    assert sum(x.get("api") == "ncclAllReduce" for x in lines) == 100
    assert (lines[-2]["skipped_disk"], lines[-1]["kind"]) == (5, "process_end")
