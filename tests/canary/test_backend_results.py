"""Results of every operation and datatype, at one to four ranks, on simnccl and simcuda."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import pytest

from nccluprobe.canary import NcclBackend
from nccluprobe.nccl.enums import DATATYPE_BYTES, DATATYPE_IDS

from .ranks import backend, run
from .values import OPERATIONS, from_bf16, pack, reduced, to_bf16, unpack

COUNT = 37


def mine(rank: int, count: int = COUNT) -> list[float]:
    """Small whole numbers, so that every datatype holds each product of four exactly."""
    return [1 + (i + rank) % 2 for i in range(count)]


def close(got: list[float], wanted: list[float], dtype: str) -> bool:
    coarse = {"float8e4m3": 0.07, "float8e5m2": 0.13, "float16": 1e-3, "bfloat16": 1e-2}
    loose = coarse.get(dtype, 1e-6 if dtype.startswith("float") else 0.0)
    return all(math.isclose(g, w, rel_tol=loose) for g, w in zip(got, wanted, strict=True))


def reductions(b: NcclBackend, dtype: str) -> list[str]:
    """What is wrong, for each reduction in every operation that has one."""
    size, world, wrong = DATATYPE_BYTES[dtype], b.world, []
    buf, out = b.alloc(COUNT * size), b.alloc(COUNT * size)
    wide, share = b.alloc(COUNT * world * size), b.alloc(COUNT * size)
    for op in OPERATIONS:
        wanted = reduced(op, dtype, [mine(r) for r in range(world)])
        buf.write(pack(dtype, mine(b.rank)))
        out.fill(0)
        b.all_reduce(buf, COUNT, dtype, op, out)
        b.synchronize()
        if not close(unpack(dtype, out.read()), wanted, dtype):
            wrong.append(f"all_reduce {op} {dtype}")
        if unpack(dtype, buf.read()) != mine(b.rank):
            wrong.append(f"all_reduce {op} {dtype} changed its input")
        root = world - 1
        b.reduce(buf, COUNT, dtype, root, op)
        b.synchronize()
        expected = wanted if b.rank == root else mine(b.rank)
        if not close(unpack(dtype, buf.read()), expected, dtype):
            wrong.append(f"reduce {op} {dtype}")
        whole = reduced(op, dtype, [mine(r, COUNT * world) for r in range(world)])
        wide.write(pack(dtype, mine(b.rank, COUNT * world)))
        b.reduce_scatter(wide, share, COUNT, dtype, op)
        b.synchronize()
        part = whole[b.rank * COUNT : (b.rank + 1) * COUNT]
        if not close(unpack(dtype, share.read()), part, dtype):
            wrong.append(f"reduce_scatter {op} {dtype}")
    for buffer in (buf, out, wide, share):
        buffer.free()
    return wrong


def moves(b: NcclBackend, dtype: str) -> list[str]:
    """What is wrong in the operations that only move data."""
    size, world, rank, wrong = DATATYPE_BYTES[dtype], b.world, b.rank, []
    buf, wide, other = (b.alloc(COUNT * world * size) for _ in range(3))
    raw = [random.Random(r).randbytes(COUNT * world * size) for r in range(world)]
    part = COUNT * size

    def differs(name: str, got: bytes, wanted: bytes) -> None:
        if got != wanted:
            wrong.append(f"{name} {dtype}")

    for root in range(world):
        buf.write(raw[rank])
        b.broadcast(buf, COUNT, dtype, root)
        differs("broadcast", buf.read(part), raw[root][:part])
    buf.write(raw[rank])
    b.all_gather(buf, wide, COUNT, dtype)
    b.synchronize()
    differs("all_gather", wide.read(), b"".join(r[:part] for r in raw))
    b.all_to_all(buf, other, COUNT, dtype)
    b.synchronize()
    wanted = b"".join(r[rank * part : (rank + 1) * part] for r in raw)
    differs("all_to_all", other.read(), wanted)
    right, left = (rank + 1) % world, (rank - 1) % world
    with b.group():
        b.send(buf, COUNT, dtype, right)
        b.recv(other, COUNT, dtype, left)
    b.synchronize()
    differs("send and receive", other.read(part), raw[left][:part])
    for buffer in (buf, wide, other):
        buffer.free()
    return wrong


def every_operation(rank: int, world: int, port: int) -> list[str]:
    with backend(rank, world, port) as b:
        wrong = []
        for dtype in DATATYPE_IDS:
            wrong += reductions(b, dtype) + moves(b, dtype)
        b.barrier()
        return wrong


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_operation_and_datatype(world: int) -> None:
    assert run(world, every_operation) == [[]] * world


# ---- two ranks -------------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 3.3895e38, -3.3895e38, 1e-40, 1.0, 1.00390625]


def by_nccl(b: NcclBackend, raw: bytes, count: int, dtype: str) -> bytes:
    """The same sum by ncclAllReduce itself."""
    buf = b.alloc(len(raw))
    buf.write(raw)
    number = DATATYPE_IDS[dtype]
    b.nccl.check("ncclAllReduce", buf.pointer, buf.pointer, count, number, 0, b.comm, b.stream)
    b.synchronize()
    result = buf.read()
    buf.free()
    return result


def pairs(rank: int, world: int, port: int) -> list[str]:
    wrong: list[str] = []
    with backend(rank, world, port) as b:
        for dtype in ("bfloat16", "float32"):
            columns = []
            for r in range(2):
                rng = random.Random(f"{dtype} {r}")
                # Bit patterns: every exponent and sign; and each special with each.
                values = [rng.getrandbits(16) for _ in range(5000)]
                specials = [to_bf16(v) for v in SPECIAL]
                values += (specials * len(SPECIAL)) if r else [s for s in specials for _ in SPECIAL]
                columns.append([from_bf16(v) for v in values])
            count = len(columns[0])
            raw = pack(dtype, columns[rank])
            buf = b.alloc(len(raw))
            buf.write(raw)
            b.all_reduce(buf, count, dtype)
            b.synchronize()
            mine, theirs = unpack(dtype, buf.read()), unpack(dtype, by_nccl(b, raw, count, dtype))
            narrow = struct.Struct("<f")
            for i, (x, y) in enumerate(zip(*columns, strict=True)):
                try:
                    exact = narrow.unpack(narrow.pack(x + y))[0]
                except OverflowError:
                    exact = math.copysign(math.inf, x + y)
                wanted = from_bf16(to_bf16(exact)) if dtype == "bfloat16" else exact
                for name, got in (("pair", mine[i]), ("ncclAllReduce", theirs[i])):
                    same = got == wanted or (math.isnan(got) and math.isnan(wanted))
                    if not same and len(wrong) < 5:
                        wrong.append(f"{name} {dtype}: {x} + {y} = {got}, not {wanted}")
        b.synchronize()
    return wrong


def test_two_rank_path_equals_all_reduce_bit_for_bit() -> None:
    assert run(2, pairs) == [[], []]


def which_calls(rank: int, world: int, port: int) -> list[str]:
    """Names of the NCCL calls of an all-reduce in each of three kinds."""
    seen: list[str] = []
    with backend(rank, world, port) as b:
        buf = b.alloc(64)
        buf.fill(0)
        inner = b.calls

        class Spy:
            def enter(self, function: str, arguments: tuple[object, ...]) -> int:
                if function != "ncclCommGetAsyncError":
                    seen.append(function)
                return inner.enter(function, arguments)

            def exit(self, token: int, function: str, result: int) -> None:
                inner.exit(token, function, result)

        b.nccl.observer = Spy()
        for dtype, op in (("float32", "sum"), ("float32", "max"), ("int32", "sum")):
            b.all_reduce(buf, 8, dtype, op)
            b.synchronize()
        b.all_reduce(buf, 0, "float32")
        b.nccl.observer = inner
    return seen


def test_two_ranks_send_and_receive_where_there_is_an_add_kernel() -> None:
    pair = ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"]
    assert run(2, which_calls) == [[*pair, "ncclAllReduce", "ncclAllReduce"]] * 2
    assert run(3, which_calls) == [["ncclAllReduce"] * 3] * 3


def asynchronous(rank: int, world: int, port: int) -> Any:
    with backend(rank, world, port) as b:
        count, rounds = 1000, 15  # 3 ** 15 is exact in float32
        buf, other = b.alloc(4 * count), b.alloc(4 * count)
        buf.write(pack("float32", [1.0] * count))
        other.write(pack("float32", [2.0] * count))
        # Both streams use the one receive buffer, in turns.
        works = []
        for _ in range(rounds):
            works.append(b.all_reduce_async(buf, count, "float32"))
            b.all_reduce(other, count, "float32", "sum" if world == 2 else "max")
        for work in works:
            work.wait()
        b.synchronize()
        assert all(work.done() for work in works)
        assert all(0 <= work.elapsed_ms() < 60000 for work in works)
        grown = float(world**rounds)
        expected = 2 * grown if world == 2 else 2.0
        return (
            unpack("float32", buf.read()) == [grown] * count
            and unpack("float32", other.read()) == [expected] * count
        )


@pytest.mark.parametrize("world", [2, 3])
def test_asynchronous_all_reduce(world: int) -> None:
    assert run(world, asynchronous) == [True] * world


def splits(rank: int, world: int, port: int) -> Any:
    with backend(rank, world, port) as b:
        child = b.split(rank % 2, -rank)  # the later rank first
        none = b.split(0 if rank == 0 else -1)
        assert child is not None and (none is None) == (rank != 0)
        buf = child.alloc(4)
        buf.write(pack("float32", [float(rank)]))
        child.all_reduce(buf, 1, "float32")
        child.synchronize()
        b.barrier()
        return child.rank, child.world, unpack("float32", buf.read())[0]


def test_split_by_colour_ordered_by_key() -> None:
    assert run(4, splits) == [(1, 2, 2.0), (1, 2, 4.0), (0, 2, 2.0), (0, 2, 4.0)]


def large(rank: int, world: int, port: int) -> bool:
    """Larger than what simnccl passes at once, and more messages than it buffers."""
    with backend(rank, world, port, capacity=8 << 20) as b:
        count = 1 << 20
        buf, recv = b.alloc(4 * count), b.alloc(4 * count)
        buf.write(pack("float32", [float(rank + 1)]) * count)
        b.all_reduce(buf, count, "float32")
        with b.group():
            for i in range(20):
                b.send(buf.view(4 * i, 4), 1, "float32", (rank + 1) % world)
                b.recv(recv.view(4 * i, 4), 1, "float32", (rank - 1) % world)
        b.synchronize()
        total = pack("float32", [world * (world + 1) / 2])
        return buf.read() == total * count and recv.read(80) == total * 20


@pytest.mark.parametrize("world", [2, 3])
def test_large_payloads_and_many_messages(world: int) -> None:
    assert run(world, large) == [True] * world
