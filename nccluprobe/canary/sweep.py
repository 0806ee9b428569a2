"""Shared-memory files that the stand-in for NCCL leaves when all of its ranks are killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from pathlib import Path

#: Locks of native/simnccl/shm.c: byte 0 while somebody joins or leaves, from here on one
#: byte for every living rank.
_LIVE = 16
_FLOCK = struct.Struct("hhqqi4x")


def sweep(folder: Path = Path("/dev/shm")) -> int:
    """Removes the files that no living process holds; how many."""
    removed = 0
    for path in folder.glob("simnccl-*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(0, 1))  # BlockingIOError: in use
                held = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _lock(_LIVE, 0))
                if _FLOCK.unpack(held)[0] == fcntl.F_UNLCK and os.fstat(fd).st_nlink:
                    path.unlink()
                    removed += 1
            finally:
                os.close(fd)
    return removed


def _lock(start: int, length: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
