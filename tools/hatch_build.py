"""Hatchling's build hook: the BPF source and the compiled native parts go into the wheel.

``ebpf/`` becomes ``nccluprobe/_ebpf/``.  The native parts are built by
native/build.py into a temporary folder and land in ``nccluprobe/_native/``; an
editable installation uses the checkout's own.  Without a C compiler the wheel is made all the same,
without them and with a warning: tracing needs only the BPF source, which BCC
compiles at run time.  A wheel with native parts is tagged for its platform but
for no Python version, as they are plain C and not extension modules.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def find_compiler() -> str | None:
    """The C compiler that native/build.py would use."""
    for name in (os.environ.get("CC", "").split(" ")[0], "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return name
    return None


class NativeBuildHook(BuildHookInterface):  # type: ignore[misc, type-arg, unused-ignore]
    """Adds what lies outside the package to a wheel; leaves a source distribution alone."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._temporary: str | None = None
        if self.target_name != "wheel" or version == "editable":
            return
        build_data["force_include"][str(Path(self.root) / "ebpf")] = "nccluprobe/_ebpf"
        # For ``nccluprobe build``, in the places that the includes expect.
        for part in ("native", "ebpf/include"):
            source = str(Path(self.root) / part)
            build_data["force_include"][source] = f"nccluprobe/_source/{part}"
        built = self._compile()
        for path in built:
            build_data["force_include"][str(path)] = f"nccluprobe/_native/{path.name}"
        if built:
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _compile(self) -> list[Path]:
        script = Path(self.root) / "native" / "build.py"
        if not script.is_file():
            self._warn("native/build.py is missing")
            return []
        if find_compiler() is None:
            self._warn("no C compiler was found (cc, gcc, clang)")
            return []
        self._temporary = tempfile.mkdtemp(prefix="nccluprobe-native-")
        done = subprocess.run(
            [sys.executable, str(script), "--out", self._temporary],
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            # For instance a compiler without the C library's headers.
            print(done.stdout, done.stderr, sep="", file=sys.stderr)
            self._warn("native/build.py failed, see above")
            return []
        return sorted(p for p in Path(self._temporary).iterdir() if p.is_file())

    def _warn(self, why: str) -> None:
        self.app.display_warning(
            f"nccluprobe: built without the native parts (CPU stand-in for NCCL, load "
            f"generator): {why}. Tracing works; the demo and the benchmarks need them."
        )
