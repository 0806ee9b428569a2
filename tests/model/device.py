"""The GPU side of the model: streams, and what an NCCL operation waits for."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from model.ops import SIZE, Op, Program

#: Sends and rooted collectives up to this size need no partner to end.
SMALL = 64 * 1024
#: Small sends that a connection holds before the next one waits.
BUFFERS = 8
LATENCY = 2e-5


class Latch:
    """Opens after ``n`` arrivals."""

    __slots__ = ("left", "waiters")

    def __init__(self, n: int) -> None:
        self.left = n
        self.waiters: list[Callable[[], None]] = []

    def arrive(self) -> None:
        self.left -= 1
        if self.left == 0:
            waiters, self.waiters = self.waiters, []
            for fn in waiters:
                fn()

    def wait(self, fn: Callable[[], None]) -> None:
        if self.left <= 0:
            fn()
        else:
            self.waiters.append(fn)


@dataclass(eq=False)
class Comm:
    """A communicator, over all ranks.  ``members``: global rank by rank in it."""

    name: str
    hash: int
    members: list[int]
    slots: dict[int, Slot] = field(default_factory=dict)
    channels: dict[tuple[int, int], Channel] = field(default_factory=dict)
    connecting: Latch | None = None

    @property
    def nranks(self) -> int:
        return len(self.members)

    def channel(self, src: int, dst: int) -> Channel:
        found = self.channels.get((src, dst))
        if found is None:
            found = self.channels[src, dst] = Channel()
        return found


@dataclass(eq=False)
class Slot:
    """One collective: the ranks whose kernels run."""

    started: dict[int, tuple[Op, Item]] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    broken: bool = False


@dataclass(eq=False)
class Channel:
    """Messages of one pair in one direction: ordinal -> who is there."""

    sends: dict[int, tuple[Op, Item]] = field(default_factory=dict)
    recvs: dict[int, tuple[Op, Item]] = field(default_factory=dict)
    #: Receives that took their message.
    taken: int = 0
    sent: set[int] = field(default_factory=set)
    broken: int | None = None
    ends: tuple[Latch, Latch] | None = None
    here: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Endpoint:
    """One rank's side of a communicator."""

    comm: Comm
    rank: int
    id: int
    idx: int = 0
    ords: int = 0
    splits: int = 0
    peer_ords: dict[tuple[str, int], int] = field(default_factory=dict)
    counters: list[int] = field(default_factory=lambda: [0] * 5)
    connected: bool = False
    slots: int = 0
    messages: dict[tuple[str, int | None], int] = field(default_factory=dict)
    live: list[Item] = field(default_factory=list)


@dataclass(eq=False)
class Stream:
    rank: int
    number: int
    live: list[Item] = field(default_factory=list)
    room: list[Latch] = field(default_factory=list)


@dataclass(eq=False)
class Item:
    """Work on a stream: a kernel of the program, or one of NCCL with its operations."""

    stream: Stream
    endpoint: Endpoint | None
    ops: tuple[Op, ...]
    dt: float
    also: Item | None = None
    needs: int = 0
    left: int = 0
    #: Number of each operation: slot, or message of its pair.
    numbers: list[int] = field(default_factory=list)
    state: str = "queued"
    after: list[Latch] = field(default_factory=list)
    followers: list[Item] = field(default_factory=list)


class Device:
    """All GPUs."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._tick = itertools.count()
        self.comms: dict[str, Comm] = {}
        self.children: dict[tuple[Comm, int, int], Comm] = {}

    def at(self, t: float, fn: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.heap, (t, next(self._tick), fn, args))

    @staticmethod
    def hash_of(name: str) -> int:
        """Hash of the unique id with this name."""
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")

    # -- streams

    def enqueue(self, item: Item) -> None:
        """Numbers the operations, and runs the item when it may."""
        before = [item.stream.live[-1]] if item.stream.live else []
        if item.also is not None and item.also.state != "done":
            before.append(item.also)
        endpoint = item.endpoint
        if endpoint is not None:
            if endpoint.live:
                before.append(endpoint.live[-1])
            endpoint.live.append(item)
            for op in item.ops:
                if op.p2p:
                    key = (op.api, op.peer)
                    item.numbers.append(endpoint.messages.get(key, 0))
                    endpoint.messages[key] = item.numbers[-1] + 1
                else:
                    item.numbers.append(endpoint.slots)
                    endpoint.slots += 1
        item.stream.live.append(item)
        item.needs = len(before)
        for other in before:
            other.followers.append(item)
        if not before:
            self._start(item)

    def _start(self, item: Item) -> None:
        item.state = "running"
        item.left = len(item.ops)
        if not item.ops:
            self.at(self.now + item.dt, self._done, item)
            return
        assert item.endpoint is not None
        for op, number in zip(item.ops, item.numbers, strict=True):
            if op.p2p:
                self._message(item, op, number)
            else:
                self._collective(item, op, number)

    def _over(self, item: Item) -> None:
        """One of its operations is over."""
        item.left -= 1
        if item.left == 0:
            self.at(self.now + LATENCY, self._done, item)

    def _done(self, item: Item) -> None:
        if item.state != "running":
            return
        item.state = "done"
        item.stream.live.remove(item)
        if item.endpoint is not None:
            item.endpoint.live.remove(item)
        self._release(item)

    def _release(self, item: Item) -> None:
        for latch in item.after:
            latch.arrive()
        room, item.stream.room = item.stream.room, []
        for latch in room:
            latch.arrive()
        for follower in item.followers:
            follower.needs -= 1
            if follower.needs == 0 and follower.state == "queued":
                self._start(follower)

    def kill(self, items: list[Item]) -> None:
        """Work that is taken off the GPU: whoever needs it waits for ever."""
        for item in items:
            if item.endpoint is not None and item.state == "running":
                self._break(item, item.endpoint)
            item.state = "dead"
            if item in item.stream.live:
                item.stream.live.remove(item)
            if item.endpoint is not None and item in item.endpoint.live:
                item.endpoint.live.remove(item)
        for item in items:
            self._release(item)

    def _break(self, item: Item, endpoint: Endpoint) -> None:
        comm = endpoint.comm
        for op, number in zip(item.ops, item.numbers, strict=True):
            if not op.p2p:
                slot = comm.slots.get(number)
                if slot is not None and endpoint.rank not in slot.over:
                    slot.broken = True
                continue
            channel = self._channel(endpoint, op)
            mine = channel.sends if op.api == "ncclSend" else channel.recvs
            if number in mine and (channel.broken is None or number < channel.broken):
                channel.broken = number

    # -- collectives

    def _collective(self, item: Item, op: Op, number: int) -> None:
        assert item.endpoint is not None
        comm, rank = item.endpoint.comm, item.endpoint.rank
        slot = comm.slots.setdefault(number, Slot())
        slot.started[rank] = (op, item)
        if (comm.hash, number) in self.program.device_hangs:
            slot.broken = True
        self._settle(comm, slot)

    def _settle(self, comm: Comm, slot: Slot) -> None:
        if slot.broken:
            return
        ops = [op for op, _ in slot.started.values()]
        first = ops[0]
        agreed = all(op.signature == first.signature for op in ops)
        if not agreed and self.program.mismatch_hangs:
            shapes = {(o.signature[0], o.bytes, o.root) for o in ops}
            if len(shapes) > 1:
                slot.broken = True
                return
        everybody = len(slot.started) == comm.nranks
        for rank, (op, item) in slot.started.items():
            if rank not in slot.over and (everybody or (agreed and self._alone(slot, rank, op))):
                slot.over.add(rank)
                self._over(item)

    @staticmethod
    def _alone(slot: Slot, rank: int, op: Op) -> bool:
        """Whether a small rooted collective is over for a rank before all came."""
        if op.root is None or op.bytes > SMALL:
            return False
        if op.signature[0] in ("ncclBroadcast", "ncclScatter"):
            return rank == op.root or op.root in slot.started
        return rank != op.root

    def connect(self, endpoint: Endpoint, op: Op) -> list[Latch]:
        """What a call waits for at its first use of a communicator or pair."""
        comm = endpoint.comm
        if not op.p2p:
            if endpoint.connected or not self.program.lazy_connect:
                return []
            endpoint.connected = True
            if comm.connecting is None:
                comm.connecting = Latch(comm.nranks)
            comm.connecting.arrive()
            return [comm.connecting]
        if op.peer == endpoint.rank:
            return []
        channel = self._channel(endpoint, op)
        side = 0 if op.api == "ncclSend" else 1
        if channel.ends is None:
            channel.ends = (Latch(1), Latch(1))
        if side not in channel.here:
            channel.here.add(side)
            channel.ends[side].arrive()
        return [channel.ends[1 - side]] if channel.ends[1 - side].left > 0 else []

    # -- messages

    def _channel(self, endpoint: Endpoint, op: Op) -> Channel:
        assert op.peer is not None
        if op.api == "ncclSend":
            return endpoint.comm.channel(endpoint.rank, op.peer)
        return endpoint.comm.channel(op.peer, endpoint.rank)

    def _message(self, item: Item, op: Op, number: int) -> None:
        assert item.endpoint is not None
        channel = self._channel(item.endpoint, op)
        (channel.sends if op.api == "ncclSend" else channel.recvs)[number] = (op, item)
        self._exchange(channel, number)
        for other in [n for n in channel.sends if n not in channel.sent]:
            self._exchange(channel, other)

    def _exchange(self, channel: Channel, number: int) -> None:
        if channel.broken is not None and number >= channel.broken:
            return
        send, recv = channel.sends.get(number), channel.recvs.get(number)
        if send is not None and recv is not None:
            if send[0].bytes != recv[0].bytes and self.program.mismatch_hangs:
                channel.broken = number
                return
            channel.taken += 1
            del channel.recvs[number]
            self._over(recv[1])
            if number in channel.sent:
                channel.sent.discard(number)
            else:
                self._over(send[1])
            del channel.sends[number]
        elif (
            send is not None
            and number not in channel.sent
            and send[0].count * SIZE[send[0].dtype] <= SMALL
            and number - channel.taken < BUFFERS
        ):
            channel.sent.add(number)
            self._over(send[1])
