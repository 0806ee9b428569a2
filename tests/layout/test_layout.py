"""Layouts of struct ncclComm: from debug information, from code, refused."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import nccl_cache

from nccluprobe.capture.elf import scan
from nccluprobe.nccl import layout as layouts
from nccluprobe.nccl.layout import Layout, LayoutError, Reason, cache, find
from nccluprobe.nccl.layout.find import derive
from nccluprobe.nccl.layout.symbols import Elf

#: Our names and those of the table, which was read from the DWARF by another program.
NAMES = {
    "rank": "rank",
    "nranks": "nRanks",
    "cuda_dev": "cudaDev",
    "async_result": "asyncResult",
    "comm_hash": "commHash",
    "seq_number": "seqNumber",
    "start_magic": "startMagic",
    "end_magic": "endMagic",
}
VERSIONS = [
    version
    for version in nccl_cache.VERSIONS
    if version in nccl_cache.DEFAULT_VERSIONS or nccl_cache.library(version) is not None
]
NEWEST = nccl_cache.DEFAULT_VERSIONS[-1]
FindNccl = Callable[[str], Path]


def look(path: Path, version: str | None = None) -> Layout:
    fd = os.open(path, os.O_RDONLY)
    try:
        image: Any = scan(fd)
        if image is None:
            image = SimpleNamespace(version=version, build_id=None, machine="x86_64")
        return derive(fd, image)
    finally:
        os.close(fd)


def strip(path: Path, target: Path) -> Path:
    subprocess.run(["strip", "--strip-all", "-o", target, path], check=True)
    return target


@pytest.fixture
def copy(real_nccl: FindNccl, tmp_path: Path) -> Iterator[Path]:
    """A stripped copy of the newest test library, to be damaged."""
    yield strip(real_nccl(NEWEST), tmp_path / "copy.so")


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def accessor(path: Path, field: str) -> tuple[int, bytes]:
    """(file offset, code) of an accessor."""
    fd = os.open(path, os.O_RDONLY)
    try:
        elf = Elf(fd)
        vaddr, size = elf.accessors()[field]
        at = elf.headers.file_offset(vaddr)
        assert at is not None
        return at, elf.code(vaddr, size)
    finally:
        os.close(fd)


@pytest.mark.nccl
@pytest.mark.parametrize("version", VERSIONS)
def test_debug_information_gives_the_known_layout(version: str, real_nccl: FindNccl) -> None:
    began = time.monotonic()
    found = look(real_nccl(version))
    assert time.monotonic() - began < 2
    table = nccl_cache.layouts()[version]
    assert (found.method, found.confidence) == ("dwarf", "confirmed")
    assert {k: found.offsets()[k] for k in NAMES} == {k: table[v] for k, v in NAMES.items()}
    assert found.size == table["sizeof"]
    assert not found.refused
    assert found.seq_counts == (nccl_cache.VERSIONS.index(version) >= 3)


@pytest.mark.nccl
@pytest.mark.parametrize("version", VERSIONS)
def test_code_alone_gives_the_same(version: str, real_nccl: FindNccl, tmp_path: Path) -> None:
    copied = strip(real_nccl(version), tmp_path / "stripped.so")
    began = time.monotonic()
    found = look(copied)
    assert time.monotonic() - began < 2
    table = nccl_cache.layouts()[version]
    assert (found.method, found.confidence) == ("code", "checked")
    assert {k: found.offsets()[k] for k in NAMES} == {k: table[v] for k, v in NAMES.items()}
    assert {r.field for r in found.refused} <= {"comm_hash", "seq_number"}
    if table["endMagic"] is not None:
        assert found.size == table["sizeof"]


def test_simnccl_both_ways(simnccl: Path, tmp_path: Path) -> None:
    full = look(simnccl)
    bare = look(strip(simnccl, tmp_path / "sim.so"))
    assert full.method == "dwarf" and bare.method == "code"
    assert {k: full.offsets()[k] for k in NAMES} == {k: bare.offsets()[k] for k in NAMES}
    assert full.seq_counts and full.searchable


@pytest.mark.parametrize("name", ["libc.so.6", "libstdc++.so.6"])
def test_other_libraries_are_refused(name: str) -> None:
    found = sorted(Path("/usr/lib").glob(f"*/{name}"))
    if not found:
        pytest.skip(f"no {name} here")
    with pytest.raises(LayoutError) as refused:
        look(found[0], "2.28.9")
    assert refused.value.reason is Reason.NO_ACCESSORS


def test_something_else_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"text", b"\x7fELF" + bytes(200), os.urandom(5000)):
        path = tmp_path / "file"
        path.write_bytes(content)
        fd = os.open(path, os.O_RDONLY)
        with pytest.raises(LayoutError) as refused:
            derive(fd, SimpleNamespace(version=None, build_id=None, machine="x86_64"))
        os.close(fd)
        assert refused.value.reason is Reason.DAMAGED


@pytest.mark.nccl
def test_an_accessor_that_reads_another_place_is_refused(
    copy: Path, real_nccl: FindNccl, tmp_path: Path
) -> None:
    table = nccl_cache.layouts()[NEWEST]
    whole = tmp_path / "whole.so"
    shutil.copyfile(real_nccl(NEWEST), whole)
    for path in (copy, whole):
        at, code = accessor(path, "nranks")
        place = code.index(struct.pack("<I", table["nRanks"]))
        patch(path, at + place, struct.pack("<I", table["nRanks"] + 16))
        with pytest.raises(LayoutError) as refused:
            look(path)
        assert refused.value.reason is Reason.DISAGREES


@pytest.mark.nccl
def test_code_that_is_gone_is_refused(copy: Path) -> None:
    at, code = accessor(copy, "rank")
    patch(copy, at, b"\x90" * len(code))
    with pytest.raises(LayoutError) as refused:
        look(copy)
    assert refused.value.reason is Reason.NOT_FOUND


@pytest.mark.nccl
def test_a_short_file_is_refused(copy: Path) -> None:
    os.truncate(copy, copy.stat().st_size // 2)
    with pytest.raises((LayoutError, Exception)) as refused:
        fd = os.open(copy, os.O_RDONLY)
        derive(fd, SimpleNamespace(version=NEWEST, build_id=None, machine="x86_64"))
    assert isinstance(refused.value, LayoutError)


@pytest.mark.nccl
def test_a_second_counter_makes_the_first_unsure(copy: Path) -> None:
    at, code = accessor(copy, "async_result")
    # addq $1, disp32(%rax,%rdx,8), another place: in code that is not the one looked at.
    disp = struct.pack("<I", nccl_cache.layouts()[NEWEST]["seqNumber"] + 800)
    patch(copy, at + len(code) - 9, b"\x48\x83\x84\xd0" + disp + b"\x01")
    found = look(copy)
    assert found.seq_number is None and not found.seq_counts
    assert [r.reason for r in found.refused if r.field == "seq_number"] == [Reason.AMBIGUOUS]


@pytest.mark.nccl
def test_random_damage_never_gives_a_wrong_layout(copy: Path) -> None:
    right = look(copy).offsets()
    at, code = accessor(copy, "cuda_dev")
    base = copy.read_bytes()[at : at + len(code)]
    for step in range(0, len(code), 7):
        patch(copy, at, base[:step] + os.urandom(3) + base[step + 3 :])
        try:
            found = look(copy)
        except LayoutError:
            continue
        assert found.offsets() == right


class TestCache:
    @pytest.fixture(autouse=True)
    def own_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    @pytest.fixture
    def opened(self, simnccl: Path) -> Iterator[tuple[int, Any]]:
        fd = os.open(simnccl, os.O_RDONLY)
        yield fd, scan(fd)
        os.close(fd)

    def kept(self) -> Path:
        folder = cache.folder()
        assert folder is not None
        (found,) = folder.glob("*.json")
        return found

    def test_the_second_time_it_is_taken_from_there(
        self, opened: tuple[int, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = find(*opened)
        assert self.kept().stat().st_mode & 0o077 == 0
        monkeypatch.setattr(layouts, "derive", None)
        assert find(*opened) == first

    @pytest.mark.parametrize(
        "content", ["", "{", "[]", '{"schema": 2}', '{"schema": 1, "layout": {"offsets": 3}}']
    )
    def test_damage_means_no_cache(self, opened: tuple[int, Any], content: str) -> None:
        first = find(*opened)
        self.kept().write_text(content)
        assert find(*opened) == first

    def test_what_others_may_write_is_not_believed(self, opened: tuple[int, Any]) -> None:
        first = find(*opened)
        path = self.kept()
        wrong = path.read_text().replace(f'"seq_number": {first.seq_number}', '"seq_number": 8')
        path.write_text(wrong)
        path.chmod(0o666)
        assert find(*opened) == first

    def test_a_link_is_not_followed(self, opened: tuple[int, Any], tmp_path: Path) -> None:
        first = find(*opened)
        path = self.kept()
        elsewhere = tmp_path / "elsewhere"
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
        assert find(*opened) == first
        assert not path.is_symlink()

    def test_it_must_fit_the_library_at_hand(self, opened: tuple[int, Any]) -> None:
        first = find(*opened)
        path = self.kept()
        path.write_text(path.read_text().replace(str(first.rank), str(first.rank + 8)))
        assert find(*opened) == first

    def test_without_a_folder_it_works(
        self, opened: tuple[int, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/1/nothing")
        assert find(*opened).method == "dwarf"
