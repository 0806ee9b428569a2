"""Standard output and error of a command: closed, full, or with nobody who reads them."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

#: What a write fails with when its disk is full or broken.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class Notes(io.TextIOWrapper):
    """Standard error.  What cannot be said there is lost, and ends nothing."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def prepare() -> None:
    """Make both usable: a command that may not even say what is wrong ends with the right code."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # Else the next file that is opened would be taken for it.
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - it stays
    if isinstance(sys.stdout, io.TextIOWrapper):  # names from traces hold any character
        sys.stdout.reconfigure(errors="backslashreplace")
    raw = io.FileIO(2, "w", closefd=False)
    sys.stderr = Notes(raw, errors="backslashreplace", write_through=True)


def say(text: str) -> None:
    """One line on standard error.

    Names of files, hosts and processes in it may be anybody's: they may not move our cursor.
    """
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    with contextlib.suppress(OSError):  # where it is not prepared, as in a library's use
        print(f"nccluprobe: {line}", file=sys.stderr, flush=True)


def write_lines(data: bytes) -> None:
    """Lines of JSON to standard output, in UTF-8 whatever the locale is."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.flush()


def drop() -> None:
    """What is still buffered for standard output must not fail once more when Python ends."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
