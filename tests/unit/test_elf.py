"""Copies of NCCL in ELF files: found, told apart, and no file breaks the reader."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import fake_nccl

from nccluprobe.capture.elf import ElfError, NcclImage, hash_form, scan
from nccluprobe.capture.insn import classify, probe_shift


def scan_path(path: Path) -> NcclImage | None:
    fd = os.open(path, os.O_RDONLY)
    try:
        return scan(fd)
    finally:
        os.close(fd)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_nccl.build(tmp_path_factory.mktemp("elf") / "libnccl.so.2", None, "-Wl,-soname,it")


def nm(path: Path, *flags: str) -> dict[str, int]:
    out = subprocess.run(["nm", *flags, path], capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in out.splitlines())
    return {row[2]: int(row[0], 16) for row in rows if len(row) == 3}


def test_functions_version_and_names(fake: Path) -> None:
    image = scan_path(fake)
    assert image is not None
    assert set(image.functions) == set(fake_nccl.NAMES)
    assert image.version == "2.28.9"
    assert image.soname == "it"
    assert image.table == ".dynsym"
    assert image.hash_form == 3
    note = subprocess.run(["readelf", "-n", fake], capture_output=True, text=True, check=True)
    assert image.build_id is not None
    assert f"Build ID: {image.build_id}" in note.stdout
    symbols = nm(fake, "-D")
    assert {f.name: f.vaddr for f in image.functions.values()} == {
        name: symbols[name] for name in fake_nccl.NAMES
    }


def test_offsets_lie_where_the_code_is(fake: Path) -> None:
    image = scan_path(fake)
    assert image is not None
    text = subprocess.run(
        ["readelf", "-SW", fake], capture_output=True, text=True, check=True
    ).stdout
    row = next(line for line in text.splitlines() if " .text " in line).split("]")[1].split()
    address, offset = int(row[2], 16), int(row[3], 16)
    for function in image.functions.values():
        assert function.entry == function.vaddr - address + offset


def test_probe_goes_behind_endbr64(tmp_path: Path) -> None:
    fake = fake_nccl.build(tmp_path / "lib.so", None, "-fcf-protection=branch")
    image = scan_path(fake)
    assert image is not None
    for function in image.functions.values():
        assert function.insn == "endbr64"
        assert function.offset == function.entry + 4
        assert function.cost == "emulated"


@pytest.mark.parametrize(
    ("code", "insn", "cost", "shift"),
    [
        ("55 4889e5", "push", "emulated", 0),
        ("4157 4156", "push", "emulated", 0),
        ("90", "nop", "emulated", 0),
        ("0f1f440000", "nop", "emulated", 0),
        ("660f1f440000", "nop", "emulated", 0),
        ("f30f1efa 55", "endbr64", "single-step", 4),
        ("f30f1efa 4155", "endbr64", "single-step", 4),
        ("f30f1efa 4883ec08", "endbr64", "single-step", 0),
        ("f30f1efa", "endbr64", "single-step", 0),
        ("4883ec08", "other", "single-step", 0),
        ("4885ff", "other", "single-step", 0),
        ("e900000000", "other", "emulated", 0),
        ("", "other", "unknown", 0),
        ("41", "other", "single-step", 0),
    ],
)
def test_first_instruction(code: str, insn: str, cost: str, shift: int) -> None:
    raw = bytes.fromhex(code)
    assert classify(raw, "x86_64") == (insn, cost)
    assert probe_shift(raw, "x86_64") == shift
    assert classify(raw, "aarch64") == ("other", "unknown")
    assert probe_shift(raw, "aarch64") == 0


def test_copy_linked_statically_into_another_library(tmp_path: Path) -> None:
    hidden = fake_nccl.build(tmp_path / "libtorch_cuda.so", fake_nccl.source(hidden=True))
    assert "ncclAllReduce" not in nm(hidden, "-D")
    image = scan_path(hidden)
    assert image is not None
    assert image.table == ".symtab"
    assert set(image.functions) == set(fake_nccl.NAMES)
    subprocess.run(["strip", "--strip-all", hidden], check=True)
    assert scan_path(hidden) is None


@pytest.mark.parametrize("style", ["gnu", "sysv", "both"])
def test_any_hash_style(tmp_path: Path, style: str) -> None:
    fake = fake_nccl.build(tmp_path / "lib.so", None, f"-Wl,--hash-style={style}")
    subprocess.run(["strip", "--strip-all", fake], check=True)
    image = scan_path(fake)
    assert image is not None
    assert set(image.functions) == set(fake_nccl.NAMES)


def test_a_user_of_nccl_is_no_copy(tmp_path: Path) -> None:
    text = "int ncclAllReduce(void); int ncclGroupEnd(void); int ncclGetVersion(void);\n"
    text += "int ncclCommInitRank(void); int f(void) { return ncclAllReduce() + ncclGroupEnd()"
    text += " + ncclGetVersion() + ncclCommInitRank(); }\n"
    assert scan_path(fake_nccl.build(tmp_path / "user.so", text)) is None


def test_some_of_the_names_are_not_enough(tmp_path: Path) -> None:
    text = "int ncclAllReduce(void) { return 1; }\n"
    assert scan_path(fake_nccl.build(tmp_path / "part.so", text)) is None


def test_functions_at_one_address_are_kept_once(tmp_path: Path) -> None:
    text = fake_nccl.source() + '\nint ncclSend(void) __attribute__((alias("pncclAllReduce")));'
    image = scan_path(fake_nccl.build(tmp_path / "lib.so", text))
    assert image is not None
    assert image.folded == ("ncclSend",)
    assert "ncclSend" not in image.functions


def test_no_version_text(tmp_path: Path) -> None:
    image = scan_path(fake_nccl.build(tmp_path / "lib.so", fake_nccl.source(version=None)))
    assert image is not None
    assert image.version is None


def test_hash_form() -> None:
    forms = {"2.16.2": 1, "2.17.1": 1, "2.18.1": 2, "2.25.1": 2, "2.26.2": 3, "2.32.3": 3}
    assert {v: hash_form(v) for v in forms} == forms
    assert hash_form(None) == 3
    assert hash_form("new") == 3
    assert hash_form("3.0.0") == 3


def test_other_files_are_refused(tmp_path: Path) -> None:
    plain = tmp_path / "text"
    plain.write_text("\x7fELF")
    for path in (plain, Path(__file__), Path("/dev/null"), tmp_path):
        with pytest.raises(ElfError):
            scan_path(path)


@pytest.mark.parametrize("hidden", [False, True])
def test_damaged_files_never_crash(tmp_path: Path, hidden: bool) -> None:
    """Any bytes: an answer or ElfError, and soon."""
    good = fake_nccl.build(tmp_path / "lib.so", fake_nccl.source(hidden=hidden)).read_bytes()
    sections = int.from_bytes(good[40:48], "little")
    rng = random.Random(7)
    target = tmp_path / "bad.so"
    for turn in range(400):
        bad = bytearray(good)
        for _ in range(rng.choice((1, 3, 30))):
            # mostly where it matters: the header, program headers, section headers, hash
            start = rng.choice((16, 64, 0x1C8, sections))
            at = min(start + rng.randrange(600), len(bad) - 8)
            value = rng.choice((0, 1, 0xFF, 0x7F, rng.randrange(256)))
            bad[at : at + rng.choice((1, 4, 8))] = bytes([value]) * rng.choice((1, 4, 8))
        if turn % 5 == 0:
            del bad[rng.randrange(len(bad)) :]
        target.write_bytes(bad)
        began = time.monotonic()
        with contextlib.suppress(ElfError):
            scan_path(target)
        assert time.monotonic() - began < 1.0


def test_a_file_that_shrinks_meanwhile(tmp_path: Path) -> None:
    path = fake_nccl.build(tmp_path / "lib.so")
    fd = os.open(path, os.O_RDWR)
    try:
        assert scan(fd) is not None
        os.truncate(fd, 5000)
        with pytest.raises(ElfError):
            scan(fd)
    finally:
        os.close(fd)


def test_large_libraries_that_are_not_nccl_are_quick() -> None:
    paths = sorted(
        (p for p in Path("/usr/lib").glob("*-linux-gnu/*.so*") if p.is_file()),
        key=lambda p: -p.stat().st_size,
    )[:10]
    for path in paths:
        times = []
        for _ in range(3):
            began = time.perf_counter()
            assert scan_path(path) is None
            times.append(time.perf_counter() - began)
        assert min(times) < 0.05, path


@pytest.mark.nccl
@pytest.mark.parametrize("version", ["2.21.5", "2.28.9"])
def test_real_nccl(real_nccl: Callable[[str], Path], version: str) -> None:
    path = real_nccl(version)
    image = scan_path(path)
    assert image is not None
    assert image.version == version
    assert image.soname == "libnccl.so.2"
    assert image.functions["ncclAllReduce"].insn == "push"
    symbols = nm(path, "-D", "--defined-only")
    assert {n: f.vaddr for n, f in image.functions.items()} == {
        n: symbols[n] for n in image.functions
    }
    assert len(image.functions) == {"2.21.5": 24, "2.28.9": 35}[version]
    began = time.perf_counter()
    scan_path(path)
    assert time.perf_counter() - began < 0.1
