"""The CPU stand-in for libnccl: identity, blocking in time, groups, ends, sanitizers."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"
SHM = Path("/dev/shm")
FLOAT32, SUM = 7, 0
SUCCESS, SYSTEM, ARGUMENT, USAGE, REMOTE, PROGRESS = 0, 2, 4, 5, 6, 7
ID_B = bytes((37 * i + 11) % 256 for i in range(128))
FORK = multiprocessing.get_context("fork")

_spec = importlib.util.spec_from_file_location("native_build", NATIVE / "build.py")
assert _spec and _spec.loader
native_build = importlib.util.module_from_spec(_spec)
sys.modules["native_build"] = native_build
_spec.loader.exec_module(native_build)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return native_build.build(tmp_path_factory.mktemp("native"), strict=True)


# ---- a thin binding --------------------------------------------------------------------------


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("ints", ctypes.c_int * 3),
        ("net_name", ctypes.c_char_p),
        ("more", ctypes.c_int * 2),
        ("comm_name", ctypes.c_char_p),
        ("rest", ctypes.c_int * 4),
    ]


PTR, SIZE, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
OUT = ctypes.POINTER(PTR)
SIGNATURES = {
    "ncclCommInitRank": [OUT, INT, UniqueId, INT],
    "ncclCommInitRankConfig": [OUT, INT, UniqueId, INT, ctypes.POINTER(Config)],
    "ncclCommInitAll": [OUT, INT, ctypes.POINTER(INT)],
    "ncclCommSplit": [PTR, INT, INT, OUT, PTR],
    "ncclCommShrink": [PTR, ctypes.POINTER(INT), INT, OUT, PTR, INT],
    "ncclCommGrow": [PTR, INT, ctypes.POINTER(UniqueId), INT, OUT, PTR],
    "ncclCommGetUniqueId": [PTR, ctypes.POINTER(UniqueId)],
    "ncclCommFinalize": [PTR],
    "ncclCommDestroy": [PTR],
    "ncclCommAbort": [PTR],
    "ncclCommUserRank": [PTR, ctypes.POINTER(INT)],
    "ncclCommGetAsyncError": [PTR, ctypes.POINTER(INT)],
    "ncclAllReduce": [PTR, PTR, SIZE, INT, INT, PTR, PTR],
    "ncclBroadcast": [PTR, PTR, SIZE, INT, INT, PTR, PTR],
    "ncclBcast": [PTR, SIZE, INT, INT, PTR, PTR],
    "ncclAlltoAll": [PTR, PTR, SIZE, INT, PTR, PTR],
    "ncclSend": [PTR, SIZE, INT, INT, PTR, PTR],
    "ncclRecv": [PTR, SIZE, INT, INT, PTR, PTR],
    "simStreamSynchronize": [PTR],
    "simStreamQuery": [PTR],
    "simStreamDestroy": [PTR],
}


class Nccl:
    """The library of one process, with calls as short as the tests need them."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))
        for name, types in SIGNATURES.items():
            getattr(self.lib, name).argtypes = types
        self.lib.simStreamCreate.restype = PTR

    def __getattr__(self, name: str) -> Callable[..., int]:
        return getattr(self.lib, name)

    def unique_id(self) -> UniqueId:
        uid = UniqueId()
        assert self.ncclGetUniqueId(ctypes.byref(uid)) == SUCCESS
        return uid

    def init(self, uid: UniqueId, nranks: int, rank: int) -> int:
        comm = PTR()
        assert self.ncclCommInitRank(ctypes.byref(comm), nranks, uid, rank) == SUCCESS
        return comm.value or 0

    def split(self, comm: int, color: int, key: int = 0) -> int | None:
        child = PTR()
        assert self.ncclCommSplit(comm, color, key, ctypes.byref(child), None) == SUCCESS
        return child.value

    def allreduce(self, comm: int, count: int = 8, stream: int | None = None) -> int:
        return self.ncclAllReduce(None, None, count, FLOAT32, SUM, comm, stream)

    def sync(self, stream: int | None = None) -> int:
        return self.simStreamSynchronize(stream)

    def field(self, comm: int, name: str) -> int:
        """A field of the struct, by its distance from rank, which NCCL keeps too."""
        rank = self.rank_offset()
        kind, distance = {
            "hash": (ctypes.c_uint64, -8),
            "rank": (INT, 0),
            "nranks": (INT, 4),
            "dev": (INT, 8),
        }[name]
        return kind.from_address(comm + rank + distance).value

    def rank_offset(self) -> int:
        """As the tool does: the displacement of the last 32-bit load in ncclCommUserRank."""
        address = ctypes.cast(self.lib.ncclCommUserRank, PTR).value or 0
        code = ctypes.string_at(address, 256)
        loads = re.findall(rb"\x8b[\x80-\xbf]\x24?(..[\x00-\x1f]\x00)", code, re.S)
        return max(int.from_bytes(d, "little") for d in loads)


def elapsed(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def random_id() -> UniqueId:
    return UniqueId.from_buffer_copy(os.urandom(128))


def ranks(
    path: Path,
    nranks: int,
    body: Callable[[Nccl, UniqueId, int], object],
    uid: UniqueId | None = None,
    timeout: float = 20,
) -> list[object]:
    """Runs body on processes and gives what each returned; a failure or a hang fails the test."""
    uid = uid or random_id()
    pipes = []
    processes = []
    for rank in range(nranks):
        here, there = FORK.Pipe(duplex=False)

        def main(rank: int = rank, pipe: object = there) -> None:
            pipe.send(body(Nccl(path), uid, rank))  # type: ignore[attr-defined]

        process = FORK.Process(target=main)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        deadline = time.monotonic() + timeout
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} hangs"
            results.append(pipe.recv())
        return results
    finally:
        for process in processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()


def segment(uid: UniqueId) -> Path:
    """The file that joins the ranks of a communicator made from this id."""
    p, q, mask = 1 ^ 128, 1, (1 << 64) - 1
    for word in struct.unpack("<16Q", bytes(uid)):
        p = (p + q) & mask
        q ^= p
        p = ((p ^ (p >> 31)) * 0x9DE62BBC8CEF3CE3) & mask
        q = ((q ^ (q >> 32)) * 0x485CD6311B599E79) & mask
        p = (p + word) & mask
    h = (((p ^ (p >> 31)) * 0xBAC3BD562846DE6B) + q) & mask
    h = ((h ^ (h >> 32)) * 0x995A187A14E7B445) & mask
    return SHM / f"simnccl-{h:016x}"


@pytest.fixture(autouse=True)
def nothing_left(built: dict[str, Path]) -> Iterator[None]:
    """Every test leaves no segment that the sweep would not remove."""
    yield
    Nccl(built["libsimnccl.so"]).simCleanup()


# ---- identity --------------------------------------------------------------------------------

HASHES_C = r"""
#include <stdio.h>
#include "ncp_hash.h"
int main(void) {
  unsigned char id[128];
  for (int v = 0; v < 2; v++) {
    for (int i = 0; i < 128; i++) id[i] = (unsigned char)(v ? 37 * i + 11 : i);
    printf("%llx %llx %llx %llx\n", ncp_hash_djb2a(id), ncp_hash_uniqueid(id), ncp_hash_226(id),
           ncp_hash_226_child(ncp_hash_226(id), 1, 3));
  }
}
"""
HASHES = [
    [0xBF47C767CBDF3105, 0x20B485532CBD7F67, 0x6AFE1CC17717E1F4, 0x221160334D3DEF2E],
    [0x65BB3B0CBA527185, 0xAE3632082B38C8D3, 0x3002DCD1BBE6653D, 0x05E49A444B66BDB0],
]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="values of signed char")
def test_hash_check_values(tmp_path: Path) -> None:
    source = tmp_path / "hashes.c"
    source.write_text(HASHES_C)
    program = tmp_path / "hashes"
    subprocess.run(
        ["cc", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE / 'include'}", source, "-o", program],
        check=True,
    )
    out = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert [[int(word, 16) for word in line.split()] for line in out.splitlines()] == HASHES


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 code")
@pytest.mark.parametrize(("version", "expected"), [(None, 2), ("2.21.5", 0)])
def test_struct_holds_the_hash(version: str | None, expected: int, tmp_path: Path) -> None:
    path = native_build.build(tmp_path, ["libsimnccl.so"], sim_version=version)["libsimnccl.so"]

    def body(nccl: Nccl, _uid: UniqueId, _rank: int) -> object:
        number = INT()
        nccl.ncclGetVersion(ctypes.byref(number))
        comm = nccl.init(UniqueId.from_buffer_copy(ID_B), 1, 0)
        return number.value, nccl.field(comm, "hash")

    assert ranks(path, 1, body) == [(22105 if version else 22809, HASHES[1][expected])]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 code")
def test_split_and_shrink_agree_across_ranks(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 4, rank)
        first = nccl.split(comm, rank % 2, key=-rank)
        second = nccl.split(comm, -1 if rank == 0 else 7)
        exclude = (INT * 1)(3)
        shrunk = PTR()
        if rank != 3:
            assert nccl.ncclCommShrink(comm, exclude, 1, ctypes.byref(shrunk), None, 0) == SUCCESS
        views = [
            c and (nccl.field(c, "hash"), nccl.field(c, "rank"), nccl.field(c, "nranks"))
            for c in (comm, first, second, shrunk.value)
        ]
        assert first and nccl.allreduce(first) == SUCCESS and nccl.sync() == 0
        return views

    views = ranks(built["libsimnccl.so"], 4, body)
    world, first, second, shrunk = (list(column) for column in zip(*views, strict=True))
    assert [v[1:] for v in world] == [(r, 4) for r in range(4)]
    assert len({v[0] for v in world}) == 1
    assert first[0][0] == first[2][0] != first[1][0] == first[3][0]
    assert [v[1:] for v in first] == [(1, 2), (1, 2), (0, 2), (0, 2)]  # the key turns the order
    assert second[0] is None and len({v[0] for v in second[1:]}) == 1
    assert shrunk[3] is None and [v[1:] for v in shrunk[:3]] == [(r, 3) for r in range(3)]


def test_grow(built: dict[str, Path]) -> None:
    path = built["libsimnccl.so"]
    here, there = FORK.Pipe(duplex=False)

    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        grown = PTR()
        if rank < 2:
            comm = nccl.init(uid, 2, rank)
            if rank == 0:
                new = UniqueId()
                assert nccl.ncclCommGetUniqueId(comm, ctypes.byref(new)) == SUCCESS
                there.send_bytes(bytes(new))
            rc = nccl.ncclCommGrow(comm, 3, None, -1, ctypes.byref(grown), None)
        else:
            new = UniqueId.from_buffer_copy(here.recv_bytes())
            rc = nccl.ncclCommGrow(None, 3, ctypes.byref(new), 2, ctypes.byref(grown), None)
        assert rc == SUCCESS and grown.value
        return nccl.allreduce(grown.value) == SUCCESS and nccl.sync() == 0

    assert ranks(path, 3, body) == [True] * 3


# ---- blocking in time ------------------------------------------------------------------------


def test_first_collective_blocks_then_calls_queue(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        times = [elapsed(lambda: time.sleep(0.3 * rank) or nccl.init(uid, 2, rank))]
        uid2 = UniqueId.from_buffer_copy(bytes(uid)[::-1])
        comm = nccl.init(uid2, 2, rank)
        for _ in range(2):
            time.sleep(0.3 * rank)
            times.append(elapsed(lambda: nccl.allreduce(comm)))
        times.append(elapsed(nccl.sync))
        return times

    init, first, second, sync = ranks(built["libsimnccl.so"], 2, body)[0]  # rank 0 waits
    assert 0.2 < init < 2
    assert 0.2 < first < 2
    assert second < 0.1
    assert 0.2 < sync < 2


def test_launch_queue_blocks_call_1022(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 2, rank)
        nccl.allreduce(comm)
        nccl.sync()
        time.sleep(0.5 * rank)
        slow = [i for i in range(1, 1500) if elapsed(lambda: nccl.allreduce(comm)) > 0.2]
        nccl.sync()
        return slow

    assert ranks(built["libsimnccl.so"], 2, body)[0] == [1022]


def test_device_goes_on_while_the_host_is_elsewhere(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 2, rank)
        for _ in range(50):
            nccl.allreduce(comm)
        if rank == 1:
            time.sleep(1)
        return elapsed(nccl.sync)

    assert ranks(built["libsimnccl.so"], 2, body)[0] < 0.7


def test_stream_order_across_communicators_can_deadlock(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        world = nccl.init(uid, 2, rank)
        comms = [world, nccl.split(world, 0)]
        for comm in comms:
            nccl.allreduce(comm)
        nccl.sync()
        for comm in comms if rank else reversed(comms):
            nccl.allreduce(comm)
        time.sleep(0.2)
        stuck = nccl.simStreamQuery(None)
        time.sleep(0.3)  # the other rank has looked, too
        for comm in comms:
            nccl.ncclCommAbort(comm)
        return stuck, nccl.simStreamQuery(None)

    assert ranks(built["libsimnccl.so"], 2, body) == [(600, 0), (600, 0)]


def test_other_call_in_the_slot_never_completes(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 2, rank)
        nccl.allreduce(comm, count=8 + rank)
        time.sleep(0.2)
        stuck = nccl.simStreamQuery(None)
        time.sleep(0.3)
        nccl.ncclCommAbort(comm)
        return stuck

    assert ranks(built["libsimnccl.so"], 2, body) == [600, 600]


def test_small_send_is_buffered_large_is_not(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 2, rank)
        move = nccl.ncclRecv if rank else nccl.ncclSend
        assert move(None, 8, FLOAT32, 1 - rank, comm, None) == SUCCESS
        nccl.sync()
        times = []
        for count in (8, 1 << 20):
            time.sleep(0.3 * rank)
            times.append(
                elapsed(
                    lambda count=count: (
                        move(None, count, FLOAT32, 1 - rank, comm, None),
                        nccl.sync(),
                    )
                )
            )
        return times

    small, large = ranks(built["libsimnccl.so"], 2, body)[0]
    assert small < 0.1
    assert large > 0.2


def test_first_p2p_group_blocks_in_group_end(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 2, rank)
        time.sleep(0.3 * rank)
        nccl.ncclGroupStart()
        inside = elapsed(lambda: nccl.ncclSend(None, 8, FLOAT32, 1 - rank, comm, None))
        nccl.ncclRecv(None, 8, FLOAT32, 1 - rank, comm, None)
        end = elapsed(nccl.ncclGroupEnd)
        nccl.sync()
        assert nccl.ncclAlltoAll(None, None, 8, FLOAT32, comm, None) == SUCCESS
        nccl.sync()
        return inside, end

    inside, end = ranks(built["libsimnccl.so"], 2, body)[0]
    assert inside < 0.1
    assert end > 0.2


# ---- groups, arguments -----------------------------------------------------------------------


def test_group_is_all_or_none(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 2, rank)
        nccl.allreduce(comm)
        codes = []
        if rank == 0:  # were the good call queued, the ranks would disagree from here on
            codes = [
                nccl.ncclGroupStart(),
                nccl.ncclGroupStart(),
                nccl.allreduce(comm),
                nccl.allreduce(None),
                nccl.ncclGroupEnd(),
                nccl.ncclGroupEnd(),
            ]
        nccl.ncclGroupStart()
        for _ in range(3):
            nccl.allreduce(comm)
        nccl.ncclGroupEnd()
        return codes, nccl.sync()

    assert ranks(built["libsimnccl.so"], 2, body) == [
        ([SUCCESS, SUCCESS, SUCCESS, ARGUMENT, SUCCESS, ARGUMENT], 0),
        ([], 0),
    ]


def test_arguments(built: dict[str, Path]) -> None:
    nccl = Nccl(built["libsimnccl.so"])
    comm = nccl.init(nccl.unique_id(), 1, 0)
    assert nccl.allreduce(comm) == SUCCESS
    assert nccl.allreduce(comm, 0) == SUCCESS
    assert nccl.ncclAllReduce(None, None, 0, 99, SUM, comm, None) == ARGUMENT
    assert nccl.ncclAllReduce(None, None, 1, FLOAT32, 77, comm, None) == ARGUMENT
    assert nccl.ncclBroadcast(None, None, 1, FLOAT32, 5, comm, None) == ARGUMENT
    assert nccl.ncclSend(None, 1, FLOAT32, 1, comm, None) == ARGUMENT
    assert nccl.ncclGroupEnd() == USAGE
    bad = PTR(57005)
    assert nccl.ncclCommInitRank(ctypes.byref(bad), 2, UniqueId(), 5) == ARGUMENT
    assert bad.value == 57005
    for name in ("Destroy", "Abort", "Finalize"):
        assert getattr(nccl, f"ncclComm{name}")(None) == SUCCESS
    assert nccl.ncclCommDestroy(comm) == SUCCESS


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 code")
def test_init_in_group(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        time.sleep(0.3 * rank)
        comm = PTR()
        nccl.ncclGroupStart()
        start = time.monotonic()
        assert nccl.ncclCommInitRank(ctypes.byref(comm), 2, uid, rank) == SUCCESS
        inner = time.monotonic() - start
        assert comm.value
        early = nccl.field(comm.value, "hash"), nccl.field(comm.value, "nranks")
        end = elapsed(nccl.ncclGroupEnd)
        return inner, early, end, nccl.field(comm.value, "nranks")

    inner, early, end, nranks = ranks(built["libsimnccl.so"], 2, body)[0]
    assert inner < 0.1 and early == (0, 0) and end > 0.2 and nranks == 2


def test_init_all_and_one_thread_per_device(built: dict[str, Path]) -> None:
    nccl = Nccl(built["libsimnccl.so"])
    comms = (PTR * 3)()
    assert nccl.ncclCommInitAll(comms, 3, None) == SUCCESS
    streams = [nccl.simStreamCreate() for _ in comms]
    nccl.ncclGroupStart()
    for comm, stream in zip(comms, streams, strict=True):
        assert nccl.allreduce(comm, stream=stream) == SUCCESS
    assert nccl.ncclGroupEnd() == SUCCESS
    assert [nccl.sync(s) for s in streams] == [0, 0, 0]
    for comm, stream in zip(comms, streams, strict=True):
        nccl.ncclCommDestroy(comm)
        nccl.simStreamDestroy(stream)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 code")
def test_nonblocking_init(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        time.sleep(0.3 * rank)
        config = Config(size=ctypes.sizeof(Config), magic=0xCAFEBEEF, version=22809, blocking=0)
        comm, state = PTR(), INT(PROGRESS)
        start = time.monotonic()
        rc = nccl.ncclCommInitRankConfig(ctypes.byref(comm), 2, uid, rank, ctypes.byref(config))
        returned = time.monotonic() - start
        assert comm.value
        early = None
        if rank == 0:
            early = nccl.field(comm.value, "hash"), nccl.allreduce(comm.value)
        while state.value == PROGRESS:
            nccl.ncclCommGetAsyncError(comm, ctypes.byref(state))
            time.sleep(0.001)
        ready = time.monotonic() - start
        child = PTR()
        assert nccl.ncclCommSplit(comm, 0, 0, ctypes.byref(child), None) == SUCCESS
        state.value = PROGRESS
        while state.value == PROGRESS:  # the parent tells when the child is there
            nccl.ncclCommGetAsyncError(comm, ctypes.byref(state))
            time.sleep(0.001)
        assert nccl.allreduce(comm.value) in (SUCCESS, PROGRESS)
        nccl.sync()
        return rc, returned, early, state.value, ready, nccl.field(comm.value, "rank"), child.value

    rc, returned, early, state, ready, rank, child = ranks(built["libsimnccl.so"], 2, body)[0]
    assert rc == PROGRESS and returned < 0.1 and early == (0, ARGUMENT)
    assert state == SUCCESS and 0.2 < ready < 3 and rank == 0 and child


# ---- ends ------------------------------------------------------------------------------------


def test_abort_wakes_own_threads_and_peers(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 3, rank)
        if rank == 2:
            time.sleep(0.3)
            return nccl.ncclCommAbort(comm)
        codes: list[int] = []
        thread = threading.Thread(target=lambda: codes.append(nccl.allreduce(comm)))
        if rank == 0:  # aborts itself, its other thread is inside
            thread.start()
            time.sleep(0.1)
            nccl.ncclCommAbort(comm)
            thread.join(5)
        else:
            codes.append(nccl.allreduce(comm))
        return codes

    uid = random_id()
    assert ranks(built["libsimnccl.so"], 3, body, uid) == [[SYSTEM], [REMOTE], SUCCESS]
    assert not segment(uid).exists()


def test_same_rank_twice_hangs_all(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        thread = threading.Thread(target=lambda: nccl.init(uid, 2, 0), daemon=True)
        thread.start()
        thread.join(0.5)
        return thread.is_alive()

    assert ranks(built["libsimnccl.so"], 2, body) == [True, True]


def test_killed_rank_leaves_nothing(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 3, rank)
        if rank == 1:
            child = os.fork()  # holds the parent's files, must not keep the segment alive
            if child == 0:
                time.sleep(1.5)
                os._exit(0)
        time.sleep(0.3)
        held = segment(uid).exists()  # all have come: it has no name any more
        time.sleep(0.2)
        if rank == 1:
            threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        else:
            time.sleep(0.4)
            nccl.ncclCommAbort(comm)
        return held

    path = built["libsimnccl.so"]
    uid = random_id()
    assert ranks(path, 3, body, uid) == [False] * 3
    assert not segment(uid).exists()


def test_ranks_killed_before_all_have_come_leave_what_is_swept(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        threading.Thread(target=lambda: nccl.init(uid, 3, rank), daemon=True).start()
        time.sleep(0.3)
        nccl.simCleanup()
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        return segment(uid).exists()

    path = built["libsimnccl.so"]
    uid = random_id()
    assert ranks(path, 2, body, uid) == [True, True]
    assert segment(uid).exists()
    Nccl(path).simCleanup()
    assert not segment(uid).exists()


def test_destroy_waits_for_queued_work(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 2, rank)
        nccl.allreduce(comm)
        time.sleep(0.3 * rank)
        nccl.allreduce(comm)
        return elapsed(lambda: nccl.ncclCommDestroy(comm))

    uid = random_id()
    assert ranks(built["libsimnccl.so"], 2, body, uid)[0] > 0.2
    assert not segment(uid).exists()


# ---- the binary ------------------------------------------------------------------------------


def run(*command: object) -> str:
    words = [str(c) for c in command]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def test_symbols_come_in_pairs(built: dict[str, Path]) -> None:
    symbols = {}
    for line in run("nm", "-D", "--defined-only", built["libsimnccl.so"]).splitlines():
        address, kind, name = line.split()
        symbols[name] = (address, kind)
    names = [n for n in symbols if n.startswith("nccl")]
    assert len(names) > 50
    for name in names:
        assert symbols[name] == (symbols["p" + name][0], "W")
        assert symbols["p" + name][1] == "T"
    assert not [n for n in symbols if not n.startswith(("nccl", "pnccl", "sim"))]
    header = run("readelf", "-d", built["libsimnccl.so"])
    assert "libnccl.so.2" in header
    assert b"NCCL version 2.28.9+sim\0" in built["libsimnccl.so"].read_bytes()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 code")
def test_entries_push_the_frame_and_bcast_goes_through_the_plt(built: dict[str, Path]) -> None:
    code = run("objdump", "-d", "--no-show-raw-insn", built["libsimnccl.so"])
    entries = re.findall(r"<p?(nccl\w+)>:\n\s*\w+:\s+(\S+ +\S+)", code)
    assert len(entries) > 50
    assert {first.split()[0] + first.split()[1] for _, first in entries} == {"push%rbp"}
    bcast = code[code.index("ncclBcast>:") :].split("\n\n")[0]
    assert "call" in bcast and "<ncclBroadcast@plt>" in bcast


@pytest.mark.parametrize("version", ["2.16.2", "2.18.1", "2.23.4", "2.26.2", "2.32.3"])
def test_other_versions_build(version: str, tmp_path: Path) -> None:
    path = native_build.build(tmp_path, ["libsimnccl.so"], sim_version=version)["libsimnccl.so"]
    assert f"NCCL version {version}+sim".encode() in path.read_bytes()


# ---- nccl_load, sanitizers, the demo -----------------------------------------------------------


def load(built: dict[str, Path], tmp_path: Path, nranks: int, *options: str) -> list[dict]:
    env = {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
        "ASAN_OPTIONS": "detect_leaks=1",
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    uid = tmp_path / f"uid-{time.monotonic_ns()}"
    processes = [
        subprocess.Popen(
            [
                built["nccl_load"],
                "--lib",
                built["libsimnccl.so"],
                "--rank",
                str(r),
                "--nranks",
                str(nranks),
                "--uid-file",
                uid,
                "--print-truth",
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for r in range(nranks)
    ]
    truths = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
        assert process.returncode == 0, err
        truths.append(json.loads(out.splitlines()[-1]))
    return truths


def test_load_tells_the_truth(built: dict[str, Path], tmp_path: Path) -> None:
    truths = load(built, tmp_path, 2, "--op", "all", "--calls", "400", "--sync-every", "20")
    assert all(t["errors"] == 0 for t in truths)
    assert truths[0]["calls"]["ncclAllReduce"] == truths[1]["calls"]["ncclAllReduce"] == 317
    null = run(
        built["nccl_load"],
        "--lib",
        built["libsimnccl.so"],
        "--null-comm",
        "--calls",
        "50",
        "--print-truth",
    )
    assert json.loads(null)["errors"] == 50
    bench = run(built["nccl_load"], "--lib", built["libsimnccl.so"], "--bench", "--calls", "1000")
    assert len(json.loads(bench)["ns_per_step"]) == 5


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    built = native_build.build(tmp_path, extra_cflags=(f"-fsanitize={sanitizer}",), strict=True)
    truths = load(
        built, tmp_path, 2, "--op", "all", "--threads", "3", "--calls", "300", "--sync-every", "5"
    )
    assert all(t["errors"] == 0 for t in truths)
    truth = load(built, tmp_path, 1, "--churn", "--threads", "4", "--calls", "100")[0]
    assert truth["errors"] == 0 and truth["calls"]["ncclCommDestroy"] == 400


def test_nonblocking_connect_behind_other_work(built: dict[str, Path]) -> None:
    """Three ranks of a process on one stream: the second's work stands behind the first's,
    which waits for it, and yet the second's connection is reported as made."""

    def ranks(conn: multiprocessing.connection.Connection) -> None:
        nccl = Nccl(built["libsimnccl.so"])
        uid, ready, connected = nccl.unique_id(), threading.Barrier(3), []

        def rank(number: int) -> None:
            comm, state = PTR(), INT(PROGRESS)
            config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 22809, 0)
            nccl.ncclCommInitRankConfig(ctypes.byref(comm), 3, uid, number, ctypes.byref(config))
            for step in (None, nccl.allreduce):
                if step:
                    ready.wait()
                    assert step(comm.value or 0) in (SUCCESS, PROGRESS)
                    state.value = PROGRESS
                while state.value == PROGRESS:
                    nccl.ncclCommGetAsyncError(comm, ctypes.byref(state))
                    time.sleep(0.001)
            connected.append(number)

        threads = [threading.Thread(target=rank, args=(r,), daemon=True) for r in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        conn.send(sorted(connected))
        os._exit(0)

    here, there = FORK.Pipe()
    process = FORK.Process(target=ranks, args=(there,))
    process.start()
    try:
        assert here.poll(40) and here.recv() == [0, 1, 2]
    finally:
        process.kill()
        process.join()
