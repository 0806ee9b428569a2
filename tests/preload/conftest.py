"""Fixtures: the library, a made-to-order NCCL, C programs, and what they recorded."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from bpf import fakelib
from support.waiting import clean_env

from nccluprobe.capture.preload_env import LIBRARY, variables
from nccluprobe.capture.preload_source import PreloadSource
from nccluprobe.record import STRUCT, Record


@pytest.fixture(scope="session")
def library(native_dir: Path) -> Path:
    """The preload library."""
    return native_dir / LIBRARY


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with all functions, which do nothing."""
    path = tmp_path_factory.mktemp("fake") / "libnccl.so.2"
    path.write_bytes(b"")
    path.unlink()
    return fakelib.build(path)


Compile = Callable[..., Path]


@pytest.fixture
def compile_c(tmp_path: Path) -> Compile:
    """Compiles C text to a program, or with ``shared`` to a library."""

    def compile_it(
        text: str, *flags: str | Path, name: str = "program", shared: bool = False
    ) -> Path:
        out = tmp_path / name
        command = ["gcc", "-x", "c", "-", "-D_GNU_SOURCE", "-O1", "-g", "-o", out]
        command += ["-shared", "-fPIC"] if shared else []
        subprocess.run(
            [*map(str, command), "-x", "none", *map(str, flags), "-ldl", "-lpthread"],
            input=text, text=True, check=True,
        )  # fmt: skip
        return out

    return compile_it


class Rings:
    """A folder of rings, and programs that write them."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        self.library = library

    def environ(
        self, extra: Mapping[str, str] | None = None, ring_kb: int = 1024
    ) -> dict[str, str]:
        base = clean_env()
        return {**base, **variables(self.library, self.folder, ring_kb, base), **(extra or {})}

    def run(
        self, *command: str | Path, rc: int = 0, ring_kb: int = 1024, env: Mapping[str, str] = {}
    ) -> subprocess.CompletedProcess[str]:
        """A program under the library, to its end."""
        done = subprocess.run(
            [*map(str, command)], env=self.environ(env, ring_kb), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == rc, (done.returncode, done.stdout, done.stderr)
        return done

    def popen(self, *command: str | Path, ring_kb: int = 1024) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*map(str, command)], env=self.environ(ring_kb=ring_kb), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.ring"))

    def records(self, *, keep: bool = True) -> list[Record]:
        """All that the rings hold."""
        source = PreloadSource(self.folder, keep=keep)
        found = [Record(*row) for chunk in source.drain() for row in STRUCT.iter_unpack(chunk)]
        self.losses = source.losses()
        self.libraries = {r.lib: source.library(r.lib) for r in found}
        source.close()
        return found


@pytest.fixture
def rings(tmp_path: Path, library: Path) -> Rings:
    return Rings(tmp_path / "rings", library)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
