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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nccluprobe.importers.common import SECOND, Numbers, Told, lines_of, printable
from nccluprobe.importers.log_items import process_items
from nccluprobe.importers.log_state import Begun, LogComm, LogProcess
from nccluprobe.match import model as m
from nccluprobe.match.signature import SignatureTable
from nccluprobe.match.untimed import ALL, LAST
from nccluprobe.nccl.api import BY_NAME, Kind
from nccluprobe.nccl.commhash import child_226
from nccluprobe.nccl.enums import datatype_name, op_name
from nccluprobe.plural import counted, verb

_HEAD = re.compile(
    rb"(?:\[(?P<clock>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(?P<part>\d{1,9}))?\] )?"
    rb"(?P<host>[^\s:()\[\]]{1,200}):(?P<pid>\d{1,10}):(?P<tid>\d{1,10}) "
    rb"\[(?P<dev>-?\d{1,6})\] NCCL INFO "
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
_DEVICE = re.compile(rb"cudaDev (\d{1,6})")
_PARENT = re.compile(rb"parent (0x[0-9a-f]{1,16})(?: splitCount (\d{1,9}))? color (-?\d{1,10}) key")

_COLLECTIVES = frozenset(
    a.name.removeprefix("nccl") for a in BY_NAME.values() if a.kind is Kind.COLLECTIVE
)
_P2P = frozenset({"Send", "Recv"})
_BEGINNINGS = {x[:n] for x in (*_COLLECTIVES, *_P2P) for n in range(1, len(x) + 1)}
_ROOTED = frozenset({"Broadcast", "Reduce", "Gather", "Scatter"})
_REDUCING = frozenset({"AllReduce", "Reduce", "ReduceScatter"})
_ENDS = {"Destroy": "destroy", "Abort": "abort", "Finalize": "finalize"}

#: What each line of a call has once, however it was torn.
_BEGINS, _GOES_ON = b": opCount ", b" recvbuff "
_OP = re.compile(rb"([A-Za-z]{3,30}): opCount ")
_POINTER = re.compile(rb" comm (0x[0-9a-f]{1,16}) \[nranks=")
_PEER = re.compile(rb" root (\d{1,9}) ")
#: A line that ends before it says that it is of a call.
_SHORT = re.compile(rb"([A-Za-z]{1,30}):? ?o?p?C?o?u?n?t? ?[\r\n]*")

#: So many beginnings of calls wait for their rests, each of so many bytes.
_MOST_OPEN, _MOST_TEXT = 64, 1000


class _Head(NamedTuple):
    """What each line begins with.  ``start``, ``end``: where, in bytes."""

    start: int
    end: int
    clock: bytes | None
    part: bytes | None
    host: str
    pid: int
    tid: int
    dev: int


class NcclLog:
    """All log files of an analysis."""

    def __init__(self, table: SignatureTable, numbers: Numbers, told: Told) -> None:
        self.table = table
        self.numbers = numbers
        self.told = told
        self.processes: dict[tuple[str, int], LogProcess] = {}
        self.clocked = False
        self._now = 0
        #: Calls of functions that are not known, by name.
        self._unknown: Counter[str] = Counter()
        #: Of the file that is read: processes, torn calls, calls that have no place for these.
        self._here: dict[tuple[str, int], LogProcess] = {}
        self._torn = self._dropped = 0
        self._of_pid: dict[int, list[LogProcess]] = {}
        #: (host, pid) -> beginning of a call whose rest has not come
        self._open: dict[tuple[str, int], tuple[_Head, bytes]] = {}

    def read(self, path: str) -> None:
        """Take a file."""
        written = Path(path).stat().st_mtime_ns
        self._now = max(self._now, written - written % SECOND) if not self.processes else self._now
        self._here, self._torn, self._dropped = {}, 0, 0
        found = 0
        for line in lines_of(path, self.told):
            heads = list(_HEAD.finditer(line)) if b" NCCL INFO " in line else []
            if not heads:
                self._rest(path, line)
                continue
            some = [self._head(h) for h in heads]
            if some[0].start:
                self._rest(path, line[: some[0].start])
            ends = [h.start for h in some[1:]] + [len(line)]
            for head, end in zip(some, ends, strict=True):
                self._now += 1000
                found += self._take(path, head, line[head.end : end])
        for key in list(self._open):
            self._give_up(key)
        if not found and not self._torn:
            self.told.problem(
                f"{path}: no line of a call or communicator; set NCCL_DEBUG=INFO and "
                "NCCL_DEBUG_SUBSYS=INIT,COLL"
            )
        if self._torn:
            n = counted(self._torn, "call", "is")
            later = counted(self._dropped, "later call", "has")
            after = f"; {later} no place, and {verb(self._dropped, 'is')} not compared"
            self.told.problem(
                f"{path}: {n} torn, where lines ran into each other or an end is missing, and "
                f"counted as lost{after * (self._dropped > 0)}"
            )

    def _head(self, h: re.Match[bytes]) -> _Head:
        """A head; where it has run into another line the host's name is too long."""
        host, pid, start = printable(h["host"]), int(h["pid"]), h.start()
        if (host, pid) not in self.processes:
            some = self._of_pid.get(pid, ())[:_MOST_OPEN]
            own = next((x for x in some if host.endswith(x.host)), None)
            at = None if own is None else _POINTER.search(h.string, h.end())
            if own is not None and (start or self._open or (at is not None and at[1] in own.live)):
                host, start = own.host, h.end("host") - len(own.host.encode())
        return _Head(start, h.end(), h["clock"], h["part"], host, pid, int(h["tid"]), int(h["dev"]))

    def _time(self, head: _Head) -> int:
        clock = head.clock
        if clock is None:
            return self._now
        try:
            stamp = calendar.timegm(time.strptime(clock.decode(), "%Y-%m-%d %H:%M:%S"))
        except ValueError:
            return self._now
        self.clocked = True
        part = int((head.part or b"0").ljust(9, b"0"))
        return max(0, stamp) * SECOND + part

    def _take(self, path: str, head: _Head, rest: bytes) -> int:
        """Take what follows a head; whether it is of a call or a communicator."""
        call = _CALL.match(rest)
        step = None if call is not None else _STEP.search(rest)
        if call is None and step is None:
            self._beginning(path, head, rest)
            return 0
        p = self._process(path, head)
        self._give_up((p.host, p.pid))
        t = self._time(head)
        p.newest = max(p.newest, t)
        if call is not None:
            self._call(p, call, head, t)
        elif step is not None:
            self._step(p, step, head.tid, t)
        return 1

    def _process(self, path: str, head: _Head) -> LogProcess:
        p = self.processes.get((head.host, head.pid))
        if p is None:
            p = self.processes[head.host, head.pid] = LogProcess(head.host, head.pid, path)
            self._of_pid.setdefault(head.pid, []).append(p)
        self._here[p.host, p.pid] = p
        return p

    # -- torn lines --------------------------------------------------------

    def _beginning(self, path: str, head: _Head, text: bytes) -> None:
        """Keep the beginning of a call until its rest comes, as the next that the process says."""
        short = _SHORT.fullmatch(text)
        if _BEGINS in text or (short is not None and short[1].decode() in _BEGINNINGS):
            p = self._process(path, head)
            self._give_up((p.host, p.pid))
            self._open[p.host, p.pid] = (head, text.rstrip(b"\r\n"))
            if len(self._open) > _MOST_OPEN:
                self._give_up(next(iter(self._open)))

    def _rest(self, path: str, text: bytes) -> None:
        """Take what has no head: it may be the rest of a call."""
        if _BEGINS not in text and _GOES_ON not in text and not self._open:
            return
        text = text[:_MOST_TEXT]
        pointer = _POINTER.search(text)
        for key, (head, begun) in list(self._open.items()):
            call = _CALL.match(begun + text)
            mine = pointer is not None and pointer[1] in self.processes[key].live
            if call is not None and (mine or len(self._open) == 1):
                del self._open[key]
                self._take(path, head, begun + text)
                return
        if _BEGINS in text or (_GOES_ON in text and not self._open):
            self._lose(None, text)
        elif _GOES_ON in text and len(self._open) == 1:
            self._give_up(next(iter(self._open)), text)

    def _give_up(self, key: tuple[str, int], more: bytes = b"") -> None:
        """The rest of a call does not come any more."""
        found = self._open.pop(key, None)
        if found is not None and b":" in found[1] + more:
            self._lose(self.processes[key], found[1] + more)

    def _lose(self, p: LogProcess | None, text: bytes) -> None:
        """Count a torn call as lost, by whomever it was made as far as that is known."""
        self._torn += 1
        at = _POINTER.search(text)
        pointer = None if at is None else at[1]
        some = list(self._here.values()) if p is None else [p]
        having = [x for x in some if pointer is not None and pointer in x.live]
        some = having if len(having) == 1 else some
        found, peer = _OP.search(text), _PEER.search(text)
        op = None if found is None else found[1].decode()
        kind = (op == "Send", int(peer[1])) if op in _P2P and peer is not None else None
        known = len(some) == 1 and (op in _COLLECTIVES or kind is not None)
        for x in some:
            x.torn(pointer, kind, known)

    # -- calls -------------------------------------------------------------

    def _call(self, p: LogProcess, c: re.Match[bytes], head: _Head, t: int) -> None:
        op, thread = c["op"].decode(), head.tid
        comm = p.live.get(c["comm"])
        if comm is None:
            comm = self._without_init(p, c, t)
        self.told.calls += 1
        datatype, root = datatype_name(int(c["type"])), int(c["root"])
        count = int(c["count"])
        if comm.cut:
            self._dropped += 1
            p.lose(comm.device)
        elif op in _P2P:
            kind = (op == "Send", root)
            order, idx = comm.place(kind)
            sig = self.table.intern_call(f"nccl{op}", count, datatype, None, None)
            comm.transfers.append((*kind, order, idx, sig, t, thread))
        elif op in _COLLECTIVES:
            order, idx = comm.place(None)
            device = comm.device if comm.device is not None else head.dev
            stream = p.stream(device, c["stream"])
            sig = self.table.intern_call(
                f"nccl{op}",
                count,
                datatype,
                op_name(int(c["redop"])) if op in _REDUCING else None,
                root if op in _ROOTED else None,
            )
            comm.calls.append((order, idx, sig, t, thread, stream))
        else:
            self._unknown[op] += 1

    def _without_init(self, p: LogProcess, c: re.Match[bytes], t: int) -> LogComm:
        """A communicator whose initialisation is not in the log, or the end of it is not."""
        at = next((key for key in p.inits if key[1] == c["comm"]), None)
        if at is None:
            return p.add(c["comm"], None, None, int(c["nranks"]), t, False, None)
        b = p.inits.pop(at)
        return p.add(c["comm"], b.uid, b.rank, b.nranks, t, True, b.device)

    # -- communicators -----------------------------------------------------

    def _step(self, p: LogProcess, s: re.Match[bytes], thread: int, t: int) -> None:
        rank, nranks = int(s["rank"]), int(s["nranks"])
        what, when = s["what"].decode(), s["when"].decode()
        if what != "Init":
            p.end(s["comm"], _ENDS[what], t, when == "COMPLETE" and what != "Finalize")
            return
        api = (s["api"] or b"ncclCommInitRank").decode()
        uid = self._hash(p, s["more"])
        found = _DEVICE.search(s["more"])
        device = None if found is None else int(found[1])
        begun = p.inits.pop((thread, s["comm"]), None)
        if when == "START":
            if uid is not None:
                p.inits[thread, s["comm"]] = Begun(api, t, uid, nranks, rank, device)
            return
        if uid is None and begun is not None:
            uid = begun.uid
        if uid is not None and "Split" not in api and "Shrink" not in api:
            start = begun.t if begun is not None else t
            made = m.Call(0, api, start, t, 0, thread, uid_hash=uid, nranks=nranks, rank=rank)
            p.lifecycle.append((device, made))
        p.add(s["comm"], uid, rank, nranks, t, True, device)

    def _hash(self, p: LogProcess, more: bytes) -> str | None:
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
        """Items, a list for each rank; what is open is taken to be so for ``open_for`` ns."""
        self._tell()
        through = max((p.newest for p in self.processes.values()), default=0) + open_for
        for p in self.processes.values():
            yield from process_items(p, self.numbers, through, LAST if self.clocked else ALL)

    def _tell(self) -> None:
        """Say what of all files is not compared."""
        for op, n in sorted(self._unknown.items()):
            self.told.problem(
                f"{counted(n, 'call')} of {op} {verb(n, 'is')} not compared: it is not known"
            )
        comms = [c for p in self.processes.values() for c in p.comms if not c.seen_init]
        if comms:
            n = sum(len(c.calls) + len(c.transfers) for c in comms)
            self.told.problem(
                f"{counted(n, 'call')} on {counted(len(comms), 'communicator')} whose "
                f"initialisation is not in the log {verb(n, 'is')} not compared; set "
                "NCCL_DEBUG_SUBSYS=INIT,COLL from the start"
            )
