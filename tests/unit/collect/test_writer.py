"""Files: parts, bounds, a full disk, and who may do what."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.collecting import Bench, Info, init, read, rec

from nccluprobe.collect import safedir, writer
from nccluprobe.collect.safedir import Owner, file_owner, open_inside, open_out, parse_owner
from nccluprobe.collect.writer import Limits
from nccluprobe.errors import ExitCode, NccluprobeError

pytestmark = pytest.mark.alone

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners")


def _calls(bench: Bench, n: int, start: int = 0) -> list[Any]:
    return [
        rec(comm_gen=1, t_enter=bench.clock.now + i, call_idx=start + i, order_idx=start + i)
        for i in range(n)
    ]


# -- parts


def _fill(bench: Bench, rounds: int, each: int = 50) -> None:
    for i in range(rounds):
        bench.step(*_calls(bench, each, i * each))


def test_parts_are_self_contained(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limits=Limits(part_bytes=40_000))
    bench.step(init(1), init(2, uid_hash=2), init(3, uid_hash=3))
    bench.step(rec("ncclCommFinalize", comm_gen=2), rec("ncclCommDestroy", comm_gen=3))
    bench.step(rec("ncclGroupStart", tid=101, group_id=7), rec("ncclGroupStart", tid=102))
    bench.step(rec("ncclGroupEnd", tid=102, group_depth=1))
    bench.source.inside = [rec(comm_gen=1, tid=105, t_enter=bench.clock.now, t_exit=0)]
    bench.steps(1)
    _fill(bench, 40)
    bench.step(rec("ncclGroupEnd", tid=101, group_id=7, group_depth=1))
    bench.close()
    names = [f.name for f in bench.files()]
    count = len(names)
    assert count > 3
    stem = "rank_unknown_pid_100"
    assert set(names) == {f"{stem}.jsonl", *(f"{stem}.part{n}.jsonl" for n in range(1, count))}
    indices: list[int] = []
    for number in range(count):
        name = f"{stem}.jsonl" if number == 0 else f"{stem}.part{number}.jsonl"
        lines = bench.lines(name)
        assert [x["kind"] for x in lines[:2]] == ["process", "clock"]
        assert lines[0]["part"] == number
        if number:
            head = lines[: next(i for i, x in enumerate(lines) if x["kind"] == "coverage") + 1]
            assert [x["id"] for x in head if x["kind"] == "comm"][:2] == [0, 1]
            assert {"finalize"} <= {x["how"] for x in head if x["kind"] == "comm_end"}
            groups = [x for x in head if x["kind"] == "call"]
            assert [(g["api"], g["thread"], g["again"]) for g in groups] == [
                ("ncclGroupStart", 101, True)
            ]
            assert [x["thread"] for x in head if x["kind"] == "enter"] == [105]
            assert head[-1]["captured"] > 0
        known = {x["id"] for x in lines if x["kind"] == "comm"}
        used = {x["comm"] for x in lines if x.get("comm") is not None}
        assert used <= known
        indices += [x["idx"] for x in lines if x["kind"] == "call" and x["api"] == "ncclAllReduce"]
    assert indices == list(range(2000))
    assert read(bench.files()[-1])  # all valid


def test_total_is_bounded_oldest_part_first(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limits=Limits(max_bytes=400_000))
    bench.step(init(1))
    for i in range(200):
        bench.step(*_calls(bench, 50, i * 50))
        assert sum(f.stat().st_size for f in bench.files()) <= 400_000
    bench.steps(2)
    bench.close()
    files = sorted(bench.files(), key=lambda f: int(f.stem.rpartition("part")[2]))
    assert not (bench.files()[0].parent / "rank_unknown_pid_100.jsonl").exists()
    lines = [x for f in files for x in read(f, check=False)]
    notes = [x for x in lines if x.get("state") == "dropped_part"]
    assert notes and "lines" in notes[-1]["detail"]
    dropped = lines[-2]["dropped"]
    indices = [x["idx"] for x in lines if x.get("api") == "ncclAllReduce"]
    assert indices == list(range(indices[0], 10_000))
    assert dropped >= indices[0]


def test_a_burst_larger_than_the_bound_keeps_its_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limits=Limits(max_bytes=200_000))
    bench.step(init(1))
    bench.step(*_calls(bench, 3000))
    assert sum(f.stat().st_size for f in bench.files()) <= 200_000
    bench.close()
    files = sorted(bench.files(), key=lambda f: int(f.stem.rpartition("part")[2]))
    indices = [
        x["idx"] for f in files for x in read(f, check=False) if x.get("api") == "ncclAllReduce"
    ]
    assert len(indices) > 500
    assert indices == list(range(indices[0], 3000))


# -- a full disk


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
    bench.step(*_calls(bench, 10))
    disk.room = 1000  # five lines and a piece
    bench.step(*_calls(bench, 50, 10))
    (path,) = bench.files()
    lines = read(path)
    kept = [x["idx"] for x in lines if x.get("api") == "ncclAllReduce"]
    assert kept == list(range(len(kept))) and 10 < len(kept) < 20
    size = path.stat().st_size
    bench.step(*_calls(bench, 40, 60))
    before = disk.calls
    bench.steps(0.5)
    assert disk.calls == before  # one attempt a second
    bench.steps(2)
    assert disk.calls - before <= 3
    assert path.stat().st_size == size
    disk.room = 10**9
    bench.steps(1.5)
    bench.step(*_calls(bench, 5, 100))
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
    bench.step(init(1), *_calls(bench, 3))
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
    bench.step(*_calls(bench, 5))
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
    bench.step(*_calls(bench, 5))
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

    monkeypatch.setattr(writer, "create_file", refuse)
    bench.step(init(1), *_calls(bench, 3))
    assert bench.files() == []
    monkeypatch.setattr(writer, "create_file", original)
    bench.steps(3)
    assert bench.of_kind("comm")
    assert bench.of_kind("coverage")[-1]["captured"] == 4


@pytest.mark.parametrize("what", ["file", "folder"])
def test_deleted_files_are_said_and_made_anew(tmp_path: Path, what: str) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1), *_calls(bench, 20))
    (first,) = bench.files()
    before = len(first.read_bytes().splitlines())
    if what == "file":
        first.unlink()
    else:
        shutil.rmtree(first.parent)
    bench.steps(2.5)
    bench.step(*_calls(bench, 30, 20))
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
    bench.step(init(1), *_calls(bench, 20))
    disk.room = 0
    bench.step(*_calls(bench, 20, 20))
    bench.files()[0].unlink()
    bench.steps(2.5)
    disk.room = 10**9
    bench.steps(2.5)
    bench.step(*_calls(bench, 5, 40))
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
            bench.step(*_calls(bench, 50, i * 50))
        (path,) = bench.files()
        kept = [x["idx"] for x in read(path, check=False) if x.get("api") == "ncclAllReduce"]
        assert kept == list(range(len(kept))) and 0 < len(kept) < 2000
        subprocess.run(["mount", "-o", "remount,size=4m", mount], check=True)
        bench.steps(3)
        bench.step(*_calls(bench, 50, 2000))
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


# -- names, links, owners


def test_name_that_exists(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    folder = tmp_path / "tracing" / "run"
    folder.mkdir(parents=True)
    (folder / "rank_unknown_pid_100.jsonl").write_text("other\n")
    bench.step(init(1))
    assert (folder / "rank_unknown_pid_100.jsonl").read_text() == "other\n"
    assert read(folder / "rank_unknown_pid_100_node1_5000000000.jsonl")
    again = Bench(tmp_path)
    again.step(init(1))
    assert read(folder / "rank_unknown_pid_100_node1_5000000000_2.jsonl")


def test_a_planted_file_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    folder = tmp_path / "out" / "tracing" / "run"
    folder.mkdir(parents=True)
    (folder / "rank_unknown_pid_100.jsonl").symlink_to(victim)
    bench = Bench(tmp_path / "out")
    bench.step(init(1))
    assert not victim.exists()
    assert (folder / "rank_unknown_pid_100_node1_5000000000.jsonl").exists()


@pytest.mark.parametrize("place", ["tracing", "tracing/run"])
def test_a_planted_folder_link_is_refused(tmp_path: Path, place: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / "out" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere, target_is_directory=True)
    bench = Bench(tmp_path / "out")
    bench.step(init(1))
    assert list(elsewhere.iterdir()) == []
    assert any(kind == "problem" and "link" in text for kind, text in bench.messages)
    link.unlink()
    bench.steps(3)
    assert bench.of_kind("comm")  # tracing went on meanwhile


@needs_root
def test_links_of_strangers_in_the_path(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    link = tmp_path / "link"
    link.symlink_to(real)
    os.close(open_out(link / "below"))  # root's own link
    assert (real / "below").is_dir()
    os.chown(link, 12345, 12345, follow_symlinks=False)
    with pytest.raises(NccluprobeError) as error:
        open_out(link / "below")
    assert error.value.code is ExitCode.OUTPUT and "12345" in str(error.value)


@needs_root
def test_folders_of_strangers_are_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(NccluprobeError, match="12345"):
        open_out(tmp_path)
    os.chown(tmp_path, 0, 0)
    (tmp_path / "tracing").mkdir()
    os.chown(tmp_path / "tracing", 12345, 12345)
    fd = open_out(tmp_path)
    with pytest.raises(NccluprobeError, match="12345"):
        open_inside(fd, "tracing", Owner(1, 1))
    os.close(open_inside(fd, "tracing", Owner(12345, 1)))
    os.close(fd)


def test_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(NccluprobeError) as error:
        open_out(tmp_path / "a")
    assert error.value.code is ExitCode.OUTPUT


@pytest.mark.parametrize("way", ["relative", "dots", "absolute link", "file"])
def test_ways_to_the_output_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").mkdir()
    if way == "file":
        (tmp_path / "x").write_text("")
        with pytest.raises(NccluprobeError) as error:
            open_out(tmp_path / "x" / "y")
        assert error.value.code is ExitCode.OUTPUT
        return
    if way == "absolute link":
        (tmp_path / "l").symlink_to(tmp_path / "target")
    path = {
        "relative": Path("target/new"),
        "dots": tmp_path / "no" / ".." / "target" / "." / "new",
        "absolute link": Path("l/new"),
    }[way]
    os.close(open_out(path))
    assert (tmp_path / "target" / "new").is_dir()
    assert (tmp_path / "target" / "new").stat().st_mode & 0o777 == 0o755


def test_modes(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        bench = Bench(tmp_path / "out")
        bench.step(init(1))
    finally:
        os.umask(old)
    assert bench.files()[0].stat().st_mode & 0o777 == 0o640


@needs_root
@pytest.mark.parametrize(
    ("explicit", "process", "sudo", "expected"),
    [
        (None, 12345, None, 12345),
        (None, 12345, "777", 12345),
        (None, 0, "777", 777),
        (None, 0, None, 0),
        (Owner(55, 56), 12345, "777", 55),
    ],
)
def test_owner(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    explicit: Owner | None,
    process: int,
    sudo: str | None,
    expected: int,
) -> None:
    for name in ("SUDO_UID", "SUDO_GID"):
        if sudo is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, sudo)
    bench = Bench(tmp_path, owner=explicit)
    bench.procs.infos[100] = Info(uid=process, gid=process)
    bench.step(init(1))
    assert bench.files()[0].stat().st_uid == expected
    assert bench.files()[0].parent.stat().st_uid == expected


def test_owner_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert file_owner(Owner(1, 1), Owner(2, 2), Owner(3, 3)) is None


def test_parse_owner() -> None:
    assert parse_owner("root") == Owner(0, 0)
    assert parse_owner("0:7") == Owner(0, 7)
    assert parse_owner("12345") == Owner(12345, 12345)
    with pytest.raises(NccluprobeError) as error:
        parse_owner("nobody-of-this-name")
    for text in ("\u0663", "9" * 5000, "root:\uff11"):
        with pytest.raises(NccluprobeError, match="no such user or group"):
            parse_owner(text)
    for text in ("99999999999999", "4294967295", "0:4294967295"):
        with pytest.raises(NccluprobeError, match="no user or group has"):
            parse_owner(text)
    assert error.value.code is ExitCode.USAGE


# -- sudden death

_VICTIM = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from support.collecting import Bench, init, rec
bench = Bench(Path({out!r}))
bench.step(init(1))
i = 0
while True:
    bench.step(*[rec(comm_gen=1, t_enter=bench.clock.now + k, call_idx=i + k) for k in range(500)])
    i += 500
"""


def test_after_sigkill_all_lines_but_the_last_are_whole(tmp_path: Path) -> None:
    code = _VICTIM.format(path=[str(Path(__file__).parents[2]), *sys.path], out=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code]) as victim:
        deadline = time.monotonic() + 30
        folder = tmp_path / "tracing" / "run"
        while time.monotonic() < deadline:
            if sum(f.stat().st_size for f in folder.glob("*.jsonl")) > 2_000_000:
                break
            time.sleep(0.02)
        victim.send_signal(signal.SIGKILL)
    (path,) = folder.glob("*.jsonl")
    whole = path.read_bytes().split(b"\n")[:-1]
    indices = [x["idx"] for x in map(json.loads, whole) if x.get("api") == "ncclAllReduce"]
    assert indices == list(range(len(indices))) and len(indices) > 5000


def test_a_batch_is_one_write(tmp_path: Path, disk: Disk) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    before = disk.calls
    bench.step(*_calls(bench, 500))
    assert disk.calls == before + 1


def test_long_drains_are_written_in_pieces(tmp_path: Path, disk: Disk) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    before = disk.calls
    bench.step(*_calls(bench, 30_000))
    assert disk.calls - before == 4
    indices = [x["idx"] for x in bench.lines(check=False) if x.get("api") == "ncclAllReduce"]
    assert indices == list(range(30_000))
