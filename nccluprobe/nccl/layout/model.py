"""What is known of ``struct ncclComm`` in one copy of NCCL."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Protocol

#: What startMagic and endMagic hold, from 2.21 on.
MAGIC = 0x0280028002800280

#: The first release that stores a hash, has magics, counts every eager collective.
HASH_SINCE = (2, 18)
MAGIC_SINCE = (2, 21)
SEQ_SINCE = (2, 26)


class Reason(str, Enum):
    """Why a layout, or a field of it, is refused."""

    MACHINE = "machine"  # code of this processor cannot be followed here
    NO_ACCESSORS = "no_accessors"  # no symbol of the functions that read the struct
    NO_DWARF = "no_dwarf"
    NOT_FOUND = "not_found"  # the code has no such instruction
    AMBIGUOUS = "ambiguous"  # several that differ
    DISAGREES = "disagrees"  # found, and contradicted by another look
    DAMAGED = "damaged"
    VERSION = "version"  # this version has no such field, or its version is not known
    TOO_LARGE = "too_large"


class LayoutError(Exception):
    """The layout of this copy is refused."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Image(Protocol):
    """What ``find`` needs to know of the file (``NcclImage`` of the scan of files)."""

    @property
    def version(self) -> str | None: ...
    @property
    def build_id(self) -> str | None: ...
    @property
    def machine(self) -> str: ...


@dataclass(frozen=True)
class Refusal:
    """A field that is not known, and why."""

    field: str
    reason: Reason
    text: str


@dataclass(frozen=True)
class Layout:
    """Byte offsets in ``struct ncclComm``; None: this copy has none, or it was refused.

    ``method`` is "dwarf" or "code".  ``confidence`` is "confirmed" when two
    independent ways agree on what both give (the debug information and the
    accessors' code), else "checked": one way, with its cross-checks passed.
    ``comm_hash`` is None before 2.18, which stores none.  ``seq_number`` counts
    every eager collective only where ``seq_counts`` is true (2.26 and later).
    ``size`` is that of the struct; the two magics exist from 2.21 on.
    """

    rank: int
    nranks: int
    cuda_dev: int
    method: str
    confidence: str
    version: str | None
    build_id: str | None
    async_result: int | None = None
    comm_hash: int | None = None
    seq_number: int | None = None
    start_magic: int | None = None
    end_magic: int | None = None
    size: int | None = None
    #: Where a pointer to the communicator's name lies (2.26 and later).
    name: int | None = None
    #: Flags of its state, where the debug information names them.
    init_state: int | None = None
    finalize_called: int | None = None
    destroy_flag: int | None = None
    refused: tuple[Refusal, ...] = ()

    @property
    def seq_counts(self) -> bool:
        """Whether the counters are known, and count every eager collective."""
        release = release_of(self.version)
        return self.seq_number is not None and release is not None and release >= SEQ_SINCE

    @property
    def searchable(self) -> bool:
        """Whether communicators can be told in memory: magics at both ends."""
        return self.start_magic is not None and self.end_magic is not None

    def offsets(self) -> dict[str, int | None]:
        """All offsets, by name."""
        return {name: getattr(self, name) for name in OFFSETS}

    def text(self) -> str:
        """For people."""
        known = ", ".join(f"{k} {v}" for k, v in self.offsets().items() if v is not None)
        return f"{self.method}, {self.confidence}: {known}"


_NOT_OFFSETS = ("method", "confidence", "version", "build_id", "refused")
OFFSETS: tuple[str, ...] = tuple(f.name for f in fields(Layout) if f.name not in _NOT_OFFSETS)


def release_of(version: str | None) -> tuple[int, int] | None:
    """(2, 28) of "2.28.9"; None when unknown."""
    parts = (version or "").split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return int(parts[0]), int(parts[1])


def to_json(layout: Layout) -> dict[str, Any]:
    """As the cache and ``doctor --json`` write it."""
    line: dict[str, Any] = {
        "version": layout.version,
        "build_id": layout.build_id,
        "method": layout.method,
        "confidence": layout.confidence,
        "offsets": {k: v for k, v in layout.offsets().items() if v is not None},
    }
    if layout.refused:
        line["refused"] = [
            {"field": r.field, "reason": r.reason.value, "text": r.text} for r in layout.refused
        ]
    return line


def from_json(line: dict[str, Any]) -> Layout:
    """The inverse; ValueError when it makes no sense."""
    offsets = line["offsets"]
    if not isinstance(offsets, dict) or not set(offsets) <= set(OFFSETS):
        raise ValueError("offsets")
    if not all(type(v) is int and 0 <= v < 1 << 30 for v in offsets.values()):
        raise ValueError("offsets")
    if line["method"] not in ("dwarf", "code"):
        raise ValueError("method")
    if line["confidence"] not in ("confirmed", "checked"):
        raise ValueError("confidence")
    refused = tuple(
        Refusal(str(r["field"]), Reason(r["reason"]), str(r["text"]))
        for r in line.get("refused", ())
    )
    texts = {k: line[k] for k in ("method", "confidence", "version", "build_id")}
    return Layout(**offsets, **texts, refused=refused)
