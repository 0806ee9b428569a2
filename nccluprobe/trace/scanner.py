"""The native reader of finished calls: whole lines in, columns out.

It takes the plain ``call`` lines that the collectors write, and tells where all
other lines are, which are left to the reader in Python.  Where the native parts
were not built there is none, and Python reads everything: slower, not otherwise.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nccluprobe import resources
from nccluprobe.errors import NccluprobeError

Int64 = NDArray[np.int64]

#: Columns of a table of calls: entry, ns inside (-1: not known), return code (-1: not
#: known), thread, open group (0: none), open GroupStarts, communicator, numbers of the
#: call, stream (-1: not known), the library's counter (-1: not known), peer, the
#: function's code, signature.
T, DUR, RC, THREAD, GROUP, GDEPTH, COMM, IDX, ORD, STREAM, SEQ, PEER, CODE, SIG = range(14)
COLUMNS = 14
#: Of lines left to Python: start and end in the data, number, calls before it.
START, END, LINE, BEFORE = range(4)

#: What a function's line must have beside what all have.
NUMBERED, HAS_COUNT, HAS_DATATYPE, HAS_OP, HAS_ROOT, HAS_PEER = (1 << i for i in range(6))

#: Bytes of a text in a signature, and so many signatures until all are forgotten.
_MAX_STRING = 32
_MAX_SIGNATURES = 1 << 14
_MAX_FIELDS = 64
#: No line of a call is shorter.
_SHORTEST = 48

_P = ctypes.c_void_p
_I64 = ctypes.c_int64


@dataclass(frozen=True)
class RawSignature:
    """A call's function and arguments; 0 and empty: the function has none."""

    code: int
    count: int
    root: int
    datatype: str
    op: str


@dataclass(frozen=True)
class Scanned:
    """A chunk: its number of lines, its calls by column, where its other lines are.

    ``calls``: (COLUMNS, n), SIG being a place in ``Scanner.signatures``
    plus one, 0 of a function that has none;
    ``rest``: (4, k); ``captured``: how many of ``calls`` went into a CUDA graph;
    ``learnt``: by field of ``Scanner.learn``, how many of ``calls`` have it.
    """

    lines: int
    calls: Int64
    rest: Int64
    captured: int
    learnt: Mapping[str, int]


def load() -> ctypes.CDLL | None:
    """The native part; None: it is not here, or not for this machine."""
    try:
        library = ctypes.CDLL(str(resources.native_file(resources.LINES)))
        new, free, scan = (
            library.ncp_lines_new,
            library.ncp_lines_free,
            library.ncp_lines_scan,
        )
        api, signature = library.ncp_lines_api, library.ncp_lines_signature
        library.ncp_lines_field.argtypes = [_P, ctypes.c_char_p, ctypes.c_int]
        library.ncp_lines_count.restype = _I64
        library.ncp_lines_count.argtypes = [ctypes.c_char_p, _I64]
        library.ncp_lines_signatures.restype = ctypes.c_uint32
        library.ncp_lines_signatures.argtypes = [_P]
        library.ncp_lines_forget.restype = None
        library.ncp_lines_forget.argtypes = [_P]
    except (NccluprobeError, OSError, AttributeError):
        return None
    new.restype, new.argtypes = _P, [_I64]
    free.restype, free.argtypes = None, [_P]
    api.argtypes = [_P, ctypes.c_char_p, ctypes.c_int32, ctypes.c_uint32]
    signature.argtypes = [_P, ctypes.c_uint32, _P, ctypes.c_char_p, ctypes.c_char_p]
    scan.restype, scan.argtypes = None, [_P, ctypes.c_char_p, _I64, _P, _I64, _P, _I64, _P]
    return library


class Scanner:
    """Reads the call lines of an analysis; remembers the signatures that it has seen."""

    def __init__(
        self,
        library: ctypes.CDLL,
        functions: Iterable[tuple[str, int, int]],
        fields: Iterable[str],
        max_peer: int,
    ) -> None:
        """``functions``: name, code, what it needs; ``fields``: all that a call may have.

        Raises MemoryError, and ValueError for more than there is room for.
        """
        self._library = library
        self._state = library.ncp_lines_new(max_peer)
        if not self._state:
            raise MemoryError
        for name, code, needs in functions:
            if not library.ncp_lines_api(self._state, name.encode(), code, needs):
                raise ValueError(f"{name} does not fit the native reader")
        self._fields: list[str] = []
        for name in fields:
            if not self._field(name, False):
                raise ValueError(f"{name} does not fit the native reader")
        self._known = len(self._fields)
        self._counts = np.zeros(4 + _MAX_FIELDS, np.int64)
        self._at = self._counts.ctypes.data

    def __del__(self) -> None:
        state = getattr(self, "_state", None)
        if state:
            self._library.ncp_lines_free(state)
            self._state = None

    def _field(self, name: str, counted: bool) -> bool:
        added = bool(self._library.ncp_lines_field(self._state, name.encode(), counted))
        if added:
            self._fields.append(name)
        return added

    def learn(self, name: str) -> None:
        """From now on take also calls with a field that is new, if there is room, and count them.

        Calls with a field that is not known are left to the reader in Python.
        """
        if name.isascii() and name.isprintable() and name not in self._fields:
            self._field(name, True)

    def scan(self, data: bytes) -> Scanned:
        """Read whole lines, each with its newline."""
        lines = int(self._library.ncp_lines_count(data, len(data)))
        most = min(lines, len(data) // _SHORTEST + 1)
        room = np.empty(COLUMNS * most + 4 * lines, np.int64)
        at = room.ctypes.data
        self._library.ncp_lines_scan(
            self._state, data, len(data), at, most, at + 8 * COLUMNS * most, lines, self._at
        )
        _, calls, rest, captured, *by_field = self._counts.tolist()
        learnt = zip(self._fields[self._known :], by_field[self._known :], strict=False)
        return Scanned(
            lines,
            room[: COLUMNS * most].reshape(COLUMNS, most)[:, :calls],
            room[COLUMNS * most :].reshape(4, lines)[:, :rest],
            captured,
            {name: n for name, n in learnt if n},
        )

    @property
    def full(self) -> bool:
        """Whether it is time to forget the signatures."""
        return int(self._library.ncp_lines_signatures(self._state)) > _MAX_SIGNATURES // 2

    def signatures(self, first: int) -> list[RawSignature]:
        """The signatures known, from a number on."""
        numbers = (_I64 * 3)()
        datatype = ctypes.create_string_buffer(_MAX_STRING + 1)
        op = ctypes.create_string_buffer(_MAX_STRING + 1)
        found = []
        for i in range(first, self._library.ncp_lines_signatures(self._state)):
            self._library.ncp_lines_signature(self._state, i, numbers, datatype, op)
            code, count, root = numbers
            texts = (datatype.value.decode("ascii"), op.value.decode("ascii"))
            found.append(RawSignature(code, count, root, *texts))
        return found

    def forget(self) -> None:
        """Forget all signatures."""
        self._library.ncp_lines_forget(self._state)
