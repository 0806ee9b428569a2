"""Reading another process's memory without stopping it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]

#: Most pieces of one system call.
MOST_PIECES = 1024


class _Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def read(pid: int, address: int, size: int) -> bytes | None:
    """Bytes of a process; None when not all can be read.

    A page that is not present is brought in, as by the process's own read: ask
    ``nccluprobe.inspect.pages`` first where that matters.
    """
    buffer = ctypes.create_string_buffer(size)
    got = read_into(pid, [(address, size)], ctypes.addressof(buffer), size)
    return buffer.raw if got == size else None


def read_into(pid: int, pieces: Sequence[tuple[int, int]], target: int, size: int) -> int:
    """Read (address, size) pieces one after another to an address of ours.

    Returns how many bytes came: reading ends at the first piece that fails.
    OSError when nothing could be read for another reason than the address.
    """
    remote = (_Piece * len(pieces))(*(_Piece(*piece) for piece in pieces))
    local = _Piece(target, size)
    got = int(_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), len(pieces), 0))
    if got >= 0:
        return got
    number = ctypes.get_errno()
    if number == 14:  # EFAULT: the first piece is not mapped
        return 0
    raise OSError(number, os.strerror(number))
