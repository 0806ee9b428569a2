"""``nccluprobe build``: compile the native parts in place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from nccluprobe import resources
from nccluprobe.errors import ExitCode, NccluprobeError


def build(
    cc: Annotated[
        str | None, typer.Option("--cc", help="C compiler. Default: $CC, else cc.")
    ] = None,
) -> None:
    """Compile the preload library and the other native parts anew, in place."""
    root = resources.checkout()
    source = (root or resources.PACKAGE / "_source") / "native" / "build.py"
    out = root / "build" / "native" if root is not None else resources.PACKAGE / "_native"
    if not source.is_file():
        raise NccluprobeError(
            "the sources of the native parts are not here: install nccluprobe from a "
            "checkout, with a C compiler",
            ExitCode.INTERNAL,
        )
    made = next(p for p in (out, *out.parents) if p.exists())
    if not os.access(made, os.W_OK | os.X_OK, effective_ids=True):
        raise NccluprobeError(
            f"{made} cannot be written to: build as the user who installed it", ExitCode.OUTPUT
        )
    command = [sys.executable, str(source), "--out", str(out), *(["--cc", cc] if cc else [])]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no message"]
        print(done.stderr, end="", file=sys.stderr)
        raise NccluprobeError(f"the compiler failed: {lines[-1]}", ExitCode.INTERNAL)
    for line in done.stdout.splitlines():
        print(Path(line))
