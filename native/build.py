"""Compiles the native parts: no dependency beyond a C compiler.

    python native/build.py --out DIR [--strict] [--sanitize address,undefined|thread]
                           [--sim-version 2.21.5]

As a module: build(out_dir) -> {target name: path}.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
WARNINGS = ("-std=c11", "-Wall", "-Wextra")
COMMON = ("-g", "-O2", "-fno-omit-frame-pointer")


@dataclass(frozen=True)
class Target:
    """One file to build. `sources` and `includes` are relative to native/."""

    sources: tuple[str, ...]
    includes: tuple[str, ...] = ("include",)
    cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    libs: tuple[str, ...] = ()
    versioned: bool = False  # takes --sim-version


def _entry_flags() -> tuple[str, ...]:
    """Every exported function begins as the real ones do: the frame pointer is pushed first."""
    flags = (
        "-fno-shrink-wrap",
        "-fno-ipa-icf",
        "-fno-partial-inlining",
        "-fno-optimize-sibling-calls",
    )
    if platform.machine() in ("x86_64", "AMD64"):
        return (*flags, "-mno-omit-leaf-frame-pointer", "-fcf-protection=none")
    return flags


TARGETS: dict[str, Target] = {
    "libsimnccl.so": Target(
        sources=tuple(
            f"simnccl/{n}.c"
            for n in ("shm", "device", "data", "job", "group", "comm", "coll", "p2p", "misc")
        ),
        cflags=("-fPIC", "-fvisibility=hidden", *_entry_flags()),
        ldflags=("-shared", "-Wl,-soname,libnccl.so.2", "-Wl,-z,nodelete"),
        libs=("-lpthread", "-lrt", "-lm"),
        versioned=True,
    ),
    "libsimcuda.so": Target(
        sources=tuple(f"simcuda/{n}.c" for n in ("device", "memory", "stream", "kernel")),
        cflags=("-fPIC", "-fvisibility=hidden"),
        ldflags=("-shared", "-Wl,-soname,libcuda.so.1", "-Wl,-z,nodelete"),
        libs=("-ldl", "-lpthread"),
    ),
    "libnccluprobe_preload.so": Target(
        sources=tuple(
            f"preload/{n}.c"
            for n in (
                "sys",
                "start",
                "file",
                "elf",
                "real",
                "dlsym",
                "comm",
                "life",
                "live",
                "wrappers",
            )
        ),
        cflags=("-D_GNU_SOURCE", "-fPIC", "-fvisibility=hidden", "-fcf-protection=none")
        if platform.machine() in ("x86_64", "AMD64")
        else ("-D_GNU_SOURCE", "-fPIC", "-fvisibility=hidden"),
        # dlsym and its like are looked up by hand, but must be there: before glibc
        # 2.34 in libdl, which newer ones still have as an empty file.
        ldflags=("-shared", "-Wl,-z,now", "-Wl,-z,nodelete", "-Wl,--no-as-needed"),
        libs=("-l:libdl.so.2",),
    ),
    "libnccluprobe_lines.so": Target(
        sources=("lines/scan.c", "lines/tables.c"),
        # The analyzer's hot path: its loops are worth unrolling.
        cflags=("-fPIC", "-fvisibility=hidden", "-O3"),
        ldflags=("-shared",),
    ),
    "libnccluprobe_dumps.so": Target(
        sources=tuple(f"dumps/{n}.c" for n in ("dumps", "pickle", "columns", "rest")),
        cflags=("-fPIC", "-fvisibility=hidden", "-O3"),
        ldflags=("-shared",),
    ),
    "nccl_load": Target(sources=("load/nccl_load.c",), libs=("-ldl", "-lpthread")),
}


def version_flags(version: str) -> tuple[str, ...]:
    """-D flags for a stand-in that claims this NCCL version."""
    major, minor, patch = (int(part) for part in version.split("."))
    # NCCL_VERSION_CODE: X*1000+Y*100+Z up to 2.8, X*10000+Y*100+Z since.
    code = (
        major * 1000 + minor * 100 + patch
        if (major, minor) <= (2, 8)
        else (major * 10000 + minor * 100 + patch)
    )
    return (f'-DSIM_VERSION="{version}"', f"-DSIM_VERSION_CODE={code}")


def build(
    out_dir: str | os.PathLike[str],
    targets: list[str] | None = None,
    cc: str | None = None,
    extra_cflags: tuple[str, ...] = (),
    sim_version: str | None = None,
    strict: bool = False,
) -> dict[str, Path]:
    """Compile `targets` (default: all) into `out_dir`; raises CalledProcessError.

    `strict` makes warnings errors. Only our own checks ask for it: another
    compiler's new warning must not keep a user from building.
    """
    compiler = shlex.split(cc or os.environ.get("CC") or "cc")
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    built: dict[str, Path] = {}
    for name in targets or list(TARGETS):
        target = TARGETS[name]
        final = out / name
        partial = out / f".{name}.{os.getpid()}"
        command = [*compiler, *WARNINGS, *COMMON, *target.cflags]
        if strict:
            command.append("-Werror")
        if target.versioned and sim_version:
            command += version_flags(sim_version)
        command += [f"-I{HERE / inc}" for inc in target.includes]
        command += [*extra_cflags, "-o", str(partial), *target.ldflags]
        command += [str(HERE / source) for source in target.sources]
        command += target.libs
        try:
            subprocess.run(command, check=True)
            partial.replace(final)  # whole or not at all: others may be using the old one
        finally:
            partial.unlink(missing_ok=True)
        built[name] = final
    return built


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build nccluprobe's native parts.")
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="default: all")
    parser.add_argument("--cc", help="compiler; default $CC or cc")
    parser.add_argument("--sanitize", help="address,undefined or thread")
    parser.add_argument("--strict", action="store_true", help="warnings are errors")
    parser.add_argument("--sim-version", help="NCCL version that the stand-in claims")
    args = parser.parse_args(argv)
    extra = (f"-fsanitize={args.sanitize}",) if args.sanitize else ()
    try:
        built = build(args.out, args.target, args.cc, extra, args.sim_version, args.strict)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        print(f"build.py: {error}", file=sys.stderr)
        return 1
    for path in built.values():
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
