"""The contract between reading and matching: what the matcher is fed.

A reader gives every trace (all parts of one process's file) a small number,
its *source*, and yields the objects below in file order.  All times are unix
nanoseconds: the reader aligns the hosts' monotonic clocks, so that times of one
boot compare exactly and times of two boots within ``ClockState.bound``.

Frequent things are columns (``Batch``, ``GroupEnds``, ``Activity``), rare
things are objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nccluprobe.match.keys import EndpointKey as EndpointKey
from nccluprobe.match.keys import ProcessKey as ProcessKey
from nccluprobe.match.phases import Phase as Phase
from nccluprobe.nccl.enums import IN_PROGRESS, SUCCESS

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]

#: ``rc`` column: never returned, or the exit was not probed.
RC_NONE = -1
#: Who is inside for so long waits for others, ns.
WAITED = 1_000_000_000
#: ``t_exit`` column: still inside, or not known.
NO_TIME = -1
#: ``seq`` column: the library's counter was not read, or cannot be relied on.
NO_SEQ = -1
#: ``sig`` column: a call that was lost; it agrees with everything.
SIG_LOST = 0


#: A communicator that claims to be larger than this is not believed.
MAX_NRANKS = 1 << 20


def not_run(rc: int) -> bool:
    """Whether NCCL did not run a call because of its return code."""
    return rc not in (SUCCESS, IN_PROGRESS, RC_NONE)


def had_waited(t: int, t_exit: int) -> bool:
    """Whether a call that failed had been taken: what NCCL refuses, it refuses at once."""
    return t_exit - t >= WAITED


@dataclass(frozen=True)
class SourceOpened:
    """A trace exists and will be read: nothing is known of it yet."""

    source: int
    name: str


@dataclass(frozen=True)
class Progress:
    """How far a source is read.  ``caught_up``: nothing more to read just now."""

    source: int
    through: int
    caught_up: bool


@dataclass(frozen=True)
class ProcessInfo:
    """Who a source speaks of; may come again when more is known."""

    source: int
    key: ProcessKey
    run_id: str
    host: str
    exe: str | None = None
    rank: int | None = None
    world_size: int | None = None
    front: str = "ebpf"
    exits: bool = True
    nccl_versions: tuple[str, ...] = ()
    cannot_see: tuple[str, ...] = ()
    untimed: str = ""  #: Which of its times are assumed, if any: see match.untimed.
    job: str | None = None
    #: Process id in its own pid namespace.
    ns_pid: int | None = None

    @property
    def pid(self) -> int:
        """Process id in the initial pid namespace."""
        return self.key.pid


@dataclass(frozen=True)
class ClockState:
    """Error bound of a host's unix time, ns; None: not known."""

    source: int
    bound: int | None


@dataclass(frozen=True)
class CommInfo:
    """A communicator of a source; may come again when more is known."""

    source: int
    id: int
    t: int
    hash: str | None
    instance: int
    comm_rank: int | None
    nranks: int | None
    learnt: str
    parent: int | None = None
    name: str | None = None
    base: int | None = None
    child: int | None = None
    #: The library's own counters before the first call seen here (SEQ_NAMES).
    seqs: tuple[int, ...] | None = None
    #: Whether ``idx`` counts the calls on it: a number that nobody shows is a lost call.
    counted: bool = True

    @property
    def from_start(self) -> bool:
        """Whether all its calls were seen."""
        return self.learnt not in ("struct", "unknown")


@dataclass(frozen=True)
class CommEnd:
    """A communicator begins to end: finalize, destroy, abort or revoke."""

    source: int
    comm: int
    t: int
    how: str

    @property
    def orderly(self) -> bool:
        """Whether what was queued is waited for; else it is taken off: by an abort, a revoke."""
        return self.how in ("destroy", "finalize")


@dataclass
class Batch:
    """Collective calls of one endpoint, as columns of equal length.

    ``ord``, ``idx``: ordinals as in the trace.  ``sig``: id in the
    SignatureTable.  ``t_exit`` NO_TIME and ``rc`` RC_NONE: not known.
    ``group``: the thread's open group, 0 when none.
    """

    source: int
    comm: int
    ord: Int64
    idx: Int64
    sig: Int32
    t_enter: Int64
    t_exit: Int64
    rc: Int32
    group: Int64
    thread: Int64
    #: nccl_seq at entry; NO_SEQ: not known.  None: of no row.
    seq: Int64 | None = None
    #: Small per-process ids of streams; None: of no row.
    stream: Int64 | None = None
    #: Ids of call sites; 0: not known.  None: of no row.
    site: Int64 | None = None

    def __len__(self) -> int:
        return len(self.ord)


@dataclass
class P2PBatch:
    """Sends and receives of one endpoint, as columns of equal length.

    ``send``: direction; ``peer``: rank in the communicator; ``ord``: ordinal
    per direction and peer; ``sig``: id in the SignatureTable of (api, count,
    datatype).  The rest is as in ``Batch``.
    """

    source: int
    comm: int
    send: NDArray[np.bool_]
    peer: Int32
    ord: Int64
    idx: Int64
    sig: Int32
    t_enter: Int64
    t_exit: Int64
    rc: Int32
    group: Int64
    thread: Int64
    #: Small per-process ids of streams; None: of no row.
    stream: Int64 | None = None

    def __len__(self) -> int:
        return len(self.ord)


@dataclass(frozen=True)
class Completed:
    """Proof that calls of an endpoint have completed on its device.

    ``calls``: its collectives with an ``ord`` below this are complete.
    ``p2p``: (is a send, peer, ordinals below this are complete).  Sources that
    see completion (flight recorder, Inspector) give it; uprobes do not.
    """

    source: int
    comm: int
    calls: int = 0
    p2p: tuple[tuple[bool, int, int], ...] = ()


@dataclass
class GroupEnds:
    """Outermost GroupEnd calls of a process, as columns; in flight: t_exit NO_TIME."""

    source: int
    group: Int64
    t_enter: Int64
    t_exit: Int64
    rc: Int32


@dataclass
class Activity:
    """Entry and exit times of all calls of a process, sorted by entry."""

    source: int
    t_enter: Int64
    t_exit: Int64


@dataclass(frozen=True)
class Call:
    """A call that is rare: lifecycle calls, and any call that returned an error."""

    source: int
    api: str
    t: int
    t_exit: int
    rc: int
    thread: int
    comm: int | None = None
    idx: int | None = None
    ord: int | None = None
    group: int = 0
    uid_hash: str | None = None
    nranks: int | None = None
    rank: int | None = None
    color: int | None = None
    key: int | None = None
    nonblocking: bool = False


@dataclass(frozen=True)
class Enter:
    """A call that is still inside.  ``sig`` and ``ord``: collectives only."""

    source: int
    api: str
    t: int
    thread: int
    comm: int | None = None
    idx: int | None = None
    ord: int | None = None
    sig: int | None = None
    #: Sends and receives: rank in the communicator, and the direction.
    peer: int | None = None
    send: bool | None = None
    seq: int = NO_SEQ
    #: Id of the call site; 0: not known.
    site: int = 0
    group: int = 0
    #: Small per-process id of its stream; None: not told.
    stream: int | None = None
    uid_hash: str | None = None
    nranks: int | None = None
    rank: int | None = None
    color: int | None = None
    key: int | None = None
    nonblocking: bool = False


class Returned(NamedTuple):
    """(thread, t_enter) of calls that were in flight and have ended."""

    source: int
    calls: tuple[tuple[int, int], ...]


class Cut(NamedTuple):
    """Calls that never returned: their thread or process ended inside."""

    source: int
    calls: tuple[Enter, ...]


@dataclass(frozen=True)
class Coverage:
    """What is known of a process up to when."""

    source: int
    t: int
    through: int
    lost: int
    blind: int
    in_flight: int
    alive: bool | None
    main: str
    syscall: str | None = None
    last_call_age: int | None = None
    #: Lines of oldest parts that were deleted.
    dropped: int = 0


@dataclass(frozen=True)
class Accounted:
    """What a source shows of its losses besides holes in the ordinals of calls, so far.

    ``known``: lost records that are starts or ends of groups or exits of known calls,
    the newest shown at ``t``; ``unplaced``: ordinals that may be missing without loss.
    """

    source: int
    known: int
    unplaced: int
    t: int


@dataclass(frozen=True)
class ProcessEnd:
    """A process ended, or tracing it did (``how`` detached)."""

    source: int
    t: int
    how: str
    code: int | None
    signal: int | None
    in_flight: int


@dataclass(frozen=True)
class LookedComm:
    """A communicator as ``inspect`` found it in a process's memory."""

    hash: str
    comm_rank: int
    nranks: int
    name: str | None
    seqs: tuple[int, ...] | None
    moving: bool


@dataclass(frozen=True)
class Looked:
    """A process as ``inspect`` saw it once."""

    source: int
    key: ProcessKey
    t: int
    host: str
    rank: int | None
    alive: bool
    main: str
    syscall: str | None
    #: NCCL functions that its threads are inside of, by their stacks.
    inside: tuple[str, ...]
    comms: tuple[LookedComm, ...]


Item = (
    SourceOpened
    | Progress
    | ProcessInfo
    | ClockState
    | CommInfo
    | CommEnd
    | Batch
    | P2PBatch
    | Completed
    | GroupEnds
    | Activity
    | Call
    | Enter
    | Returned
    | Cut
    | Coverage
    | Accounted
    | ProcessEnd
    | Phase
    | Looked
)
