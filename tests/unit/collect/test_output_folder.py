"""The output folder: names, links, owners."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.collecting import Bench, Info, init, read

from nccluprobe.collect.safedir import (
    Owner,
    check_out,
    file_owner,
    open_inside,
    open_out,
    parse_owner,
)
from nccluprobe.errors import ExitCode, NccluprobeError

pytestmark = pytest.mark.alone


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners")


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


def test_a_look_at_the_output_folder_makes_nothing(tmp_path: Path) -> None:
    check_out(tmp_path / "new" / "deeper")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NccluprobeError) as caught:
            check_out(path)
        assert caught.value.code == ExitCode.OUTPUT


@pytest.mark.parametrize("path", ["/proc/x", "/proc/x/deeper", "/proc", "/proc/self"])
def test_where_nothing_can_be_made_is_told_before(path: str) -> None:
    """Permissions do not tell, for root."""
    with pytest.raises(NccluprobeError, match="cannot be written to") as caught:
        check_out(Path(path))
    assert caught.value.code == ExitCode.OUTPUT


def test_a_look_at_a_link_to_nowhere_makes_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there" / "deeper")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    check_out(tmp_path / "link")
    assert not (tmp_path / "there").exists()
    with pytest.raises(NccluprobeError):
        check_out(tmp_path / "round")
