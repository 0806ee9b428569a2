"""The preload library's file, as native/preload/ncp_shm.h lays it out."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from nccluprobe.record import FIELDS, NAME_SIZE, RECORD_VERSION, SIZE

MAGIC = b"NCPRING\n"
VERSION = 1
HEADER_SIZE = 8192
MAX_SLOTS = 4096
MAX_RING = 1 << 31
COPIES = 4
_PATH = 384
_COPIES_AT = 320
_COPY = struct.Struct(f"<QQQIIQQQQQ{_PATH}s")
#: Of a copy: offsets in struct ncclComm, the first written last.
_RANK_AT = 32
_OFFSETS = struct.Struct("<QQQQ")
_ENVIRON_AT = _COPIES_AT + COPIES * _COPY.size
_ENVIRON = 3072
_HEAD = struct.Struct("<8sIIIIQQQQIIIIIIQqQQQQQII40s64s72s")
#: Where the collector writes: whether to record nothing more.
DENIED_AT = 136
SLOT_DENIED_AT = 20
#: How many slots were ever taken.
TOP_AT = 140

assert _HEAD.size == _COPIES_AT and _ENVIRON_AT + _ENVIRON <= HEADER_SIZE

_TYPES = {"u64": "<u8", "u32": "<u4", "i32": "<i4", "u16": "<u2", "u8": "u1"}
RECORD = np.dtype([(f.name, _TYPES[f.ctype]) for f in FIELDS])
SLOT = np.dtype(
    [
        ("seq", "<u8"),
        ("head", "<u8"),
        ("tid", "<u4"),
        ("denied", "<u4"),
        ("lost", "<u8"),
        ("blind", "<u8"),
        ("nested", "<u8"),
        ("unwound", "<u8"),
        ("zero", "<u8"),
        ("apart", "u1", 64),
        ("read", "<u8"),
        ("overwritten", "<u8"),
        ("rest", "u1", 112),
    ]
)
#: In a slot: what the collector has taken, and what it came too late for.
READ_AT = 128
READ = struct.Struct("<QQ")
BIRTH = np.dtype(
    [
        ("seq", "<u8"),
        ("gen", "<u4"),
        ("closed", "<u4"),
        ("rec", RECORD),
        ("identity", RECORD),
        ("name", f"S{NAME_SIZE}"),
    ]
)
assert RECORD.itemsize == SIZE and SLOT.itemsize == 256 and BIRTH.itemsize == 384


class LayoutError(Exception):
    """The file is none of ours, or of another version."""


@dataclass(frozen=True)
class Offsets:
    """Of the fields of struct ncclComm that are read; 0: unknown."""

    magics: int
    rank: int
    hash: int
    seq: int
    end_magic: int

    def text(self) -> str:
        """For the file that the library reads."""
        return f"{self.magics} {self.rank} {self.hash} {self.seq} {self.end_magic}\n"


@dataclass(frozen=True)
class Copy:
    """A copy of NCCL in the process."""

    dev: int
    ino: int
    version: int
    path: str
    #: Whether the process knows where the struct's fields are.
    known: bool

    @property
    def release(self) -> str | None:
        """Like "2.28.9"; None when the library did not tell."""
        v = self.version
        if v <= 0:
            return None
        if v < 10000:
            return f"{v // 1000}.{v // 100 % 10}.{v % 100}"
        return f"{v // 10000}.{v // 100 % 100}.{v % 100}"


@dataclass(frozen=True)
class Header:
    """The file's head."""

    slots: int
    slots_at: int
    births_at: int
    births: int
    rings_at: int
    ring_bytes: int
    ring_records: int
    pid: int
    uid: int
    gid: int
    start_ticks: int
    born: int
    lost: int
    births_made: int
    unwrapped: int
    boot_id: str
    exe: str
    host: str
    copies: tuple[Copy, ...]
    environ: dict[str, str]


def layout_writes(index: int, offsets: Offsets) -> list[tuple[int, bytes]]:
    """What to write where to tell a process of a copy's struct, in this order."""
    at = _COPIES_AT + index * _COPY.size + _RANK_AT
    rest = _OFFSETS.pack(offsets.hash, offsets.seq, offsets.end_magic, offsets.magics)
    return [(at + 8, rest), (at, offsets.rank.to_bytes(8, "little"))]


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")


def ready(data: bytes) -> bool:
    """Whether the writer has finished making the file."""
    return data[: len(MAGIC)] == MAGIC


def parse(data: bytes, file_size: int) -> Header:
    """The header; LayoutError when it makes no sense.  The file is not trusted."""
    if len(data) < HEADER_SIZE or not ready(data):
        raise LayoutError("no ring of the preload library")
    (
        _, version, record_version, record_size, slots, slots_at, births_at, rings_at,
        ring_bytes, ring_records, births, pid, uid, gid, copies, ticks, _, born, size,
        lost, births_made, unwrapped, _, _, boot_id, exe, host,
    ) = _HEAD.unpack_from(data)  # fmt: skip
    if version != VERSION or record_version != RECORD_VERSION or record_size != SIZE:
        raise LayoutError(f"made by another release (layout {version}, record {record_version})")
    sound = (
        0 < slots <= MAX_SLOTS
        and 0 < ring_bytes <= MAX_RING
        and 1 < ring_records <= ring_bytes // SIZE
        and slots_at + slots * SLOT.itemsize <= births_at
        and births_at + births * BIRTH.itemsize <= rings_at
        and rings_at + slots * ring_bytes <= size <= file_size
    )
    if not sound:
        raise LayoutError("damaged")
    found = []
    for i in range(min(copies, COPIES)):
        copy = _COPY.unpack_from(data, _COPIES_AT + i * _COPY.size)
        found.append(Copy(copy[1], copy[2], copy[3], _text(copy[-1]), bool(copy[5])))
    environ = {}
    for item in data[_ENVIRON_AT : _ENVIRON_AT + _ENVIRON].split(b"\0"):
        name, equals, value = item.decode("utf-8", "replace").partition("=")
        if equals:
            environ[name] = value
    return Header(
        slots, slots_at, births_at, births, rings_at, ring_bytes, ring_records, pid, uid, gid,
        ticks, born, lost, births_made, unwrapped, _text(boot_id), _text(exe), _text(host),
        tuple(found), environ,
    )  # fmt: skip
