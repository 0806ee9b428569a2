"""A program that calls NVIDIA's own libnccl without a GPU, with known arguments.

    python real_nccl.py LIBNCCL VERSION --go GO --truth TRUTH --done DONE [--calls N]

It loads the library, prints "ready PID", waits until the file GO exists (so
that probes are on before the first call), makes the calls, writes to TRUTH
what it called and what came back, prints "called", and waits for DONE.

The communicators are made up: zeroed memory of the struct's size with rank,
nRanks, hash and magics planted where this version keeps them
(tests/data/nccl_layouts.json).  From 2.21 on, real collectives of count 0 on
such a one return ncclSuccess; with a count they fail for want of CUDA.  Each
call is one that returns in every version that has the function (what crashes,
such as Send on a made-up communicator up to 2.27 or Shrink(NULL), is not done),
except the last one of ``--crash``.

Only ctypes and the standard library: this is the independent side of the
comparison and takes nothing from nccluprobe.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
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


def verify(program: Program) -> None:
    """The accessors of the library give back what was planted."""
    for comm in program.comms:
        for accessor, planted in (
            ("ncclCommUserRank", comm.rank),
            ("ncclCommCount", comm.nranks),
            ("ncclCommCuDevice", 5),
        ):
            value = ctypes.c_int(-1)
            rc = getattr(program.lib, accessor)(ctypes.c_void_p(comm.pointer), ctypes.byref(value))
            if rc != 0 or value.value != planted:
                raise SystemExit(f"{accessor} gave rc {rc} and {value.value}, planted {planted}")
    number = ctypes.c_int()
    program.lib.ncclGetVersion(ctypes.byref(number))
    major, minor, patch = program.version
    if number.value != major * 10000 + minor * 100 + patch:
        raise SystemExit(f"ncclGetVersion says {number.value}")


COLLECTIVES = tuple(
    api for api, text in SIGNATURES.items() if "count" in text.split() and "peer" not in text
)
P2P = ("ncclSend", "ncclRecv")
BIG = 1 << 33  # counts beyond 32 bits
STREAMS = (0, 0x1000, 0x7F0000002000)


def plan(program: Program, calls: int, fewer: int) -> Iterator[str]:
    """All calls of one run; gives a name after each part.

    ``calls`` of each collective and point-to-point function outside groups,
    ``fewer`` of each other one.
    """
    for api in program.has(*COLLECTIVES):
        rooted = "root" in SIGNATURES[api]
        for i in range(calls):
            # In turn: works, fails for want of CUDA, refused for its root, no communicator.
            turn = i % 4
            comm = None if turn == 3 else i % 2
            nranks = COMMS[comm][1] if comm is not None else 8
            program.call(
                api,
                comm,
                count=(0, 1 + i, BIG + i, 3 * BIG + i)[turn],
                datatype=i % len(DATATYPES),
                op=i % len(OPS),
                root=nranks + 100 + i if rooted and turn == 2 else i % nranks,
                stream=STREAMS[i % 3],
            )
    yield "collectives"
    for api in program.has(*P2P, "ncclPutSignal", "ncclSignal", "ncclWaitSignal"):
        for i in range(calls):
            # A peer beyond the last rank is refused; a valid one would be used.
            comm = None if i % 3 == 2 else i % 2
            program.call(
                api,
                comm,
                count=BIG + i,
                datatype=i % len(DATATYPES),
                peer=100 + i % 5,
                stream=STREAMS[i % 3],
            )
    yield "p2p"
    for i in range(fewer):
        program.group(i)
        inner = i % 3 == 1
        if inner:
            program.call("ncclGroupStart")
        for j, api in enumerate(program.has("ncclAllReduce", "ncclBcast", "ncclReduceScatter")):
            program.call(api, j % 2, count=0, datatype=i % 10, op=j, root=1, stream=STREAMS[i % 3])
        if inner:
            program.call("ncclGroupEnd")
        if i % 5 == 4:  # one refused call makes the whole group fail
            program.call("ncclSend", 0, count=i, datatype=7, peer=100, stream=0)
        program.end_group()
    for api in program.has("ncclGroupSimulateEnd"):
        for _ in range(fewer):
            program.call(api)
    yield "groups"
    for i in range(fewer):
        uid = (UID_A, UID_B)[i % 2]
        for api in program.has(
            "ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommInitRankScalable"
        ):
            extra = {} if api == "ncclCommInitRank" else {"blocking": i % 2}
            program.call(api, nranks=2 + i, rank=i % 2, uid=uid, I=1, **extra)
        program.call("ncclCommInitAll", nranks=-1 - i)
        for api in program.has("ncclCommSplit"):
            program.call(api, i % 2, color=i - 1, key=1000 - i)
            program.call(api, None, color=i - 1, key=-i, blocking=0)
        for api in program.has("ncclCommShrink"):
            program.call(api, i % 2, nranks=1, blocking=i % 2)
        for api in program.has("ncclCommGrow"):
            program.call(api, i % 2, nranks=20 + i, rank=i, uid=uid)  # refused
            program.call(api, None, nranks=20 + i, rank=1 + i, uid=uid)
    yield "init"
    for i in range(fewer):
        for api in program.has("ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort"):
            program.call(api)
        for api in program.has("ncclCommRevoke"):
            program.call(api)
        for api in program.has("ncclCommSuspend", "ncclCommResume"):
            program.call(api, i % 2)
            program.call(api)
    yield "ends"
    for i in range(fewer):
        for api in program.has("ncclCommRegister"):
            program.call(api, None, size=BIG + i)
        for api in program.has("ncclCommDeregister"):
            program.call(api)
        for api in program.has("ncclCommWindowRegister"):
            program.call(api, i % 2, size=4096 * i)
        for api in program.has(
            "ncclCommWindowDeregister", "ncclDevCommCreate", "ncclDevCommDestroy"
        ):
            program.call(api, i % 2)
        for api in program.has("ncclMemAlloc"):
            program.call(api, size=BIG + i)
        for api in program.has("ncclMemFree"):
            program.call(api)
        program.call("ncclRedOpCreatePreMulSum", None, datatype=i % 10)
        program.call("ncclRedOpDestroy", i % 2, op=i % 5)
    yield "registration"
    for _turn in range(2):  # the same pointer again after its end: another communicator
        for _ in range(fewer):
            program.call("ncclAllReduce", 2, count=0, datatype=7, op=0, stream=0)
        program.call("ncclCommDestroy", 2)
    yield "generations"


def in_thread(program: Program, comm: int, calls: int) -> None:
    for i in range(calls):
        program.call("ncclReduce", comm, count=0, datatype=i % 10, op=1, root=i % 16, stream=0)
        program.call("ncclAllGather", comm, count=0, datatype=i % 10, stream=0)


def crash(program: Program) -> Any:
    """A call that ends the process inside NCCL, where this version has one."""
    if program.version >= (2, 26):
        return program.call("ncclCommAbort", 0, later=True)
    return program.call("ncclSend", 0, later=True, count=0, datatype=7, peer=1, stream=0)


def wait_for(path: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{path} did not appear within {seconds:.0f} s")
        time.sleep(0.01)


def main() -> int:
    parser = argparse.ArgumentParser(description="calls NVIDIA's libnccl without a GPU")
    parser.add_argument("library", type=Path)
    parser.add_argument("version")
    parser.add_argument("--verify", action="store_true", help="check the layout table and exit")
    parser.add_argument("--go", type=Path, help="begin when this file exists")
    parser.add_argument("--truth", type=Path, help="write what was called here")
    parser.add_argument("--done", type=Path, help="end when this file exists")
    parser.add_argument("--calls", type=int, default=1009, help="of each data function")
    parser.add_argument("--fewer", type=int, default=101, help="of each other function")
    parser.add_argument("--crash", action="store_true", help="die inside a call at the end")
    args = parser.parse_args()
    program = Program(args.library, args.version)
    if args.verify:
        verify(program)
        return 0
    print(f"ready {os.getpid()}", flush=True)
    if args.go:
        wait_for(args.go, 120)
    for part in plan(program, args.calls, args.fewer):
        print(f"part {part}", flush=True)
    threads = [
        threading.Thread(target=in_thread, args=(program, comm, args.calls)) for comm in (3, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = crash(program) if args.crash else None
    if args.truth:
        truth = {"pid": os.getpid(), "version": args.version, "calls": program.calls}
        args.truth.write_text(json.dumps(truth))
    print("called", flush=True)
    if args.done:
        wait_for(args.done, 120)
    if last is not None:
        last()
    # The library's own clean-up at exit has nothing to clean up.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
