"""What the importers share: numbers of sources, who a process is, lines of text."""

from __future__ import annotations

import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from nccluprobe.match import model as m
from nccluprobe.plural import counted

#: Sources of traces are numbered from 0: ours begin here.
FIRST_SOURCE = 1 << 24
SECOND = 1_000_000_000

_PART = 64 << 20
_MAX_LINE = 64 << 10
_MAX_TEXT = 64 << 30
#: Text of a compressed file: so many times its size, and at least so much.
_MOST_PACKED, _PACKED_LEAST = 250, 256 << 20
_GZIP = b"\x1f\x8b"


@dataclass
class Numbers:
    """Hands out source numbers, and the keys of processes that traces know already."""

    next_source: int = FIRST_SOURCE
    #: (host, pid) -> the process, as its trace names it.
    known: dict[tuple[str, int], m.ProcessKey] = field(default_factory=dict)

    def take(self, n: int = 1) -> int:
        """The first of ``n`` new numbers."""
        first = self.next_source
        self.next_source += n
        return first

    def key(self, front: str, host: str, pid: int) -> m.ProcessKey:
        """The process ``pid`` of ``host``: a trace of the same one is found by it."""
        return self.known.setdefault((host, pid), m.ProcessKey(f"{front} {host}", pid, 0))


@dataclass
class Told:
    """What could not be read, for the report."""

    calls: int = 0
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        """Remember a problem; the first ones are shown."""
        if len(self.problems) < 1000:
            self.problems.append(text)


def open_file(path: str) -> io.FileIO:
    """Open a regular file; ValueError if it is none by now: a pipe may never say anything."""
    raw = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    if not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
        raw.close()
        raise ValueError("it is no regular file (any more)")
    return raw


def read_whole(path: str, most: int) -> tuple[bytes, int]:
    """Contents of a file, and when it was written, unix ns; ValueError: too large, or no file."""
    with open_file(path) as raw:
        data = bytearray()
        while len(data) <= most and (part := raw.read(min(most + 1 - len(data), _PART))):
            data += part
        if len(data) > most:
            raise ValueError(f"it is larger than {most} bytes")
        return bytes(data), os.fstat(raw.fileno()).st_mtime_ns


def lines_of(path: str, told: Told) -> Iterator[bytes]:
    """Lines of a text file, plain or gzip; what is too long for a line is cut.

    Of a file that grows, what it holds when it is opened.  ValueError: it is no regular file.
    """
    with io.BufferedReader(open_file(path)) as raw:
        packed = raw.read(2) == _GZIP
        raw.seek(0)
        f = gzip.GzipFile(fileobj=raw) if packed else raw
        size = os.fstat(raw.fileno()).st_size
        left = min(_MAX_TEXT, max(size * _MOST_PACKED, _PACKED_LEAST) if packed else size)
        cut = 0
        inside = False  # of a line that was cut
        try:
            while left > 0 and (line := f.readline(min(_MAX_LINE, left))):
                left -= len(line)
                whole = line.endswith(b"\n")
                if inside:
                    inside = not whole
                    continue
                if not whole and len(line) >= _MAX_LINE:
                    inside = True
                    cut += 1
                yield line
        except (EOFError, zlib.error, gzip.BadGzipFile):
            told.problem(f"{path}: it was cut, or its compression is broken: the rest is missing")
        if packed and left <= 0:
            told.problem(f"{path}: it holds more text than such a file needs: the rest is not read")
        if cut:
            told.problem(
                f"{path}: {counted(cut, 'line', 'was')} longer than {_MAX_LINE} bytes, and cut"
            )


def printable(raw: bytes, most: int = 200) -> str:
    """Text of bytes that may be anything."""
    return raw[:most].decode("utf-8", "replace")
