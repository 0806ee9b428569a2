"""Writes the cases of this folder: ``python tests/cases/make.py``.

Each case becomes a folder with its traces, as ``nccluprobe attach`` lays them
out, ``expected.json`` and ``why.md``.  ``test_cases.py`` tells when they are stale.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path[:0] = [str(here.parent), str(here.parent.parent)]

import orjson

import cases.counters
import cases.experts
import cases.reports
import cases.required  # noqa: F401  (it registers its cases, like the line above)
from cases.kit import CASES, Case

FOLDER = Path(__file__).resolve().parent


def write(case: Case, folder: Path) -> None:
    """Write one case into a folder that does not exist yet."""
    case.build().write(folder)
    expected = orjson.dumps(asdict(case.verdict), option=orjson.OPT_INDENT_2)
    (folder / "expected.json").write_bytes(expected + b"\n")
    (folder / "why.md").write_text(case.why + "\n")


def contents(folder: Path) -> dict[str, bytes]:
    """Relative path -> bytes of all files below."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def main() -> None:
    """Write all cases anew, and remove those that are no longer made."""
    for old in FOLDER.iterdir():
        if (old / "expected.json").is_file():
            shutil.rmtree(old)
    for case in CASES.values():
        with tempfile.TemporaryDirectory() as tmp:
            write(case, Path(tmp) / case.name)
            shutil.copytree(Path(tmp) / case.name, FOLDER / case.name)


if __name__ == "__main__":
    main()
