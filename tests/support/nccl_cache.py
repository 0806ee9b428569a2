"""Where the test copies of NVIDIA's libnccl lie, and what is known of each.

``tools/nccl-matrix fetch`` fills the cache; the fixture ``real_nccl`` and the
benchmarks read it.  Only the standard library is used.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

#: Every version that facts and tests cover, oldest first.
VERSIONS: tuple[str, ...] = (
    "2.16.2",
    "2.18.1",
    "2.21.5",
    "2.26.2",
    "2.27.3",
    "2.28.9",
    "2.30.7",
    "2.32.3",
)

#: What ``tools/test`` fetches: one before and one after the hash changed (2.26).
DEFAULT_VERSIONS: tuple[str, ...] = ("2.21.5", "2.28.9")

LAYOUTS = Path(__file__).resolve().parent.parent / "data" / "nccl_layouts.json"


def folder() -> Path:
    """The cache; NCCLUPROBE_NCCL_CACHE and XDG_CACHE_HOME move it."""
    named = os.environ.get("NCCLUPROBE_NCCL_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "nccluprobe" / "nccl"


def library(version: str) -> Path | None:
    """The cached libnccl.so.2 of a version, None when it was not fetched."""
    path = folder() / version / "libnccl.so.2"
    return path if path.is_file() and (path.parent / "meta.json").is_file() else None


def layouts() -> dict[str, dict[str, Any]]:
    """Offsets in struct ncclComm by version, for made-up communicators."""
    found: dict[str, dict[str, Any]] = json.loads(LAYOUTS.read_text())["versions"]
    return found
