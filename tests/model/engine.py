"""A discrete-event model of NCCL on GPUs.

Hosts run threads; a thread gives work to streams and goes on.  Work runs when
what is before it in its stream, and on its communicator, is done.  An NCCL
operation is done when the others came, as far as it needs them:

- a collective needs all members; with a small message the root of a broadcast
  or scatter needs nobody, the others only the root; reduce and gather the
  other way round;
- a receive needs its send; a send needs its receive, unless it is small and
  the connection has a free buffer;
- the operations of a group on one communicator run together.

The host blocks inside a call: at a communicator's first collective until all
members are in theirs, at the first send or receive of a pair until its peer
is in its own, when a stream has too many launches, in init and split until
all came, in destroy until the communicator's work is done.

Times are seconds.  What a tracer would see is written to ``Process.records``.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from model.device import Comm, Device, Endpoint, Item, Latch, Stream
from model.ops import (
    COUNTER,
    Await,
    Call,
    End,
    Group,
    Host,
    Init,
    Instruction,
    Kernel,
    Leave,
    Op,
    Post,
    Program,
    Split,
    Stop,
    StreamWait,
    Sync,
)
from model.process import Gen, Process, Record, Thread
from nccluprobe.nccl.commhash import child_hash

VERSION = (2, 28, 9)


class Engine(Device):
    """Runs a program to its end, or until nothing moves any more."""

    def __init__(self, program: Program, seed: int) -> None:
        super().__init__(program)
        self.rng = random.Random(seed)
        self.procs = [Process(r) for r in range(program.nranks)]
        self.inits: dict[str, dict[int, list[int]]] = {}
        self.init_latch: dict[str, Latch] = {}
        self.splits: dict[tuple[Comm, int], dict[int, Split]] = {}
        self.split_latch: dict[tuple[Comm, int], Latch] = {}

    def run(self, limit: float = 1e7) -> float:
        """Runs; returns the time of the last event."""
        for proc in self.procs:
            if proc.rank in self.program.never_started:
                continue
            proc.states.append((0.0, "running", None))
            for i, code in enumerate(self.program.code[proc.rank]):
                thread = Thread(proc, i)
                thread.gen = self._thread(thread, code)
                proc.threads.append(thread)
                self.at(0.5 + self.rng.random() * 0.2, self._resume, thread)
        while self.heap:
            t, _, fn, args = heapq.heappop(self.heap)
            if t > limit:
                break
            self.now = t
            fn(*args)
        return self.now

    # -- threads

    def _resume(self, thread: Thread) -> None:
        proc = thread.proc
        if proc.ended is not None or thread.gen is None:
            return
        if proc.frozen:
            proc.woken.append(thread)
            return
        try:
            wait = next(thread.gen)
        except StopIteration:
            thread.done = True
            return
        if isinstance(wait, Latch):
            wait.wait(lambda: self.at(self.now, self._resume, thread))
        else:
            self.at(self.now + wait, self._resume, thread)

    def _gap(self) -> float:
        return 2e-6 + self.rng.random() * 2e-5

    def _state(self, thread: Thread, main: str, syscall: str | None = None) -> None:
        if thread.index == 0:
            thread.proc.states.append((self.now, main, syscall))

    def _thread(self, thread: Thread, code: list[Instruction]) -> Gen:
        handlers: dict[type, Callable[[Thread, Any], Gen]] = {
            Host: self._host,
            Kernel: self._kernel,
            Call: self._call,
            Group: self._group,
            Sync: self._sync,
            StreamWait: self._stream_wait,
            Post: self._post,
            Await: self._await,
            Init: self._init,
            Split: self._split,
            End: self._end,
            Leave: self._leave,
            Stop: self._stop,
        }
        for instruction in code:
            thread.at = instruction
            yield from handlers[type(instruction)](thread, instruction)
            yield self._gap()
        thread.at = None

    def _host(self, thread: Thread, what: Host) -> Gen:
        self._state(thread, what.main, what.syscall)
        if what.dt is None:
            yield Latch(1)
        else:
            yield what.dt
        self._state(thread, "running")

    def _stream(self, proc: Process, number: int) -> Stream:
        found = proc.streams.get(number)
        if found is None:
            found = proc.streams[number] = Stream(proc.rank, number)
        return found

    def _kernel(self, thread: Thread, what: Kernel) -> Gen:
        stream = self._stream(thread.proc, what.stream)
        yield from self._room(stream)
        self.enqueue(Item(stream, None, (), what.dt))

    def _room(self, stream: Stream) -> Gen:
        while len(stream.live) >= self.program.depth:
            latch = Latch(1)
            stream.room.append(latch)
            yield latch

    def _sync(self, thread: Thread, what: Sync) -> Gen:
        stream = self._stream(thread.proc, what.stream)
        if stream.live:
            self._state(thread, *self.program.sync_state)
            latch = Latch(1)
            stream.live[-1].after.append(latch)
            yield latch
            self._state(thread, "running")

    def _stream_wait(self, thread: Thread, what: StreamWait) -> Gen:
        on = self._stream(thread.proc, what.on)
        item = Item(self._stream(thread.proc, what.stream), None, (), 0.0)
        if on.live:
            item.also = on.live[-1]
        self.enqueue(item)
        yield 0.0

    def _sem(self, proc: Process, name: str) -> Latch:
        return proc.sems.setdefault(name, Latch(1))

    def _post(self, thread: Thread, what: Post) -> Gen:
        self._sem(thread.proc, what.sem).arrive()
        yield 0.0

    def _await(self, thread: Thread, what: Await) -> Gen:
        self._state(thread, "syscall", "futex")
        yield self._sem(thread.proc, what.sem)
        self._state(thread, "running")

    # -- calls

    def _enter(self, thread: Thread, api: str, fields: dict[str, Any]) -> Record:
        record = Record(self.now, thread.index, api, fields)
        thread.proc.records.append(record)
        thread.inside = record
        self._state(thread, "nccl")
        return record

    def _exit(self, thread: Thread, record: Record) -> None:
        record.end = self.now
        thread.inside = None
        self._state(thread, "running")

    def _number(self, endpoint: Endpoint) -> dict[str, Any]:
        fields = {"comm": endpoint.id, "idx": endpoint.idx}
        endpoint.idx += 1
        return fields

    def _fields(self, endpoint: Endpoint, op: Op, grouped: bool) -> dict[str, Any]:
        fields = self._number(endpoint)
        if op.peer is not None:
            key = (op.api, op.peer)
            fields["ord"] = endpoint.peer_ords.get(key, 0)
            endpoint.peer_ords[key] = fields["ord"] + 1
        else:
            fields["ord"] = endpoint.ords
            endpoint.ords += 1
        fields["count"] = op.count
        fields["datatype"] = op.dtype
        for name in ("op", "root", "peer"):
            if getattr(op, name) is not None:
                fields[name] = getattr(op, name)
        fields["stream"] = op.stream
        slot = COUNTER.get(op.api)
        if self.program.counters and slot is not None and not grouped:
            fields["seq"] = endpoint.counters[slot]
        return fields

    def _call(self, thread: Thread, what: Call) -> Gen:
        endpoint = thread.proc.comms[what.op.comm]
        record = self._enter(thread, what.op.api, self._fields(endpoint, what.op, False))
        record.op = what.op
        yield from self._launch(thread, [(endpoint, what.op)])
        self._exit(thread, record)

    def _group(self, thread: Thread, what: Group) -> Gen:
        proc = thread.proc
        proc.groups += 1
        group = proc.groups
        record = self._enter(thread, "ncclGroupStart", {"group": group})
        yield 1e-6
        self._exit(thread, record)
        ops = []
        for i, op in enumerate(what.ops):
            yield 1e-6
            if what.stall is not None and what.stall[0] == i:
                yield from self._host(thread, what.stall[1])
            endpoint = proc.comms[op.comm]
            fields = self._fields(endpoint, op, True) | {"group": group, "gpos": i}
            record = self._enter(thread, op.api, fields)
            record.op = op
            yield 1e-6
            self._exit(thread, record)
            ops.append((endpoint, op))
        yield 1e-6
        record = self._enter(thread, "ncclGroupEnd", {"group": group, "gpos": len(ops)})
        yield from self._launch(thread, ops)
        self._exit(thread, record)

    def _launch(self, thread: Thread, ops: list[tuple[Endpoint, Op]]) -> Gen:
        """Connects where needed, then gives the work to the streams."""
        run = [(e, op) for e, op in ops if op.p2p or (op.count and e.comm.nranks > 1)]
        latches = []
        for endpoint, op in run:
            latches += self.connect(endpoint, op)
        yield from latches
        by_comm: dict[int, list[Op]] = {}
        for endpoint, op in run:
            by_comm.setdefault(endpoint.id, []).append(op)
        for number, mine in by_comm.items():
            endpoint = thread.proc.endpoints[number]
            stream = self._stream(thread.proc, mine[0].stream)
            yield from self._room(stream)
            item = Item(stream, endpoint, tuple(mine), 0.0)
            for op in mine:
                slot = COUNTER.get(op.api)
                if slot is not None:
                    endpoint.counters[slot] += 1
            self.enqueue(item)
        yield self._gap()

    # -- communicators

    def _init(self, thread: Thread, what: Init) -> Gen:
        name = what.uid or what.comm
        uid = self.hash_of(name)
        fields = {"nranks": what.nranks, "rank": what.rank, "uid_hash": f"{uid:016x}"}
        record = self._enter(thread, "ncclCommInitRankConfig", fields | {"new_comm": None})
        claims = self.inits.setdefault(name, {})
        claims.setdefault(what.rank, []).append(thread.proc.rank)
        latch = self.init_latch.setdefault(name, Latch(1))
        clash = any(len(c) > 1 for c in claims.values())
        if len(claims) == what.nranks and not clash:
            members = [claims[r][0] for r in range(what.nranks)]
            self.comms[name] = Comm(what.comm, uid, members)
            latch.arrive()
        yield latch
        yield 0.05 + self.rng.random() * 0.1
        self._made(thread, record, what.comm, self.comms[name], {"learnt": "init"})

    def _made(
        self, thread: Thread, record: Record, name: str, comm: Comm, more: dict[str, Any]
    ) -> None:
        proc = thread.proc
        endpoint = Endpoint(comm, comm.members.index(proc.rank), len(proc.endpoints))
        proc.endpoints.append(endpoint)
        proc.comms[name] = proc.known[name] = endpoint
        record.fields["new_comm"] = endpoint.id
        record.comm_line = {
            "id": endpoint.id,
            "hash": f"{comm.hash:016x}",
            "comm_rank": endpoint.rank,
            "nranks": comm.nranks,
            "parent": None,
            **more,
        }
        self._exit(thread, record)

    def _split(self, thread: Thread, what: Split) -> Gen:
        parent = thread.proc.comms[what.parent]
        parent.splits += 1
        number = parent.splits
        fields = self._number(parent) | {"ord": number, "color": what.color, "key": what.key}
        record = self._enter(thread, "ncclCommSplit", fields | {"new_comm": None})
        came = self.splits.setdefault((parent.comm, number), {})
        came[parent.rank] = what
        latch = self.split_latch.setdefault((parent.comm, number), Latch(1))
        if len(came) == parent.comm.nranks:
            latch.arrive()
        yield latch
        yield 0.01 + self.rng.random() * 0.05
        if what.color < 0:
            self._exit(thread, record)
            return
        ranks = sorted((s.key, r) for r, s in came.items() if s.color == what.color)
        key = (parent.comm, number, what.color)
        comm = self.children.get(key)
        if comm is None:
            members = [parent.comm.members[r] for _, r in ranks]
            value = child_hash(VERSION, "split", parent.comm.hash, number, what.color)
            assert value is not None
            comm = self.children[key] = Comm(what.child, value, members)
        more = {"parent": parent.id, "learnt": "split", "child": number, "color": what.color}
        self._made(thread, record, what.child, comm, more)

    def _end(self, thread: Thread, what: End) -> Gen:
        endpoint = thread.proc.comms.pop(what.comm)
        api = "ncclCommDestroy" if what.how == "destroy" else "ncclCommAbort"
        record = self._enter(thread, api, self._number(endpoint))
        record.comm_line = {"comm": endpoint.id, "how": what.how}
        if what.how == "abort":
            self.kill(list(endpoint.live))
        elif endpoint.live:
            latch = Latch(1)
            endpoint.live[-1].after.append(latch)
            yield latch
        yield 0.01 + self.rng.random() * 0.02
        self._exit(thread, record)

    # -- processes

    def _leave(self, thread: Thread, what: Leave) -> Gen:
        self.end_process(thread.proc, what.code, what.signal)
        yield 0.0

    def end_process(self, proc: Process, code: int | None, signal: int | None) -> None:
        """The process is gone, with all that its GPU was given."""
        proc.ended = (self.now, code, signal)
        for stream in proc.streams.values():
            self.kill(list(stream.live))

    def _stop(self, thread: Thread, what: Stop) -> Gen:
        proc = thread.proc
        proc.frozen = True
        proc.stops.append((self.now, None))
        if what.dt is not None:
            self.at(self.now + what.dt, self._continue, proc)
        yield 0.0

    def _continue(self, proc: Process) -> None:
        proc.frozen = False
        proc.stops[-1] = (proc.stops[-1][0], self.now)
        woken, proc.woken = proc.woken, []
        for thread in woken:
            self._resume(thread)
