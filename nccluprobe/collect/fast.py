"""The hot path: from record to line for calls like many before.

Every combination of thread, function, constant arguments, communicator, stream
and return code has its template; a record is then one dictionary look-up and
one ``%``.  What has no template yet, or needs a thought, goes to ``slow``.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import length_hint
from typing import Generic, TypeVar

from nccluprobe.collect import lines
from nccluprobe.collect.decode import HOT, form_key, what_key
from nccluprobe.nccl.api import BY_ID, Kind
from nccluprobe.record import (
    FLAG_BLIND,
    FLAG_NO_RETURN,
    FLAG_NONBLOCKING,
    FLAG_UNWOUND,
    KIND_CALL,
    SIZE,
    UNKNOWN_SEQ,
    Record,
)

P = TypeVar("P")

#: Kinds of a template's arguments.
_PLAIN, _PEER, _GROUP, _GROUP_OPENS, _GROUP_CLOSES = range(5)

#: Templates of one thread; beyond it they are made anew.
_MOST_TEMPLATES = 2048

_DATA = (Kind.COLLECTIVE, Kind.P2P, Kind.ONE_SIDED)
_ODD = FLAG_BLIND | FLAG_NO_RETURN | FLAG_UNWOUND | FLAG_NONBLOCKING

#: Outside a group, in one, the same with seq; and what they take.
Templates = tuple[str, str, str, str, int]
_Key = tuple[int, int, int, int, int]

_START = next(a.id for a in BY_ID.values() if a.name == "ncclGroupStart")


class Thread(Generic[P]):
    """A thread of a traced process, as the hot path needs it."""

    __slots__ = ("_once", "add", "group", "last", "owner", "templates", "tid")

    def __init__(self, owner: P, tid: int, add: Callable[[str], None]) -> None:
        self.owner = owner
        self.tid = tid
        self.add = add
        self.templates: dict[_Key, Templates] = {}
        self._once: set[_Key] = set()
        #: t_exit of the last record.
        self.last = 0
        #: The line of the outermost GroupStart that is open.
        self.group: str | None = None

    def learn(self, rec: Record, ids: lines.Ids) -> None:
        """Make the template for calls like this one, if they are simple enough.

        Only at the second such call: a template costs as much as ten lines.
        """
        api = BY_ID[rec.api]
        data = api.kind in _DATA and ids.comm is not None
        if rec.flags & _ODD or not (data or api.kind is Kind.GROUP):
            return
        key = (what_key(rec), form_key(rec), rec.comm_gen, rec.stream, rec.rc)
        if key not in self._once:
            if len(self._once) >= _MOST_TEMPLATES:
                self._once.clear()
            self._once.add(key)
            return
        if len(self.templates) >= _MOST_TEMPLATES:
            self.templates.clear()
        like = rec._replace(callsite_id=0, uid_hash=0)
        alone, grouped = like._replace(group_id=0), like._replace(group_id=1)
        shape = _PEER if lines.has_root_or_peer(rec.api) else _PLAIN
        if not data:
            shape = _group_shape(rec)
        self.templates[key] = (
            lines.template(alone._replace(nccl_seq=UNKNOWN_SEQ), ids),
            lines.template(grouped._replace(nccl_seq=UNKNOWN_SEQ), ids),
            lines.template(alone._replace(nccl_seq=0), ids),
            lines.template(grouped._replace(nccl_seq=0), ids),
            shape,
        )

    def note_group(self, rec: Record, line: str) -> None:
        """Remember which group is open (the hot path does the same by itself)."""
        if rec.kind != KIND_CALL or BY_ID[rec.api].kind is not Kind.GROUP:
            return
        shape = _group_shape(rec)
        if shape == _GROUP_OPENS:
            self.group = line
        elif shape == _GROUP_CLOSES:
            self.group = None


def _group_shape(rec: Record) -> int:
    if rec.api == _START:
        return _GROUP_OPENS if rec.group_depth == 0 else _GROUP
    return _GROUP_CLOSES if rec.group_depth <= 1 else _GROUP


def outermost_end(rec: Record) -> bool:
    """Whether the record is the end of a thread's outermost group."""
    return BY_ID[rec.api].kind is Kind.GROUP and _group_shape(rec) == _GROUP_CLOSES


class Router(Generic[P]):
    """Takes pieces of the ring, gives lines to the threads' processes."""

    def __init__(self, slow: Callable[[bytes | memoryview, int], None]) -> None:
        #: Threads of traced processes, by ``who_key``; None: drop silently.
        self.threads: dict[bytes, Thread[P] | None] = {}
        #: Entry times of calls seen inside: their exits are not for the hot path.
        self.watch: set[int] = set()
        self._slow = slow

    def run(self, piece: bytes | memoryview) -> None:
        """All records of a piece, in order."""
        threads = self.threads
        watch = self.watch
        slow = self._slow
        size = len(piece)
        rest = HOT.iter_unpack(piece)
        for (
            t,
            t_exit,
            count,
            stream,
            idx,
            order,
            seq,
            site,
            who,
            gen,
            group,
            rc,
            peer,
            what,
            pos,
            form,
        ) in rest:
            try:
                thread = threads[who]
                if thread is None:
                    continue
                alone, grouped, alone_seq, grouped_seq, shape = thread.templates[
                    what, form, gen, stream, rc
                ]
            except KeyError:
                slow(piece, size - (length_hint(rest) + 1) * SIZE)
                continue
            if t in watch or site:
                slow(piece, size - (length_hint(rest) + 1) * SIZE)
                continue
            thread.last = t_exit or t
            if seq < 0:
                if group:
                    if shape == 0:
                        line = grouped % (t, t_exit - t, idx, order, count, group, pos)
                    elif shape == 1:
                        line = grouped % (t, t_exit - t, idx, order, count, peer, group, pos)
                    else:
                        line = grouped % (t, t_exit - t, idx, order, count, group, pos)
                        if shape == 3:
                            thread.group = line
                        elif shape == 4:
                            thread.group = None
                elif shape == 0:
                    line = alone % (t, t_exit - t, idx, order, count)
                elif shape == 1:
                    line = alone % (t, t_exit - t, idx, order, count, peer)
                else:
                    line = alone % (t, t_exit - t, idx, order, count)
                    if shape == 3:
                        thread.group = line
                    elif shape == 4:
                        thread.group = None
            elif group:
                if shape == 1:
                    line = grouped_seq % (t, t_exit - t, idx, order, count, peer, group, pos, seq)
                else:
                    line = grouped_seq % (t, t_exit - t, idx, order, count, group, pos, seq)
            elif shape == 1:
                line = alone_seq % (t, t_exit - t, idx, order, count, peer, seq)
            else:
                line = alone_seq % (t, t_exit - t, idx, order, count, seq)
            thread.add(line)
