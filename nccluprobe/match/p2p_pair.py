"""Pairing: the n-th send with the n-th receive, many at once.

Where a pair differs, its channel stands still until what follows shows whether
an argument is wrong or one side's operations are shifted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nccluprobe.match import model as m
from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.disagree import MAX_SHIFT
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.options import Options
from nccluprobe.match.p2p_queue import SIG, Lane, Op, Queue, Side, T
from nccluprobe.match.signature import Signature, SignatureTable
from nccluprobe.nccl.enums import DATATYPE_BYTES

#: A message of so many bytes is surely buffered, unless too many are before it.
SMALL = 64 << 10
#: Of operations that nobody can answer, so many of the newest are kept.
_KEPT_LONELY = 64
At = tuple[int, int]


class Channel(NamedTuple):
    """From one rank of a communicator to another."""

    comm: CommKey
    src: int
    dst: int


@dataclass
class Pair:
    """A send and its receive that differ, or do not belong together."""

    channel: Channel
    position: int
    send: Op
    recv: Op
    #: Operations that one side has more than the other, if the calls are shifted.
    extra: tuple[Op, ...] = ()
    several_fit: bool = False
    provisional: bool = False
    #: The two sides made two operations in different orders.
    swapped: bool = False

    @property
    def first(self) -> int:
        """Entry of the first of the two."""
        return min(self.send.t, self.recv.t)


#: No transfer is larger: what a broken caller passes must not overflow sums.
_MOST_BYTES = 1 << 42
_MOST_LESSONS = 100_000


class Wires:
    """What a send and its receive must agree on, as columns by signature id."""

    def __init__(self, table: SignatureTable) -> None:
        self._table = table
        self._forget()

    def _forget(self) -> None:
        self._epoch = self._table.epoch
        self._ids: dict[tuple[int | None, str | None], int] = {}
        #: By id of a signature; 0: not looked at so far.
        self._wire = np.zeros(1, np.int64)
        self._bytes = np.full(1, -1, np.int64)

    def _learn(self, ids: m.Int64) -> None:
        more = int(ids.max()) + 1 - len(self._wire)
        if more > 0:
            more = max(more, len(self._wire))
            self._wire = np.concatenate([self._wire, np.zeros(more, np.int64)])
            self._bytes = np.concatenate([self._bytes, np.full(more, -1, np.int64)])
        for i in np.unique(ids[self._wire[ids] == 0]).tolist():
            s = self._table[i]
            if i == m.SIG_LOST:
                continue
            wire = self._ids.setdefault((s.count, s.datatype), len(self._ids) + 1)
            n = size_of(s)
            self._wire[i] = wire
            if n is None:
                self._bytes[i] = -1 - wire
            else:
                self._bytes[i] = n if 0 <= n < _MOST_BYTES else _MOST_BYTES

    def wire(self, sig: m.Int64) -> m.Int64:
        """Numbers for (count, datatype); 0: a call that was lost."""
        if self._epoch != self._table.epoch:
            self._forget()
        if len(sig) and (int(sig.max()) >= len(self._wire) or not self._wire[sig].all()):
            self._learn(sig)
        return self._wire[sig]

    def size(self, sig: m.Int64) -> m.Int64:
        """Bytes; negative where a datatype is not known (-1: a call that was lost)."""
        self.wire(sig)
        return self._bytes[sig]


def size_of(s: Signature) -> int | None:
    """Bytes of a send or receive."""
    width = DATATYPE_BYTES.get(s.datatype or "")
    return None if width is None or s.count is None else s.count * width


class Pairs:
    """All channels: what is open, what is in dispute, what is decided."""

    def __init__(self, options: Options, table: SignatureTable) -> None:
        self.options = options
        self.wires = Wires(table)
        #: Channels with open operations.
        self.open: dict[Channel, None] = {}
        self.disputed: dict[Channel, Pair] = {}
        #: Decided, and not yet taken by whoever makes findings of them.
        self.decided: list[Pair] = []
        #: Pairs of equal size and other type, one per channel.
        self.other_type: dict[Channel, Pair] = {}
        #: Receives that waited beyond the threshold and were served, per channel.
        self.lessons: dict[Channel, int] = {}
        #: Long waits for the other half, since the last look: who waited, from when to when.
        self.waited: list[tuple[CommKey, int, int, int]] = []

    def pair_all(
        self,
        comm: Communicator,
        side: Side,
        lanes: Iterable[Lane],
        sides: Mapping[At, Side],
        safe_time: int,
    ) -> None:
        """Pair the operations of an endpoint in some directions."""
        rank = side.endpoint.comm_rank
        if rank is None:
            return
        for send, peer in lanes:
            if not 0 <= peer < comm.key.nranks:
                side.queue(send, peer).give_up()
                continue
            other = comm.endpoints.get(peer)
            channel = Channel(comm.key, *((rank, peer) if send else (peer, rank)))
            known = other is not None and (is_unplaced(other) or not side.placed)
            if other is None or known:
                self._lonely(channel, side.queue(send, peer), safe_time, known)
                continue
            found = (
                side if other is side.endpoint else sides.get((other.info.source, other.info.id))
            )
            mine = side.queue(send, peer)
            theirs = None if found is None else found.queue(not send, rank)
            if mine.odd or (theirs is not None and theirs.odd):
                mine.give_up()
                self.open.pop(channel, None)
                continue
            if theirs is None:
                self._keep(channel, mine)
            else:
                self.pair(channel, *((mine, theirs) if send else (theirs, mine)))

    def _lonely(self, channel: Channel, queue: Queue, safe_time: int, known: bool) -> None:
        """Nobody speaks for the peer, or nobody knows how many there were before."""
        if not queue.n:
            return
        old = queue.n if known else int((queue.rows()[:, T] <= safe_time).sum())
        queue.drop(max(0, min(old, queue.n - _KEPT_LONELY)))
        self._keep(channel, queue)

    def _keep(self, channel: Channel, *queues: Queue) -> None:
        held = 0
        for queue in queues:
            queue.settle()
            held += queue.n
        if held:
            self.open[channel] = None
        else:
            self.open.pop(channel, None)

    def pair(self, channel: Channel, sends: Queue, recvs: Queue) -> None:
        """Pair what both sides have come to."""
        start = max(sends.first, recvs.first)
        for queue in (sends, recvs):
            if queue.first < start:
                queue.drop(min(queue.n, start - queue.first))
        while channel not in self.disputed and sends.first == recvs.first:
            n = min(sends.n, recvs.n)
            if n == 0:
                break
            a, b = sends.head(n)[:, SIG], recvs.head(n)[:, SIG]
            agreed = n
            same = self.wires.wire(a) == self.wires.wire(b)
            if not same.all():
                agreed = self._compare(channel, sends, recvs, same)
            self._learn(channel, sends, recvs, agreed)
            sends.drop(agreed)
            recvs.drop(agreed)
            if agreed < n:
                self.disputed[channel] = _pair_at(channel, sends, recvs)
                self.decide(channel, sends, recvs, due=False)
        self._keep(channel, sends, recvs)

    def _learn(self, channel: Channel, sends: Queue, recvs: Queue, n: int) -> None:
        """Receives that waited long and were served in the end: so it goes on this channel."""
        if not n:
            return
        self._note_waits(channel, sends.head(n), recvs.head(n))
        waited = sends.head(n)[:, T] - recvs.head(n)[:, T]
        long = int((waited > self.options.missing_after).sum())
        if long and (channel in self.lessons or len(self.lessons) < _MOST_LESSONS):
            self.lessons[channel] = self.lessons.get(channel, 0) + long

    def _note_waits(self, channel: Channel, sends: m.Int64, recvs: m.Int64) -> None:
        """Who made its half long before the other; a small send is buffered, and waits not."""
        waited = sends[:, T] - recvs[:, T]
        for at in np.flatnonzero(np.abs(waited) > self.options.late_after).tolist():
            received = waited[at] > 0
            if received or int(self.wires.size(sends[at : at + 1, SIG])[0]) > SMALL:
                rank = channel.dst if received else channel.src
                came, last = sorted((int(sends[at, T]), int(recvs[at, T])))
                self.waited.append((channel.comm, rank, came, last))

    def _compare(
        self,
        channel: Channel,
        sends: Queue,
        recvs: Queue,
        same: NDArray[np.bool_],
    ) -> int:
        """How many of the next pairs agree in size, at least."""
        for at in np.flatnonzero(~same).tolist():
            a, b = sends.rows()[at : at + 1, SIG], recvs.rows()[at : at + 1, SIG]
            if m.SIG_LOST in (int(a[0]), int(b[0])):
                continue
            if int(self.wires.size(a)[0]) != int(self.wires.size(b)[0]):
                return int(at)
            if channel not in self.other_type:
                self.other_type[channel] = _pair_at(channel, sends, recvs, at)
        return len(same)

    def decide(self, channel: Channel, sends: Queue, recvs: Queue, due: bool) -> None:
        """Judge a dispute when enough follows it, or when it is time."""
        calls = self.options.decide_calls
        if not due and min(sends.n, recvs.n) <= calls:
            return
        pair = self.disputed.pop(channel)
        by, several, score = self._shift(sends, recvs, calls)
        pair.swapped = self._swapped(sends, recvs, calls, by, score)
        by, several = (0, False) if pair.swapped else (by, several)
        longer = sends if by > 0 else recvs
        if by:
            rows = longer.rows()[: abs(by)].tolist()
            pair.extra = tuple(Op(*row) for row in rows)
            longer.take_out(0, abs(by))
        else:
            sends.drop(1 + pair.swapped)
            recvs.drop(1 + pair.swapped)
        pair.several_fit = several
        self.decided.append(pair)

    def look(self, pair: Pair, sends: Queue, recvs: Queue) -> Pair:
        """What a dispute looks like so far."""
        calls = self.options.decide_calls
        by, several, score = self._shift(sends, recvs, calls)
        swapped = self._swapped(sends, recvs, calls, by, score)
        by, several = (0, False) if swapped else (by, several)
        longer = sends if by > 0 else recvs
        rows = longer.rows()[: abs(by)].tolist()
        return Pair(
            pair.channel,
            pair.position,
            pair.send,
            pair.recv,
            tuple(Op(*row) for row in rows),
            several,
            provisional=True,
            swapped=swapped,
        )

    def _swapped(self, sends: Queue, recvs: Queue, calls: int, by: int, shift: int) -> bool:
        """Whether the next two operations stand in the other order on the two sides.

        ``shift``: how many of the next ``calls`` fit when one side is shifted ``by`` so many; a
        shift looks like it for two operations, and goes on, or one side has so many more.
        """
        if min(sends.n, recvs.n) < 2:
            return False
        a = self.wires.size(sends.head(min(calls, sends.n))[:, SIG]).tolist()
        b = self.wires.size(recvs.head(min(calls, recvs.n))[:, SIG]).tolist()
        if a[:2] != b[1::-1] or (len(a) > 2 and len(b) > 2 and not _agree(a[2], b[2])):
            return False
        score = 2 + sum(map(_agree, a[2:], b[2:]))
        return score > shift or (score == shift and by != sends.n - recvs.n)

    def _shift(self, sends: Queue, recvs: Queue, calls: int) -> tuple[int, bool, int]:
        """How many more operations the sender (or, negative, the receiver) made; 0: none.

        Also whether several numbers fit, and how many of the next ``calls`` do then.
        """
        n = calls + MAX_SHIFT + 1
        a = self.wires.size(sends.rows()[:n, SIG]).tolist()
        b = self.wires.size(recvs.rows()[:n, SIG]).tolist()
        least = 1 + sum(map(_agree, a[1 : 1 + calls], b[1 : 1 + calls]))
        fits: list[tuple[int, int]] = []
        for by in range(1, MAX_SHIFT + 1):
            for sign, x, y in ((1, a[by:], b), (-1, b[by:], a)):
                if x and y and _agree(x[0], y[0]):
                    score = sum(map(_agree, x[:calls], y[:calls]))
                    if score >= least + (by > 1):  # one wrong argument is likelier than two calls
                        fits.append((score, sign * by))
        if not fits:
            return 0, False, 0
        top = max(score for score, _ in fits)
        fitting = [by for score, by in fits if score == top]
        return fitting[0], len(fitting) > 1, top

    def forget(self, side: Side) -> None:
        """Drop what an endpoint's communicator has open."""
        info, rank = side.endpoint.info, side.endpoint.comm_rank
        if info.hash is None or info.nranks is None or rank is None:
            return
        key = CommKey(info.hash, info.instance, info.nranks)
        for send, peer in side.queues:
            channel = Channel(key, *((rank, peer) if send else (peer, rank)))
            self.open.pop(channel, None)
            self.disputed.pop(channel, None)
            self.other_type.pop(channel, None)
            self.lessons.pop(channel, None)


def is_unplaced(e: Endpoint) -> bool:
    """Whether the ordinals of its sends and receives start anywhere."""
    return not e.info.from_start


def _agree(a: int, b: int) -> bool:
    return a == b or -1 in (a, b)


def _pair_at(channel: Channel, sends: Queue, recvs: Queue, at: int = 0) -> Pair:
    send, recv = sends.at(sends.first + at), recvs.at(recvs.first + at)
    assert send is not None and recv is not None
    return Pair(channel, sends.first + at, send, recv)
