"""The wheel: what is in it, and that it runs outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

#: Left out of the copy that is built: not part of the sources.
NOT_SOURCES = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "__pycache__", "*.egg-info", ".*_cache", "_native"
)


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done


def build_wheel(source: Path, out: Path, **env: str) -> tuple[Path, str]:
    """The wheel of a source tree, and what hatchling said."""
    done = run(
        sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out, cwd=source, **env
    )
    (wheel,) = out.glob("*.whl")
    return wheel, done.stdout + done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout as a clone would have it."""
    pytest.importorskip("hatchling")
    copy = tmp_path_factory.mktemp("source") / "nccluprobe"
    shutil.copytree(REPO, copy, ignore=NOT_SOURCES, symlinks=True)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))[0]


@pytest.mark.slow
def test_the_wheel_holds_all_that_runs(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    ebpf = REPO / "ebpf"
    checkout = {str(p.relative_to(ebpf)) for p in ebpf.rglob("*") if p.is_file()}
    assert "nccluprobe.bpf.c" in checkout
    packed = {n.removeprefix("nccluprobe/_ebpf/") for n in names if "/_ebpf/" in n}
    assert packed == checkout
    for name in (
        "nccluprobe/trace/trace.schema.json",
        "nccluprobe/match/finding.schema.json",
        "nccluprobe/_native/libsimcuda.so",
        "nccluprobe/_native/libnccluprobe_dumps.so",
        "nccluprobe/_native/libnccluprobe_lines.so",
        "nccluprobe/_native/libsimnccl.so",
        "nccluprobe/_native/nccl_load",
        "nccluprobe/cli/main.py",
    ):
        assert name in names, name
    modules = {str(p.relative_to(REPO)) for p in (REPO / "nccluprobe").rglob("*.py")}
    assert modules <= names
    assert not [n for n in names if n.startswith(("tests/", "tools/")) or "__pycache__" in n]


@pytest.mark.slow
def test_the_wheel_is_for_this_platform_and_any_python(wheel: Path) -> None:
    assert wheel.name.split("-", 2)[2].startswith("py3-none-linux_")


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_made_without_native_parts(
    source: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    wheel, said = build_wheel(source, tmp_path / "wheel", PATH=str(empty), CC="")
    assert "without the native parts" in said
    assert not [n for n in zipfile.ZipFile(wheel).namelist() if "/_native/" in n]
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.slow
def test_the_installed_command_runs_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    # The distribution's Python, as README says: it sees the distribution's bcc.
    run("/usr/bin/python3", "-m", "venv", "--system-site-packages", venv, cwd=tmp_path)
    run(
        venv / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "10",
        wheel, cwd=elsewhere,
    )  # fmt: skip
    from nccluprobe import __version__

    shown = run(venv / "bin/nccluprobe", "--version", cwd=elsewhere)
    assert __version__ in shown.stdout
    where = run(
        venv / "bin/python",
        "-c",
        "from nccluprobe import resources as r; print(r.ebpf_dir(), r.native_file('nccl_load'))",
        cwd=elsewhere,
    )
    ebpf, load = where.stdout.split()
    assert str(REPO) not in where.stdout
    assert list(Path(ebpf).rglob("*.c"))
    assert os.access(load, os.X_OK)
