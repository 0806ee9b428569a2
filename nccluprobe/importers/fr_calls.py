"""Calls of one rank in one process group, from its dump.

A ring is cut at its old end, and a dump of active entries leaves out what is
complete: what is not there is not lost.  PyTorch's own numbers place the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nccluprobe.importers.fr_dump import COMPLETED, Dump
from nccluprobe.importers.fr_names import COALESCED, Operation, datatype, operation
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

    @property
    def end(self) -> int:
        """The number that comes next."""
        return self.base + len(self.sig)


@dataclass
class Transfers:
    """Sends and receives in order; ``done``: complete."""

    send: _Bools
    peer: Int32
    sig: Int32
    t: Int64
    record: Int64
    done: _Bools


class Calls:
    """Reads the entries of one dump, group by group."""

    def __init__(self, dump: Dump, table: SignatureTable) -> None:
        self.dump = dump
        self.table = table
        self.operations = [operation(n) for n in dump.names]
        self._types = [datatype(d) for d in dump.datatypes]
        self._coalesced = {i for i, n in enumerate(self.operations) if n.api == COALESCED}
        self._sigs: dict[tuple[int, int, int, int, int], int] = {}
        self.state = dump.state.copy()
        self.kept = np.ones(len(dump), np.bool_)
        self._in_coalesced = np.zeros(len(dump), np.bool_)
        self._rows: dict[int, Int64] = {}
        if len(dump):
            order = np.argsort(dump.group, kind="stable")
            starts = np.flatnonzero(np.diff(dump.group[order], prepend=-1))
            for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
                self._rows[int(dump.group[order[start]])] = order[start:end]
        if self._coalesced:
            for rows in self._rows.values():
                self._end_groups(rows)

    def has_p2p(self, group: int) -> bool:
        """Whether the group (index in groups_seen) shows sends or receives."""
        return bool(self.dump.is_p2p[self._rows[group]].any())

    def _end_groups(self, rows: Int64) -> None:
        """Calls put together have no state: that of the entry that ends them is theirs."""
        d = self.dump
        open_: list[int] = []
        for i in rows.tolist():
            if int(d.name[i]) not in self._coalesced:
                open_.append(i)
                continue
            p2p = [j for j in open_ if d.is_p2p[j] and d.p2p_seq[j] == d.p2p_seq[i]]
            calls = [j for j in open_ if not d.is_p2p[j] and d.seq[j] == d.seq[i]]
            open_ = []
            if p2p or calls:
                self.kept[i] = False
                for j in (*p2p, *calls):
                    self.state[j] = self.state[i]
                self._in_coalesced[calls] = True
            elif d.is_p2p[i]:
                self.kept[i] = False

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
        if end - base != len(seq):
            at = seq - base
            filled = np.zeros(end - base, np.int32)
            filled[at] = sigs
            after = np.searchsorted(seq, np.arange(base, end))
            sigs, t, record = filled, t[after], record[after]
        pending = int(waiting.min()) if len(waiting) else end
        return Collectives(base, sigs, t, record, max(base, pending))

    def transfers(
        self, group: int, nranks: int, status: tuple[int, int] | None
    ) -> Transfers | None:
        """The sends and receives of a group."""
        d = self.dump
        rows = self._rows[group]
        rows = rows[self.kept[rows] & d.is_p2p[rows]]
        told = [self.operations[n] for n in d.name[rows].tolist()]
        good = [i for i, o in enumerate(told) if o.peer is not None and 0 <= o.peer < nranks]
        if not good:
            return None
        rows = rows[good]
        peers = [told[i].peer or 0 for i in good]
        done = self.state[rows] == COMPLETED
        if status is not None and status[0] == int(d.p2p_seq[rows].max()):
            done |= d.p2p_seq[rows] <= status[1]
        return Transfers(
            send=np.array([told[i].send for i in good], np.bool_),
            peer=np.array(peers, np.int32),
            sig=self._signatures(rows),
            t=d.created[rows],
            record=d.record[rows],
            done=done,
        )

    def entered(self, group: int) -> int:
        """Number of the newest collective that any entry of a group speaks of."""
        return int(self.dump.seq[self._rows[group]].max())

    # -- signatures --------------------------------------------------------

    def _signatures(self, rows: Int64) -> Int32:
        d, known = self.dump, self._sigs
        keys = zip(
            d.name[rows].tolist(),
            d.datatype[rows].tolist(),
            d.inputs[rows].tolist(),
            d.outputs[rows].tolist(),
            self._in_coalesced[rows].tolist(),
            strict=True,
        )
        found = []
        for key in keys:
            sig = known.get(key)
            if sig is None:
                sig = known[key] = self._signature(*key)
            found.append(sig)
        return np.array(found, np.int32)

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


def _by_lists(op: Operation, inputs: int, outputs: int) -> bool:
    """Whether tensors of several sizes were passed, which PyTorch allows."""
    small, large = (inputs, outputs) if op.api == "ncclAllGather" else (outputs, inputs)
    return op.api in ("ncclAllGather", "ncclReduceScatter") and (small <= 0 or large % small != 0)
