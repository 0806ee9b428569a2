"""Records of the kernel's mmap events, and rings of them that may have lost some."""

from __future__ import annotations

import mmap
import struct

import pytest

from nccluprobe.capture.mmap_events import MmapBatch, _Ring, parse_records


def test_parse_records() -> None:
    def record(kind: int, misc: int, *words: int) -> bytes:
        body = struct.pack(f"={len(words)}I", *words)
        return struct.pack("=IHH", kind, misc, 8 + len(body)) + body

    batch = MmapBatch()
    parse_records(
        record(10, 2, 11, 12, 0, 0)
        + record(3, 1 << 13, 13, 13, 0, 0)
        + record(3, 0, 14, 14, 0, 0)
        + record(7, 0, 15, 1, 15, 1)
        + record(7, 0, 16, 16, 17, 16)
        + record(4, 0, 18, 1, 18, 1),
        batch,
    )
    assert batch == MmapBatch({11}, {13}, {15}, {15: 1}, {18}, False)
    for broken in (record(2, 0, 0, 0, 5, 0), b"\1", struct.pack("=IHH", 10, 0, 4), b"\0" * 8):
        batch = MmapBatch()
        parse_records(broken, batch)
        assert batch.lost


@pytest.mark.parametrize(
    ("room", "lost"), [(60000, False), (8192, False), (4096, True), (0, True), (-4096, True)]
)
def test_a_ring_without_room_may_have_lost_some(room: int, lost: bool) -> None:
    """The kernel writes its record of losses only beside a later one, which may not come.

    ``room``: bytes that are free.
    """
    size = 16 * mmap.PAGESIZE
    record = struct.pack("=IHHIIII", 4, 0, 64, 11, 1, 11, 1) + bytes(40)
    memory = bytearray(mmap.PAGESIZE) + bytearray(record * (size // len(record)))
    struct.pack_into("@Q", memory, 1024, (size - room) // len(record) * len(record))
    ring = _Ring.__new__(_Ring)
    ring._size, ring._map = size, memory  # type: ignore[assignment]
    batch = MmapBatch()
    ring.drain(batch)
    assert batch.lost is lost
    assert batch.exits == (set() if room < 0 else {11})
    again = MmapBatch()
    ring.drain(again)
    assert again == MmapBatch()
