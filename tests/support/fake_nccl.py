"""Libraries that define NCCL's names and do nothing, built from a few lines of C."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from nccluprobe.nccl.api import SIGNATURE_SYMBOLS

NAMES = ("ncclAllReduce", "ncclBroadcast", "ncclCommInitRank", "ncclGroupStart", "ncclGroupEnd")


def source(
    names: Iterable[str] = NAMES,
    version: str | None = "2.28.9",
    aliases: bool = True,
    hidden: bool = False,
) -> str:
    """C text; each function differs from the others, so that none are folded."""
    lines = []
    if version:
        lines.append(
            f'__attribute__((used)) static const char banner[] = "NCCL version {version}+test";'
        )
    visibility = '__attribute__((visibility("hidden"))) ' if hidden else ""
    for number, name in enumerate(sorted({*names, *SIGNATURE_SYMBOLS})):
        body = f"{{ volatile int x = {number}; return x; }}"
        if aliases:
            lines.append(f"{visibility}int p{name}(void) {body}")
            lines.append(f'{visibility}int {name}(void) __attribute__((weak, alias("p{name}")));')
        else:
            lines.append(f"{visibility}int {name}(void) {body}")
    lines.append("int other(void) { return 7; }")
    return "\n".join(lines)


def build(path: Path, text: str | None = None, *flags: str) -> Path:
    """Compile to a shared library at ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-O1", "-fno-omit-frame-pointer", "-Wl,--build-id"]
    subprocess.run(
        [*command, *flags, "-x", "c", "-", "-o", str(path)],
        input=source() if text is None else text,
        text=True,
        check=True,
        timeout=60,
    )
    return path
