"""NCCL's communicator hashes, as arithmetic.

``commHash`` is the number that NCCL's logs, RAS and profiler print for a
communicator.  It is a function of the 128 bytes of the unique id at init, and
of the parent's hash at split and shrink; which function depends on the version.
"""

from __future__ import annotations

UNIQUE_ID_BYTES = 128

_U64 = (1 << 64) - 1
_U32 = (1 << 32) - 1

Version = tuple[int, ...]


def parse_version(text: str | None) -> Version | None:
    """(2, 28, 9) of "2.28.9" or "2.28.9-1"; None when it is not a version."""
    if text is None:
        return None
    parts = text.strip().split("-")[0].split("+")[0].split(".")
    try:
        version = tuple(int(part) for part in parts)
    except ValueError:
        return None
    return version if len(version) >= 2 else None


def _char(byte: int, signed: bool) -> int:
    # The old hashes add a C `char`: signed on x86-64, unsigned on aarch64.
    return byte - 256 if signed and byte > 127 else byte


def djb2a(data: bytes, signed_char: bool = True) -> int:
    """commHash of 2.18 to 2.25, over the whole unique id."""
    h = 5381
    for byte in data:
        h = ((h * 33) & _U64) ^ (_char(byte, signed_char) & _U64)
    return h


def hash_unique_id(data: bytes, signed_char: bool = True) -> int:
    """The commId that NCCL's log prints up to 2.25."""
    h = 0xDEADBEEF
    for byte in data:
        h ^= h >> 32
        h = (h * 0x8DB3DB47FA2994AD + _char(byte, signed_char)) & _U64
    return h


class _Accumulator:
    """The two-word accumulator of 2.26 and later."""

    def __init__(self) -> None:
        self.p = 1
        self.q = 1

    def eat(self, block: bytes) -> None:
        self.p ^= len(block)
        for at in range(0, len(block), 8):
            word = int.from_bytes(block[at : at + 8], "little")
            self.p = (self.p + self.q) & _U64
            self.q ^= self.p
            self.p ^= self.p >> 31
            self.p = (self.p * 0x9DE62BBC8CEF3CE3) & _U64
            self.q ^= self.q >> 32
            self.q = (self.q * 0x485CD6311B599E79) & _U64
            self.p = (self.p + word) & _U64

    def digest(self) -> int:
        h = self.p
        h ^= h >> 31
        h = (h * 0xBAC3BD562846DE6B) & _U64
        h = (h + self.q) & _U64
        h ^= h >> 32
        return (h * 0x995A187A14E7B445) & _U64


def hash_226(data: bytes) -> int:
    """commHash (and the log's commId) of 2.26 and later."""
    acc = _Accumulator()
    acc.eat(data)
    return acc.digest()


def child_226(parent: int, count: int, color: int) -> int:
    """commHash of a child in 2.26 and later; ``count`` is 1 for the first split."""
    acc = _Accumulator()
    acc.eat(parent.to_bytes(8, "little"))
    acc.eat((count & _U32).to_bytes(4, "little"))
    acc.eat((color & _U32).to_bytes(4, "little"))
    return acc.digest()


def _text_hash(text: str) -> int:
    return djb2a(text.encode("ascii").ljust(UNIQUE_ID_BYTES, b"\0"))


def init_hash(version: Version, unique_id: bytes, signed_char: bool = True) -> int:
    """The hash that traces carry for a communicator made from a unique id.

    commHash from 2.18 on.  2.16 and 2.17 store none: there it is the commId of
    NCCL's log, the same number on all ranks.
    """
    if version >= (2, 26):
        return hash_226(unique_id)
    if version >= (2, 18):
        return djb2a(unique_id, signed_char)
    return hash_unique_id(unique_id, signed_char)


def child_hash(version: Version, how: str, parent: int, count: int, color: int) -> int | None:
    """commHash of a child; None when the version's rule is not known.

    ``how`` is "split" or "shrink"; ``count`` is the ordinal of the child on its
    parent, from 1.  Not unique in two cases: all shrinks of one parent, and up
    to 2.23 splits of one parent with one colour.
    """
    if how == "shrink":
        return child_226(parent, 0, 0) if version >= (2, 27) else None
    if how != "split":
        return None
    if version >= (2, 26):
        return child_226(parent, count, color)
    if version >= (2, 24):
        return _text_hash(f"{parent:016x}-{count}-{color}")
    if version >= (2, 18):
        return _text_hash(f"{parent:016x}-{color}")
    return None
