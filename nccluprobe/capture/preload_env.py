"""What a program is started with to be under the preload library."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from nccluprobe import resources
from nccluprobe.errors import ExitCode, NccluprobeError

LIBRARY = "libnccluprobe_preload.so"
DIR, RING_KB, SWITCH = (
    "NCCLUPROBE_PRELOAD_DIR",
    "NCCLUPROBE_PRELOAD_RING_KB",
    "NCCLUPROBE_PRELOAD",
)
SHM = Path("/dev/shm")
_MAX_INTERPRETERS = 4
_RUN = "run-"


def default_folder() -> Path:
    """Where the library puts its files when it is not told."""
    return SHM / f"nccluprobe-{os.getuid()}"


def private_folder() -> Path:
    """A new folder for one run: in shared memory, or else in the temporary folder."""
    base = default_folder()
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        if base.is_symlink() or base.stat().st_uid != os.getuid():
            raise OSError(f"{base} is not ours")
        return Path(tempfile.mkdtemp(prefix=_RUN, dir=base))
    except OSError:
        return Path(tempfile.mkdtemp(prefix="nccluprobe-"))


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A new folder for one run, held while it goes and removed when nothing is left in it."""
    folder = private_folder()
    hold(folder)
    try:
        yield folder
    finally:
        tidy(folder)


def hold(folder: Path) -> int | None:
    """Say that a run's folder is being read, as long as this process lives; None: another does.

    The file descriptor goes with the process, however that ends.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:  # a file system without locks
        pass
    return fd


def private_folders() -> list[Path]:
    """This user's folders of single runs, that of a killed ``preload`` among them."""
    try:
        return sorted(p for p in default_folder().glob(f"{_RUN}*") if p.is_dir())
    except OSError:
        return []


def tidy(folder: Path) -> None:
    """Remove a run's folder, unless a process's file is left in it."""
    with contextlib.suppress(OSError):
        if not any(folder.glob("*.ring")):
            for note in folder.glob("*.layout"):
                note.unlink()
            folder.rmdir()


def library(*, build: bool = False) -> Path:
    """The library to preload."""
    try:
        path = resources.native_file(LIBRARY, build=build)
    except NccluprobeError as error:
        raise NccluprobeError(
            f"{LIBRARY} is not built: run `nccluprobe build` (it needs a C compiler)", error.code
        ) from error
    if any(c in " :" for c in str(path)):
        raise NccluprobeError(
            f"{path}: LD_PRELOAD takes no path with a space or a colon; "
            "install nccluprobe somewhere else",
            ExitCode.USAGE,
        )
    return path


def variables(path: Path, folder: Path, ring_kb: int, base: Mapping[str, str]) -> dict[str, str]:
    """The variables to set; what LD_PRELOAD had before comes after ours."""
    before = base.get("LD_PRELOAD", "")
    return {
        "LD_PRELOAD": f"{path}:{before}" if before else str(path),
        DIR: str(folder),
        RING_KB: str(ring_kb),
    }


def interpreter(program: Path) -> str | None:
    """The dynamic loader that a program asks for; None when it is not such a file."""
    for _ in range(_MAX_INTERPRETERS):
        try:
            with program.open("rb") as file:
                head = file.read(4096)
        except OSError:
            return None
        if head[:2] == b"#!":
            words = head[2:].split(b"\n", 1)[0].split()
            if not words:
                return None
            name = os.fsdecode(words[0])
            if Path(name).name == "env" and len(words) > 1:
                name = shutil.which(os.fsdecode(words[-1])) or name
            program = Path(name)
            continue
        if head[:4] != b"\x7fELF" or head[4] != 2:
            return None
        at, size, count = (
            int.from_bytes(head[32:40], "little"),
            int.from_bytes(head[54:56], "little"),
            int.from_bytes(head[56:58], "little"),
        )
        for i in range(count):
            entry = head[at + i * size : at + (i + 1) * size]
            if int.from_bytes(entry[:4], "little") == 3:  # PT_INTERP
                start = int.from_bytes(entry[8:16], "little")
                return os.fsdecode(head[start : start + 256].split(b"\0", 1)[0])
        return None
    return None


def refuse_unfit(program: Path) -> None:
    """NccluprobeError for a program that the library cannot be loaded into."""
    loader = interpreter(program)
    if loader is not None and "musl" in Path(loader).name:
        raise NccluprobeError(
            f"{program} is a program for musl ({loader}); the preload library needs glibc 2.17 "
            "or later: use `nccluprobe attach`",
            ExitCode.USAGE,
        )
