"""Traces of a made-up healthy training job, as ``attach`` writes them, and fast.

Tensor parallelism of 8, pipelines of 4 stages, the rest data parallel: every
process has four communicators.  A step of it is 73 calls: all-reduces in the
tensor-parallel group, grouped sends and receives between pipeline stages,
reduce-scatters and all-gathers in the data-parallel group, one all-reduce of
all ranks.  ``pure`` jobs have one communicator of all ranks and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

S = 1_000_000_000
MONO = 5_000 * S
UNIX = 1_700_000_000 * S
TP, STAGES = 8, 4
REPLICA = TP * STAGES
#: Time between two calls of a rank, ns.
GAP = 50_000

_CALL = (
    b'{"kind":"call","api":"%b","t":%d,"thread":%d,"dur":8000,"rc":0,"comm":%d,"idx":%d,'
    b'"ord":%d,"count":%d,'
)
_REDUCING = _CALL + b'"datatype":"bfloat16","op":"sum","stream":%d,"seq":%d}\n'
_GATHERING = _CALL + b'"datatype":"bfloat16","stream":%d,"seq":%d}\n'
_P2P = _CALL + b'"datatype":"bfloat16","peer":%d,"stream":3,"group":%d,"gpos":%d}\n'
_GROUP_START = (
    b'{"kind":"call","api":"ncclGroupStart","t":%d,"thread":%d,"dur":200,"rc":0,"group":%d}\n'
)
_GROUP_END = (
    b'{"kind":"call","api":"ncclGroupEnd","t":%d,"thread":%d,"dur":9000,"rc":0,'
    b'"group":%d,"gpos":%d}\n'
)
_COVERAGE = (
    b'{"kind":"coverage","t":%d,"through":%d,"captured":%d,"lost_kernel":0,"lost_queue":0,'
    b'"overwritten":0,"skipped_disk":0,"blind":0,"in_flight":0,"alive":true,"main":"running",'
    b'"last_call_age":1}\n'
)
_PROCESS = (
    b'{"kind":"process","schema":1,"run_id":"bench","host":"node%d","boot_id":"boot-%d",'
    b'"pid":%d,"ns_pid":null,"start":%d,"exe":"python3","rank":%d,"rank_source":"torchrun",'
    b'"world_size":%d,"local_rank":%d,"front":"ebpf","probe_version":"0.1.0","libs":[],'
    b'"exits":true,"cannot_see":[],"part":0}\n'
    b'{"kind":"clock","mono":%d,"unix":%d,"synced":true,"err":1000}\n'
)
_COMM = (
    b'{"kind":"comm","id":%d,"t":%d,"hash":"%016x","instance":0,"comm_rank":%d,"nranks":%d,'
    b'"parent":null,"name":null,"learnt":"init","lib":0}\n'
)
WORLD, TENSOR, PIPE, DATA = range(4)


@dataclass
class Counters:
    """Where a rank's numbers of calls stand."""

    idx: list[int] = field(default_factory=lambda: [0] * 4)
    ord: list[int] = field(default_factory=lambda: [0] * 4)
    groups: int = 0
    captured: int = 0
    through: int = MONO


class Rank:
    """One process of the job."""

    def __init__(self, rank: int, ranks: int, pure: bool = False, gap: int = GAP) -> None:
        self.gap = gap
        self.rank, self.ranks, self.pure = rank, ranks, pure
        self.n = Counters()
        self.thread = 1000 + rank
        tensor, stage, replica = rank % TP, rank // TP % STAGES, rank // REPLICA
        self.stage = stage
        #: (hash, rank in it, its size) of each communicator
        self.comms = [(1, rank, ranks)]
        if not pure:
            self.comms += [
                (0x1000000 + rank // TP, tensor, TP),
                (0x2000000 + replica * TP + tensor, stage, STAGES),
                (0x3000000 + rank % REPLICA, replica, ranks // REPLICA),
            ]

    def head(self) -> bytes:
        """The lines before the first call."""
        node = self.rank // 8
        out = _PROCESS % (
            node,
            node,
            self.thread,
            self.thread * 1000,
            self.rank,
            self.ranks,
            self.rank % 8,
            MONO,
            UNIX,
        )
        return out + b"".join(
            _COMM % (i, MONO, *comm) for i, comm in enumerate(self.comms) if comm[2] > 1
        )

    def coverage(self, t: int) -> bytes:
        """All calls before ``t`` (monotonic ns) are in the file."""
        return _COVERAGE % (t, t, self.n.captured)

    def steps(self, count: int, start: int) -> bytes:
        """Lines of some steps, from ``start`` (monotonic ns) on, and a coverage line."""
        out: list[bytes] = []
        t = start + self.rank % 97
        for _ in range(count):
            for lines in self._pure(t) if self.pure else self._step(t):
                out += lines
            t = self.n.through
        out.append(self.coverage(t))
        return b"".join(out)

    def collective(self, api: bytes, t: int, comm: int, count: int) -> bytes:
        """The line of a collective that begins at ``t``."""
        n = self.n
        form = _GATHERING if api == b"ncclAllGather" else _REDUCING
        idx, order = n.idx[comm], n.ord[comm]
        n.idx[comm], n.ord[comm] = idx + 1, order + 1
        n.captured += 1
        return form % (api, t, self.thread, comm, idx, order, count, comm, order)

    def _pure(self, t: int) -> Iterator[list[bytes]]:
        yield [
            self.collective(b"ncclAllReduce", t + i * self.gap, WORLD, (1 << 20) + i % 3)
            for i in range(CALLS_PER_STEP)
        ]
        self.n.through = t + CALLS_PER_STEP * self.gap

    def _step(self, t: int) -> Iterator[list[bytes]]:
        for _ in range(MICRO):
            yield self._transfer(t)
            t += 4 * self.gap
            yield [
                self.collective(
                    b"ncclAllReduce", t + i * self.gap, TENSOR, 4096 * 8192 if i % 6 else 4096
                )
                for i in range(12)
            ]
            t += 12 * self.gap
        if self.comms[DATA][2] > 1:
            yield [
                self.collective(
                    b"ncclAllGather" if i % 2 else b"ncclReduceScatter",
                    t + i * self.gap,
                    DATA,
                    (1 << 22) + i // 2,
                )
                for i in range(DATA_CALLS)
            ]
        t += DATA_CALLS * self.gap
        yield [self.collective(b"ncclAllReduce", t, WORLD, 1)]
        self.n.through = t + self.gap

    def _transfer(self, t: int) -> list[bytes]:
        """A group: send to the next stage, receive from the one before."""
        n = self.n
        n.groups += 1
        group, turn = n.groups, n.groups - 1
        out = [_GROUP_START % (t, self.thread, group)]
        peers = ((b"ncclSend", (self.stage + 1) % STAGES), (b"ncclRecv", (self.stage - 1) % STAGES))
        for at, (api, peer) in enumerate(peers):
            t += self.gap // 2
            idx = n.idx[PIPE]
            n.idx[PIPE] = idx + 1
            args = (api, t, self.thread, PIPE, idx, turn, 1 << 24, peer, group, at)
            out.append(_P2P % args)
        out.append(_GROUP_END % (t + self.gap // 2, self.thread, group, 2))
        n.captured += 4
        return out


MICRO, DATA_CALLS = 4, 8
#: Lines of calls in a step of either kind of job, GroupStart and GroupEnd included.
CALLS_PER_STEP = MICRO * (4 + 12) + DATA_CALLS + 1


def unix(t: int) -> int:
    """Unix ns of a moment on the job's clock."""
    return UNIX - MONO + t
