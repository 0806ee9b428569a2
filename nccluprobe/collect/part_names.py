"""New files for the parts of a trace, under names that nobody has."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from nccluprobe.collect.safedir import Owner, create_file

_MOST_NAMES = 1000


def create_first(folder: int, names: Sequence[str], owner: Owner | None) -> tuple[int, str]:
    """A file by the first of these names that is free, or the last one with a number.

    Its descriptor, and its name without ``.jsonl``.  OSError.
    """
    more = (f"{names[-1]}_{n}" for n in range(2, _MOST_NAMES))
    for base in (*names, *more):
        with contextlib.suppress(FileExistsError):
            return create_file(folder, f"{base}.jsonl", owner), base
    raise FileExistsError(f"{names[-1]}.jsonl and {_MOST_NAMES} more names are taken")


def create_next(folder: int, base: str, part: int, owner: Owner | None) -> tuple[int, int]:
    """A file for a part after ``part``: its descriptor and number.  OSError."""
    for number in range(part + 1, part + _MOST_NAMES):
        with contextlib.suppress(FileExistsError):
            return create_file(folder, f"{base}.part{number}.jsonl", owner), number
    raise FileExistsError(f"{base}.part{part + 1}.jsonl and more names are taken")
