"""What a program of the model consists of: instructions of a thread, and operations."""

from __future__ import annotations

from dataclasses import dataclass, field

SIZE = {"int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4}
SIZE |= {"int64": 8, "float64": 8}

#: Collectives, and whether they have a reduction op and a root.
COLLECTIVES: dict[str, tuple[bool, bool]] = {
    "ncclAllReduce": (True, False),
    "ncclBroadcast": (False, True),
    "ncclBcast": (False, True),
    "ncclReduce": (True, True),
    "ncclAllGather": (False, False),
    "ncclReduceScatter": (True, False),
    "ncclAlltoAll": (False, False),
    "ncclGather": (False, True),
    "ncclScatter": (False, True),
}
#: Index of the library's own counter.
COUNTER = {
    "ncclBroadcast": 0,
    "ncclBcast": 0,
    "ncclReduce": 1,
    "ncclAllGather": 2,
    "ncclReduceScatter": 3,
    "ncclAllReduce": 4,
}


@dataclass(frozen=True)
class Op:
    """A collective, send or receive.  ``comm`` is the program's name of the communicator."""

    api: str
    comm: str
    count: int = 1024
    dtype: str = "float32"
    op: str | None = None
    root: int | None = None
    peer: int | None = None
    stream: int = 0

    @property
    def p2p(self) -> bool:
        return self.peer is not None

    @property
    def bytes(self) -> int:
        return self.count * SIZE[self.dtype]

    @property
    def signature(self) -> tuple[str, int, str, str | None, int | None]:
        """What all members of a communicator have to agree on."""
        api = "ncclBroadcast" if self.api == "ncclBcast" else self.api
        return (api, self.count, self.dtype, self.op, self.root)


@dataclass(frozen=True)
class Host:
    """The thread is busy outside NCCL for ``dt`` seconds; None: for ever."""

    dt: float | None
    main: str = "running"
    syscall: str | None = None


@dataclass(frozen=True)
class Kernel:
    """A kernel of the program is put on a stream."""

    stream: int
    dt: float


@dataclass(frozen=True)
class Call:
    op: Op


@dataclass(frozen=True)
class Group:
    """GroupStart, calls, GroupEnd.  ``stall`` inside: before that call, for ever."""

    ops: tuple[Op, ...]
    stall: tuple[int, Host] | None = None


@dataclass(frozen=True)
class Sync:
    """cudaStreamSynchronize."""

    stream: int


@dataclass(frozen=True)
class StreamWait:
    """cudaStreamWaitEvent: ``stream`` waits for what ``on`` has been given so far."""

    stream: int
    on: int


@dataclass(frozen=True)
class Post:
    sem: str


@dataclass(frozen=True)
class Await:
    sem: str


@dataclass(frozen=True)
class Init:
    """ncclCommInitRankConfig; ``uid`` names the unique id (default: as the communicator)."""

    comm: str
    nranks: int
    rank: int
    uid: str = ""


@dataclass(frozen=True)
class Split:
    """ncclCommSplit; the child is called ``child`` here (color -1: no child)."""

    parent: str
    color: int
    key: int
    child: str


@dataclass(frozen=True)
class End:
    """``how``: destroy or abort."""

    comm: str
    how: str = "destroy"


@dataclass(frozen=True)
class Leave:
    """The process ends: by exit with a code, or by a signal."""

    code: int | None = 0
    signal: int | None = None


@dataclass(frozen=True)
class Stop:
    """SIGSTOP to the own process, with SIGCONT ``dt`` seconds later; None: never."""

    dt: float | None = None


Instruction = (
    Host
    | Kernel
    | Call
    | Group
    | Sync
    | StreamWait
    | Post
    | Await
    | Init
    | Split
    | End
    | Leave
    | Stop
)


@dataclass
class Program:
    """The code of all ranks: rank -> thread (0 is the main one) -> instructions."""

    nranks: int
    code: list[list[list[Instruction]]]
    #: Launches that a stream takes before the host blocks in the next.
    depth: int = 1022
    #: Communicators connect at their first collective (NCCL 2.22 and later).
    lazy_connect: bool = True
    #: The library's own counters are in the trace.
    counters: bool = True
    per_host: int = 8
    #: Host state while in a synchronisation: (main, syscall).
    sync_state: tuple[str, str | None] = ("running", None)
    #: Slots (hash of the communicator, number) that hang on the device.
    device_hangs: set[tuple[int, int]] = field(default_factory=set)
    #: Ranks whose processes never load NCCL: no trace.
    never_started: set[int] = field(default_factory=set)
    #: A disagreement in size, root or api hangs; else it passes unseen.
    mismatch_hangs: bool = True
    #: The tracer sees what the main thread does.
    host_state: bool = True
