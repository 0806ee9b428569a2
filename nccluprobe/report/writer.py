"""Writes findings.jsonl and analyzer.log."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from nccluprobe.errors import ExitCode, NccluprobeError
from nccluprobe.match.finding import Finding

FINDINGS = "findings.jsonl"
LOG = "analyzer.log"
_LARGEST = 64 << 20


def finding_line(finding: Finding) -> bytes:
    """One line of findings.jsonl, with its newline."""
    return orjson.dumps(finding.to_json(), option=orjson.OPT_APPEND_NEWLINE)


class FindingWriter:
    """Appends to both files in a folder; links are not followed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
        os.write(self._findings, b"".join(finding_line(f) for f in findings))
        for f in findings:
            self.log(f"{f.state} {f.severity} {f.hang_type} {f.id} {f.role}")

    def log(self, text: str) -> None:
        """Append a line to analyzer.log."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        os.write(self._log, f"{stamp} {text}\n".encode("utf-8", "backslashreplace"))

    def close(self) -> None:
        """Close both files."""
        os.close(self._findings)
        os.close(self._log)

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
        if path.is_symlink() or path.stat().st_size > _LARGEST:
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
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o640)
