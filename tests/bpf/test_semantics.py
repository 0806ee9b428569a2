"""Numbers, groups, generations, nesting, and calls that do not return."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from bpf.calls import allreduce, init, names, new_ptr
from bpf.conftest import Attach, Probed
from bpf.fakelib import FakeLib, functions
from nccluprobe.capture import state
from nccluprobe.capture.bpf import Sizes
from nccluprobe.capture.source import Library
from nccluprobe.record import (
    FLAG_BLIND,
    FLAG_COMM_LATE,
    FLAG_NO_RETURN,
    FLAG_UNWOUND,
    SIZE,
    STRUCT,
    Record,
)

pytestmark = pytest.mark.root


def test_exact_counts(probed: Probed, fake: FakeLib) -> None:
    n, ptr = 10_007, new_ptr()
    fake.dll.drive_allreduce(n, ptr, 0x42)
    found = probed.records()
    assert [r.call_idx for r in found] == list(range(n))
    assert [r.order_idx for r in found] == list(range(n))
    assert [r.count for r in found] == list(range(n))
    assert {r.comm_gen for r in found} == {found[0].comm_gen}
    assert {r.flags for r in found} == {FLAG_COMM_LATE}
    assert all(a.t_exit <= b.t_enter for a, b in itertools.pairwise(found))


def test_two_threads(probed: Probed, fake: FakeLib) -> None:
    n, ptr = 5_003, new_ptr()
    init(fake, ptr)
    probed.records()
    threads = [
        threading.Thread(target=fake.dll.drive_allreduce, args=(n, ptr, 0)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = probed.records()
    assert sorted(r.call_idx for r in found) == list(range(2 * n))
    assert sorted(r.order_idx for r in found) == list(range(2 * n))
    assert len({r.tid for r in found}) == 2


def test_bcast_is_one_call(probed: Probed, fake: FakeLib) -> None:
    before = probed.source.stats()
    fake.dll.drive_bcast(101, new_ptr())
    found = probed.records()
    assert names(found) == ["Bcast"] * 101
    assert [r.order_idx for r in found] == list(range(101))
    after = probed.source.stats()
    assert after["nested"] - before["nested"] == 101
    assert after["no_entry"] == before["no_entry"]


def test_numbers_by_kind(probed: Probed, fake: FakeLib) -> None:
    ptr = new_ptr()
    init(fake, ptr)
    fake.dll.ncclSend(0, 1, 7, 1, ptr, 0)
    fake.dll.ncclSend(0, 1, 7, 2, ptr, 0)
    fake.dll.ncclRecv(0, 1, 7, 1, ptr, 0)
    fake.dll.ncclSend(0, 1, 7, 1, ptr, 0)
    allreduce(fake, ptr)
    fake.dll.ncclCommFinalize(ptr)
    found = probed.records()[1:]
    assert [r.call_idx for r in found] == [0, 1, 2, 3, 4, 5]
    assert [r.order_idx for r in found] == [0, 0, 0, 1, 0, 0]
    assert {r.flags for r in found} == {0}


def test_groups(probed: Probed, fake: FakeLib) -> None:
    ptr = new_ptr()
    with fake.group():
        allreduce(fake, ptr)
        with fake.group():
            allreduce(fake, ptr)
        allreduce(fake, ptr)
    allreduce(fake, ptr)
    fake.dll.ncclGroupEnd()  # one too many
    with fake.group():
        pass
    found = probed.records()
    first = found[0].group_id
    assert names(found)[:7] == [
        "GroupStart",
        "AllReduce",
        "GroupStart",
        "AllReduce",
        "GroupEnd",
        "AllReduce",
        "GroupEnd",
    ]
    assert [r.group_id for r in found] == [first] * 7 + [0, 0] + [first + 1] * 2
    assert [r.group_depth for r in found] == [0, 1, 1, 2, 2, 1, 1, 0, 0, 0, 1]
    assert [r.group_pos for r in found] == [0, 0, 1, 1, 2, 2, 3, 0, 0, 0, 0]


@pytest.mark.parametrize("deeper", [0, 256, 4096])
def test_longjmp(probed: Probed, fake: FakeLib, deeper: int) -> None:
    ptr = new_ptr()
    before = probed.source.stats()["unwound"]
    assert fake.dll.drive_jump(deeper, ptr) == 0
    left, after = probed.records()
    assert (left.count, left.flags & FLAG_UNWOUND) == (111, FLAG_UNWOUND)
    assert (after.count, after.flags & FLAG_UNWOUND, after.rc) == (222, 0, 0)
    assert left.t_exit <= after.t_enter
    assert probed.source.stats()["unwound"] == before + 1
    assert probed.source.in_flight() == b""


def test_thread_ends_inside(probed: Probed, fake: FakeLib) -> None:
    fake.set(sleep_us=3_000_000)
    assert fake.dll.drive_cancel(new_ptr()) == 0
    (record,) = probed.records()
    assert (record.count, record.flags & FLAG_NO_RETURN) == (333, FLAG_NO_RETURN)
    assert record.t_exit > record.t_enter
    assert probed.source.in_flight() == b""


def test_in_flight(probed: Probed, fake: FakeLib) -> None:
    ptr = new_ptr()
    fake.set(sleep_us=400_000)
    thread = threading.Thread(target=allreduce, args=(fake, ptr, 777))
    thread.start()
    time.sleep(0.1)
    first, second = probed.source.in_flight(), probed.source.in_flight()
    assert first == second and len(first) == SIZE
    inside = Record(*STRUCT.unpack(first))
    assert (inside.t_exit, inside.count, inside.comm, inside.call_idx) == (0, 777, ptr, 0)
    thread.join()
    (record,) = probed.records()
    assert record == inside._replace(t_exit=record.t_exit)
    assert probed.source.in_flight() == b""


def test_two_attachments_of_one_file(
    probed: Probed, fake: FakeLib, fake_path: Path, tmp_path: Path
) -> None:
    """One inode under two paths, as overlays show it."""
    link = tmp_path / "again.so"
    link.hardlink_to(fake_path)
    source, ptr = probed.source, new_ptr()
    before = source.stats()
    source.add_library(Library(2, str(link), "2.28.9", None))
    source.attach(2, str(link), functions(fake_path))
    fake.dll.drive_allreduce(101, ptr, 0)
    fake.dll.drive_bcast(11, ptr)
    assert source.detach(2) < 5
    fake.dll.drive_allreduce(3, ptr, 0)
    found = probed.records()
    assert [r.call_idx for r in found] == list(range(115))
    after = source.stats()
    assert after["duplicate"] - before["duplicate"] == 112
    assert after["no_entry"] == before["no_entry"]
    assert after["unwound"] == before["unwound"]


def test_forced_loss_is_exact(attach: Attach, fake: FakeLib) -> None:
    probed = attach({"ncclAllReduce"}, sizes=Sizes(ring_bytes=4096))
    n, ptr = 1_009, new_ptr()
    fake.dll.drive_allreduce(n, ptr, 0)
    kept = probed.records()
    fake.dll.drive_allreduce(1, ptr, 0)
    (last,) = probed.records()
    lost = probed.source.losses().by_process
    assert len(kept) < 40
    assert list(lost.values()) == [n - len(kept)]
    assert last.call_idx == n  # a hole as long as the loss
    assert probed.source.stats()["lost"] == n - len(kept)
    assert list(probed.source.captured().values()) == [len(kept) + 1]


def test_full_map_of_communicators(attach: Attach, fake: FakeLib) -> None:
    probed = attach({"ncclAllReduce"}, sizes=Sizes(ring_bytes=1 << 20, comms=4))
    for _ in range(64):
        allreduce(fake, new_ptr())
    found = probed.records()
    blind = [r for r in found if r.flags & FLAG_BLIND]
    assert len(found) == 64 and blind
    assert {(r.comm_gen, r.call_idx, r.order_idx) for r in blind} == {(0, 0, 0)}
    assert list(probed.source.losses().blind.values()) == [len(blind)]


def test_sweep_frees_counters(probed: Probed, fake: FakeLib) -> None:
    gone, stays = new_ptr(), new_ptr()
    for ptr in (gone, stays):
        for peer in range(5):
            fake.dll.ncclSend(0, 1, 7, peer, ptr, 0)
    fake.dll.ncclCommDestroy(gone)
    generation = probed.records()[0].comm_gen
    probed.source.sweep()
    keys = [np.frombuffer(k, state.P2P_KEY) for k, _ in probed.source._maps["p2p"].batches()]
    assert generation not in np.concatenate(keys)["gen"]
    fake.dll.ncclSend(0, 1, 7, 4, stays, 0)
    assert probed.records()[-1].order_idx == 1


def test_enter_only(attach: Attach, fake: FakeLib) -> None:
    probed = attach(exits=False)
    ptr = new_ptr()
    fake.dll.drive_allreduce(13, ptr, 0)
    fake.dll.drive_bcast(7, ptr)
    fake.dll.ncclBroadcast(0, 0, 1, 7, 0, ptr, 0)
    with fake.group():
        allreduce(fake, ptr)
    found = probed.records()
    assert names(found) == ["AllReduce"] * 13 + ["Bcast"] * 7 + [
        "Broadcast",
        "GroupStart",
        "AllReduce",
        "GroupEnd",
    ]
    assert [r.order_idx for r in found[:21]] == list(range(21))
    assert {(r.t_exit, r.flags & 4) for r in found} == {(0, 4)}
    assert found[-2].group_id == found[-1].group_id != 0
    assert probed.source.in_flight() == b""
