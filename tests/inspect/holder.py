"""A process with made-up communicators of NVIDIA's libnccl, among noise and decoys.

    python holder.py LIBNCCL VERSION [--noise MB] [--late]

It prints one JSON line with what it holds, then obeys lines on standard input:
``step N`` makes N calls of ncclAllReduce on each communicator and counts them in
the struct, as NCCL would; ``group N`` makes N of them in one group; ``status``
prints how much memory it uses; ``end`` ends.  Takes nothing from nccluprobe.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import re
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.nccl_program import LAYOUTS, MAGIC, Program

PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: large allocations come from the heap
NAME = b"world of tests\0"


class Made:
    """A communicator at any address."""

    def __init__(self, layout: dict[str, Any], at: int, rank: int, nranks: int, ident: int) -> None:
        self.layout, self.pointer = layout, at
        self.rank, self.nranks, self.hash = rank, nranks, ident
        self.flag = ctypes.c_uint32(0)
        ctypes.memset(at, 0, layout["sizeof"])
        self.put("startMagic", "<Q", MAGIC)
        self.put("endMagic", "<Q", MAGIC)
        self.put("abortFlag", "<Q", ctypes.addressof(self.flag))
        ctypes.c_int.from_address(at + layout["config"] + 16).value = 1
        self.ready()
        for slot in range(5):
            self.count(slot, 100 * slot + 7 * nranks)

    def ready(self) -> None:
        self.put("commHash", "<Q", self.hash)
        self.put("rank", "<i", self.rank)
        self.put("nRanks", "<i", self.nranks)
        self.put("cudaDev", "<i", 2)

    def put(self, name: str, code: str, value: int) -> None:
        raw = struct.pack(code, value)
        ctypes.memmove(self.pointer + self.layout[name], raw, len(raw))

    def count(self, slot: int, by: int) -> None:
        if self.layout["seqNumber"] is not None:
            place = self.pointer + self.layout["seqNumber"] + 8 * slot
            ctypes.c_uint64.from_address(place).value += by

    def seqs(self) -> list[int] | None:
        if self.layout["seqNumber"] is None:
            return None
        place = self.pointer + self.layout["seqNumber"]
        return list((ctypes.c_uint64 * 5).from_address(place))

    def told(self) -> dict[str, Any]:
        return {
            "hash": f"{self.hash:016x}",
            "rank": self.rank,
            "nranks": self.nranks,
            "seqs": self.seqs(),
            "at": self.pointer,
        }


def address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Holder:
    def __init__(self, library: Path, version: str, noise: int, late: bool) -> None:
        self.program = Program(library, version) if late else None
        self.lib = self.program.lib if self.program else ctypes.CDLL(str(library))
        self.layout = json.loads(LAYOUTS.read_text())["versions"][version]
        self.size = self.layout["sizeof"]
        self.keep: list[Any] = []
        self.comms = [
            Made(self.layout, self.own_mapping(), 1, 4, 0xA1A1),
            Made(self.layout, self.heap(), 0, 2, 0xB2B2),
        ]
        if noise:
            self.comms.append(Made(self.layout, self.in_noise(noise), 3, 8, 0xC3C3))
            self.decoys()
        if late:
            self.comms.append(Made(self.layout, self.shared_file(), 2, 16, 0xD4D4))
            self.comms.append(Made(self.layout, self.own_mapping(), 5, 32, 0xE5E5))
            for name in ("rank", "nRanks", "cudaDev"):
                self.comms[-1].put(name, "<i", 0)  # still being made

    def map(self, size: int, flags: int = PRIVATE) -> int:
        memory = mmap.mmap(-1, size, flags=flags)
        self.keep.append(memory)
        return address(memory)

    def own_mapping(self) -> int:
        """As malloc does with a large one: a mapping, 16 bytes in."""
        return self.map(self.size + PAGE) + 16

    def heap(self) -> int:
        _libc.malloc(48 + 16 * (os.getpid() % 50))
        return int(_libc.malloc(self.size))

    def in_noise(self, megabytes: int) -> int:
        """Somewhere in much written memory."""
        block = os.urandom(1 << 20)
        size = megabytes << 20
        at = self.map(size)
        for start in range(0, size, len(block)):
            ctypes.memmove(at + start, block, len(block))
        word = struct.pack("<Q", MAGIC)
        for start in range(0, size, 3 << 20):
            ctypes.memmove(at + start + 4096 + 8 * (start % 100), word, 8)
        self.noise = at, size
        return at + size // 2 + 3 * 16

    def decoys(self) -> None:
        word = struct.pack("<Q", MAGIC)
        at, size = self.noise
        end = self.layout["endMagic"]
        # Two words at the right distance, nonsense between them; and all zero.
        for place in (at + 64, at + size // 4 + 16):
            ctypes.memmove(place, word, 8)
            ctypes.memmove(place + end, word, 8)
        zero = self.map(self.size + PAGE)
        ctypes.memmove(zero, word, 8)
        ctypes.memmove(zero + end, word, 8)
        # A start whose end would lie in memory that was never touched.
        untouched = self.map(64 << 20)
        ctypes.memmove(untouched, word, 8)
        # Whole communicators where nothing may be read: shared, and untouched beside them.
        Made(self.layout, self.map(4 << 20, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS), 0, 3, 0xBAD1)
        self.map(256 << 20, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        watched = self.map(4 << 20)
        Made(self.layout, watched, 0, 3, 0xBAD2)
        self.fault_fd = userfaultfd(watched, 4 << 20)

    def shared_file(self) -> int:
        """Pages that are in no page table although they have content."""
        file = tempfile.TemporaryFile()  # noqa: SIM115
        file.truncate(4 << 20)
        memory = mmap.mmap(file.fileno(), 4 << 20)
        self.keep += [file, memory]
        self.droppable = memory
        return address(memory)

    def step(self, calls: int, group: bool) -> None:
        assert self.program is not None
        functions = self.program.functions
        if group:
            functions["ncclGroupStart"]()
        for _ in range(calls):
            for comm in self.comms:
                functions["ncclAllReduce"](None, None, 0, 7, 0, comm.pointer, None)
                if not group:
                    comm.count(4, 1)
        if group:
            functions["ncclGroupEnd"]()
            for comm in self.comms:
                comm.count(4, calls)

    def run(self) -> None:
        for line in sys.stdin:
            word, _, number = line.strip().partition(" ")
            if word in ("step", "group"):
                self.step(int(number), word == "group")
            elif word == "drop":
                self.droppable.madvise(mmap.MADV_DONTNEED)
            elif word == "ready":
                self.comms[-1].ready()
            elif word == "end":
                os._exit(0)
            self.say()

    def say(self) -> None:
        status = Path("/proc/self/status").read_text()
        memory = dict(re.findall(r"^(VmRSS|VmPTE|VmSwap|RssAnon|RssShmem):\s*(\d+)", status, re.M))
        told = {"comms": [c.told() for c in self.comms], "memory": memory}
        print(json.dumps(told), flush=True)


def userfaultfd(at: int, size: int) -> int:
    """Register for missing pages; -1 when the kernel has none."""
    fd = _libc.syscall(323, 0x80000 | 1)
    if fd < 0:
        return -1
    api = ctypes.create_string_buffer(struct.pack("<QQQ", 0xAA, 0, 0))
    _libc.ioctl(fd, ctypes.c_ulong(0xC018AA3F), api)
    register = ctypes.create_string_buffer(struct.pack("<QQQQ", at, size, 1, 0))
    if _libc.ioctl(fd, ctypes.c_ulong(0xC020AA00), register) != 0:
        os.close(fd)
        return -1
    return int(fd)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", type=Path)
    parser.add_argument("version")
    parser.add_argument("--noise", type=int, default=0)
    parser.add_argument("--late", action="store_true")
    args = parser.parse_args()
    holder = Holder(args.library, args.version, args.noise, args.late)
    print(
        json.dumps({"pid": os.getpid(), "fault_fd": getattr(holder, "fault_fd", None)}), flush=True
    )
    holder.say()
    holder.run()


if __name__ == "__main__":
    main()
