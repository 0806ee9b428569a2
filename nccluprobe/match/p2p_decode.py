"""Lines of sends and receives to columns."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match.signature import SignatureTable
from nccluprobe.nccl.api import BY_NAME, Kind

#: Name of a function -> whether it sends.
SENDS = {n: a.direction == "send" for n, a in BY_NAME.items() if a.kind is Kind.P2P}
_what = itemgetter("api", "count", "datatype")


class PairDecoder:
    """Makes batches; remembers the signatures that it has seen."""

    def __init__(self, table: SignatureTable) -> None:
        self._table = table
        self._known: dict[tuple[Any, ...], int] = {}

    def batch(
        self,
        source: int,
        comm: int,
        rows: list[dict[str, Any]],
        at: Sequence[int],
        columns: tuple[m.Int64, m.Int64, m.Int32, m.Int64, m.Int64],
    ) -> m.P2PBatch:
        """The rows ``at``, all of one communicator; ``columns``: t, t_exit, rc, group, thread.

        Raises what a wrong line raises (lines.BAD).
        """
        mine = rows if len(at) == len(rows) else [rows[i] for i in at]
        select = slice(None) if len(at) == len(rows) else np.array(at)
        t, t_exit, rc, group, threads = columns
        what = list(map(_what, mine))
        sigs = list(map(self._known.get, what))
        if None in sigs:
            sigs = [self._signature(key) for key in what]
        peer, order, idx = (_column([r[name] for r in mine]) for name in ("peer", "ord", "idx"))
        if bool((np.abs(peer) > m.MAX_NRANKS).any()):
            raise ValueError("peer is out of range")
        return m.P2PBatch(
            source=source,
            comm=comm,
            send=np.array([SENDS[key[0]] for key in what], np.bool_),
            peer=peer.astype(np.int32),
            ord=order,
            idx=idx,
            sig=np.array(sigs, np.int32),
            t_enter=t[select],
            t_exit=t_exit[select],
            rc=rc[select],
            group=group[select],
            thread=threads[select],
        )

    def _signature(self, key: tuple[Any, ...]) -> int:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._table.intern_call(key[0], key[1], key[2], None, None)
        return found


def _column(values: list[Any]) -> m.Int64:
    """Integers only: anything else raises."""
    return np.frombuffer(array("q", values), np.int64)
