"""Epochs of processes, denial, forgetting, and paths to a library."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bpf.conftest import Attach, Probed
from bpf.fakelib import FakeLib, functions
from nccluprobe.capture.ebpf_source import EbpfSource
from nccluprobe.capture.source import Library
from nccluprobe.errors import ExitCode, NccluprobeError
from nccluprobe.record import STRUCT, Record

pytestmark = pytest.mark.root

PTR = 0x5550000

#: Calls, executes itself once, calls again; "fork" does so in a child.
CHILD = """
import ctypes, os, sys
dll = ctypes.CDLL(sys.argv[1])
call = lambda n: dll.ncclAllReduce(None, None, ctypes.c_size_t(n), 7, 0,
                                   ctypes.c_void_p(0x5550000), None)
n = int(sys.argv[2])
call(n)
if n == 1:
    if os.fork() == 0:
        call(10)
        os._exit(0)
    os.wait()
    os.execv(sys.executable, [sys.executable, "-c", sys.orig_argv[2], sys.argv[1], "2"])
"""


def drain(source: EbpfSource) -> list[Record]:
    return [Record(*row) for chunk in source.drain() for row in STRUCT.iter_unpack(chunk)]


def test_fork_and_exec(attach: Attach, fake_path: Path) -> None:
    probed = attach({"ncclAllReduce"})
    with subprocess.Popen([sys.executable, "-c", CHILD, str(fake_path), "1"]) as child:
        pid = child.pid
        assert child.wait(20) == 0
    first, forked, second = drain(probed.source)
    assert [first.count, forked.count, second.count] == [1, 10, 2]
    assert first.pid == second.pid == pid != forked.pid
    # Three processes as far as identity goes: one pointer, three generations.
    assert len({r.epoch for r in (first, forked, second)}) == 3
    assert len({r.comm_gen for r in (first, forked, second)}) == 3
    assert list(probed.source._maps["procs"].batches()) == []
    captured = probed.source.captured()
    assert captured == {(r.pid, r.epoch): 1 for r in (first, forked, second)}
    for r in (first, forked, second):
        probed.source.forget(r.pid, r.epoch)
    assert probed.source.captured() == {}
    for name in ("threads", "procs", "tallies", "comms"):
        assert list(probed.source._maps[name].batches()) == [], name


def test_reused_pid(attach: Attach, fake_path: Path) -> None:
    """A process gets the pid of one that is gone."""
    probed = attach({"ncclAllReduce"})
    code = CHILD.replace("if n == 1:", "if False:")
    args = [sys.executable, "-c", code, str(fake_path)]
    with subprocess.Popen([*args, "1"]) as child:
        assert child.wait(20) == 0
    pid = child.pid
    for _ in range(20):
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        except OSError as e:
            pytest.skip(f"ns_last_pid cannot be set: {e}")
        with subprocess.Popen([*args, "2"]) as again:
            assert again.wait(20) == 0
        if again.pid == pid:
            break
    else:
        pytest.fail("the pid was never given out again")
    found = [r for r in drain(probed.source) if r.pid == pid]
    assert [r.count for r in found] == [1, 2]
    assert found[0].epoch != found[1].epoch
    assert found[0].comm_gen != found[1].comm_gen


def test_deny(attach: Attach, fake: FakeLib) -> None:
    probed = attach({"ncclAllReduce"})
    fake.dll.drive_allreduce(3, PTR, 0)
    (record, _, last) = probed.records()
    probed.source.deny(os.getpid(), record.epoch)
    fake.dll.drive_allreduce(5, PTR, 0)
    assert probed.records() == []
    assert last.call_idx == 2
    assert probed.source.stats()["no_entry"] == 0
    # Other processes are not concerned.
    code = CHILD.replace("if n == 1:", "if False:")
    subprocess.run([sys.executable, "-c", code, str(fake.path), "4"], check=True)
    assert [r.count for r in drain(probed.source)] == [4]


def test_sweep_of_processes(attach: Attach, fake_path: Path) -> None:
    """What is freed without being told: processes without a record, and denied ones."""
    probed = attach()
    quiet = CHILD.replace("call(n)", "dll.ncclGetUniqueId(ctypes.create_string_buffer(128))", 1)
    for code, n in ((quiet, "2"), (CHILD, "3"), (CHILD, "4")):
        subprocess.run([sys.executable, "-c", code, str(fake_path), n], check=True)
    wanted, unwanted = drain(probed.source)
    probed.source.deny(unwanted.pid, unwanted.epoch)
    assert len(probed.source.captured()) == 3
    probed.source.sweep()
    assert probed.source.captured() == {(wanted.pid, wanted.epoch): 1}
    assert list(probed.source._maps["denied"].batches()) == []


def test_forget_frees_everything(attach: Attach, fake: FakeLib) -> None:
    probed = attach({"ncclSend", "ncclAllReduce"})
    for i in range(2_500):
        fake.dll.ncclSend(0, 1, 7, i, PTR + i % 100, 0)
    (epoch,) = {r.epoch for r in probed.records()}
    start = time.monotonic()
    probed.source.forget(os.getpid(), epoch)
    assert time.monotonic() - start < 1.0
    for name in ("threads", "procs", "tallies", "comms", "p2p"):
        assert list(probed.source._maps[name].batches()) == [], name
    fake.dll.drive_allreduce(1, PTR, 0)  # it was not gone after all
    (record,) = probed.records()
    assert record.epoch != epoch and record.call_idx == 0


@pytest.mark.parametrize("link", ["multi", "perf"])
@pytest.mark.parametrize("way", ["descriptor", "map_files"])
def test_ways_to_a_file(fake: FakeLib, link: str, way: str) -> None:
    """The file is found by descriptor or mapping, whatever its name is worth."""
    source = EbpfSource(link=link)
    source.add_library(Library(1, "somewhere", "2.28.9", None))
    only = functions(fake.path, {"ncclAllReduce"})
    if way == "descriptor":
        with fake.path.open("rb") as f:
            source.attach(1, f.fileno(), only)
    else:
        maps = Path("/proc/self/maps").read_text().splitlines()
        line = next(line for line in maps if line.endswith(str(fake.path)))
        source.attach(1, f"/proc/{os.getpid()}/map_files/{line.split()[0]}", only)
    fake.dll.drive_allreduce(7, PTR, 0)
    assert len([r for r in drain(source) if r.pid == os.getpid()]) == 7
    source.detach(1)
    fake.dll.drive_allreduce(7, PTR, 0)
    assert drain(source) == []
    source.close()


def test_refusals_leave_nothing(probed: Probed) -> None:
    source = probed.source
    source.add_library(Library(99, "/nowhere", None, None))
    with pytest.raises(NccluprobeError) as e:
        source.attach(99, "/nowhere", [(1, 0x1000)])
    assert e.value.code is ExitCode.BPF_REFUSED
    assert "\n" not in str(e.value)
    source.add_library(Library(99, "/bin/true", None, None))
    with pytest.raises(NccluprobeError):
        source.attach(99, "/bin/true", [])
    assert 99 not in source._attached
