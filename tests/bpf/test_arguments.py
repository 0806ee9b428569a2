"""Every api's arguments arrive as they were passed; the hashes are NCCL's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from bpf.conftest import Attach, Probed
from bpf.fakelib import FakeLib, config, functions, uid
from nccluprobe.capture.ebpf_source import EbpfSource
from nccluprobe.capture.source import Library
from nccluprobe.nccl.api import API_TABLE, BY_NAME, Api, Kind, Role
from nccluprobe.record import KIND_CALL, UNKNOWN_SEQ, Record

pytestmark = pytest.mark.root

# Wider than the field where the ABI leaves the upper half undefined.
_VALUES: dict[Role, int] = {
    Role.COUNT: 0x1122334455667788,
    Role.SIZE: 0x99AABBCCDDEEFF,
    Role.DATATYPE: 9,
    Role.OP: 4,
    Role.ROOT: 5,
    Role.PEER: 6,
    Role.COMM: 0x7F0011223340,
    Role.STREAM: 0x7F5566778890,
    Role.NRANKS: 3,
    Role.RANK: 2,
    Role.COLOR: -7,
    Role.KEY: -9,
    Role.OTHER: 0xDEADDEADDEADDEAD,
}
_FIELDS: dict[Role, str] = {
    Role.COUNT: "count",
    Role.SIZE: "count",
    Role.DATATYPE: "datatype",
    Role.OP: "op",
    Role.ROOT: "peer",
    Role.PEER: "peer",
    Role.RANK: "peer",
    Role.KEY: "peer",
    Role.COMM: "comm",
    Role.STREAM: "stream",
    Role.NRANKS: "nranks",
    Role.COLOR: "color",
}
ID_A = bytes(range(128))
ID_B = bytes((37 * i + 11) % 256 for i in range(128))
#: facts: commHash of both ids, and the log's commId where it differs.
HASHES = {
    "2.28.9": ((0x6AFE1CC17717E1F4, 0), (0x3002DCD1BBE6653D, 0)),
    "2.21.5": (
        (0xBF47C767CBDF3105, 0x20B485532CBD7F67),
        (0x65BB3B0CBA527185, 0xAE3632082B38C8D3),
    ),
    "2.16.2": ((0x20B485532CBD7F67, 0), (0xAE3632082B38C8D3, 0)),
}


@pytest.fixture(scope="module", params=["multi", "perf"])
def all_apis(request: pytest.FixtureRequest, fake_path: Path) -> Iterator[Probed]:
    source = EbpfSource(link=request.param)
    assert source.link_kind == request.param
    source.add_library(Library(7, str(fake_path), "2.28.9", None))
    source.attach(7, str(fake_path), functions(fake_path))
    yield Probed(source, 7)
    source.close()


def call(fake: FakeLib, api: Api) -> int:
    """Call it with the values above; the time just before."""
    held: list[object] = []
    args: list[object] = []
    for role in api.args:
        if role in (Role.NEW_COMM, Role.COMM_ARRAY):
            array = (ctypes.c_uint64 * 8)()
            held.append(array)
            args.append(ctypes.addressof(array))
        elif role is Role.UID:
            args.append(uid(ID_A))
        elif role is Role.UID_PTR:
            held.append(uid(ID_A))
            args.append(ctypes.addressof(held[-1]))  # type: ignore[arg-type]
        elif role is Role.CONFIG:
            held.append(config(blocking=0))
            args.append(ctypes.addressof(held[-1]))  # type: ignore[arg-type]
        else:
            args.append(_VALUES[role])
    return int(getattr(fake.dll, api.name)(*args))


@pytest.mark.parametrize("api", API_TABLE, ids=lambda api: api.name)
def test_arguments(all_apis: Probed, fake: FakeLib, api: Api) -> None:
    all_apis.records(0)
    fake.set(rc=3)
    assert call(fake, api) == (0 if api.kind is Kind.HELPER else 3)
    found = all_apis.records()
    if api.kind is Kind.HELPER:
        assert found == []
        return
    assert [r.api for r in found] == [api.id]
    got = found[0]
    for role in api.args:
        if role in _FIELDS:
            assert getattr(got, _FIELDS[role]) == _VALUES[role], role
    unused = set(_FIELDS.values()) - {_FIELDS[r] for r in api.args if r in _FIELDS}
    assert {f: getattr(got, f) for f in unused} == dict.fromkeys(unused, 0)
    assert (got.kind, got.lib, got.rc, got.nccl_seq) == (KIND_CALL, 7, 3, UNKNOWN_SEQ)
    assert 0 < got.t_enter <= got.t_exit
    assert bool(got.flags & 8) == api.has(Role.CONFIG)
    assert (got.uid_hash != 0) == (api.makes_comm in ("init", "init_all"))
    assert (got.new_comm, got.new_gen) == (0, 0)


def _init(fake: FakeLib, data: bytes) -> None:
    out = ctypes.c_uint64()
    fake.dll.ncclCommInitRank(ctypes.addressof(out), 2, uid(data), 1)


@pytest.mark.parametrize("version", HASHES)
def test_hashes(attach: Attach, fake: FakeLib, version: str) -> None:
    probed = attach({"ncclCommInitRank", "ncclCommInitRankScalable"}, version=version)
    fake.set(handle=0x10000)
    for data in (ID_A, ID_B):
        _init(fake, data)
    ids = (ctypes.c_ubyte * 256)(*ID_B, *ID_A)
    out = ctypes.c_uint64()
    fake.dll.ncclCommInitRankScalable(ctypes.addressof(out), 2, 1, 2, ctypes.addressof(ids), 0)
    found = [(r.uid_hash, r.log_hash) for r in probed.records()]
    a, b = HASHES[version]
    assert found == [a, b, b]


def test_init_all_hash(probed: Probed, fake: FakeLib) -> None:
    fake.set(handle=0x900000)
    fake.set_uid(ID_B)
    array = (ctypes.c_uint64 * 4)()
    fake.dll.ncclCommInitAll(ctypes.addressof(array), 3, 0)
    (record,) = probed.records()
    assert record.uid_hash == 0x3002DCD1BBE6653D
    assert record.new_comm == 0x900000
    for i in range(3):
        fake.dll.ncclAllReduce(0, 0, 1, 7, 0, 0x900000 + 0x1000 * i, 0)
    assert [r.comm_gen - record.new_gen for r in probed.records()] == [0, 1, 2]
    fake.dll.ncclAllReduce(0, 0, 1, 7, 0, 0x900000 + 0x3000, 0)
    (other,) = probed.records()
    assert other.flags & 16 and other.comm_gen > record.new_gen + 2


def test_unreadable_pointers(probed: Probed, fake: FakeLib) -> None:
    """Pointers that lead nowhere are no reason to lose the call."""
    fake.set(rc=4)
    fake.dll.ncclCommInitRankScalable(8, 2, 1, 1, 16, 24)
    fake.dll.ncclCommSplit(0, 1, 2, 0, 0)
    init, split = probed.records()
    assert (init.uid_hash, init.nranks, init.rc) == (0, 2, 4)
    assert (split.comm_gen, split.color, split.peer) == (0, 1, 2)


def test_names(probed: Probed, fake: FakeLib) -> None:
    out = ctypes.c_uint64()
    fake.set(handle=0x7000)

    def name_of(given: bytes | None, size: int = 64) -> bytes | None:
        named = config(name=given, size=size)
        fake.dll.ncclCommInitRankConfig(
            ctypes.addressof(out), 2, uid(ID_A), 0, ctypes.addressof(named)
        )
        found = probed.records()
        made = found[0].new_gen
        assert made and [r.new_gen for r in found] == [made] * len(found)
        assert [r.kind for r in found[1:]] in ([], [2])
        return _name_in(found[1]) if len(found) > 1 else None

    assert name_of(b"tp_group") == b"tp_group"
    assert name_of(b"x" * 100) == b"x" * 63
    assert name_of(None) is None
    assert name_of(b"") is None
    assert name_of(b"old config", size=48) is None


def _name_in(record: Record) -> bytes:
    from nccluprobe.record import NAME_OFFSET, NAME_SIZE, STRUCT

    raw = STRUCT.pack(*record)[NAME_OFFSET : NAME_OFFSET + NAME_SIZE]
    return raw.split(b"\0")[0]


def test_table_is_complete() -> None:
    assert set(BY_NAME) == {api.name for api in API_TABLE}
