"""What a log has told so far of a process and its communicators, and which calls were torn.

Lines of several writers can run into each other, and the last one may be half written.  A
call of which a part is missing was made: it keeps its place where that is known.  Where it
is not, all that follows it may be one call further than it looks, and is not compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nccluprobe.match import model as m


@dataclass
class LogComm:
    """A communicator of a process; a pointer is used again after its end.

    ``device``: its CUDA device, None: the log does not tell; ``thread``: who drives it.
    """

    id: int
    hash: str | None
    rank: int | None
    nranks: int
    t: int
    seen_init: bool
    device: int | None = None
    instance: int = 0
    splits: dict[int, int] = field(default_factory=dict)
    #: ordinal, index, signature, time, thread, stream
    calls: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    #: is a send, peer, ordinal, index, signature, time, thread
    transfers: list[tuple[bool, int, int, int, int, int, int]] = field(default_factory=list)
    sent: dict[tuple[bool, int], int] = field(default_factory=dict)
    #: Collectives so far, and calls of all kinds, torn ones too.
    next_ord: int = 0
    next_idx: int = 0
    #: A call was torn whose place is not known: what follows has none, either.
    cut: bool = False
    ended: tuple[str, int] | None = None

    def place(self, kind: tuple[bool, int] | None) -> tuple[int, int]:
        """Ordinal and index of its next call; ``kind``: (is a send, peer), None: a collective."""
        idx, self.next_idx = self.next_idx, self.next_idx + 1
        if kind is None:
            at, self.next_ord = self.next_ord, self.next_ord + 1
        else:
            at = self.sent.get(kind, 0)
            self.sent[kind] = at + 1
        return at, idx


@dataclass
class Begun:
    """An initialisation that has begun."""

    api: str
    t: int
    uid: str
    nranks: int
    rank: int
    device: int | None


@dataclass
class LogProcess:
    """A process of the log."""

    host: str
    pid: int
    name: str
    comms: list[LogComm] = field(default_factory=list)
    live: dict[bytes, LogComm] = field(default_factory=dict)
    #: (hash, rank) -> communicators of it so far: a process may drive several of its ranks
    hashes: dict[tuple[str, int | None], int] = field(default_factory=dict)
    #: (thread, comm) of an initialisation that has begun
    inits: dict[tuple[int, bytes], Begun] = field(default_factory=dict)
    #: (device, what happened)
    lifecycle: list[tuple[int | None, m.CommEnd | m.Call]] = field(default_factory=list)
    #: As they are written, by device -> small ids.
    streams: dict[tuple[int | None, bytes], int] = field(default_factory=dict)
    newest: int = 0
    #: Calls that were torn, and calls that have no place for that; by device.
    lost: dict[int | None, int] = field(default_factory=dict)

    def add(
        self,
        pointer: bytes,
        hash_: str | None,
        rank: int | None,
        nranks: int,
        t: int,
        seen_init: bool,
        device: int | None,
    ) -> LogComm:
        """A new communicator."""
        comm = LogComm(len(self.comms) + 1, hash_, rank, nranks, t, seen_init, device)
        if hash_ is not None:
            comm.instance = self.hashes.get((hash_, rank), 0)
            self.hashes[hash_, rank] = comm.instance + 1
        self.comms.append(comm)
        self.live[pointer] = comm
        return comm

    def end(self, pointer: bytes, how: str, t: int, gone: bool) -> None:
        """A communicator ends; ``gone``: its pointer may be used again."""
        comm = self.live.get(pointer)
        if comm is not None and comm.ended is None:
            comm.ended = (how, t)
            self.lifecycle.append((comm.device, m.CommEnd(0, comm.id, t, how)))
        if gone:
            self.live.pop(pointer, None)

    def stream(self, device: int | None, text: bytes | None) -> int:
        """A small number of a stream; -1: it is not told.  Each device has a default stream."""
        if text is None:
            return -1
        return self.streams.setdefault((device, text), len(self.streams))

    def lose(self, device: int | None, n: int = 1) -> None:
        """Count calls that were made, and are not compared."""
        self.lost[device] = self.lost.get(device, 0) + n

    def torn(self, pointer: bytes | None, kind: tuple[bool, int] | None, known: bool) -> None:
        """A call was made of which a part of the line is missing.

        ``pointer``: its communicator, if that part is there; ``known``: whether ``kind`` is.
        """
        own = self.live.get(pointer) if pointer is not None else None
        some = [own] if own is not None else [c for c in self.live.values() if c.nranks > 1]
        for device in {c.device for c in some} or {None}:
            self.lose(device)
        if len(some) == 1 and known:
            some[0].place(kind)
            return
        for comm in some:
            comm.cut = True

    @property
    def lanes(self) -> list[int | None]:
        """Devices, where it drives several ranks of one communicator; else one for all."""
        ranks: dict[tuple[str, int], set[int | None]] = {}
        for c in self.comms:
            if c.hash is not None and c.device is not None:
                ranks.setdefault((c.hash, c.nranks), set()).add(c.device)
        if all(len(devices) < 2 for devices in ranks.values()):
            begun: dict[str, set[int | None]] = {}
            for b in self.inits.values():
                begun.setdefault(b.uid, set()).add(b.device)
            if all(len(devices) < 2 for devices in begun.values()):
                return [None]
        devices = {c.device for c in self.comms} | {b.device for b in self.inits.values()}
        return sorted(devices, key=lambda d: -1 if d is None else d)
