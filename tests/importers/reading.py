"""Imports files and judges them, as ``nccluprobe analyze`` does."""

from __future__ import annotations

import os
from pathlib import Path

from nccluprobe.importers.files import find
from nccluprobe.importers.run import Imported, import_files
from nccluprobe.match.finding import Finding
from nccluprobe.match.options import Options
from nccluprobe.match.pipeline import Analysis


class Result:
    """Findings of some paths, and what was imported."""

    def __init__(
        self, *paths: Path, kind: str | None = None, options: Options | None = None
    ) -> None:
        self.analysis = Analysis(options or Options())
        found = find(paths, kind)
        self.imported: Imported = import_files(found, self.analysis)
        self.analysis.scan(None)
        self.findings: list[Finding] = self.analysis.matcher.book.all()

    @property
    def blamed(self) -> set[int]:
        """Ranks that are named as root causes."""
        causes = [f for f in self.findings if f.role == "root_cause" and f.state == "open"]
        return {n["rank"] for f in causes for n in f.named}

    @property
    def errors(self) -> list[str]:
        """Kinds of findings of severity error."""
        return [f.hang_type for f in self.findings if f.severity == "error"]

    @property
    def types(self) -> set[str]:
        """Kinds of all findings."""
        return {f.hang_type for f in self.findings}


def written_at(folder: Path, unix: float) -> None:
    """Give all files this time of writing."""
    for path in folder.iterdir():
        os.utime(path, (unix, unix))
