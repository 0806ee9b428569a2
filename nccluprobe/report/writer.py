"""Writes findings.jsonl and analyzer.log."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from nccluprobe.errors import ExitCode, NccluprobeError
from nccluprobe.match.finding import Finding

FINDINGS = "findings.jsonl"
LOG = "analyzer.log"
PID = "analyzer.pid"
_LARGEST = 64 << 20
#: Another analysis writes for milliseconds.
_PATIENCE_S = 2.0


def finding_line(finding: Finding) -> bytes:
    """One line of findings.jsonl, with its newline."""
    content = finding.to_json()
    try:
        return orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        # A broken trace may hold numbers, or texts, that orjson does not write.
        return json.dumps(content).encode() + b"\n"


class FindingWriter:
    """Appends to both files in a folder, which it makes when needed; links are not followed.

    Nothing is made before there is something to write, or ``open`` is called.
    NccluprobeError (OUTPUT) where the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._failed = False
        self._marked: bool | None = None  # not tried so far
        #: What the file says of each finding: another analysis may have written it.
        self._last: dict[str, tuple[object, ...]] = {}
        self._read = 0  # bytes of the file that `_last` knows
        self._unwritten: list[Finding] = []
        self._torn = False  # the file ends in a part of a line
        self._findings = self._log = -1
        #: Whether the files were made, or found and opened.
        self.made = False

    def open(self) -> None:
        """Make both files, as also an analysis without a finding leaves them."""
        if self._log >= 0:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._findings = _append(self.folder / FINDINGS)
            self._log = _append(self.folder / LOG)
            self.made = True
        except OSError as error:
            self.close()
            raise self._cannot(error) from error

    @property
    def lacks(self) -> bool:
        """Whether findings are in no file so far: the disk is full."""
        return bool(self._unwritten)

    def _cannot(self, error: OSError) -> NccluprobeError:
        return NccluprobeError(
            f"{FINDINGS} is not written, cannot write to {self.folder}: {error.strerror}; "
            "give a folder of yours with --out DIR",
            ExitCode.OUTPUT,
        )

    def write(self, findings: list[Finding]) -> None:
        """Append findings, whole lines in one write each file.

        Several analyses may write to one folder at once: what one has written, no
        other writes again.
        """
        findings = [*self._unwritten, *findings]
        if not findings:
            return
        self._look()
        self.open()
        with _locked(self._findings):
            self._catch_up()
            new = [f for f in findings if self._last.get(f.id) != _said(f.to_json())]
            data = b"".join(finding_line(f) for f in new)
            # Whoever wrote before was ended in mid-line: what follows is a line of its own.
            if not self._put(self._findings, (b"\n" if self._torn and data else b"") + data):
                self._unwritten = new  # until there is room
                return
            self._unwritten = []
            self._last.update((f.id, _said(f.to_json())) for f in new)
            self._catch_up()
        for f in new:
            self.log(f"{f.state} {f.severity} {f.hang_type} {f.id} {f.role}")

    def _look(self) -> None:
        """Go on in a new file where somebody has deleted ours; never in a deleted folder."""
        if self._findings < 0 or os.fstat(self._findings).st_nlink:
            return
        if not self.folder.is_dir():
            raise self._cannot(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
        for fd in (self._findings, self._log):
            os.close(fd)
        self._findings = self._log = -1
        self._read = 0
        self._last.clear()

    def _catch_up(self) -> None:
        """Read what has been appended since the last time, also by others."""
        try:
            size = os.fstat(self._findings).st_size
            if size == self._read or size - self._read > _LARGEST:
                return
            if size < self._read:  # somebody cut it
                self._read = 0
                self._last.clear()
            data = os.pread(self._findings, size - self._read, self._read)
        except OSError:
            return
        end = data.rfind(b"\n") + 1
        self._torn = end < len(data)
        self._read += end
        self._last.update(_told(data[:end]))

    def log(self, text: str) -> None:
        """Append a line to analyzer.log."""
        self.open()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._put(self._log, f"{stamp} {text}\n".encode("utf-8", "backslashreplace"))

    def _put(self, fd: int, data: bytes) -> bool:
        """Whether all is written; a full disk must not keep the verdict from being shown."""
        try:
            while data:  # a disk that is nearly full takes a part
                data = data[os.write(fd, data) :]
        except OSError as error:
            if not self._failed:
                self._failed = True
                sys.stderr.write(f"nccluprobe: {self._cannot(error)}\n")
            return False
        return True

    def mark(self) -> None:
        """Write ``analyzer.pid``, as long as this analysis follows a job."""
        if self._marked is not None:
            return
        self._marked = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._cannot(error) from error
        try:
            fd = os.open(self.folder / PID, flags, 0o640)
        except OSError as error:
            self.log(f"{PID} is not written: {error.strerror}")
            return
        self._marked = True
        self._put(fd, f"{os.getpid()}\n".encode())
        os.close(fd)

    def close(self) -> None:
        """Close both files; ``analyzer.pid`` goes."""
        for fd in (self._findings, self._log):
            if fd >= 0:
                os.close(fd)
        self._findings = self._log = -1
        if self._marked:
            with contextlib.suppress(OSError):
                if (self.folder / PID).read_text().strip() == str(os.getpid()):
                    (self.folder / PID).unlink()

    def __enter__(self) -> FindingWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _said(line: dict[str, Any]) -> tuple[object, ...]:
    """What a change of is worth a line."""
    names = ("state", "severity", "role", "hang_type", "comm_uid_hash", "comm_seq", "run_id")
    limits = line.get("limits")
    return (
        *(line.get(name) for name in names),
        tuple(sorted(limits.items())) if isinstance(limits, dict) else None,
    )


def _told(data: bytes) -> dict[str, tuple[object, ...]]:
    """What lines of findings say; the last one of each finding holds."""
    last: dict[str, tuple[object, ...]] = {}
    for line in data.splitlines():
        try:
            found = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(found, dict) and isinstance(found.get("id"), str):
            last[found["id"]] = _said(found)
    return last


@contextlib.contextmanager
def _locked(fd: int) -> Iterator[None]:
    """Alone on a file, for a moment; a file system without locks must do without."""
    deadline = time.monotonic() + _PATIENCE_S
    held = False
    while not held and time.monotonic() < deadline:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:  # not for ever: whoever may write the folder may hold the lock
            time.sleep(0.01)
        except OSError:
            break
    try:
        yield
    finally:
        if held:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)


def _append(path: Path) -> int:
    # Not blocking: a FIFO of that name would hold us for ever.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o640)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file")
    return fd
