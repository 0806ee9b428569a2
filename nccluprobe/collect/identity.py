"""Which communicator is meant: identity within one process.

A communicator is a generation of a pointer (``Record.comm_gen``), numbered by
the front.  Here it gets a small id for the file, NCCL's own hash where that can
be known, and its place among communicators with the same hash.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from nccluprobe.capture.source import Library
from nccluprobe.collect.lines import Line, hex_hash
from nccluprobe.nccl.api import BY_ID
from nccluprobe.nccl.comm_struct import CommState
from nccluprobe.nccl.commhash import child_hash, parse_version
from nccluprobe.nccl.enums import IN_PROGRESS, SUCCESS
from nccluprobe.nccl.layout.model import Layout
from nccluprobe.record import (
    FLAG_BLIND,
    FLAG_NO_RETURN,
    FLAG_UNWOUND,
    NAME_OFFSET,
    NAME_SIZE,
    READ_FAULT,
    READ_OK,
    STRUCT,
    Record,
)

#: A communicator that ended is kept this long for calls of other threads.
GRACE_NS = 10_000_000_000

#: Bounds of what is remembered beyond live communicators.
_HASHES = 16384
_NAMES = 1024
_CHILDREN = 4096
_STREAMS = 65536


@dataclass
class Comm:
    """One communicator generation, as the trace describes it."""

    id: int
    gen: int
    t: int
    lib: int
    learnt: str = "unknown"
    hash: int | None = None
    instance: int = 0
    comm_rank: int | None = None
    nranks: int | None = None
    parent: int | None = None
    name: str | None = None
    log_hash: int | None = None
    child: int | None = None
    color: int | None = None
    in_group: bool = False
    #: Device, and the five counters before the first call seen, by the live struct.
    device: int | None = None
    seqs: tuple[int, ...] | None = None
    #: Which of the process's ranks made it (the rank at the root communicator).
    endpoint: int | None = None
    ends: list[tuple[int, str]] = field(default_factory=list)
    #: When it was closed by destroy or abort.
    closed: int | None = None

    def line(self) -> Line:
        """Its ``comm`` line."""
        line: Line = {
            "kind": "comm",
            "id": self.id,
            "t": self.t,
            "hash": None if self.hash is None else hex_hash(self.hash),
            "instance": self.instance,
            "comm_rank": self.comm_rank,
            "nranks": self.nranks,
            "parent": self.parent,
            "name": self.name,
            "learnt": self.learnt,
            "lib": self.lib,
        }
        optional: dict[str, Any] = {
            "log_id": hex_hash(self.log_hash) if self.log_hash else None,
            "child": self.child,
            "color": self.color,
            "in_group": self.in_group or None,
            "dev": self.device,
            "seqs": None if self.seqs is None else list(self.seqs),
            "base_seq": None if self.seqs is None else sum(self.seqs),
        }
        line.update((key, value) for key, value in optional.items() if value is not None)
        return line

    def text(self) -> str:
        """For messages."""
        value = "hash unknown" if self.hash is None else f"hash {hex_hash(self.hash)}"
        size = "?" if self.nranks is None else self.nranks
        rank = "?" if self.comm_rank is None else self.comm_rank
        return f"communicator {self.id} ({self.learnt}), {value}, rank {rank} of {size}"


#: Reads the live struct at an address of the process.
Memory = Callable[[int, Layout], "CommState | None"]


class Identity:
    """The communicators and streams of one process."""

    def __init__(self, library: Callable[[int], Library | None]) -> None:
        self._library = library
        self.live: dict[int, Comm] = {}
        self._next_id = 0
        # How many communicators had this hash at this endpoint.  Bounded: a
        # hash repeats only among children of one parent, never long after.
        self._instances: OrderedDict[tuple[int, int | None], int] = OrderedDict()
        self._names: OrderedDict[int, str] = OrderedDict()
        # Calls in a group whose communicator comes later: (parent, ordinal).
        self._awaited: OrderedDict[tuple[int, int], Record] = OrderedDict()
        self._streams: dict[int, int] = {}
        self._next_stream = 0
        self._closed: list[Comm] = []

    # -- looking up

    def stream(self, address: int) -> int:
        """Small id of a stream."""
        found = self._streams.get(address)
        if found is None:
            if len(self._streams) >= _STREAMS:
                self._streams.clear()  # ids go on: none is used twice
            found = self._streams[address] = self._next_stream
            self._next_stream += 1
        return found

    def seen(self, rec: Record) -> tuple[Comm | None, bool]:
        """The communicator of a call, and whether it is new here.

        A generation whose making was not seen (made before the tracer came, or
        its record was lost) is entered as unknown.
        """
        if not rec.comm_gen or rec.flags & FLAG_BLIND:
            return None, False
        comm = self.live.get(rec.comm_gen)
        if comm is not None:
            return comm, False
        return self._add(rec.comm_gen, rec.t_enter, rec.lib), True

    # -- making

    def made(self, rec: Record) -> list[Comm]:
        """The communicators that a finished lifecycle call made; the call's own is last.

        Before it may come its parent, when that was not known either.
        """
        how = BY_ID[rec.api].makes_comm
        if how is None or rec.flags & (FLAG_NO_RETURN | FLAG_UNWOUND):
            return []
        if rec.rc not in (SUCCESS, IN_PROGRESS):
            return []
        if how in ("split", "shrink", "grow") and not rec.new_gen:
            # In a group, or not blocking: bound later by a KIND_NEW_COMM.
            if rec.comm_gen and not rec.flags & FLAG_BLIND:
                self._awaited[rec.comm_gen, rec.order_idx] = rec
                if len(self._awaited) > _CHILDREN:
                    self._awaited.popitem(last=False)
            return []
        if not rec.new_gen:
            return []
        if how == "init":
            return [self._root(rec, rec.new_gen, rec.peer, rec.nranks, how)]
        if how == "init_all":
            # One call, one communicator, one endpoint per device.
            ranks = range(min(max(rec.nranks, 0), 4096))
            made = [self._root(rec, rec.new_gen + i, i, rec.nranks, how) for i in ranks]
            for comm in made:
                comm.in_group = True
            return made
        return self._child(rec, rec, how)

    def bound(self, rec: Record) -> list[Comm]:
        """The communicator that a KIND_NEW_COMM record speaks of."""
        if not rec.new_gen:
            return []
        call = self._awaited.pop((rec.comm_gen, rec.order_idx), None)
        api = BY_ID.get(call.api if call is not None else rec.api)
        how = api.makes_comm if api is not None else None
        if not rec.comm_gen and how in (None, "init"):
            return [self._root(rec, rec.new_gen, rec.peer, rec.nranks, "init")]
        return self._child(rec, call, how or "split")

    def _root(self, rec: Record, gen: int, rank: int, nranks: int, how: str) -> Comm:
        comm = self._get_or_add(gen, rec)
        comm.learnt = how
        comm.comm_rank = comm.endpoint = rank
        comm.nranks = nranks if nranks > 0 else None
        comm.log_hash = rec.log_hash or None
        self._hashed(comm, rec.uid_hash or None)
        return comm

    def _child(self, rec: Record, call: Record | None, how: str) -> list[Comm]:
        """A child; ``call`` is the record of the call that made it, if it was seen."""
        parent, new = self.seen(rec)
        comm = self._get_or_add(rec.new_gen, call or rec)
        comm.learnt = how
        if parent is not None:
            comm.parent, comm.endpoint = parent.id, parent.endpoint
            comm.child = rec.order_idx or None
        if how == "split":
            comm.color = rec.color
        if how == "grow" and call is not None:
            comm.nranks = call.nranks if call.nranks > 0 else None
            comm.comm_rank = call.peer if call.peer >= 0 else None
        if how == "shrink" and call is not None and parent is not None and parent.nranks:
            left = parent.nranks - call.nranks  # nranks: how many are excluded
            comm.nranks = left if 0 < left <= parent.nranks else None
        self._hashed(comm, self._child_hash(comm, parent, how))
        return [parent, comm] if parent is not None and new else [comm]

    def _child_hash(self, comm: Comm, parent: Comm | None, how: str) -> int | None:
        if parent is None or parent.hash is None or comm.child is None:
            return None
        if parent.learnt in ("struct", "unknown"):
            return None  # children before our time are not counted in comm.child
        library = self._library(comm.lib)
        version = parse_version(library.version) if library is not None else None
        if version is None:
            return None
        return child_hash(version, how, parent.hash, comm.child, comm.color or 0)

    def _hashed(self, comm: Comm, value: int | None) -> None:
        if value is None or value == comm.hash:
            return
        comm.hash = value
        key = (value, comm.endpoint)
        comm.instance = self._instances.pop(key, 0)
        self._instances[key] = comm.instance + 1
        if len(self._instances) > _HASHES:
            self._instances.popitem(last=False)

    def _get_or_add(self, gen: int, rec: Record) -> Comm:
        found = self.live.get(gen)
        return found if found is not None else self._add(gen, rec.t_enter, rec.lib)

    def _add(self, gen: int, t: int, lib: int) -> Comm:
        comm = Comm(self._next_id, gen, t, lib, name=self._names.pop(gen, None))
        self._next_id += 1
        self.live[gen] = comm
        return comm

    # -- by the live struct

    def identified(self, rec: Record, memory: Memory) -> Comm | None:
        """What a KIND_IDENTITY record adds to its communicator; None: nothing."""
        comm, new = self.seen(rec)
        library = self._library(rec.lib)
        layout = library.layout if library is not None else None
        if comm is None or layout is None:
            return comm if new else None
        if rec.rc == READ_OK:
            hash_, rank, nranks = rec.uid_hash or None, rec.peer, rec.nranks
            if not new and (comm.hash, comm.comm_rank, comm.nranks) == (hash_, rank, nranks):
                return None  # seen from its making
            comm.device = rec.color
            counted = (rec.count, rec.stream, rec.call_idx, rec.order_idx, rec.nccl_seq)
            if layout.seq_counts and (comm.learnt == "unknown" or any(counted)):
                comm.seqs = counted
        elif rec.rc == READ_FAULT and (found := memory(rec.comm, layout)) is not None:
            # Later than the call: who it is holds, the counters do not.
            hash_, rank, nranks = found.hash, found.rank, found.nranks
            comm.device, comm.name = found.device, comm.name or found.name
        else:
            return comm if new else None
        if comm.learnt == "unknown":
            comm.learnt, comm.endpoint = "struct", rank
        comm.comm_rank, comm.nranks = rank, nranks
        self._hashed(comm, hash_)
        return comm

    # -- naming and ending

    def named(self, rec: Record) -> Comm | None:
        """The communicator that a KIND_NAME record names, when it is known already."""
        raw = STRUCT.pack(*rec)[NAME_OFFSET : NAME_OFFSET + NAME_SIZE]
        name = raw.split(b"\0", 1)[0].decode("utf-8", "replace")
        comm = self.live.get(rec.new_gen)
        if comm is None:
            self._names[rec.new_gen] = name
            if len(self._names) > _NAMES:
                self._names.popitem(last=False)
            return None
        if comm.name == name:
            return None
        comm.name = name
        return comm

    def ended(self, rec: Record) -> tuple[Comm, str] | None:
        """The communicator that a call begins to end, the first time it is seen."""
        how = BY_ID[rec.api].ends_comm
        if how is None:
            return None
        comm, _ = self.seen(rec)
        if comm is None or (rec.t_enter, how) in comm.ends:
            return None
        comm.ends.append((rec.t_enter, how))
        if how in ("destroy", "abort") and comm.closed is None:
            comm.closed = rec.t_enter
            self._closed.append(comm)
        return comm, how

    def expire(self, now: int, busy: Collection[int]) -> list[Comm]:
        """Forget communicators that ended long enough ago and hold no call.

        ``busy`` are generations with a call still inside: their calls will
        return and need the id.
        """
        gone = [c for c in self._closed if (c.closed or 0) + GRACE_NS < now and c.gen not in busy]
        if gone:
            ids = {c.gen for c in gone}
            self._closed = [c for c in self._closed if c.gen not in ids]
            for comm in gone:
                self.live.pop(comm.gen, None)
            for key in [k for k in self._awaited if k[0] in ids]:
                del self._awaited[key]
        return gone
