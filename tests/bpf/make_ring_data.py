"""Records tests/data/ring/calls.bin: the ring's bytes of a short, known run.

    sudo python tests/bpf/make_ring_data.py

The library is simnccl with one rank; tests/unit/test_replay.py knows the run.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bpf.fakelib import Uid, config, functions, uid  # noqa: E402
from nccluprobe import resources  # noqa: E402
from nccluprobe.capture.bpf import Sizes  # noqa: E402
from nccluprobe.capture.ebpf_source import EbpfSource  # noqa: E402
from nccluprobe.capture.ring import MappedRing  # noqa: E402
from nccluprobe.capture.source import Library  # noqa: E402


def run(dll: ctypes.CDLL) -> None:
    """The run: a world, a group with a split, point to point, a zero count, the end."""
    u64, size = ctypes.c_uint64, ctypes.c_size_t
    world, child = u64(), u64()
    buffer = (ctypes.c_ubyte * 4096)()
    at, stream = ctypes.addressof(buffer), u64(0)
    named = config(name=b"world")
    dll.ncclCommInitRankConfig(
        ctypes.byref(world), 1, uid(bytes(range(128))), 0, ctypes.byref(named)
    )
    for i in range(20):
        dll.ncclAllReduce(u64(at), u64(at), size(i), 7, 0, world, stream)
    dll.ncclBcast(u64(at), size(5), 7, 0, world, stream)
    dll.ncclGroupStart()
    dll.ncclCommSplit(world, 4, 0, ctypes.byref(child), u64(0))
    dll.ncclGroupEnd()
    dll.ncclAllReduce(u64(at), u64(at), size(3), 9, 2, child, stream)
    dll.ncclGroupStart()
    dll.ncclSend(u64(at), size(8), 1, 0, world, stream)
    dll.ncclRecv(u64(at), size(8), 1, 0, world, stream)
    dll.ncclGroupEnd()
    dll.ncclAllReduce(u64(at), u64(at), size(3), 9, 99, u64(0), stream)
    dll.ncclCommDestroy(child)
    dll.ncclCommFinalize(world)
    dll.ncclCommDestroy(world)


def main() -> None:
    path = resources.native_file(resources.SIMNCCL, build=True)
    dll = ctypes.CDLL(str(path))
    dll.ncclCommInitRankConfig.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        Uid,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    source = EbpfSource(Sizes(ring_bytes=1 << 20))
    source.add_library(Library(1, path.name, "2.28.9", None))
    source.attach(1, str(path), functions(path))
    run(dll)
    ring = source._ring
    assert isinstance(ring, MappedRing)
    out = ROOT / "tests" / "data" / "ring" / "calls.bin"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(ring._data[: int(ring._producer[0])].tobytes())
    print(f"{out}: {out.stat().st_size} bytes; {source.stats()}")
    source.close()


if __name__ == "__main__":
    main()
