"""Which files are whose: by their contents, not by their names."""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from nccluprobe.importers.common import open_file
from nccluprobe.plural import counted

FR, RAS, INSPECTOR, NCCL_LOG = "fr", "ras", "inspector", "nccl-log"
KINDS = (FR, RAS, INSPECTOR, NCCL_LOG)
TRACE = "trace"

_HEAD = 64 << 10
_MAX_DEPTH = 8
_MAX_FILES = 200_000
_TRACE = re.compile(rb'\{"(?:kind|v)"')
_LOG = re.compile(rb" NCCL (?:INFO|WARN) ")
_RAS_TEXT = re.compile(rb"^(?:Job summary|Communicators\.\.\.|RAS )", re.MULTILINE)
_DUMP_NAME = re.compile(r"(dump|trace|rank)\D*\d+", re.IGNORECASE)


@dataclass
class Found:
    """Files by kind, (path, size in bytes) each; ``traces``: paths that hold traces."""

    files: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    traces: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, kind: str, path: str, size: int) -> None:
        """Take a file."""
        self.files.setdefault(kind, []).append((path, size))

    @property
    def any(self) -> bool:
        """Whether there is anything to import."""
        return any(self.files.values())


def find(paths: Iterable[Path], kind: str | None) -> Found:
    """Sort out what the paths hold.  ``kind``: what all their files are, None: look at them.

    A folder that holds traces is a run folder and nothing else.  Links inside
    folders are not followed.
    """
    found = Found()
    for path in paths:
        try:
            info = path.stat()
        except OSError as error:
            found.problems.append(f"{path}: {error.strerror}")
            continue
        if stat.S_ISDIR(info.st_mode):
            _folder(path, kind, found)
            continue
        if not stat.S_ISREG(info.st_mode):
            # A pipe can be read once only, and may never end; a device may never say anything.
            found.problems.append(f"{path}: it is no regular file; save what it gives to one")
            continue
        size = info.st_size
        try:
            what = kind or kind_of(str(path)) or _by_name(path, size)
        except OSError as error:
            found.problems.append(f"{path}: {error.strerror}")
            continue
        if what is None and not path.name.endswith(".jsonl"):
            found.problems.append(f"{path}: {_UNKNOWN}")
        elif what in KINDS:
            found.add(what or "", str(path), size)
        else:
            found.traces.append(path)
    return found


_UNKNOWN = (
    "neither a trace nor a flight recorder dump, RAS report, Inspector or NCCL log; "
    "--from says which it is"
)


def _folder(top: Path, kind: str | None, found: Found) -> None:
    here = Found()
    empty: list[str] = []
    unknown: list[str] = []
    for path, size in _regular_files(str(top), here):
        try:
            what = kind or (kind_of(path) if size else None)
        except OSError as error:
            if not path.endswith(".jsonl"):  # else it is told by who reads traces
                here.problems.append(f"{path}: {error.strerror}")
            continue
        if what == TRACE:
            found.traces.append(top)
            return
        if what is not None:
            here.add(what, path, size)
        elif size == 0:
            empty.append(path)
        else:
            unknown.append(path)
    if here.files.get(FR) or not here.any:
        # A rank that could not write any more leaves an empty file.
        for path in empty:
            if _DUMP_NAME.search(Path(path).name) and not path.endswith(".jsonl"):
                here.add(FR, path, 0)
    if not here.any:
        found.problems += here.problems
        found.traces.append(top)
        return
    if unknown:
        more = f" and {counted(len(unknown) - 1, 'more file')}" if len(unknown) > 1 else ""
        here.problems.append(f"{min(unknown)}{more}: not read: nothing that is known")
    found.problems += here.problems
    for what, files in here.files.items():
        for path, size in sorted(files):
            found.add(what, path, size)


def _by_name(path: Path, size: int) -> str | None:
    return FR if size == 0 and _DUMP_NAME.search(path.name) else None


def _regular_files(top: str, found: Found) -> list[tuple[str, int]]:
    files: list[tuple[str, int]] = []
    #: What is passed over and why, by the first of each kind.
    left: dict[str, list[str]] = {}
    stack = [(top, 0)]
    while stack:
        folder, depth = stack.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    why = _take(entry, depth, files, stack)
                    if why is not None:
                        left.setdefault(why, []).append(entry.path)
        except OSError as error:
            found.problems.append(f"{folder}: {error.strerror}")
    for why, some in left.items():
        more = f" and {len(some) - 1} more" if len(some) > 1 else ""
        found.problems.append(f"{min(some)}{more}: not read: {why}")
    return files


def _take(
    entry: os.DirEntry[str], depth: int, files: list[tuple[str, int]], stack: list[tuple[str, int]]
) -> str | None:
    """Take what a folder holds; or why it is passed over."""
    try:
        info = entry.stat(follow_symlinks=False)
    except OSError as error:
        return error.strerror
    if stat.S_ISDIR(info.st_mode):
        if depth >= _MAX_DEPTH:
            return f"more than {_MAX_DEPTH} folders deep"
        stack.append((entry.path, depth + 1))
    elif stat.S_ISLNK(info.st_mode):
        return "links in folders are not followed; name the files that are meant"
    elif not stat.S_ISREG(info.st_mode):
        return "no regular file"
    elif len(files) >= _MAX_FILES:
        return f"more than {_MAX_FILES} files"
    else:
        files.append((entry.path, info.st_size))
    return None


def kind_of(path: str) -> str | None:
    """What a file holds by its first bytes; None: nothing that is known.  OSError: not readable."""
    try:
        with open_file(path) as f:
            head = f.read(_HEAD)
    except ValueError:  # it was replaced by what is no file
        return None
    if head[:2] == b"\x1f\x8b":
        try:
            head = zlib.decompressobj(31).decompress(head, _HEAD)
        except zlib.error:
            return None
    return _kind(head)


def _kind(head: bytes) -> str | None:
    if len(head) > 1 and head[0] == 0x80 and head[1] <= 5:
        return FR
    text = head.lstrip()
    if text.startswith((b"{", b"[")):
        if _TRACE.match(text):
            return TRACE
        if b'"coll_perf"' in head or b'"p2p_perf"' in head:
            return INSPECTOR
        if b'"communicators' in head:
            return RAS
        if b'"pg_config"' in head or b'"collective_seq_id"' in head or b'"entries"' in head:
            return FR
        return None
    if _LOG.search(head):
        return NCCL_LOG
    if _RAS_TEXT.search(head):
        return RAS
    return None
