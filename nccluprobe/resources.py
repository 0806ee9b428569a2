"""Where the files beside the Python code are: BPF source, native parts, schemas.

Installed, all of them lie inside the package (``_ebpf``, ``_native``; the wheel
is made so by tools/hatch_build.py).  In a checkout the BPF source is
``ebpf/`` and the native parts are built by ``native/build.py`` into
``build/native`` when a test or a tool first asks for them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nccluprobe.errors import ExitCode, NccluprobeError

PACKAGE = Path(__file__).resolve().parent

#: The stand-ins for NCCL and the CUDA driver, and the load generator, by file name.
SIMNCCL = "libsimnccl.so"
SIMCUDA = "libsimcuda.so"
NCCL_LOAD = "nccl_load"
#: The native reader of call lines.
LINES = "libnccluprobe_lines.so"
#: The native reader of flight recorder dumps.
DUMPS = "libnccluprobe_dumps.so"


def checkout() -> Path | None:
    """The source tree that this package runs from, None when installed."""
    root = PACKAGE.parent
    if (root / "pyproject.toml").is_file() and (root / "ebpf").is_dir():
        return root
    return None


def ebpf_dir() -> Path:
    """The folder of the BPF program and its headers."""
    installed = PACKAGE / "_ebpf"
    if installed.is_dir():
        return installed
    root = checkout()
    if root is not None:
        return root / "ebpf"
    raise NccluprobeError(
        f"the BPF source is missing: {installed} does not exist; install nccluprobe again",
        ExitCode.INTERNAL,
    )


def native_dir(*, build: bool = False) -> Path | None:
    """The folder of the native parts; None when they are not there.

    ``build``: in a checkout, compile what is missing or older than its source.
    Only tests and tools ask for that; a command never runs a compiler.
    """
    root = checkout()
    if root is None:
        installed = PACKAGE / "_native"
        return installed if installed.is_dir() else None
    built = root / "build" / "native"
    if build:
        _run_build(root, built)
    return built if built.is_dir() else None


def native_file(name: str, *, build: bool = False) -> Path:
    """One native part by its file name; NccluprobeError when it is not there."""
    folder = native_dir(build=build)
    if folder is not None and (folder / name).is_file():
        return folder / name
    raise NccluprobeError(
        f"{name} is not here: this installation was made without a C compiler; "
        "install gcc, then nccluprobe again",
        ExitCode.INTERNAL,
    )


def _up_to_date(root: Path, out: Path) -> bool:
    built = [out / SIMNCCL, out / SIMCUDA, out / NCCL_LOAD, out / LINES, out / DUMPS]
    if not all(path.is_file() for path in built):
        return False
    oldest = min(path.stat().st_mtime for path in built)
    # The preload library shares headers with the BPF program.
    sources = (*(root / "native").rglob("*.[chy]*"), *(root / "ebpf").rglob("*.h"))
    return all(path.stat().st_mtime <= oldest for path in sources)


def _run_build(root: Path, out: Path) -> None:
    if _up_to_date(root, out):
        return
    script = root / "native" / "build.py"
    done = subprocess.run(
        [sys.executable, str(script), "--out", str(out)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise NccluprobeError(
            f"building the native parts failed: {done.stderr.strip() or done.stdout.strip()}",
            ExitCode.INTERNAL,
        )
