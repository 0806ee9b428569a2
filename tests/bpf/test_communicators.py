"""Communicators as the BPF program sees them: made, failed, split, ended, used again."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest

from bpf.calls import allreduce, init, names, new_ptr
from bpf.conftest import Probed
from bpf.fakelib import FakeLib, config, uid
from nccluprobe.nccl.api import BY_ID
from nccluprobe.record import (
    FLAG_COMM_LATE,
    FLAG_NONBLOCKING,
    KIND_CALL,
    KIND_NAME,
    KIND_NEW_COMM,
)

pytestmark = pytest.mark.root


def test_generations(probed: Probed, fake: FakeLib) -> None:
    ptr = new_ptr()
    init(fake, ptr)
    allreduce(fake, ptr)
    fake.dll.ncclCommFinalize(ptr)
    fake.dll.ncclCommDestroy(ptr)
    init(fake, ptr)
    allreduce(fake, ptr)
    fake.dll.ncclCommAbort(ptr)
    fake.dll.ncclCommDestroy(ptr)  # of a handle that nothing is known of
    made, first, final, destroy, again, second, abort, unknown = probed.records()
    assert made.new_comm == again.new_comm == ptr
    assert made.new_gen == first.comm_gen == final.comm_gen == destroy.comm_gen
    assert again.new_gen == second.comm_gen == abort.comm_gen != made.new_gen
    assert (unknown.comm, unknown.comm_gen, unknown.flags) == (ptr, 0, 0)
    assert [first.call_idx, final.call_idx, destroy.call_idx, second.call_idx] == [0, 1, 2, 0]


def test_failed_init_makes_nothing(probed: Probed, fake: FakeLib) -> None:
    ptr = new_ptr()
    out = ctypes.c_uint64(ptr)  # left as it was
    fake.set(rc=2)
    fake.dll.ncclCommInitRank(ctypes.addressof(out), 2, uid(bytes(128)), 0)
    (record,) = probed.records()
    assert (record.rc, record.new_comm, record.new_gen) == (2, 0, 0)


def test_nonblocking_init(probed: Probed, fake: FakeLib) -> None:
    ptr = new_ptr()
    fake.set(rc=7, handle=ptr)
    out, conf = ctypes.c_uint64(), config(blocking=0)
    fake.dll.ncclCommInitRankConfig(
        ctypes.addressof(out), 2, uid(bytes(128)), 0, ctypes.addressof(conf)
    )
    (record,) = probed.records()
    assert record.rc == 7 and record.flags == FLAG_NONBLOCKING
    assert record.new_comm == ptr and record.new_gen


def test_race_of_destroy_and_init(probed: Probed, fake: FakeLib) -> None:
    """An init may return the pointer of a destroy that is still inside."""
    ptr = new_ptr()
    init(fake, ptr)
    fake.set(sleep_us=200_000)
    thread = threading.Thread(target=fake.dll.ncclCommDestroy, args=(ptr,))
    thread.start()
    time.sleep(0.05)
    fake.set(sleep_us=0)
    init(fake, ptr)
    allreduce(fake, ptr)
    thread.join()
    allreduce(fake, ptr)
    first, again, one, destroy, two = probed.records()
    assert names([first, again, one, destroy, two])[3] == "CommDestroy"
    assert destroy.comm_gen == first.new_gen
    assert one.comm_gen == two.comm_gen == again.new_gen != first.new_gen
    assert [one.call_idx, two.call_idx] == [0, 1]


def test_split_in_a_group(probed: Probed, fake: FakeLib) -> None:
    parent, child = new_ptr(), new_ptr()
    init(fake, parent)
    fake.set(handle=child, defer=1)
    named = config(name=b"pp")
    slots = [ctypes.c_uint64(1) for _ in range(3)]
    with fake.group():
        for i, slot in enumerate(slots):
            colour = -1 if i == 1 else 5 + i
            fake.dll.ncclCommSplit(
                parent, colour, i, ctypes.addressof(slot), ctypes.addressof(named)
            )
    fake.set(defer=0)
    allreduce(fake, child)
    found = probed.records()
    parent_gen = found[0].new_gen
    splits = [r for r in found if r.kind == KIND_CALL and BY_ID[r.api].name == "ncclCommSplit"]
    assert [(r.order_idx, r.new_comm, r.new_gen) for r in splits] == [
        (1, 0, 0),
        (2, 0, 0),
        (3, 0, 0),
    ]
    made = [r for r in found if r.kind == KIND_NEW_COMM]
    # The one without a colour gets no communicator, whatever its slot holds.
    assert [(r.order_idx, r.color, r.new_comm) for r in made] == [
        (1, 5, child),
        (3, 7, child + 0x2000),
    ]
    assert {(r.comm_gen, r.api, r.rc, r.call_idx) for r in made} == {(parent_gen, 68, 0, 0)}
    assert [r.t_enter for r in made] == [splits[0].t_enter, splits[2].t_enter]
    assert [r.new_gen for r in found if r.kind == KIND_NAME] == [r.new_gen for r in made]
    assert found[-1].comm_gen == made[0].new_gen and found[-1].flags == 0


def test_split_outside_a_group_written_later(probed: Probed, fake: FakeLib) -> None:
    """Not blocking: another thread writes the handle; the first use tells."""
    parent, child = new_ptr(), new_ptr()
    init(fake, parent)
    fake.set(handle=child, defer=1)
    slot = ctypes.c_uint64()
    fake.dll.ncclCommSplit(parent, 3, 0, ctypes.addressof(slot), 0)
    with fake.group():  # another group's end does not look at it
        pass
    slot.value = child
    allreduce(fake, child)
    found = probed.records()
    made = [r for r in found if r.kind == KIND_NEW_COMM]
    assert [(r.new_comm, r.order_idx) for r in made] == [(child, 1)]
    assert found[-1].comm_gen == made[0].new_gen and not found[-1].flags & FLAG_COMM_LATE


def test_more_children_than_fit(probed: Probed, fake: FakeLib) -> None:
    """The last 32 are told; the others are seen late, when they are used."""
    parent, child, n = new_ptr(), new_ptr(), 40
    init(fake, parent)
    fake.set(handle=child, defer=1)
    slots = (ctypes.c_uint64 * n)()
    before = probed.source.stats()["pending_full"]
    with fake.group():
        for i in range(n):
            fake.dll.ncclCommSplit(parent, 1, 0, ctypes.addressof(slots) + 8 * i, 0)
    made = [r for r in probed.records() if r.kind == KIND_NEW_COMM]
    assert sorted(r.order_idx for r in made) == list(range(n - 31, n + 1))
    assert {r.new_comm for r in made} == set(slots[n - 32 :])
    assert probed.source.stats()["pending_full"] == before + n - 32
    allreduce(fake, slots[0])
    allreduce(fake, slots[n - 1])
    assert [bool(r.flags & FLAG_COMM_LATE) for r in probed.records()] == [True, False]


def test_failed_group_makes_nothing(probed: Probed, fake: FakeLib) -> None:
    parent, child = new_ptr(), new_ptr()
    init(fake, parent)
    fake.set(handle=child, defer=1)
    slot = ctypes.c_uint64()
    fake.dll.ncclGroupStart()
    fake.dll.ncclCommSplit(parent, 3, 0, ctypes.addressof(slot), 0)
    fake.set(rc=5)
    fake.dll.ncclGroupEnd()
    slot.value = child
    fake.set(rc=0)
    allreduce(fake, child)
    found = probed.records()
    assert not [r for r in found if r.kind == KIND_NEW_COMM]
    assert found[-1].flags & FLAG_COMM_LATE
