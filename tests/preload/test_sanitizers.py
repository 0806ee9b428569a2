"""The library under the sanitizers of the compiler: memory, undefined behaviour, races.

It is compiled into a program with its dlsym left out, as the sanitizers look
functions up before anything else runs.  No forks under ThreadSanitizer, which
takes the threads that a child does not have for racing ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import clean_env

from preload import soak
from preload.conftest import Rings

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "native"))


def compile_driver(out: Path, fake: Path, *flags: str) -> Path:
    from build import HERE, TARGETS  # type: ignore[import-not-found]

    target = TARGETS["libnccluprobe_preload.so"]
    sources = [str(HERE / s) for s in target.sources]
    command = [
        "gcc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-fno-omit-frame-pointer",
        *target.cflags, "-fPIE", "-rdynamic", "-DNCP_NO_DLSYM", *flags, f"-I{HERE / 'include'}",
        "-o", str(out), str(Path(__file__).with_name("driver.c")), *sources,
        str(fake), f"-Wl,-rpath,{fake.parent}", "-lpthread", "-ldl",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["address,undefined", "thread"])
def test_no_report(kinds: str, fake: Path, rings: Rings, tmp_path: Path) -> None:
    program = compile_driver(
        tmp_path / "driver", fake, f"-fsanitize={kinds}", "-fno-sanitize-recover=all"
    )
    env = {**clean_env(), "NCCLUPROBE_PRELOAD_DIR": str(rings.folder)}
    env["ASAN_OPTIONS"] = "detect_leaks=1:detect_stack_use_after_return=1"
    runs = [["6", "20000"], *([["4", "3000", "fork"]] if kinds != "thread" else [])]
    for arguments in runs:
        done = subprocess.run(
            [program, *arguments], env=env, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0 and done.stderr == "", done.stderr[:4000]
        made = int(done.stdout)
        if len(arguments) == 2:
            found = rings.records(keep=False)
            counted = sum(r.kind == 1 for r in found)
            gone = sum(rings.losses.overwritten.values()) + sum(rings.losses.by_process.values())
            assert made - counted - gone <= 0 and counted  # NEW_COMM and names are records too


def test_soak_in_short(library: Path, fake: Path, tmp_path: Path) -> None:
    """Two million calls, readers that come and go: every record is read once or counted once."""
    result = soak.run(library, fake, tmp_path, calls=2_000_000, threads=4)
    assert result.errors == [] and result.readers >= 3
    assert result.read + result.overwritten == result.published == result.called
    assert os.listdir(tmp_path / "rings") == []  # noqa: PTH208
