"""The host's clocks: the pair of monotonic and unix time, and how good it is."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass

_STA_UNSYNC = 0x0040
_TIME_ERROR = 5
_ATTEMPTS = 5


class _Timex(ctypes.Structure):
    """struct timex of a 64-bit kernel."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("constant", ctypes.c_long),
        ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long),
        ("time", ctypes.c_long * 2),
        ("tick", ctypes.c_long),
        ("rest", ctypes.c_char * 128),
    )


@dataclass(frozen=True)
class Reading:
    """One moment on both clocks.

    ``synced`` and ``err`` (the kernel's bound of the unix clock's error, ns)
    are None when the kernel did not say.
    """

    mono: int
    unix: int
    synced: bool | None
    err: int | None


class Clock:
    """The clocks of this host."""

    def __init__(self) -> None:
        try:
            self._libc: ctypes.CDLL | None = ctypes.CDLL(None, use_errno=True)
            self._libc.adjtimex.restype = ctypes.c_int
        except (OSError, AttributeError):
            self._libc = None

    def mono(self) -> int:
        """CLOCK_MONOTONIC, ns."""
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC)

    def reading(self) -> Reading:
        """Both clocks, read as close together as a few attempts allow."""
        best: tuple[int, int, int] | None = None
        for _ in range(_ATTEMPTS):
            before = self.mono()
            unix = time.time_ns()
            after = self.mono()
            if best is None or after - before < best[0]:
                best = (after - before, (before + after) // 2, unix)
        assert best is not None
        synced, err = self._quality()
        return Reading(best[1], best[2], synced, err)

    def _quality(self) -> tuple[bool | None, int | None]:
        if self._libc is None:
            return None, None
        timex = _Timex()
        timex.modes = 0  # only read
        state = self._libc.adjtimex(ctypes.byref(timex))
        if state < 0:
            return None, None
        synced = state != _TIME_ERROR and not timex.status & _STA_UNSYNC
        return synced, max(0, int(timex.maxerror)) * 1000
