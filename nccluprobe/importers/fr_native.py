"""The native reader of flight recorder dumps: a pickle's bytes in, columns out.

It takes what the newest versions of PyTorch write.  All else, good or bad, is left
to the reader in Python, and so is everything where the native parts were not built:
slower, not otherwise.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from nccluprobe import resources
from nccluprobe.errors import NccluprobeError
from nccluprobe.importers.fr_entries import Columns

#: Columns, as in native/dumps/columns.c.
_WIDE = ("record", "seq", "p2p_seq", "op", "created", "ended", "timeout")
_NARROW = ("group", "call", "state")
_P = ctypes.c_void_p
_I64 = ctypes.c_int64


class _Reader:
    """Reads one dump after another; not for several threads at once."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.ncp_dumps_new.restype = library.ncp_dumps_rest.restype = _P
        library.ncp_dumps_read.restype = library.ncp_dumps_columns.restype = _I64
        library.ncp_dumps_read.argtypes = [_P, _P, _I64]
        library.ncp_dumps_columns.argtypes = [_P, _P, _P, _P, _I64]
        library.ncp_dumps_rest.argtypes = library.ncp_dumps_free.argtypes = [_P]
        library.ncp_dumps_free.restype = None
        self._state = library.ncp_dumps_new()
        if not self._state:
            raise MemoryError

    def read(self, data: bytes, most: int) -> tuple[dict[str, Any], bytes] | None:
        """Columns of the entries, and what is beside them; None: not for here."""
        at = np.frombuffer(data, np.uint8).ctypes.data
        n = int(self._library.ncp_dumps_read(self._state, at, len(data)))
        if not 0 < n <= most:
            return None
        wide = np.empty((len(_WIDE), n), np.int64)
        narrow = np.empty((len(_NARROW), n), np.int32)
        is_p2p = np.empty(n, np.bool_)
        places = (x.ctypes.data for x in (wide, narrow, is_p2p))
        size = self._library.ncp_dumps_columns(self._state, *places, n)
        if size < 0:
            return None
        columns = dict(zip(_WIDE, wide, strict=True)) | dict(zip(_NARROW, narrow, strict=True))
        rest = ctypes.string_at(self._library.ncp_dumps_rest(self._state), size)
        return columns | {"is_p2p": is_p2p}, rest


@functools.cache
def _reader() -> _Reader | None:
    """The native part; None: it is not here, or not for this machine."""
    try:
        return _Reader(ctypes.CDLL(str(resources.native_file(resources.DUMPS))))
    except (NccluprobeError, OSError, AttributeError):
        return None


def read_natively(
    data: bytes, most: int, load: Callable[[bytes], Any]
) -> tuple[dict[Any, Any], Columns] | None:
    """A dump without its entries, and these; None: it is left to Python.

    ``most``: entries; ``load``: reads a small pickle of plain values.  Memory and time are
    bounded by the length of ``data``, whatever it holds.
    """
    reader = _reader()
    found = None if reader is None else reader.read(data, most)
    if found is None:
        return None
    columns, rest = found
    content, names, datatypes, groups, begun, calls = load(rest)
    return content, Columns(
        **columns,
        calls=np.frombuffer(calls, np.int64).reshape(-1, 4),
        begun=begun,
        groups=groups,
        names=names,
        datatypes=datatypes,
    )
