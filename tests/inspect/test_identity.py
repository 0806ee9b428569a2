"""What a record of the live struct adds to a communicator: without privileges."""

from __future__ import annotations

from typing import Any

import pytest

from nccluprobe.capture.source import Library
from nccluprobe.collect.identity import Comm, Identity
from nccluprobe.nccl.api import BY_NAME
from nccluprobe.nccl.comm_struct import CommState, read_comm
from nccluprobe.nccl.layout.model import MAGIC, Layout
from nccluprobe.record import (
    FIELDS,
    KIND_CALL,
    KIND_IDENTITY,
    READ_FAULT,
    READ_OK,
    READ_OTHER,
    Record,
)

LAYOUT = Layout(
    rank=24,
    nranks=28,
    cuda_dev=32,
    method="code",
    confidence="checked",
    version="2.28.9",
    build_id=None,
    async_result=40,
    comm_hash=16,
    seq_number=48,
    start_magic=0,
    end_magic=88,
    size=96,
)
HASH = 0xFEED


def record(**values: int) -> Record:
    return Record(**{**{f.name: 0 for f in FIELDS}, "lib": 1, "comm_gen": 7, **values})


def identity(**values: int) -> Record:
    seqs = {"count": 1, "stream": 2, "call_idx": 3, "order_idx": 4, "nccl_seq": 5}
    who = {"peer": 1, "nranks": 4, "color": 2, "uid_hash": HASH}
    return record(**{"kind": KIND_IDENTITY, "comm": 0x1000, **seqs, **who, **values})


@pytest.fixture
def ids() -> Identity:
    return Identity(lambda lib: Library(lib, "lib", "2.28.9", None, LAYOUT))


def never(address: int, layout: Layout) -> CommState | None:
    raise AssertionError("read again")


def test_a_late_one_gets_everything(ids: Identity) -> None:
    comm = ids.identified(identity(rc=READ_OK), never)
    assert comm is not None and comm.learnt == "struct"
    assert (comm.hash, comm.comm_rank, comm.nranks, comm.device) == (HASH, 1, 4, 2)
    line = comm.line()
    assert line["seqs"] == [1, 2, 3, 4, 5] and line["base_seq"] == 15
    assert ids.seen(record(kind=KIND_CALL, comm=0x1000)) == (comm, False)


def test_a_fault_is_read_again_and_gives_no_counters(ids: Identity) -> None:
    asked: list[int] = []

    def again(address: int, layout: Layout) -> CommState | None:
        asked.append(address)
        return CommState(address, HASH, 3, 8, 0, (9,) * 5, 0, "name", None, None, None)

    blank = dict.fromkeys(("peer", "nranks", "color", "uid_hash"), 0)
    comm = ids.identified(identity(rc=READ_FAULT, **blank), again)
    assert asked == [0x1000] and comm is not None
    assert (comm.learnt, comm.hash, comm.comm_rank, comm.name) == ("struct", HASH, 3, "name")
    assert comm.seqs is None and "base_seq" not in comm.line()


@pytest.mark.parametrize("status", [READ_OTHER, READ_FAULT])
def test_no_communicator_stays_unknown(ids: Identity, status: int) -> None:
    comm = ids.identified(identity(rc=status), lambda a, b: None)
    assert comm is not None and comm.learnt == "unknown" and comm.hash is None
    assert ids.identified(identity(rc=status), lambda a, b: None) is None


def made(ids: Identity) -> Comm:
    init = record(
        kind=KIND_CALL,
        api=BY_NAME["ncclCommInitRank"].id,
        comm_gen=0,
        new_comm=0x1000,
        new_gen=7,
        peer=1,
        nranks=4,
        uid_hash=HASH,
        t_exit=1,
    )
    (comm,) = ids.made(init)
    return comm


def test_one_seen_from_its_making_is_not_written_again(ids: Identity) -> None:
    comm = made(ids)
    zero = dict.fromkeys(("count", "stream", "call_idx", "order_idx", "nccl_seq"), 0)
    assert ids.identified(identity(rc=READ_OK, **zero), never) is None
    assert comm.learnt == "init" and comm.seqs is None


def test_the_struct_is_believed_about_the_hash(ids: Identity) -> None:
    comm = made(ids)
    assert ids.identified(identity(rc=READ_OK, uid_hash=HASH + 1), never) is comm
    assert comm.hash == HASH + 1 and comm.learnt == "init"


def test_children_of_a_late_parent_get_no_computed_hash(ids: Identity) -> None:
    ids.identified(identity(rc=READ_OK), never)
    split = record(
        kind=KIND_CALL,
        api=BY_NAME["ncclCommSplit"].id,
        comm=0x1000,
        new_comm=0x2000,
        new_gen=8,
        order_idx=1,
        t_exit=1,
    )
    *_, child = ids.made(split)
    assert child.hash is None  # splits before our time are not counted
    known = ids.identified(identity(rc=READ_OK, comm_gen=8, comm=0x2000, uid_hash=5), never)
    assert known is child and child.hash == 5 and child.learnt == "split"


class TestStruct:
    def memory(self, **words: int) -> Any:
        made = bytearray(96)
        values = {"start": MAGIC, "end": MAGIC, "hash": HASH, "rank": 1, "nranks": 4, **words}
        for name, at, size in (
            ("start", 0, 8),
            ("hash", 16, 8),
            ("rank", 24, 4),
            ("nranks", 28, 4),
            ("dev", 32, 4),
            ("error", 40, 4),
            ("seq", 80, 8),
            ("end", 88, 8),
        ):
            value = values.get(name, 0) & (1 << 8 * size) - 1
            made[at : at + size] = value.to_bytes(size, "little")

        def read(address: int, size: int) -> bytes | None:
            at = address - 0x5000
            return bytes(made[at : at + size]) if 0 <= at <= 96 - size else None

        return read

    def test_a_sound_one(self) -> None:
        state = read_comm(self.memory(seq=12), 0x5000, LAYOUT)
        assert state is not None and state.seqs == (0, 0, 0, 0, 12) and state.rank == 1

    @pytest.mark.parametrize(
        "wrong",
        [
            {"start": 1},
            {"end": 1},
            {"hash": 0},
            {"rank": 4},
            {"rank": -1},
            {"nranks": 0},
            {"nranks": -5},
            {"dev": -2},
            {"error": 1000},
            {"seq": 1 << 60},
        ],
    )
    def test_nonsense_is_none(self, wrong: dict[str, int]) -> None:
        assert read_comm(self.memory(**wrong), 0x5000, LAYOUT) is None

    def test_what_cannot_be_read_is_none(self) -> None:
        assert read_comm(lambda address, size: None, 0x5000, LAYOUT) is None
        assert read_comm(self.memory(), 0x5008, LAYOUT) is None
