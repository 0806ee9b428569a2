"""Layouts that were worked out before, by build id, in the user's cache folder.

A file of the cache is believed when it is ours, nobody else can write it, and
the accessors of the library at hand still read what it says.  Any trouble means
that there is no cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tempfile
from pathlib import Path

from nccluprobe.nccl.layout.model import Layout, from_json, to_json

#: Of what is in the files: others are not read.
SCHEMA = 1
_MAX = 64 << 10
_BUILD_ID = re.compile(r"[0-9a-f]{16,128}")


def folder() -> Path | None:
    """The cache's folder, made when needed; None when none can be had.

    Under sudo the home may be another user's: then there is no cache, for we
    neither believe nor litter what is not ours.
    """
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(named) if named and named.startswith("/") else Path.home() / ".cache"
        anchor = base if base.is_dir() else base.parent
        if anchor.stat().st_uid != os.geteuid():
            return None
        made = base / "nccluprobe" / "layouts"
        made.mkdir(parents=True, exist_ok=True, mode=0o700)
        for part in (made, made.parent):
            status = part.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                return None
            if status.st_mode & 0o022:
                return None
    except (OSError, RuntimeError):
        return None
    return made


def _path(build_id: str | None, size: int) -> Path | None:
    if build_id is None or not _BUILD_ID.fullmatch(build_id):
        return None
    there = folder()
    return there / f"{build_id}-{size}.json" if there is not None else None


def load(build_id: str | None, size: int) -> Layout | None:
    """The layout kept for this build, None when there is none to believe."""
    path = _path(build_id, size)
    if path is None:
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        mine = status.st_uid == os.geteuid() and not status.st_mode & 0o022
        if not stat.S_ISREG(status.st_mode) or not mine or status.st_size > _MAX:
            return None
        line = json.loads(os.read(fd, _MAX))
        if line["schema"] != SCHEMA:
            return None
        layout = from_json(line["layout"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    finally:
        os.close(fd)
    return layout if layout.build_id == build_id else None


def store(layout: Layout, size: int) -> None:
    """Keep it; two writers at once do no harm."""
    path = _path(layout.build_id, size)
    if path is None:
        return
    name = None
    try:
        fd, name = tempfile.mkstemp(prefix=".", dir=path.parent)
        with os.fdopen(fd, "w", encoding="ascii") as out:
            json.dump({"schema": SCHEMA, "layout": to_json(layout)}, out)
        os.replace(name, path)  # noqa: PTH105
    except OSError:
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)  # noqa: PTH108
