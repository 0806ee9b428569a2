"""Writes findings.jsonl and analyzer.log."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
import time
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


def finding_line(finding: Finding) -> bytes:
    """One line of findings.jsonl, with its newline."""
    content = finding.to_json()
    try:
        return orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        # A broken trace may hold numbers, or texts, that orjson does not write.
        return json.dumps(content).encode() + b"\n"


class FindingWriter:
    """Appends to both files in a folder; links are not followed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._failed = False
        self._marked = False
        #: What the file says of each finding: an earlier analysis may have written it.
        self._last: dict[str, tuple[object, ...]] = _read_last(folder / FINDINGS)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._findings = _append(folder / FINDINGS)
            self._log = _append(folder / LOG)
        except OSError as error:
            raise NccluprobeError(
                f"cannot write to {folder}: {error.strerror}; give another folder with --out",
                ExitCode.OUTPUT,
            ) from error

    def write(self, findings: list[Finding]) -> None:
        """Append findings, whole lines in one write each file."""
        new = []
        for f in findings:
            said = _said(f.to_json())
            if self._last.get(f.id) != said:
                self._last[f.id] = said
                new.append(f)
        findings = new
        if not findings:
            return
        self._put(self._findings, b"".join(finding_line(f) for f in findings))
        for f in findings:
            self.log(f"{f.state} {f.severity} {f.hang_type} {f.id} {f.role}")

    def log(self, text: str) -> None:
        """Append a line to analyzer.log."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._put(self._log, f"{stamp} {text}\n".encode("utf-8", "backslashreplace"))

    def _put(self, fd: int, data: bytes) -> None:
        """A full disk must not keep the verdict from being shown."""
        try:
            while data:  # a disk that is nearly full takes a part
                data = data[os.write(fd, data) :]
        except OSError as error:
            if not self._failed:
                self._failed = True
                sys.stderr.write(
                    f"nccluprobe: findings are not written to {self.folder}: {error.strerror}\n"
                )

    def mark(self) -> None:
        """Write ``analyzer.pid``, as long as this analysis follows a job."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
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
        os.close(self._findings)
        os.close(self._log)
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
    names = ("state", "severity", "role", "hang_type", "comm_uid_hash", "comm_seq")
    return tuple(line.get(name) for name in names)


def _read_last(path: Path) -> dict[str, tuple[object, ...]]:
    last: dict[str, tuple[object, ...]] = {}
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            return last
        lines = path.read_bytes().splitlines()
    except OSError:
        return last
    for line in lines:
        try:
            found = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(found, dict) and isinstance(found.get("id"), str):
            last[found["id"]] = _said(found)
    return last


def _append(path: Path) -> int:
    # Not blocking: a FIFO of that name would hold us for ever.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o640)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file")
    return fd
