"""Calls of one rank in one process group, from its dump.

A ring is cut at its old end, and a dump of active entries leaves out what is
complete: what is not there is not lost.  PyTorch's own numbers place the rest.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from nccluprobe.importers.fr_dump import Dump
from nccluprobe.importers.fr_entries import COMPLETED, SCHEDULED, STARTED
from nccluprobe.importers.fr_names import COALESCED, Operation, datatype, operation
from nccluprobe.importers.fr_numbers import BIG
from nccluprobe.match.model import SIG_LOST, Int32, Int64
from nccluprobe.match.signature import SignatureTable

_Bools = np.ndarray[Any, np.dtype[np.bool_]]

#: More numbers missing between two entries than this: what is older is left out.
_MAX_HOLE = 100_000


@dataclass
class Collectives:
    """Collectives by PyTorch's number.  ``pending``: number of the first that is not complete."""

    base: int
    sig: Int32
    t: Int64
    record: Int64
    pending: int
    #: Whether none of the ranks can complete it without all others.
    needs_all: _Bools
    #: Whether its device is seen to have begun it.
    begun: _Bools

    @property
    def end(self) -> int:
        """The number that comes next."""
        return self.base + len(self.sig)

    def begins(self, number: int) -> bool:
        """Whether its device has begun the collective of this number."""
        return self.base <= number < self.end and bool(self.begun[number - self.base])

    def waits_for_all(self, number: int) -> bool:
        """Whether it is in a collective up to this number that no rank completes alone."""
        return bool(self.needs_all[self.pending - self.base : number + 1 - self.base].any())

    def as_begun(self) -> Collectives | None:
        """Without what its device has not begun; None: nothing is left."""
        open_ = self.begun[self.pending - self.base :]
        n = self.pending - self.base + (len(open_) if open_.all() else int(np.argmin(open_)))
        if n == 0:
            return None
        sig, t, record = self.sig[:n], self.t[:n], self.record[:n]
        needs_all, begun = self.needs_all[:n], self.begun[:n]
        return Collectives(self.base, sig, t, record, self.pending, needs_all, begun)

    def unseen(self, complete: int) -> int:
        """Calls that are complete, and not as this rank knows.

        ``complete``: below this, another rank has completed every call.
        """
        first = self.pending - self.base
        took_part = np.flatnonzero(self.needs_all[first : complete - self.base])
        return int(took_part[-1]) + 1 if len(took_part) else 0


@dataclass
class Transfers:
    """Sends and receives in order; ``done``: complete; ``begun``: on the device, as far as seen.

    ``batch``: those put together have one number in a dump, others 0.  ``from_first``: whether
    the first is the first of the group.
    """

    send: _Bools
    peer: Int32
    sig: Int32
    t: Int64
    record: Int64
    done: _Bools
    begun: _Bools
    batch: Int64
    from_first: bool

    def as_begun(self) -> Transfers | None:
        """Without what its device has not begun; None: nothing is left."""
        return self.only(self.done | self.begun)

    def only(self, keep: _Bools) -> Transfers | None:
        """These of them; None: nothing is left."""
        send, done, begun = (x[keep] for x in (self.send, self.done, self.begun))
        peer, sig, t, record = self.peer[keep], self.sig[keep], self.t[keep], self.record[keep]
        if not keep.any():
            return None
        batch = self.batch[keep]
        return Transfers(send, peer, sig, t, record, done, begun, batch, self.from_first)


class Calls:
    """Reads the entries of one dump, group by group."""

    def __init__(self, dump: Dump, table: SignatureTable) -> None:
        self.dump = dump
        self.table = table
        self.operations = [operation(n) for n in dump.names]
        self._types = [datatype(d) for d in dump.datatypes]
        self._coalesced = {i for i, n in enumerate(self.operations) if n.api == COALESCED}
        self._needs_all = np.array([n.needs_all for n in self.operations], np.bool_)
        #: Signature of each call that differs: alone, and put together with others; -1: not yet.
        self._sigs = np.full((len(dump.calls), 2), -1, np.int32)
        self._name = dump.name
        self.state = dump.state.copy()
        #: When its end was noticed; of what was put together that of all.
        self._ended = dump.ended.copy()
        self.kept = np.ones(len(dump), np.bool_)
        self._end = int(dump.created.max(initial=0))
        self._in_coalesced = np.zeros(len(dump), np.bool_)
        self._rows: dict[int, Int64] = {}
        if len(dump):
            order = np.argsort(dump.group, kind="stable")
            starts = np.flatnonzero(np.diff(dump.group[order], prepend=-1))
            for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
                self._rows[int(dump.group[order[start]])] = order[start:end]
        #: Sends and receives that were put together with others, or may have been.
        self._batched = np.zeros(len(dump), np.bool_)
        self._batch = np.zeros(len(dump), np.int64)
        for group, rows in self._rows.items():
            left = self._end_groups(rows)
            if len(left) and not (self.state[rows] == COMPLETED).any():
                self._without_end(group, rows, left)

    @property
    def oldest_open(self) -> int | None:
        """When the oldest call that is not complete was made, unix ns."""
        open_ = self.dump.created[self.kept & (self.state != COMPLETED)]
        return int(open_.min()) if len(open_) else None

    @property
    def oldest(self) -> tuple[int, int]:
        """Number in the dump and time of the oldest call that it holds; unix ns."""
        d = self.dump
        return int(d.record.min(initial=BIG)), int(d.created.min(initial=BIG))

    @property
    def forgets(self) -> bool:
        """Whether the dump does not show every call up to the moment that it was cut at.

        It leaves out what is complete, or its ring has gone past that moment.
        """
        return not (self.dump.whole and int(self.dump.created.min()) <= self._end)

    def has_lost(self) -> bool:
        """Whether its status has collectives as open that are older than what it shows."""
        d = self.dump
        told = {g: last[1] for g, i in enumerate(d.pg_ids) if (last := d.status.get(i))}
        shown = {g: self._rows[g] for g in told if not self.has_p2p(g)}
        return d.whole and any(int(d.seq[x].min()) > told[g] + 1 for g, x in shown.items())

    def cut(self, t: int) -> bool:
        """Forget what was made later than ``t``, and ends that were noticed later; if any."""
        self._end = t
        late, ended = self.dump.created > t, self._ended > t
        self.kept &= ~late
        self.state[ended] = SCHEDULED
        return bool(late.any() or ended.any())

    def has_p2p(self, group: int) -> bool:
        """Whether the group (index in groups_seen) shows sends or receives."""
        return bool(self.dump.is_p2p[self._rows[group]].any())

    def _end_groups(self, rows: Int64) -> list[int]:
        """Calls put together have no state: that of the entry that ends them is theirs.

        Returns the calls that no such entry follows.
        """
        d = self.dump
        numbers: list[int] = rows.tolist()
        if not self._coalesced:
            return numbers
        open_: list[int] = []
        left: list[int] = []
        for i in numbers:
            if int(self._name[i]) not in self._coalesced:
                open_.append(i)
                continue
            together = self._put_together(open_, i)
            left += open_[: len(open_) - len(together)]
            open_ = []
            if together:
                self.kept[i] = False
                self.state[together] = self.state[i]
                self._ended[together] = d.ended[i]
                if d.is_p2p[together[0]]:
                    self._batched[together] = True
                    self._batch[together] = int(d.record[i]) + 1
                else:
                    self._in_coalesced[together] = True
            elif d.is_p2p[i]:
                self.kept[i] = False
        return left + open_

    def _put_together(self, before: list[int], end: int) -> list[int]:
        """The calls that an entry ends: the last ones, of one kind, that have its number.

        A batch of sends has the number of the collective before it, too (measured: 2.11).
        """
        d = self.dump
        n = len(before)
        p2p = n > 0 and bool(d.is_p2p[before[-1]])
        number = d.p2p_seq if p2p else d.seq
        while n and d.is_p2p[before[n - 1]] == p2p and number[before[n - 1]] == number[end]:
            n -= 1
        return before[n:]

    def _without_end(self, group: int, rows: Int64, left: list[int]) -> None:
        """In a dump of what is active, calls put together whose end is not there are complete.

        They stay in it for as long as the ring holds them, as they have no state.  That
        they were put together shows by a number that several have, or by operations
        that outnumber the numbers given out.
        """
        d = self.dump
        p2p = [i for i in left if d.is_p2p[i]]
        calls = [i for i in left if not d.is_p2p[i]]
        together = [*_alike(p2p, d.p2p_seq), *_alike(calls, d.seq)]
        if self._batched[rows].any() or any(d.op[i] > d.seq[i] + d.p2p_seq[i] for i in p2p):
            together += p2p
        status = d.status.get(d.pg_ids[group])
        last = int(rows[-1])
        for i in dict.fromkeys(together):
            number = d.p2p_seq if d.is_p2p[i] else d.seq
            if status is not None and status[0] == int(number[last]) and status[1] < number[i]:
                continue  # it is not complete, or was not put together with others
            if status is not None and status[0] == int(number[i]) - 1 and i == len(d) - 1:
                continue  # it is being put together
            self.state[i] = COMPLETED
            if d.is_p2p[i]:
                self._batched[i] = True
            else:
                self._in_coalesced[i] = True

    def collectives(self, group: int, status: tuple[int, int] | None) -> Collectives | None:
        """The collectives of a group; ``status``: last enqueued and completed, if of use."""
        d = self.dump
        rows = self._rows[group]
        rows = rows[self.kept[rows] & ~d.is_p2p[rows]]
        if len(rows) == 0:
            return None
        seq, first = np.unique(d.seq[rows], return_index=True)
        done = self.state[rows] == COMPLETED
        if status is not None and status[0] == int(seq[-1]):
            done |= d.seq[rows] <= status[1]
        waiting = d.seq[rows][~done]
        holes = np.flatnonzero(np.diff(seq) > _MAX_HOLE)
        if len(holes):
            seq, first = seq[holes[-1] + 1 :], first[holes[-1] + 1 :]
        picked = rows[first]
        sigs = self._signatures(picked)
        base, end = int(seq[0]), int(seq[-1]) + 1
        record, t = d.record[picked], d.created[picked]
        needs_all = self._needs_all[self._name[picked]]
        begun = self.state[picked] >= STARTED
        if end - base != len(seq):
            at = seq - base
            filled = np.zeros(end - base, np.int32)
            filled[at] = sigs
            after = np.searchsorted(seq, np.arange(base, end))
            sigs, t, record = filled, t[after], record[after]
            needs_all, begun = (_spread(x, at, end - base) for x in (needs_all, begun))
        pending = int(waiting.min()) if len(waiting) else end
        return Collectives(base, sigs, t, record, max(base, pending), needs_all, begun)

    def transfers(
        self, group: int, nranks: int, status: tuple[int, int] | None
    ) -> Transfers | None:
        """The sends and receives of a group."""
        d = self.dump
        rows = self._rows[group]
        rows = rows[self.kept[rows] & d.is_p2p[rows]]
        told = [self.operations[n] for n in self._name[rows].tolist()]
        good = [i for i, o in enumerate(told) if o.peer is not None and 0 <= o.peer < nranks]
        if not good:
            return None
        rows = rows[good]
        peers = [told[i].peer or 0 for i in good]
        done = self.state[rows] == COMPLETED
        if status is not None and status[0] == int(d.p2p_seq[rows].max()):
            # By itself each pair has its own stream: a later one may be complete before.
            # The number may be that of a collective which was made before the batch.
            mine = self._batched[rows] & (d.seq[rows] < status[1])
            done |= mine & (d.p2p_seq[rows] <= status[1])
        return Transfers(
            send=np.array([told[i].send for i in good], np.bool_),
            peer=np.array(peers, np.int32),
            sig=self._signatures(rows),
            t=d.created[rows],
            record=d.record[rows],
            done=done,
            begun=self.state[rows] >= STARTED,
            batch=self._batch[rows],
            from_first=_from_first(d.p2p_seq[rows]),
        )

    def entered(self, group: int) -> int:
        """Number of the newest collective that any entry of a group speaks of."""
        d, rows = self.dump, self._rows[group]
        made = rows[d.created[rows] <= self._end]
        if len(made):
            return int(d.seq[made].max())
        return int(d.seq[rows[0]]) - (not d.is_p2p[rows[0]])  # what was cut begins with the next

    # -- signatures --------------------------------------------------------

    def _signatures(self, rows: Int64) -> Int32:
        call, several = self.dump.call[rows], self._in_coalesced[rows].astype(np.int32)
        found = self._sigs[call, several]
        new = found < 0
        if new.any():
            for at in np.unique(call[new] * 2 + several[new]).tolist():
                name, kind, inputs, outputs = self.dump.calls[at // 2].tolist()
                self._sigs[at // 2, at % 2] = self._signature(name, kind, inputs, outputs, at % 2)
            found = self._sigs[call, several]
        return found

    def _signature(self, name: int, kind: int, inputs: int, outputs: int, several: int) -> int:
        op = self.operations[name]
        if op.api == COALESCED:
            return SIG_LOST  # what was put together has left the ring
        type_name, per_element = self._types[kind]
        count: int | None = outputs if op.by_output or inputs < 0 else inputs
        if op.uneven or several or count is None or count < 0 or _by_lists(op, inputs, outputs):
            count = None
        return self.table.intern_call(
            op.api, None if count is None else count * per_element, type_name, None, None
        )


def _spread(values: _Bools, at: Int64, n: int) -> _Bools:
    """Values at their places among ``n``, False where there is none."""
    found = np.zeros(n, np.bool_)
    found[at] = values
    return found


def _from_first(numbers: Int64) -> bool:
    """Whether these are all that there were: 1, 2 and so on, each once or more."""
    found = np.unique(numbers)
    return int(found[0]) <= 1 and int(found[-1]) - int(found[0]) == len(found) - 1


def _alike(rows: list[int], numbers: Int64) -> list[int]:
    """Those of the rows whose number another one has, too."""
    count = Counter(numbers[rows].tolist())
    return [i for i in rows if count[int(numbers[i])] > 1]


def _by_lists(op: Operation, inputs: int, outputs: int) -> bool:
    """Whether tensors of several sizes were passed, which PyTorch allows."""
    small, large = (inputs, outputs) if op.api == "ncclAllGather" else (outputs, inputs)
    return op.api in ("ncclAllGather", "ncclReduceScatter") and (small <= 0 or large % small != 0)
