"""A live ``struct ncclComm``, decoded and checked."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from nccluprobe.nccl.layout.model import MAGIC, Layout

#: Reads (address, size) of the process; None when that fails.
Read = Callable[[int, int], bytes | None]

COUNTERS = 5
_MOST_RANKS = 10_000_000
_MOST_DEVICES = 4096
_MOST_RESULT = 64
_NAME = 256


@dataclass(frozen=True)
class CommState:
    """What a communicator's memory says; None: this layout does not tell.

    ``seqs`` counts the eager collectives so far: Broadcast, Reduce, AllGather,
    ReduceScatter, AllReduce (``SEQ_NAMES``).
    """

    address: int
    hash: int | None
    rank: int
    nranks: int
    device: int
    seqs: tuple[int, ...] | None
    async_error: int | None
    name: str | None
    init_state: int | None
    finalized: bool | None
    destroyed: bool | None


def read_comm(read: Read, address: int, layout: Layout) -> CommState | None:
    """The communicator at this address; None when there is none, or it is not ready."""
    if layout.searchable and layout.end_magic is not None:
        for place in (0, layout.end_magic):
            if _number(read, address + place, "<Q") != MAGIC:
                return None
    head = read(address + layout.rank, 12)
    if head is None:
        return None
    rank, nranks, device = struct.unpack("<3i", head)
    if not (0 < nranks <= _MOST_RANKS and 0 <= rank < nranks and -1 <= device < _MOST_DEVICES):
        return None
    value = None
    if layout.comm_hash is not None:
        value = _number(read, address + layout.comm_hash, "<Q")
        if not value:
            return None
    error = _field(read, address, layout.async_result, "<i")
    if error is not None and not 0 <= error < _MOST_RESULT:
        return None
    seqs = None
    if layout.seq_counts and layout.seq_number is not None:
        raw = read(address + layout.seq_number, 8 * COUNTERS)
        if raw is None:
            return None
        seqs = struct.unpack(f"<{COUNTERS}Q", raw)
        if max(seqs) >> 56:
            return None  # counted in years at any rate
    finalized = _field(read, address, layout.finalize_called, "<B")
    destroyed = _field(read, address, layout.destroy_flag, "<I")
    return CommState(
        address=address,
        hash=value,
        rank=rank,
        nranks=nranks,
        device=device,
        seqs=seqs,
        async_error=error,
        name=_name(read, address, layout),
        init_state=_field(read, address, layout.init_state, "<i"),
        finalized=None if finalized is None else finalized != 0,
        destroyed=None if destroyed is None else destroyed != 0,
    )


def _field(read: Read, address: int, offset: int | None, code: str) -> int | None:
    return None if offset is None else _number(read, address + offset, code)


def _number(read: Read, address: int, code: str) -> int | None:
    raw = read(address, struct.calcsize(code))
    if raw is None:
        return None
    (value,) = struct.unpack(code, raw)
    return int(value)


def _name(read: Read, address: int, layout: Layout) -> str | None:
    """The communicator's name, when it has one that can be read."""
    pointer = _field(read, address, layout.name, "<Q")
    if not pointer or pointer >> 47:
        return None
    # Up to the end of its page, which may be the last one that is mapped.
    raw = read(pointer, min(_NAME, 4096 - pointer % 4096))
    if raw is None:
        return None
    text, end, _ = raw.partition(b"\0")
    if not end or not text:
        return None
    decoded = text.decode("utf-8", "replace")
    return decoded if decoded.isprintable() else None
