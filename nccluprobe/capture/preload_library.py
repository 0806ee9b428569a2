"""Copies of NCCL for the preload front: what their files say.

Where the fields of ``struct ncclComm`` are is found out here, not in the
process: it is written into the process's file, and into a file beside it that
later processes read at their first call.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

from nccluprobe.capture import elf
from nccluprobe.capture.preload_layout import Copy, Offsets
from nccluprobe.capture.preload_processes import Process
from nccluprobe.capture.source import Library
from nccluprobe.nccl import layout as layouts
from nccluprobe.nccl.layout.model import Layout


def describe(lib: int, copy: Copy, process: Process | None, folder: str) -> Library:
    """Version, build id and layout from the file, as the eBPF front reads them."""
    inside = [f"/proc/{process.pid}/root{copy.path}"] if process is not None else []
    for path in [*inside, copy.path]:
        with contextlib.suppress(OSError, elf.ElfError), _open(path) as file:
            info = os.fstat(file.fileno())
            if (info.st_dev, info.st_ino) != (copy.dev, copy.ino):
                continue
            image = elf.scan(file.fileno())
            if image is None:
                continue
            where = os.path.realpath(copy.path) if path == copy.path else copy.path
            found = _layout(file.fileno(), image)
            _note(folder, info, offsets(found))
            return Library(lib, where, image.version or copy.release, image.build_id, found)
    return Library(lib, copy.path, copy.release, None)


def prepare(folder: Path, library: Path) -> bool:
    """Look at a file of NCCL before a process calls it; whether it is one."""
    try:
        with _open(library) as file:
            image = elf.scan(file.fileno())
            if image is None:
                return False
            found = offsets(_layout(file.fileno(), image))
            _note(os.fspath(folder), os.fstat(file.fileno()), found)
    except (OSError, elf.ElfError):
        return False
    return True


def _open(path: str | Path) -> BinaryIO:
    """A pipe with nobody at its other end is opened, too, for ``elf.scan`` to refuse it."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def offsets(layout: Layout | None) -> Offsets | None:
    """What a process needs of a layout."""
    if layout is None:
        return None
    magics = layout.start_magic == 0 and layout.end_magic is not None
    return Offsets(
        magics=int(magics),
        rank=layout.rank,
        hash=layout.comm_hash or 0,
        seq=(layout.seq_number or 0) if layout.seq_counts else 0,
        end_magic=(layout.end_magic or 0) if magics else 0,
    )


def _layout(fd: int, image: elf.NcclImage) -> Layout | None:
    try:
        return layouts.find(fd, image)
    except layouts.LayoutError:
        return None


def _note(folder: str, info: os.stat_result, found: Offsets | None) -> None:
    if found is None:
        return
    path = f"{folder}/nccl-{info.st_dev}-{info.st_ino}-{info.st_size}.layout"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        partial = f"{path}.{os.getpid()}"
        fd = os.open(partial, flags, 0o644)
        with os.fdopen(fd, "w") as file:
            file.write(found.text())
        os.replace(partial, path)  # noqa: PTH105
