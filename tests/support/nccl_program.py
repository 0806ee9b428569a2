"""Calls of a library of NCCL's interface, noted as they are made, on made-up communicators.

Only ctypes and the standard library, as the program real_nccl.py says.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import threading
from pathlib import Path
from typing import Any

LAYOUTS = Path(__file__).resolve().parent.parent / "data" / "nccl_layouts.json"
MAGIC = 0x0280028002800280

UID_A = bytes(range(128))
UID_B = bytes((37 * i + 11) % 256 for i in range(128))

DATATYPES = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64",
    "float16", "float32", "float64", "bfloat16",
)  # fmt: skip
OPS = ("sum", "prod", "max", "min", "avg")

#: What each function takes, in order.  P: any pointer, by value.
SIGNATURES: dict[str, str] = {
    "ncclAllReduce": "P P count datatype op comm stream",
    "ncclBroadcast": "P P count datatype root comm stream",
    "ncclBcast": "P count datatype root comm stream",
    "ncclReduce": "P P count datatype op root comm stream",
    "ncclAllGather": "P P count datatype comm stream",
    "ncclReduceScatter": "P P count datatype op comm stream",
    "ncclAlltoAll": "P P count datatype comm stream",
    "ncclGather": "P P count datatype root comm stream",
    "ncclScatter": "P P count datatype root comm stream",
    "ncclAllReduceConfig": "P P count datatype op comm stream P",
    "ncclBroadcastConfig": "P P count datatype root comm stream P",
    "ncclReduceConfig": "P P count datatype op root comm stream P",
    "ncclAllGatherConfig": "P P count datatype comm stream P",
    "ncclReduceScatterConfig": "P P count datatype op comm stream P",
    "ncclAlltoAllConfig": "P P count datatype comm stream P",
    "ncclGatherConfig": "P P count datatype root comm stream P",
    "ncclScatterConfig": "P P count datatype root comm stream P",
    "ncclSend": "P count datatype peer comm stream",
    "ncclRecv": "P count datatype peer comm stream",
    "ncclPutSignal": "P count datatype peer P P I I I comm stream",
    "ncclSignal": "peer I I I comm stream",
    "ncclWaitSignal": "I P comm stream",
    "ncclGroupStart": "",
    "ncclGroupEnd": "",
    "ncclGroupSimulateEnd": "P",
    "ncclCommInitRank": "newcomm nranks uid rank",
    "ncclCommInitRankConfig": "newcomm nranks uid rank config",
    "ncclCommInitRankScalable": "newcomm nranks rank I uidptr config",
    "ncclCommInitAll": "P nranks P",
    "ncclCommSplit": "comm color key newcomm config",
    "ncclCommShrink": "comm P nranks newcomm config I",
    "ncclCommGrow": "comm nranks uidptr rank newcomm config",
    "ncclCommFinalize": "comm",
    "ncclCommDestroy": "comm",
    "ncclCommAbort": "comm",
    "ncclCommRevoke": "comm I",
    "ncclCommSuspend": "comm I",
    "ncclCommResume": "comm",
    "ncclCommRegister": "comm P size P",
    "ncclCommDeregister": "comm P",
    "ncclCommWindowRegister": "comm P size P I",
    "ncclCommWindowDeregister": "comm P",
    "ncclMemAlloc": "P size",
    "ncclMemFree": "P",
    "ncclDevCommCreate": "comm P P",
    "ncclDevCommDestroy": "comm P",
    "ncclRedOpCreatePreMulSum": "P P datatype I comm",
    "ncclRedOpDestroy": "op comm",
}

COLLECTIVES = tuple(
    api for api, text in SIGNATURES.items() if "count" in text.split() and "peer" not in text
)
P2P = ("ncclSend", "ncclRecv")

#: Index in seqNumber[] of the functions that have a counter of their own.
SEQ_SLOT = {
    "ncclBroadcast": 0,
    "ncclBcast": 0,
    "ncclReduce": 1,
    "ncclAllGather": 2,
    "ncclReduceScatter": 3,
    "ncclAllReduce": 4,
    "ncclBroadcastConfig": 0,
    "ncclReduceConfig": 1,
    "ncclAllGatherConfig": 2,
    "ncclReduceScatterConfig": 3,
    "ncclAllReduceConfig": 4,
}


class UniqueId(ctypes.Structure):
    """ncclUniqueId: passed by value."""

    _fields_ = [("internal", ctypes.c_ubyte * 128)]


class Config(ctypes.Structure):
    """ncclConfig_t as 2.16 had it; later versions accept it by its version field."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


_CTYPES: dict[str, Any] = {
    "P": ctypes.c_void_p,
    "I": ctypes.c_int,
    "count": ctypes.c_size_t,
    "size": ctypes.c_size_t,
    "comm": ctypes.c_void_p,
    "stream": ctypes.c_void_p,
    "uid": UniqueId,
}


def _ctype(token: str) -> Any:
    if token in ("newcomm", "config", "uidptr"):
        return ctypes.c_void_p
    return _CTYPES.get(token, ctypes.c_int)


#: rank, nRanks and hash of the made-up communicators.  The first two take all
#: kinds of calls, the third is ended and its pointer used again, the others
#: belong to a thread each.
COMMS: tuple[tuple[int, int, int], ...] = (
    (3, 8, 0x1122334455667788),
    (0, 2, 0xFEDCBA9876543210),
    (1, 4, 0x0BADC0FFEE0DDF00),
    (5, 16, 0x00000000000000A1),
    (6, 16, 0x80000000000000B2),
)


class FakeComm:
    """Memory that this version of NCCL takes for a communicator."""

    def __init__(self, layout: dict[str, Any], rank: int, nranks: int, ident: int) -> None:
        size = layout["sizeof"]
        self.rank, self.nranks, self.hash = rank, nranks, ident
        # Touched by hand: a BPF program reads no page that is not present.
        # Private, as what NCCL allocates.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, max(size, 4 << 20), flags=flags)
        self._memory.write(bytes(len(self._memory)))
        self.pointer = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._flag = ctypes.c_uint32(0)
        self._put(layout["startMagic"], MAGIC, ctypes.c_uint64)
        self._put(layout["endMagic"], MAGIC, ctypes.c_uint64)
        # 2.16 stores no hash; the word before rank is the first of the unique id.
        self._put(layout["rank"] - 8, ident, ctypes.c_uint64)
        self._put(layout["rank"], rank, ctypes.c_int)
        self._put(layout["nRanks"], nranks, ctypes.c_int)
        self._put(layout["cudaDev"], 5, ctypes.c_int)
        self._put(layout["abortFlag"], ctypes.addressof(self._flag), ctypes.c_uint64)
        if layout["config"] is not None:
            self._put(layout["config"] + 16, 1, ctypes.c_int)
        self._seq_at = layout["seqNumber"]
        if self._seq_at is not None:
            for slot in range(5):
                self._put(self._seq_at + 8 * slot, 1000 * (slot + 1) + rank, ctypes.c_uint64)

    def seq(self, api: str) -> int | None:
        """The struct's own counter for this function, None where it has none."""
        slot = SEQ_SLOT.get(api.removesuffix("Config"))
        if self._seq_at is None or slot is None:
            return None
        at = self.pointer + self._seq_at + 8 * slot
        return int(ctypes.c_uint64.from_address(at).value)

    def _put(self, offset: int | None, value: int, ctype: Any) -> None:
        if offset is not None:
            ctype.from_address(self.pointer + offset).value = value


class Program:
    """Makes calls and notes each one: the api, what was passed, what came back."""

    def __init__(self, library: Path, version: str) -> None:
        self.lib = ctypes.CDLL(str(library))
        self.version = tuple(int(part) for part in version.split("."))
        self.layout = json.loads(LAYOUTS.read_text())["versions"][version]
        self.calls: list[dict[str, Any]] = []
        self.functions: dict[str, Any] = {}
        for api, signature in SIGNATURES.items():
            function = getattr(self.lib, api, None)
            if function is not None:
                function.argtypes = [_ctype(token) for token in signature.split()]
                function.restype = ctypes.c_int
                self.functions[api] = function
        self.comms = [FakeComm(self.layout, *planted) for planted in COMMS]
        self._local = threading.local()

    def has(self, *apis: str) -> list[str]:
        """Those of the functions that this version exports."""
        return [api for api in apis if api in self.functions]

    def call(self, api: str, comm: int | None = None, *, later: bool = False, **passed: Any) -> Any:
        """One call on made-up communicator ``comm``, or NULL.

        ``later``: note it as one that never returns and give what does it.
        """
        note: dict[str, Any] = {"api": api, "comm": comm, "thread": threading.get_native_id()}
        values: list[Any] = []
        # What the pointers point to must live as long as the call.
        out = (ctypes.c_void_p * 64)()
        keep: list[Any] = []
        for token in SIGNATURES[api].split():
            value = passed.get(token)
            if token == "comm":
                values.append(None if comm is None else self.comms[comm].pointer)
                continue
            if token in ("newcomm", "P"):
                values.append(ctypes.addressof(out))
                continue
            if token == "config":
                note["nonblocking"] = passed.get("blocking", 1) == 0
                if "blocking" not in passed:
                    values.append(None)
                    continue
                made = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21602, passed["blocking"])
                keep.append(made)
                values.append(ctypes.addressof(made))
                continue
            if token in ("uid", "uidptr"):
                uid = UniqueId((ctypes.c_ubyte * 128)(*passed["uid"]))
                keep.append(uid)
                values.append(uid if token == "uid" else ctypes.addressof(uid))
                note["uid"] = "A" if passed["uid"] == UID_A else "B"
                continue
            values.append(0 if value is None else value)
            if token == "datatype":
                note[token] = DATATYPES[value]
            elif token == "op":
                note[token] = OPS[value]
            elif token != "I":
                note[token] = value
        group = getattr(self._local, "group", None)
        if group is not None and not api.startswith("ncclGroup"):
            note["group"], note["gpos"] = group
            self._local.group = (group[0], group[1] + 1)
        elif comm is not None and group is None:
            note["seq"] = self.comms[comm].seq(api)
        self.calls.append(note)
        if later:
            note["rc"] = None
            return lambda: (self.functions[api](*values), keep, out)
        note["rc"] = self.functions[api](*values)
        return note["rc"]

    def group(self, number: int) -> None:
        """GroupStart; the calls that follow are noted as its members."""
        self.call("ncclGroupStart")
        self._local.group = (number, 0)

    def end_group(self) -> None:
        self._local.group = None
        self.call("ncclGroupEnd")
