"""What the cost of a call is measured on: a stub, the stand-in, NVIDIA's own library."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support import nccl_cache

from nccluprobe import resources

HERE = Path(__file__).resolve().parent
ENTRY_FLAGS = ("-fno-omit-frame-pointer", "-mno-omit-leaf-frame-pointer", "-fcf-protection=none")


@dataclass
class Target:
    """A library to call, and the communicator to pass."""

    name: str
    path: Path
    comm: str


def compile_parts(folder: Path) -> tuple[Path, Path]:
    """The calling program and the stub library."""
    cc = os.environ.get("CC", "cc")
    common = [cc, "-std=c11", "-Wall", "-Wextra", "-Werror", "-O2"]
    caller, stub = folder / "caller", folder / "libstub.so"
    flags = ENTRY_FLAGS if platform.machine() == "x86_64" else ENTRY_FLAGS[:1]
    commands = (
        [*common, "-o", str(caller), str(HERE / "_caller.c"), "-ldl", "-lpthread"],
        [
            *common, *flags, "-fno-shrink-wrap", "-fPIC", "-shared", "-Wl,-soname,libnccl.so.2",
            "-o", str(stub), str(HERE / "_stub.c"),
        ],
    )  # fmt: skip
    for command in commands:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return caller, stub


def private_copy(library: Path, folder: Path) -> Path:
    """A file of our own: another tracer's probes on the original would count as ours."""
    copy = folder / f"{library.parent.name}-{library.name}"
    subprocess.run(["cp", "--sparse=always", str(library), str(copy)], check=True)
    return copy


def targets(stub: Path, nvidia: Path | None) -> list[Target]:
    folder = stub.parent
    simnccl = resources.native_file(resources.SIMNCCL, build=True)
    found = [
        Target("stub", stub, "memory"),
        Target("simnccl", private_copy(simnccl, folder), "init"),
    ]
    if nvidia is None:
        fetched = [nccl_cache.library(version) for version in nccl_cache.VERSIONS]
        # 2.28.9 is what current PyTorch has; any other serves as well.
        nvidia = nccl_cache.library("2.28.9") or next((p for p in fetched if p), None)
    if nvidia is not None:
        name = f"NVIDIA {nvidia.parent.name}"
        found.append(Target(name, private_copy(nvidia, folder), "null"))
    else:
        print("no libnccl of NVIDIA's: tools/nccl-matrix fetch, or --lib", file=sys.stderr)
    return found
