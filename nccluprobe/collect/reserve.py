"""Room on the disk for the last lines of a trace.

Blocks behind the end of a file are allocated before they are needed.  What is written at the
end goes into them, also where the disk is full by then: so the count of what was not written
reaches who reads the trace.  A file system that allocates nothing ahead keeps no room; then all
is written while it can be.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

#: Kept free behind the end, bytes, for the lines that close the trace.
ROOM = 8 << 10
#: Allocated at once, so that not every write asks for more.
STEP = 64 << 10
_LEAST = 512
_KEEP_SIZE = 1
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_fallocate.restype = ctypes.c_int


def allocate(fd: int, start: int, size: int) -> int:
    """Allocate blocks of a file, whose size stays as it is; 0, or what went wrong (errno)."""
    while _fallocate(fd, _KEEP_SIZE, start, size) != 0:
        error = ctypes.get_errno()
        if error != errno.EINTR:
            return error
    return 0


class Reserve:
    """What is allocated behind the end of one file."""

    def __init__(self) -> None:
        self._end = 0
        self._works = True
        #: Why there was no room, errno.
        self.error = errno.ENOSPC

    def fits(self, fd: int, size: int, more: int) -> int:
        """How many of ``more`` bytes may follow the ``size`` bytes of the file, so that ROOM stays.

        Allocates what is needed for it, and ahead.
        """
        if not self._works or size + more + ROOM <= self._end:
            return more
        for ahead in (STEP, 0):
            if self._take(fd, size, more + ROOM + ahead):
                return more
        most = more // 2
        while most >= _LEAST and not self._take(fd, size, most + ROOM):
            most //= 2
        return min(more, max(0, self._end - ROOM - size))

    def _take(self, fd: int, start: int, size: int) -> bool:
        error = allocate(fd, start, size)
        if error in _FULL:
            self.error = error
            return False
        self._works = self._works and error == 0
        self._end = max(self._end, start + size)
        return True

    def was_cut(self, fd: int, size: int) -> None:
        """The file was cut to ``size``: what was behind its end is free again."""
        self._end = size
        self._take(fd, size, ROOM)

    def give_back(self, fd: int) -> None:
        """Nothing more will be written."""
        with contextlib.suppress(OSError):
            if self._works and self._end > (size := os.fstat(fd).st_size):
                os.ftruncate(fd, size)
