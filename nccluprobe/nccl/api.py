"""The API table: the one list of NCCL functions that nccluprobe traces.

Everything that needs to know a function's arguments is generated from this
table or reads it: the BPF argument readers, the C record header, the preload
wrappers, the JSON Schema of the trace and the reference page.  Supporting a
function means adding one row.

Prototypes are those of nccl.h 2.16 to 2.32; none changed in between.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """What a function does, as far as matching is concerned."""

    COLLECTIVE = "collective"
    P2P = "p2p"
    ONE_SIDED = "one_sided"
    GROUP = "group"
    LIFECYCLE = "lifecycle"
    REGISTRATION = "registration"
    # Probed for what it tells about others, never written as a call.
    HELPER = "helper"


class Role(str, Enum):
    """What an argument carries.  One role appears once per function."""

    COUNT = "count"
    DATATYPE = "datatype"
    OP = "op"
    ROOT = "root"
    PEER = "peer"
    COMM = "comm"
    STREAM = "stream"
    NEW_COMM = "newcomm"  # ncclComm_t*: written by the callee
    COMM_ARRAY = "comms"  # ncclComm_t[ndev]: written by the callee
    UID = "uid"  # ncclUniqueId by value, 128 bytes
    UID_PTR = "uid_ptr"  # const ncclUniqueId*: the first one names the communicator
    NRANKS = "nranks"
    RANK = "rank"
    COLOR = "color"
    KEY = "key"
    CONFIG = "config"
    SIZE = "size"
    OTHER = "other"  # not recorded


@dataclass(frozen=True)
class Place:
    """Where an argument lies at the function's first instruction.

    ``reg`` is the index of the integer argument register (x86-64: rdi, rsi,
    rdx, rcx, r8, r9; aarch64: x0..x7), or None.  ``stack`` is the byte offset
    from the stack pointer, or None.  Both None never happens.
    """

    reg: int | None
    stack: int | None


@dataclass(frozen=True)
class Api:
    """One traced function.

    ``id`` is written into the binary record: never reuse or change one.
    ``since`` is the first NCCL release that exports it.  ``seq_slot`` is the
    index in ncclComm.seqNumber[] that an eager call increments (NCCL 2.26+),
    or None.  ``same_as`` names the call that this one is a spelling of, for
    matching across ranks (ncclBcast and ncclBroadcast are one collective).
    """

    id: int
    name: str
    kind: Kind
    since: str
    args: tuple[Role, ...]
    seq_slot: int | None = None
    same_as: str | None = None
    direction: str | None = None  # p2p: "send" or "recv"
    ends_comm: str | None = None  # closes the communicator: how
    makes_comm: str | None = None  # makes one: how the trace says it was learnt

    @property
    def canonical(self) -> str:
        """The name under which calls of several ranks are compared."""
        return self.same_as or self.name

    def has(self, role: Role) -> bool:
        return role in self.args

    def place(self, role: Role, arch: str) -> Place:
        """Place of the argument with this role; KeyError when there is none.

        ``arch`` is "x86_64" or "aarch64".  System V: a 128-byte struct by
        value takes no register and lies on the stack; AAPCS64: the caller
        passes a pointer to a copy.
        """
        regs = {"x86_64": 6, "aarch64": 8}[arch]
        # At entry the x86-64 return address is at [rsp]; aarch64 keeps it in x30.
        stack = {"x86_64": 8, "aarch64": 0}[arch]
        reg = 0
        for arg in self.args:
            if arg is Role.UID and arch == "x86_64":
                found = Place(None, stack)
                stack += 128
            elif reg < regs:
                found = Place(reg, None)
                reg += 1
            else:
                found = Place(None, stack)
                stack += 8
            if arg is role:
                return found
        raise KeyError(role)


_C, _D, _O, _R = Role.COUNT, Role.DATATYPE, Role.OP, Role.ROOT
_P, _M, _S, _X = Role.PEER, Role.COMM, Role.STREAM, Role.OTHER
_N, _F = Role.NEW_COMM, Role.CONFIG
_COLL, _LIFE, _REG = Kind.COLLECTIVE, Kind.LIFECYCLE, Kind.REGISTRATION


API_TABLE: tuple[Api, ...] = (
    # Collectives
    Api(1, "ncclAllReduce", _COLL, "2.16", (_X, _X, _C, _D, _O, _M, _S), seq_slot=4),
    Api(2, "ncclBroadcast", _COLL, "2.16", (_X, _X, _C, _D, _R, _M, _S), seq_slot=0),
    Api(
        3,
        "ncclBcast",
        _COLL,
        "2.16",
        (_X, _C, _D, _R, _M, _S),
        seq_slot=0,
        same_as="ncclBroadcast",
    ),
    Api(4, "ncclReduce", _COLL, "2.16", (_X, _X, _C, _D, _O, _R, _M, _S), seq_slot=1),
    Api(5, "ncclAllGather", _COLL, "2.16", (_X, _X, _C, _D, _M, _S), seq_slot=2),
    Api(6, "ncclReduceScatter", _COLL, "2.16", (_X, _X, _C, _D, _O, _M, _S), seq_slot=3),
    Api(7, "ncclAlltoAll", _COLL, "2.28", (_X, _X, _C, _D, _M, _S)),
    Api(8, "ncclGather", _COLL, "2.28", (_X, _X, _C, _D, _R, _M, _S)),
    Api(9, "ncclScatter", _COLL, "2.28", (_X, _X, _C, _D, _R, _M, _S)),
    Api(
        10,
        "ncclAllReduceConfig",
        _COLL,
        "2.32",
        (_X, _X, _C, _D, _O, _M, _S, _X),
        seq_slot=4,
        same_as="ncclAllReduce",
    ),
    Api(
        11,
        "ncclBroadcastConfig",
        _COLL,
        "2.32",
        (_X, _X, _C, _D, _R, _M, _S, _X),
        seq_slot=0,
        same_as="ncclBroadcast",
    ),
    Api(
        12,
        "ncclReduceConfig",
        _COLL,
        "2.32",
        (_X, _X, _C, _D, _O, _R, _M, _S, _X),
        seq_slot=1,
        same_as="ncclReduce",
    ),
    Api(
        13,
        "ncclAllGatherConfig",
        _COLL,
        "2.32",
        (_X, _X, _C, _D, _M, _S, _X),
        seq_slot=2,
        same_as="ncclAllGather",
    ),
    Api(
        14,
        "ncclReduceScatterConfig",
        _COLL,
        "2.32",
        (_X, _X, _C, _D, _O, _M, _S, _X),
        seq_slot=3,
        same_as="ncclReduceScatter",
    ),
    Api(
        15,
        "ncclAlltoAllConfig",
        _COLL,
        "2.32",
        (_X, _X, _C, _D, _M, _S, _X),
        same_as="ncclAlltoAll",
    ),
    Api(
        16,
        "ncclGatherConfig",
        _COLL,
        "2.32",
        (_X, _X, _C, _D, _R, _M, _S, _X),
        same_as="ncclGather",
    ),
    Api(
        17,
        "ncclScatterConfig",
        _COLL,
        "2.32",
        (_X, _X, _C, _D, _R, _M, _S, _X),
        same_as="ncclScatter",
    ),
    # Point to point
    Api(32, "ncclSend", Kind.P2P, "2.16", (_X, _C, _D, _P, _M, _S), direction="send"),
    Api(33, "ncclRecv", Kind.P2P, "2.16", (_X, _C, _D, _P, _M, _S), direction="recv"),
    # One-sided
    Api(40, "ncclPutSignal", Kind.ONE_SIDED, "2.29", (_X, _C, _D, _P, _X, _X, _X, _X, _X, _M, _S)),
    Api(41, "ncclSignal", Kind.ONE_SIDED, "2.29", (_P, _X, _X, _X, _M, _S)),
    Api(42, "ncclWaitSignal", Kind.ONE_SIDED, "2.29", (_X, _X, _M, _S)),
    # Groups
    Api(48, "ncclGroupStart", Kind.GROUP, "2.16", ()),
    Api(49, "ncclGroupEnd", Kind.GROUP, "2.16", ()),
    Api(50, "ncclGroupSimulateEnd", Kind.GROUP, "2.22", (_X,)),
    # Lifecycle
    Api(
        64,
        "ncclCommInitRank",
        _LIFE,
        "2.16",
        (_N, Role.NRANKS, Role.UID, Role.RANK),
        makes_comm="init",
    ),
    Api(
        65,
        "ncclCommInitRankConfig",
        _LIFE,
        "2.16",
        (_N, Role.NRANKS, Role.UID, Role.RANK, _F),
        makes_comm="init",
    ),
    Api(
        66,
        "ncclCommInitRankScalable",
        _LIFE,
        "2.23",
        (_N, Role.NRANKS, Role.RANK, _X, Role.UID_PTR, _F),
        makes_comm="init",
    ),
    Api(
        67,
        "ncclCommInitAll",
        _LIFE,
        "2.16",
        (Role.COMM_ARRAY, Role.NRANKS, _X),
        makes_comm="init_all",
    ),
    Api(
        68,
        "ncclCommSplit",
        _LIFE,
        "2.18",
        (_M, Role.COLOR, Role.KEY, _N, _F),
        makes_comm="split",
    ),
    # nranks carries excludeRanksCount: the child has the parent's size less that.
    Api(
        69,
        "ncclCommShrink",
        _LIFE,
        "2.27",
        (_M, _X, Role.NRANKS, _N, _F, _X),
        makes_comm="shrink",
    ),
    Api(
        70,
        "ncclCommGrow",
        _LIFE,
        "2.29",
        (_M, Role.NRANKS, Role.UID_PTR, Role.RANK, _N, _F),
        makes_comm="grow",
    ),
    Api(71, "ncclCommFinalize", _LIFE, "2.16", (_M,), ends_comm="finalize"),
    Api(72, "ncclCommDestroy", _LIFE, "2.16", (_M,), ends_comm="destroy"),
    Api(73, "ncclCommAbort", _LIFE, "2.16", (_M,), ends_comm="abort"),
    Api(74, "ncclCommRevoke", _LIFE, "2.28", (_M, _X), ends_comm="revoke"),
    Api(75, "ncclCommSuspend", _LIFE, "2.29", (_M, _X)),
    Api(76, "ncclCommResume", _LIFE, "2.29", (_M,)),
    # Registration and device communicators
    Api(96, "ncclCommRegister", _REG, "2.19", (_M, _X, Role.SIZE, _X)),
    Api(97, "ncclCommDeregister", _REG, "2.19", (_M, _X)),
    Api(98, "ncclCommWindowRegister", _REG, "2.27", (_M, _X, Role.SIZE, _X, _X)),
    Api(99, "ncclCommWindowDeregister", _REG, "2.27", (_M, _X)),
    Api(100, "ncclMemAlloc", _REG, "2.19", (_X, Role.SIZE)),
    Api(101, "ncclMemFree", _REG, "2.19", (_X,)),
    Api(102, "ncclDevCommCreate", _REG, "2.28", (_M, _X, _X)),
    Api(103, "ncclDevCommDestroy", _REG, "2.28", (_M, _X)),
    Api(104, "ncclRedOpCreatePreMulSum", _REG, "2.16", (_X, _X, _D, _X, _M)),
    Api(105, "ncclRedOpDestroy", _REG, "2.16", (_O, _M)),
    # ncclCommInitAll makes its unique id inside; seen there, it gives the hash.
    Api(120, "ncclGetUniqueId", Kind.HELPER, "2.16", (Role.UID_PTR,)),
)

BY_ID: dict[int, Api] = {api.id: api for api in API_TABLE}
BY_NAME: dict[str, Api] = {api.name: api for api in API_TABLE}

#: Apis that appear in a trace as ``call`` and ``enter`` lines.
TRACED: tuple[Api, ...] = tuple(api for api in API_TABLE if api.kind is not Kind.HELPER)

#: A file that defines all of these is taken for a copy of NCCL, whatever its name.
SIGNATURE_SYMBOLS: frozenset[str] = frozenset(
    {"ncclAllReduce", "ncclCommInitRank", "ncclGroupEnd", "ncclGetVersion"}
)


def matching(pattern: str) -> list[Api]:
    """Traced apis whose name matches a shell pattern, with or without "nccl"."""
    return [
        api
        for api in TRACED
        if fnmatch.fnmatchcase(api.name, pattern)
        or fnmatch.fnmatchcase(api.name.removeprefix("nccl"), pattern)
    ]
