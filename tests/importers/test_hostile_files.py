"""Files that cannot be read, change while they are read, or are none: one line, and soon."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import nccluprobe
from importers import test_inspector
from importers.frgen import one_group
from importers.reading import Result
from importers.test_fr import stalled
from importers.test_nccl_log import job
from importers.test_ras import report, write
from nccluprobe.importers import files
from nccluprobe.importers.files import KINDS, find
from nccluprobe.importers.inspector import Inspector
from nccluprobe.importers.nccl_log import NcclLog


def one_of(kind: str, folder: Path) -> Path:
    """A good file of a kind."""
    folder.mkdir(exist_ok=True)
    if kind == "fr":
        return stalled().write(folder) / "nccl_trace_rank_0"
    if kind == "ras":
        return write(folder / "ras.json", report(0, {0: 9, 1: 9, 2: 8, 3: 9}))
    if kind == "inspector":
        test_inspector.write(folder, test_inspector.job())
        return sorted(folder.iterdir())[0]
    return job(2).merged(folder / "all.log")


def as_nobody(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``nccluprobe analyze`` by a user who owns nothing."""
    code = (
        "import os, sys; import nccluprobe.cli.analyze; from nccluprobe.__main__ import start; "
        "os.setgroups([]); os.setgid(65534); os.setuid(65534); "
        "sys.argv = ['nccluprobe', *sys.argv[1:]]; start()"
    )
    home = str(Path(nccluprobe.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", code, "analyze", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": home},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def open_to_all(tmp_path: Path) -> Path:
    """A folder that everybody can reach."""
    top = Path(tempfile.gettempdir())
    if top not in tmp_path.parents:
        pytest.skip("temporary files lie where others may not look")
    for folder in (tmp_path, *tmp_path.parents):
        if top in folder.parents:
            folder.chmod(folder.stat().st_mode | 0o055)
    return tmp_path


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@needs_root
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_whose_files_are_closed(kind: str, open_to_all: Path) -> None:
    path = one_of(kind, open_to_all / "files")
    for other in path.parent.iterdir():
        other.chmod(0)
    for chosen in ((), ("--from", kind)):
        told = as_nobody(*chosen, "files", cwd=open_to_all)
        assert told.returncode == 12, told
        assert "Permission denied" in told.stderr
        assert len(told.stderr.splitlines()) == 1


@needs_root
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_in_a_closed_folder(kind: str, open_to_all: Path) -> None:
    path = one_of(kind, open_to_all / "files")
    path.parent.chmod(0o700)
    for chosen in ((), ("--from", kind)):
        told = as_nobody(*chosen, f"files/{path.name}", cwd=open_to_all)
        assert told.returncode == 12, told
        assert told.stderr.splitlines() == [f"nccluprobe: files/{path.name}: Permission denied"]


@needs_root
def test_one_closed_file_among_others_is_named(open_to_all: Path) -> None:
    path = one_of("fr", open_to_all / "files")
    path.chmod(0)
    told = as_nobody("files", "--out", ".", cwd=open_to_all)
    assert "files/nccl_trace_rank_0: Permission denied" in " ".join(told.stdout.split())


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [to_pipe, to_device, to_folder, to_circle, Path.unlink])
def test_a_file_that_is_replaced_after_it_was_found(
    kind: str, change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what never ends, or never begins."""
    path = one_of(kind, tmp_path / "files")
    found = find([path], kind)
    change(path)
    monkeypatch.setattr("importers.reading.find", lambda *_: found)
    began = time.monotonic()
    result = Result(path)
    assert result.findings == []
    (told,) = result.imported.told.problems
    assert str(path) in told
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("change", [to_pipe, to_device, to_circle, Path.unlink])
def test_a_file_that_is_replaced_while_a_folder_is_looked_through(
    change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = one_of("fr", tmp_path / "files")
    regular = files._regular_files

    def then_change(top: str, found: files.Found) -> list[tuple[str, int]]:
        listed = regular(top, found)
        change(path)
        return listed

    monkeypatch.setattr(files, "_regular_files", then_change)
    result = Result(path.parent)
    assert any(str(path) in told for told in result.imported.told.problems)


@pytest.mark.parametrize("kind", ["inspector", "nccl-log"])
def test_a_file_that_grows_as_it_is_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read as far as it went when it was opened."""
    path = one_of(kind, tmp_path / "files")
    line = path.read_bytes().splitlines(True)[-1]
    stop = threading.Event()
    grown = threading.Event()

    def grow() -> None:
        with path.open("ab") as f:
            while not stop.is_set():
                f.write(line * 1000)
                f.flush()
                grown.set()

    reader = "Inspector._record" if kind == "inspector" else "NcclLog._take"
    module = "inspector" if kind == "inspector" else "nccl_log"
    name = f"nccluprobe.importers.{module}.{reader}"
    owner, method = (Inspector, "_record") if kind == "inspector" else (NcclLog, "_take")
    real = getattr(owner, method)

    def slow(*arguments: object) -> object:
        if not grown.is_set():
            writer.start()
            grown.wait(20)
        return real(*arguments)

    monkeypatch.setattr(name, slow)
    writer = threading.Thread(target=grow)
    try:
        result = Result(path)
    finally:
        stop.set()
        writer.join()
    assert result.imported.told.calls < 1000


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_a_pipe_and_links_in_a_circle_are_named(kind: str, tmp_path: Path) -> None:
    path = one_of(kind, tmp_path / "files")
    os.mkfifo(path.parent / "pipe")
    (path.parent / "circle").symlink_to("circle")
    (path.parent / "up").symlink_to("..")
    for chosen in (None, kind):
        told = "\n".join(Result(path.parent, kind=chosen).imported.told.problems)
        assert "pipe: not read: no regular file" in told
        assert "circle and 1 more: not read: links in folders are not followed" in told


def test_links_to_dumps_are_told(tmp_path: Path) -> None:
    """Only links lie there: nobody wonders why there is nothing."""
    path = one_of("fr", tmp_path / "files")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "nccl_trace_rank_0").symlink_to(path)
    told = find([tmp_path / "links"], None).problems
    assert told == [
        f"{tmp_path}/links/nccl_trace_rank_0: not read: links in folders are not followed; "
        "name the files that are meant"
    ]


def test_what_is_nothing_that_is_known_is_counted(tmp_path: Path) -> None:
    path = one_of("ras", tmp_path / "files")
    for n in range(3):
        (path.parent / f"notes{n}").write_text("hello\n")
    told = find([path.parent], None).problems
    assert told == [f"{path.parent}/notes0 and 2 more files: not read: nothing that is known"]


def test_folders_too_deep_and_too_many_files_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MAX_FILES", 3)
    monkeypatch.setattr(files, "_MAX_DEPTH", 1)
    one_of("fr", tmp_path / "files")
    (tmp_path / "files" / "a" / "b").mkdir(parents=True)
    told = " ".join(find([tmp_path / "files"], None).problems)
    assert "b: not read: more than 1 folders deep" in told
    assert "not read: more than 3 files" in told


def test_thousands_of_dumps(tmp_path: Path) -> None:
    began = time.process_time()
    whole = one_group(2)
    whole.all("0", 1.0)
    data = json.dumps(whole.ranks[0].dump()).replace("[0, 1]", str(list(range(5000)))).encode()
    for rank in range(5000):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(data)
    result = Result(tmp_path)
    assert result.findings == []
    assert result.imported.files["fr"] == 5000
    assert time.process_time() - began < 60


def test_a_compressed_file_of_nothing_but_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not unpacked for ever."""
    monkeypatch.setattr("nccluprobe.importers.common._PACKED_LEAST", 1 << 20)
    path = tmp_path / "all.log.gz"
    path.write_bytes(gzip.compress(bytes(64 << 20)))
    told = Result(path, kind="nccl-log").imported.told.problems
    assert any("more text than such a file needs: the rest is not read" in t for t in told)
