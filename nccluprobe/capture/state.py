"""How the BPF program's maps look from here (ebpf/include/ncp_maps.h).

The C side asserts the places in ``struct ncp_thread``; ``check_layout``
compares the sizes of all with what the kernel says of the loaded maps.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from nccluprobe.errors import ExitCode, NccluprobeError
from nccluprobe.record import NAME_SIZE, OFFSETS, SIZE

THREAD = np.dtype(
    {
        "names": ["rec", "lib", "captured", "epoch", "active"],
        "formats": [f"V{SIZE}", "<u2", "<u8", "<u4", "u1"],
        "offsets": [0, OFFSETS["lib"], SIZE + 40, SIZE + 48, SIZE + 67],
        "itemsize": SIZE + 72,
    }
)
TALLY = np.dtype(
    [("pid", "<u4"), ("zero", "<u4"), ("captured", "<u8"), ("lost", "<u8"), ("blind", "<u8")]
)
COMM_KEY = np.dtype([("epoch", "<u4"), ("zero", "<u4"), ("ptr", "<u8")])
COMM = np.dtype(
    [
        ("gen", "<u4"),
        ("flags", "<u4"),
        ("hash", "<u8"),
        ("calls", "<u8"),
        ("collectives", "<u8"),
        ("children", "<u8"),
    ]
)
P2P_KEY = np.dtype([("epoch", "<u4"), ("gen", "<u4"), ("peer", "<i4"), ("direction", "<u4")])
PENDING_KEY = np.dtype([("thread", "<u8"), ("slot", "<u8")])

PROC_VALUE = np.dtype([("epoch", "<u4"), ("leader_gone", "<u4"), ("threads", "<u8")])

#: struct ncp_lib, struct ncp_proc, struct ncp_globals
LIB = struct.Struct("=II7Q")
PROC = struct.Struct("=IIQ")
GLOBALS = struct.Struct("=QQQ")

#: enum of the counters, in order.
STATS = (
    "lost",
    "thread_full",
    "proc_full",
    "comm_full",
    "p2p_full",
    "pending_full",
    "nested",
    "duplicate",
    "unwound",
    "no_entry",
    "no_return",
)

_SIZES: dict[str, tuple[int, int]] = {
    "threads": (8, THREAD.itemsize),
    "procs": (4, PROC.size),
    "tallies": (4, TALLY.itemsize),
    "denied": (4, 4),
    "comms": (COMM_KEY.itemsize, COMM.itemsize),
    "p2p": (P2P_KEY.itemsize, 8),
    "pending": (PENDING_KEY.itemsize, SIZE + 8 + NAME_SIZE),
    "libs": (4, LIB.size),
    "globals": (4, GLOBALS.size),
    "deny_version": (4, 4),
    "stats": (4, 8),
}
MAPS = tuple(_SIZES)


def check_layout(sizes_of: Callable[[str], tuple[int, int]]) -> None:
    """Compare with the loaded program; NccluprobeError when a map differs."""
    for name, expected in _SIZES.items():
        found = sizes_of(name)
        if found != expected:
            raise NccluprobeError(
                f"map {name} has sizes {found}, expected {expected}: the BPF program and"
                " nccluprobe are of different versions, install again",
                ExitCode.INTERNAL,
            )
