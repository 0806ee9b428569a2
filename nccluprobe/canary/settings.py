"""What the command was asked to do, checked: the same on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nccluprobe.canary.cases import OPERATIONS
from nccluprobe.canary.errors import ArgumentError
from nccluprobe.nccl.enums import DATATYPE_IDS, REDUCTION_OPS

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LARGEST = 8 << 30


@dataclass(frozen=True)
class Settings:
    """One run of the canary. Times are seconds, sizes bytes."""

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    redops: tuple[str, ...] = ("sum",)
    iters: int = 20
    warmup: int = 5
    #: Steps of a made-up training in place of the measurement; None: measure.
    steps: int | None = None
    pause: float = 0.0
    #: For one operation; None: as long as it takes.
    deadline: float | None = 30.0
    #: How long a rank waits for the others to start; None: as the backend does.
    patience: float | None = None
    serve: bool = False
    every: float | None = None
    requests: int | None = None
    inject: tuple[str, ...] = field(default_factory=tuple)
    truth: Path | None = None
    as_json: bool = False
    verbose: bool = False
    progress: bool = True
    #: Nothing ends a job that a planted fault hangs: neither --hold nor --deadline.
    endless: bool = False


def sizes_of(text: str) -> tuple[int, ...]:
    """Bytes of "8,64K,16M"; ArgumentError for anything else."""
    found = []
    for word in _words(text, "--sizes"):
        match = re.fullmatch(r"(\d{1,12})([KMG]?)(i?B)?", word, re.IGNORECASE | re.ASCII)
        size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
        if not 0 < size <= LARGEST:
            raise ArgumentError(f"--sizes: {word!r}: give bytes like 8, 64K or 16M, up to 8G")
        found.append(size)
    return tuple(dict.fromkeys(found))


def _names(option: str, known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        words = list(known) if text == "all" else _words(text, option)
        for word in words:
            if word not in known:
                raise ArgumentError(f"{option}: {word!r}: give all or some of {', '.join(known)}")
        return tuple(dict.fromkeys(words))

    return names


ops_of = _names("--ops", OPERATIONS)
dtypes_of = _names("--dtypes", tuple(DATATYPE_IDS))
redops_of = _names("--redops", tuple(REDUCTION_OPS.values()))


def _words(text: str, option: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ArgumentError(f"{option}: nothing in {text!r}; give a list with commas")
    return words
