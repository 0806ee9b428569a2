"""NCCL's own log (NCCL_DEBUG=INFO, subsystems INIT and COLL) to the matcher's items.

One file a rank or one for all; other lines and prefixes of launchers do not
matter.  A log mostly has no clock: lines are taken to be a microsecond apart, and
of what is open at the end nobody knows for how long.  Calls in a group count
from their own line: the log does not show groups.
"""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nccluprobe.importers.common import SECOND, Numbers, Told, lines_of, printable
from nccluprobe.match import model as m
from nccluprobe.match.signature import SignatureTable
from nccluprobe.nccl.api import BY_NAME, Kind
from nccluprobe.nccl.commhash import child_226
from nccluprobe.nccl.enums import datatype_name, op_name

_LINE = re.compile(
    rb"(?:\[(?P<clock>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(?P<part>\d{1,9}))?\] )?"
    rb"(?P<host>[^\s:()\[\]]{1,200}):(?P<pid>\d{1,10}):(?P<tid>\d{1,10}) "
    rb"\[(?P<dev>-?\d{1,6})\] NCCL INFO (?P<rest>.*)"
)
_CALL = re.compile(
    rb"(?P<op>[A-Za-z]{3,30}): opCount [0-9a-f]{1,16} sendbuff \S{1,20} recvbuff \S{1,20} "
    rb"count (?P<count>\d{1,19}) datatype (?P<type>\d{1,9}) op (?P<redop>\d{1,10}) "
    rb"root (?P<root>-?\d{1,10}) comm (?P<comm>0x[0-9a-f]{1,16}) \[nranks=(?P<nranks>\d{1,9})\]"
    rb"(?: stream (?P<stream>\S{1,20}))?"
)
_STEP = re.compile(
    rb"(?:(?P<api>ncclComm\w{1,40}) )?comm (?P<comm>0x[0-9a-f]{1,16}) rank (?P<rank>\d{1,9}) "
    rb"n?ranks (?P<nranks>\d{1,9}) (?P<more>.{0,300}?)- ?"
    rb"(?P<what>Init|Destroy|Abort|Finalize) (?P<when>START|COMPLETE)"
)
_COMM_ID = re.compile(rb"commId 0x([0-9a-f]{1,16})")
_PARENT = re.compile(rb"parent (0x[0-9a-f]{1,16})(?: splitCount (\d{1,9}))? color (-?\d{1,10}) key")

_COLLECTIVES = frozenset(
    a.name.removeprefix("nccl") for a in BY_NAME.values() if a.kind is Kind.COLLECTIVE
)
_ROOTED = frozenset({"Broadcast", "Reduce", "Gather", "Scatter"})
_REDUCING = frozenset({"AllReduce", "Reduce", "ReduceScatter"})
_ENDS = {"Destroy": "destroy", "Abort": "abort", "Finalize": "finalize"}

#: Ids of streams that a process surely does not have.
_STREAMS = 1 << 32


@dataclass
class _Comm:
    """A communicator of a process; a pointer is used again after its end."""

    id: int
    hash: str | None
    rank: int | None
    nranks: int
    t: int
    seen_init: bool
    instance: int = 0
    splits: dict[int, int] = field(default_factory=dict)
    #: index, signature, time, thread, stream
    calls: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    transfers: list[tuple[bool, int, int, int, int, int, int]] = field(default_factory=list)
    sent: dict[tuple[bool, int], int] = field(default_factory=dict)
    ended: tuple[str, int] | None = None


@dataclass
class _Process:
    host: str
    pid: int
    name: str
    comms: list[_Comm] = field(default_factory=list)
    live: dict[bytes, _Comm] = field(default_factory=dict)
    hashes: dict[str, int] = field(default_factory=dict)
    #: (thread, comm) of an initialisation that has begun -> time, id, rank, ranks
    inits: dict[tuple[int, bytes], tuple[str, int, str, int, int]] = field(default_factory=dict)
    lifecycle: list[m.Item] = field(default_factory=list)
    #: As they are written -> small ids.
    streams: dict[bytes | None, int] = field(default_factory=lambda: {None: -1})
    index: int = 0
    world: tuple[int, int] = (0, 0)  # ranks, rank of its largest communicator
    newest: int = 0


class NcclLog:
    """All log files of an analysis."""

    def __init__(self, table: SignatureTable, numbers: Numbers, told: Told) -> None:
        self.table = table
        self.numbers = numbers
        self.told = told
        self.processes: dict[tuple[str, int], _Process] = {}
        self.clocked = False
        self._now = 0

    def read(self, path: str) -> None:
        """Take a file."""
        written = Path(path).stat().st_mtime_ns
        self._now = max(self._now, written - written % SECOND) if not self.processes else self._now
        found = 0
        for line in lines_of(path, self.told):
            if b" NCCL INFO " not in line:
                continue
            head = _LINE.search(line)
            if head is None:
                continue
            self._now += 1000
            t = self._time(head)
            found += self._take(path, head, t)
        if not found:
            self.told.problem(
                f"{path}: no line of a call or communicator; set NCCL_DEBUG=INFO and "
                "NCCL_DEBUG_SUBSYS=INIT,COLL"
            )

    def _time(self, head: re.Match[bytes]) -> int:
        clock = head["clock"]
        if clock is None:
            return self._now
        try:
            stamp = calendar.timegm(time.strptime(clock.decode(), "%Y-%m-%d %H:%M:%S"))
        except ValueError:
            return self._now
        self.clocked = True
        part = int((head["part"] or b"0").ljust(9, b"0"))
        return max(0, stamp) * SECOND + part

    def _take(self, path: str, head: re.Match[bytes], t: int) -> int:
        rest = head["rest"]
        call = _CALL.match(rest)
        step = None if call is not None else _STEP.search(rest)
        if call is None and step is None:
            return 0
        key = (printable(head["host"]), int(head["pid"]))
        p = self.processes.get(key)
        if p is None:
            p = self.processes[key] = _Process(*key, path)
        p.newest = max(p.newest, t)
        thread = int(head["tid"])
        if call is not None:
            self._call(p, call, thread, t)
        elif step is not None:
            self._step(p, step, thread, t)
        return 1

    # -- calls -------------------------------------------------------------

    def _call(self, p: _Process, c: re.Match[bytes], thread: int, t: int) -> None:
        op = c["op"].decode()
        comm = p.live.get(c["comm"])
        if comm is None:
            # Its initialisation is not in the log.
            comm = self._new(p, c["comm"], None, None, int(c["nranks"]), t, seen_init=False)
        datatype, root = datatype_name(int(c["type"])), int(c["root"])
        count = int(c["count"])
        idx, p.index = p.index, p.index + 1
        stream = p.streams.setdefault(c["stream"], len(p.streams))
        self.told.calls += 1
        if op in ("Send", "Recv"):
            at = (op == "Send", root)
            order = comm.sent.get(at, 0)
            comm.sent[at] = order + 1
            sig = self.table.intern_call(f"nccl{op}", count, datatype, None, None)
            comm.transfers.append((op == "Send", root, order, idx, sig, t, thread))
        elif op in _COLLECTIVES:
            sig = self.table.intern_call(
                f"nccl{op}",
                count,
                datatype,
                op_name(int(c["redop"])) if op in _REDUCING else None,
                root if op in _ROOTED else None,
            )
            comm.calls.append((idx, sig, t, thread, stream))

    # -- communicators -----------------------------------------------------

    def _step(self, p: _Process, s: re.Match[bytes], thread: int, t: int) -> None:
        rank, nranks = int(s["rank"]), int(s["nranks"])
        what, when = s["what"].decode(), s["when"].decode()
        if what != "Init":
            comm = p.live.get(s["comm"])
            if comm is not None and comm.ended is None:
                comm.ended = (_ENDS[what], t)
                p.lifecycle.append(m.CommEnd(0, comm.id, t, _ENDS[what]))
            if when == "COMPLETE" and what != "Finalize":
                p.live.pop(s["comm"], None)
            return
        api = (s["api"] or b"ncclCommInitRank").decode()
        uid = self._hash(p, s["more"])
        begun = p.inits.pop((thread, s["comm"]), None)
        if when == "START":
            if uid is not None:
                p.inits[thread, s["comm"]] = (api, t, uid, nranks, rank)
            return
        if uid is None and begun is not None:
            uid = begun[2]
        if uid is not None and "Split" not in api and "Shrink" not in api:
            start = begun[1] if begun is not None else t
            p.lifecycle.append(
                m.Call(0, api, start, t, 0, thread, uid_hash=uid, nranks=nranks, rank=rank)
            )
        self._new(p, s["comm"], uid, rank, nranks, t, seen_init=True)

    def _new(
        self,
        p: _Process,
        pointer: bytes,
        hash_: str | None,
        rank: int | None,
        nranks: int,
        t: int,
        seen_init: bool,
    ) -> _Comm:
        comm = _Comm(len(p.comms) + 1, hash_, rank, nranks, t, seen_init)
        if hash_ is not None:
            comm.instance = p.hashes.get(hash_, 0)
            p.hashes[hash_] = comm.instance + 1
        p.comms.append(comm)
        p.live[pointer] = comm
        if rank is not None:
            p.world = max(p.world, (nranks, rank))
        return comm

    def _hash(self, p: _Process, more: bytes) -> str | None:
        """NCCL's hash of a new communicator, or a name that all its ranks derive alike."""
        found = _COMM_ID.search(more)
        if found is not None and int(found[1], 16):
            return f"{int(found[1], 16):016x}"
        child = _PARENT.search(more)
        if child is None:
            return None
        parent = p.live.get(child[1])
        if parent is None or parent.hash is None:
            return None
        color = int(child[3])
        count = parent.splits.get(color, 0) + 1
        parent.splits[color] = count
        if child[2] is not None and len(parent.hash) == 16:
            return f"{child_226(int(parent.hash, 16), int(child[2]), color):016x}"
        return f"{parent.hash}-{color}-{count}"

    # -- items -------------------------------------------------------------

    def items(self, open_for: int) -> Iterator[list[m.Item]]:
        """Items, a list for each process; what is open is taken to be so for ``open_for`` ns."""
        through = max((p.newest for p in self.processes.values()), default=0) + open_for
        for p in self.processes.values():
            yield list(self._process_items(p, through))

    def _process_items(self, p: _Process, through: int) -> Iterator[m.Item]:
        source = self.numbers.take()
        yield m.SourceOpened(source, p.name)
        yield m.ProcessInfo(
            source=source,
            key=self.numbers.key("log", p.host, p.pid),
            run_id="nccl-log",
            host=p.host,
            rank=p.world[1] if p.world[0] else None,
            front="nccl log",
            cannot_see=("groups",),
        )
        for comm in p.comms:
            yield m.CommInfo(
                source=source,
                id=comm.id,
                t=comm.t,
                hash=comm.hash,
                instance=comm.instance,
                comm_rank=comm.rank,
                nranks=comm.nranks,
                learnt="init" if comm.seen_init else "unknown",
                counted=False,  # a process numbers the calls of all its communicators
            )
        for comm in p.comms:
            if comm.calls:
                yield _batch(source, comm)
            if comm.transfers:
                yield _p2p_batch(source, comm)
        for item in p.lifecycle:
            if isinstance(item, (m.CommEnd, m.Call)):
                yield _of(source, item)
        for (thread, _), (api, t, uid, nranks, rank) in p.inits.items():
            yield m.Enter(source, api, t, thread, uid_hash=uid, nranks=nranks, rank=rank)
        yield m.Coverage(
            source=source,
            t=through,
            through=through,
            lost=0,
            blind=0,
            in_flight=len(p.inits),
            alive=None,
            main="unknown",
        )
        yield m.Progress(source, through, caught_up=True)


def _of(source: int, item: m.CommEnd | m.Call) -> m.Item:
    if isinstance(item, m.CommEnd):
        return m.CommEnd(source, item.comm, item.t, item.how)
    return m.Call(
        source,
        item.api,
        item.t,
        item.t_exit,
        item.rc,
        item.thread,
        uid_hash=item.uid_hash,
        nranks=item.nranks,
        rank=item.rank,
    )


def _batch(source: int, comm: _Comm) -> m.Batch:
    idx, sig, t, thread, stream = (np.array(c, np.int64) for c in zip(*comm.calls, strict=True))
    n = len(idx)
    return m.Batch(
        source=source,
        comm=comm.id,
        ord=np.arange(n, dtype=np.int64),
        idx=idx,
        sig=sig.astype(np.int32),
        t_enter=t,
        t_exit=t,
        rc=np.zeros(n, np.int32),
        group=np.zeros(n, np.int64),
        thread=thread,
        stream=stream,
    )


def _p2p_batch(source: int, comm: _Comm) -> m.P2PBatch:
    columns = [np.array(c, np.int64) for c in zip(*comm.transfers, strict=True)]
    send, peer, order, idx, sig, t, thread = columns
    # Groups do not show: two sends head to head may be one group with their receives, which
    # cannot hold up itself. So none waits for another: each has a stream of its own.
    stream = _STREAMS + idx
    n = len(idx)
    return m.P2PBatch(
        source=source,
        comm=comm.id,
        send=send.astype(np.bool_),
        peer=peer.astype(np.int32),
        ord=order,
        idx=idx,
        sig=sig.astype(np.int32),
        t_enter=t,
        t_exit=t,
        rc=np.zeros(n, np.int32),
        group=np.zeros(n, np.int64),
        thread=thread,
        stream=stream,
    )
