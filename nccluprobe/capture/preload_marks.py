"""A process is traced by one front only.

The preload library maps its file before the process's first traced call
reaches NCCL, so the eBPF front sees by the process's maps that it came second.
The other way round the library cannot see probes; so the eBPF front leaves a
note about each process that it traces, which the library reads before it
begins: native/preload/file.c.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from nccluprobe import procinfo
from nccluprobe.capture.preload_env import LIBRARY

#: One file per process: its start time, the tracer's pid and start time, in ticks.
NOTES = Path("/run/nccluprobe/ebpf")
_RING = re.compile(rb"/(\d+)\.\d+\.ring(?: \(deleted\))?$", re.MULTILINE)


def carries_preload(pid: int) -> bool:
    """Whether the preload library is loaded in the process, be it that it records or not."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return False
    return f"/{LIBRARY}".encode() in maps


def about_preload(pid: int) -> str | None:
    """What another tracer has to know of the library in the process; None: it is not there."""
    if traced_by_preload(pid):
        return "the preload library traces it already: attach leaves it to that"
    if carries_preload(pid):
        return (
            "the preload library is loaded in it: from when that records on, attach leaves the "
            "process to it"
        )
    return None


def traced_by_preload(pid: int) -> bool:
    """Whether the preload library records in the process."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    numbers = next((x.split()[1:] for x in status.splitlines() if x.startswith("NSpid:")), [])
    # A fork inherits the mapping on old kernels; the name says whose it is.
    own = {str(pid).encode(), *(n.encode() for n in numbers)}
    return any(m[1] in own for m in _RING.finditer(maps))


class Notes:
    """The notes of one eBPF tracer."""

    def __init__(self, folder: Path = NOTES) -> None:
        self._folder = folder
        self._written: set[int] = set()
        self._tail = f" {os.getpid()} {procinfo.read_state(os.getpid()).start_ticks}\n"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            # What killed tracers left about processes that are gone.
            for path in folder.iterdir():
                if path.name.isdecimal() and not Path("/proc", path.name).exists():
                    path.unlink()

    def add(self, pid: int) -> None:
        """The process is traced from now on.  A folder that is not ours is no failure."""
        with contextlib.suppress(OSError, ValueError):
            ticks = procinfo.read_state(pid).start_ticks
            path = self._folder / str(pid)
            path.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(path, flags, 0o644)
            with open(fd, "w") as file:  # noqa: PTH123 - a descriptor
                file.write(f"{ticks}{self._tail}")
            self._written.add(pid)

    def remove(self, pid: int) -> None:
        """The process is gone."""
        if pid in self._written:
            self._written.discard(pid)
            with contextlib.suppress(OSError):
                (self._folder / str(pid)).unlink()

    def clear(self) -> None:
        """Nothing is traced any more."""
        for pid in list(self._written):
            self.remove(pid)
