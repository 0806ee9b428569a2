"""Recorded bytes of a real run: the ring's reader and the record, without privilege."""

from __future__ import annotations

import mmap
import os
import platform
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from nccluprobe.capture.ring import MappedRing
from nccluprobe.nccl.api import BY_ID
from nccluprobe.record import (
    KIND_CALL,
    KIND_NAME,
    KIND_NEW_COMM,
    NAME_OFFSET,
    NAME_SIZE,
    SIZE,
    STRUCT,
    UNKNOWN_SEQ,
    Record,
)

RING = Path(__file__).parent.parent / "data" / "ring" / "calls.bin"
PAGE = mmap.PAGESIZE
STRIDE = SIZE + 8
BUSY, DISCARDED = 1 << 31, 1 << 30

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the mapped ring is for x86-64"
)


class FakeRing:
    """A memory file laid out like the kernel's ring; the second copy of the data is kept equal."""

    def __init__(self, size: int = 64 * PAGE) -> None:
        self.size = size
        self.fd = os.memfd_create("ring")
        os.truncate(self.fd, 2 * PAGE + 2 * size)
        self.map = mmap.mmap(self.fd, 2 * PAGE + 2 * size)
        self.ring = MappedRing(self.fd, size)
        self.producer = 0

    def consumer(self) -> int:
        return int(struct.unpack_from("=Q", self.map, 0)[0])

    def start_at(self, position: int) -> None:
        """Both ends there, as if much had passed."""
        self.producer = position
        struct.pack_into("=Q", self.map, 0, position)
        struct.pack_into("=Q", self.map, PAGE, position)

    def write(self, data: bytes) -> None:
        for i in range(0, len(data), 8):
            at = 2 * PAGE + (self.producer + i) % self.size
            for base in (at, at + self.size):
                self.map[base : base + 8] = data[i : i + 8]
        self.producer += len(data)
        struct.pack_into("=Q", self.map, PAGE, self.producer)

    def put(self, payload: bytes, flags: int = 0) -> int:
        """One entry; where its header is."""
        at = self.producer
        padded = payload + bytes(-len(payload) % 8)
        self.write(struct.pack("=II", len(payload) | flags, 0) + padded)
        return at

    def commit(self, at: int, length: int = SIZE) -> None:
        struct.pack_into("=I", self.map, 2 * PAGE + at % self.size, length)
        struct.pack_into("=I", self.map, 2 * PAGE + self.size + at % self.size, length)

    def read(self) -> list[bytes]:
        joined = b"".join(self.ring.chunks())
        return [joined[i : i + SIZE] for i in range(0, len(joined), SIZE)]

    def close(self) -> None:
        self.ring.close()
        self.map.close()
        os.close(self.fd)


@pytest.fixture
def ring() -> Iterator[FakeRing]:
    made = FakeRing()
    yield made
    made.close()


def payload(i: int) -> bytes:
    return struct.pack("=I", i) * (SIZE // 4)


def recorded(ring: FakeRing) -> list[Record]:
    ring.write(RING.read_bytes())
    return [Record(*row) for chunk in ring.ring.chunks() for row in STRUCT.iter_unpack(chunk)]


def test_recorded_run(ring: FakeRing) -> None:
    records = recorded(ring)
    assert ring.consumer() == ring.producer == len(RING.read_bytes())
    assert len(records) == RING.stat().st_size // STRIDE
    calls = [r for r in records if r.kind == KIND_CALL]
    assert [BY_ID[r.api].name.removeprefix("nccl") for r in calls] == [
        "CommInitRankConfig",
        *["AllReduce"] * 20,
        "Bcast",
        "GroupStart",
        "CommSplit",
        "GroupEnd",
        "AllReduce",
        "GroupStart",
        "Send",
        "Recv",
        "GroupEnd",
        "AllReduce",
        "CommDestroy",
        "CommFinalize",
        "CommDestroy",
    ]
    init = calls[0]
    assert init.uid_hash == 0x6AFE1CC17717E1F4
    world = [r for r in calls if r.comm_gen == init.new_gen]
    assert [r.call_idx for r in world] == list(range(len(world)))
    assert {r.comm for r in world} == {init.new_comm}
    assert [r.count for r in calls[1:21]] == list(range(20))
    assert {r.nccl_seq for r in calls} == {UNKNOWN_SEQ}
    assert all(0 < r.t_enter <= r.t_exit for r in calls)
    refused = calls[-4]
    assert (refused.rc, refused.comm, refused.comm_gen, refused.op) == (4, 0, 0, 99)


def test_recorded_child(ring: FakeRing) -> None:
    records = recorded(ring)
    (made,) = [r for r in records if r.kind == KIND_NEW_COMM]
    (split,) = [r for r in records if r.kind == KIND_CALL and BY_ID[r.api].name == "ncclCommSplit"]
    assert (made.t_enter, made.comm_gen, made.order_idx) == (split.t_enter, split.comm_gen, 1)
    assert (made.color, split.new_gen) == (4, 0)
    on_child = [r for r in records if r.comm_gen == made.new_gen]
    assert [(r.comm, r.call_idx) for r in on_child] == [(made.new_comm, 0), (made.new_comm, 1)]


def test_recorded_name(ring: FakeRing) -> None:
    (name,) = [r for r in recorded(ring) if r.kind == KIND_NAME]
    raw = STRUCT.pack(*name)[NAME_OFFSET : NAME_OFFSET + NAME_SIZE]
    assert raw == b"world".ljust(NAME_SIZE, b"\0")
    assert name.new_gen == 1


def test_stops_at_a_busy_entry(ring: FakeRing) -> None:
    ring.put(payload(1))
    busy = ring.put(payload(2), BUSY)
    ring.put(payload(3))
    assert ring.read() == [payload(1)]
    assert ring.read() == []
    ring.commit(busy)
    assert ring.read() == [payload(2), payload(3)]
    assert ring.ring.unknown == 0


def test_skips_what_is_no_record(ring: FakeRing) -> None:
    ring.put(payload(1))
    ring.put(payload(2), DISCARDED)
    ring.put(b"x" * 13)
    ring.put(b"y" * 800)
    ring.put(payload(3))
    assert ring.read() == [payload(1), payload(3)]
    assert ring.ring.unknown == 2
    assert ring.consumer() == ring.producer


def test_wraps_around(ring: FakeRing) -> None:
    ring.start_at((1 << 40) - 3 * STRIDE // 8 * 8)
    sent = []
    for i in range(5000):
        ring.put(payload(i))
        sent.append(payload(i))
        if i % 97 == 0:
            assert ring.read() == sent
            sent = []
    assert ring.read() == sent


def test_many_records_come_in_chunks(ring: FakeRing) -> None:
    big = FakeRing(1 << 22)
    n = 20_000
    for i in range(n):
        big.put(payload(i))
    assert big.ring.fill() == pytest.approx(n * STRIDE / (1 << 22))
    chunks = list(big.ring.chunks())
    assert len(chunks) > 1 and b"".join(chunks) == b"".join(payload(i) for i in range(n))
    assert big.ring.fill() == 0.0
    big.close()


def test_empty(ring: FakeRing) -> None:
    assert ring.read() == [] and ring.ring.fill() == 0.0
