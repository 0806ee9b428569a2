"""Tails trace files: whole lines out, part after part, in bounded steps.

Knows folders, files and parts, and nothing of what the lines mean beyond the
``process`` line that says which process and part a file is.
"""

from __future__ import annotations

import heapq
import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path
from typing import Any

import orjson

_SUFFIX = ".jsonl"
#: What analyze writes itself.
_NOT_TRACES = frozenset({"findings.jsonl", "analyzer.log"})
_NOT_FOLDERS = frozenset({"heartbeat", "evidence"})
#: Begins what ``inspect --json`` writes: of no run.
_INSPECT = b'{"kind":"inspect"'
_MAX_DEPTH = 8
_MAX_FILES = 200_000
_MAX_LINE = 8 << 20
_HEAD = 64 << 10
_CHUNK_MIN, _CHUNK_MAX, _CHUNK_ALL = 128 << 10, 256 << 10, 256 << 20
_RESCAN_S = 1.0
_MTIME_SETTLED_S = 2.0
#: So many bytes before the place that was read up to tell whether it is still the same file.
_MARK = 128


@dataclass(frozen=True)
class Chunk:
    """Whole lines of one source, each with its newline, in one piece.

    ``caught_up``: nothing more to read just now.
    """

    source: int
    path: str
    first_line: int
    data: bytes
    caught_up: bool


@dataclass
class _Part:
    """One file."""

    path: str
    file_id: tuple[int, int]
    number: int
    offset: int = 0
    size: int = 0
    line: int = 1
    torn: int = 0  # bytes of a last line without newline
    within: bool = False  # a line that is too long: what is left of it is passed over
    gone: bool = False
    mark: bytes = b""  # what stands before the offset, or, at first, behind it


class _ReplacedError(OSError):
    """Another file has this part's name."""


@dataclass
class _Source:
    id: int
    key: tuple[Any, ...]
    name: str
    ignored: bool = False
    parts: list[_Part] = field(default_factory=list)
    at: int = 0  # index of the part being read
    position: int = 0  # how far in time, told by the decoder
    idle: bool = False  # said to be caught up already


@dataclass
class ReadCounts:
    """What could not be read, for the report."""

    files: int = 0
    bytes: int = 0
    oversize_lines: int = 0
    #: Where the first of these is.
    oversize: str = ""
    unreadable_files: int = 0
    vanished_files: int = 0
    #: Files that others were put in the place of, while they were read.
    replaced: list[str] = field(default_factory=list)
    #: Path -> what it is: things in folders that are not read.
    passed_over: dict[str, str] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)

    def example(self, text: str) -> None:
        """Remember a few places for people to look at."""
        if len(self.examples) < 20:
            self.examples.append(text)


class TraceReader:
    """All traces under some folders, read in step with each other.

    The source that is furthest behind in time is read next, so that memory in
    the matcher does not depend on the size of the files.
    """

    def __init__(self, paths: Iterable[str | Path], run_id: str | None = None) -> None:
        self.counts = ReadCounts()
        self._paths = [os.path.realpath(p) for p in paths]
        self._run_id = run_id
        self._sources: list[_Source] = []
        self._by_key: dict[tuple[Any, ...], _Source] = {}
        self._known: dict[str, tuple[int, int]] = {}  # path -> file id
        self._headless: dict[str, tuple[int, int]] = {}  # no whole first line yet
        self._folders: dict[str, tuple[int, list[str], list[str]]] = {}
        self._next_rescan = 0.0
        #: Run ids of all traces found, those passed over too.
        self.run_ids: set[str] = set()

    # -- finding files -----------------------------------------------------

    def names(self) -> list[tuple[int, str]]:
        """Number and name of every source known so far."""
        return [(s.id, s.name) for s in self._sources if not s.ignored]

    def discover(self, force: bool = False) -> None:
        """Look for new files, at most once a second."""
        now = time.monotonic()
        if not force and now < self._next_rescan:
            return
        self._next_rescan = now + _RESCAN_S
        for path in self._paths:
            if os.path.isfile(path):  # noqa: PTH113 - False also where a folder above is closed
                if Path(path).name not in _NOT_TRACES:
                    self._add(path)
            else:
                self._walk(path)
        for path in list(self._headless):
            self._open_head(path)

    def _walk(self, top: str) -> None:
        stack = [(top, 0)]
        while stack:
            folder, depth = stack.pop()
            folders, files = self._list(folder)
            for name in files:
                self._add(f"{folder}/{name}")
            if depth < _MAX_DEPTH:
                stack += [(f"{folder}/{name}", depth + 1) for name in folders]

    def _list(self, folder: str) -> tuple[list[str], list[str]]:
        """Sub-folders and traces; a folder that did not change is not read again."""
        try:
            changed = Path(folder).stat().st_mtime_ns
        except OSError:
            return [], []
        cached = self._folders.get(folder)
        if cached is not None and cached[0] == changed:
            return cached[1], cached[2]
        folders, files = [], []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        self._pass(entry.path, "links in folders are not followed")
                    elif entry.is_dir(follow_symlinks=False):
                        if entry.name not in _NOT_FOLDERS:
                            folders.append(entry.name)
                    elif entry.name.endswith(_SUFFIX) and entry.name not in _NOT_TRACES:
                        files.append(entry.name)
        except OSError as error:
            self.counts.example(f"{folder}: {error.strerror}")
            return [], []
        # A time stamp that is still young may not show the next change.
        settled = time.time() - changed / 1e9 > _MTIME_SETTLED_S
        self._folders[folder] = (changed if settled else -1, sorted(folders), sorted(files))
        return sorted(folders), sorted(files)

    def _add(self, path: str) -> None:
        if path in self._known or path in self._headless or len(self._known) >= _MAX_FILES:
            return
        try:
            found = Path(path).stat()
        except OSError:
            return
        if stat.S_ISREG(found.st_mode):
            self._headless[path] = (found.st_dev, found.st_ino)
        else:
            self._pass(path, "no regular file")

    def _pass(self, path: str, why: str) -> None:
        if len(self.counts.passed_over) < _MAX_FILES:
            self.counts.passed_over[path] = why

    def _open_head(self, path: str) -> None:
        file_id = self._headless[path]
        try:
            with Path(path).open("rb") as f:
                head = f.read(_HEAD)
        except OSError as error:
            del self._headless[path]
            self._known[path] = file_id
            self.counts.unreadable_files += 1
            self.counts.example(f"{path}: {error.strerror}")
            return
        line, newline, _ = head.partition(b"\n")
        if not newline and len(head) < _HEAD:
            return  # the writer has not finished its first line
        del self._headless[path]
        self._known[path] = file_id
        self.counts.files += 1
        key, number, run_id = _who(line, path)
        if run_id is not None and len(self.run_ids) < _MAX_FILES:
            self.run_ids.add(run_id)
        other = self._run_id is not None and run_id != self._run_id
        ignored = other and not line.startswith(_INSPECT)
        source = self._part_of(key, path, ignored)
        if any(p.gone and p.path == path for p in source.parts):
            return  # written anew: what was read of it would be read twice
        part = _Part(path, file_id, number, mark=head[: min(len(line) + 1, _MARK)])
        source.parts.append(part)
        done, waiting = source.parts[: source.at + 1], source.parts[source.at + 1 :]
        if source.at == 0 and len(source.parts) > 1 and done[0].offset == 0:
            done, waiting = [], source.parts
        source.parts = done + sorted(waiting, key=lambda p: p.number)

    def _part_of(self, key: tuple[Any, ...], path: str, ignored: bool) -> _Source:
        source = self._by_key.get(key)
        if source is None:
            source = _Source(len(self._sources), key, path, ignored)
            self._sources.append(source)
            self._by_key[key] = source
        return source

    # -- reading -----------------------------------------------------------

    def at_time(self, source: int, position: int) -> None:
        """Told by the decoder: how far in time a source has been read."""
        self._sources[source].position = position

    def poll(
        self, max_bytes: int | None = None, only: Collection[int] | None = None
    ) -> Iterator[Chunk]:
        """Everything that can be read now, the source furthest behind first.

        ``only``: of these sources.
        """
        self.discover()
        heap = [
            (s.position, s.id)
            for s in self._sources
            if not s.ignored and (only is None or s.id in only)
        ]
        heapq.heapify(heap)
        size = max(_CHUNK_MIN, min(_CHUNK_MAX, _CHUNK_ALL // max(1, len(heap))))
        left = max_bytes
        while heap and (left is None or left > 0):
            _, number = heapq.heappop(heap)
            source = self._sources[number]
            before = self.counts.bytes
            chunk = self._read(source, size)
            if chunk is None:
                continue
            yield chunk
            if left is not None:
                left -= self.counts.bytes - before
            if not chunk.caught_up:
                heapq.heappush(heap, (source.position, number))

    def _read(self, source: _Source, size: int) -> Chunk | None:
        """The next lines of a source; None when there is nothing new."""
        while source.at < len(source.parts):
            part = source.parts[source.at]
            first = part.line
            data, at_end = self._lines(part, size)
            last_part = source.at + 1 >= len(source.parts)
            if at_end and not last_part:
                source.at += 1
            caught_up = at_end and last_part
            if data or (caught_up and not source.idle):
                part.line += data.count(b"\n")
                source.idle = caught_up
                return Chunk(source.id, part.path, first, data, caught_up)
            if caught_up:
                return None
        return None

    def _lines(self, part: _Part, size: int) -> tuple[bytes, bool]:
        """Whole lines from the part's offset; whether its end was reached."""
        if part.gone:
            return b"", True
        try:
            found = os.stat(part.path)  # noqa: PTH116 - thousands of files a second
            part.size = found.st_size
            other = (found.st_dev, found.st_ino) != part.file_id
            if part.size < part.offset:
                raise _ReplacedError if other else OSError("the file was cut")
            if part.size <= part.offset + part.torn and not other:
                return b"", True
            with open(part.path, "rb", buffering=0) as f:  # noqa: PTH123 - the same
                if not _same(part, f):
                    raise _ReplacedError
                part.file_id = (found.st_dev, found.st_ino)
                data = f.read(size)
                while b"\n" not in data and len(data) < _MAX_LINE and (more := f.read(size)):
                    data += more
        except _ReplacedError:
            # The other one is read as what its first line says it is.
            part.gone = True
            self.counts.replaced.append(part.path)
            self._known.pop(part.path, None)
            self._add(part.path)
            return b"", True
        except OSError as error:
            part.gone = True
            self.counts.vanished_files += 1
            self.counts.example(f"{part.path}: {error.strerror or error}")
            return b"", True
        end = data.rfind(b"\n") + 1
        if part.within or (end == 0 and len(data) >= _MAX_LINE):
            self._pass_line(part, data)
            return b"", not data
        if end == 0:
            part.torn = len(data)
            return b"", True
        part.offset += end
        part.mark = data[max(0, end - _MARK) : end]
        part.torn = len(data) - end if part.offset + len(data) - end >= part.size else 0
        self.counts.bytes += end
        return data[:end], part.offset + part.torn >= part.size

    def _pass_line(self, part: _Part, data: bytes) -> None:
        """Pass over a line that is too long, or what is here of it."""
        if not part.within:
            self.counts.oversize_lines += 1
            self.counts.oversize = self.counts.oversize or f"{part.path}:{part.line}"
        end = data.find(b"\n") + 1
        part.within = end == 0
        part.line += end > 0
        part.torn = 0
        data = data[:end] if end else data
        part.offset += len(data)
        part.mark = (part.mark + data)[-_MARK:]

    def torn_lines(self) -> list[str]:
        """Files with a last line without a newline: their writers are dead or still writing."""
        return [*self._headless, *(p.path for s in self._sources for p in s.parts if p.torn)]


def _same(part: _Part, f: RawIOBase) -> bool:
    """Whether this file goes on where the part was read up to; leaves it there.

    Copies that are put in each other's place are the same file as long as they only grow.
    """
    f.seek(max(0, part.offset - len(part.mark)))
    same = f.read(len(part.mark)) == part.mark
    if not part.offset:
        f.seek(0)
    return same


def _who(line: bytes, path: str) -> tuple[tuple[Any, ...], int, str | None]:
    """Which process and part a file's first line says it is, and its run."""
    folder = str(Path(path).parent)
    try:
        head = orjson.loads(line)
    except orjson.JSONDecodeError:
        head = None
    if not isinstance(head, dict) or head.get("kind") != "process":
        return (path,), 0, None
    number = head.get("part", 0)
    run_id = head.get("run_id")
    identity = tuple(str(head.get(name)) for name in ("boot_id", "pid", "start", "front"))
    return (
        (folder, _stem(path), *identity),
        number if isinstance(number, int) else 0,
        run_id if isinstance(run_id, str) else None,
    )


def _stem(path: str) -> str:
    """Name of a file without its part: parts of one trace share it."""
    name = Path(path).name.removesuffix(_SUFFIX)
    head, dot, tail = name.rpartition(".")
    return head if dot and tail.removeprefix("part").isdigit() else name
