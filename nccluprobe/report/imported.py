"""What importers have read, as the lines that a trace would have of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match.signature import SignatureTable
from nccluprobe.report.evidence import Evidence, Wanted

#: Newest rows of a batch that are looked at, beside those around the finding.
_NEWEST = 64

_Done = Mapping[tuple[int, int], m.Completed]


def show(evidence: Evidence, items: Iterable[m.Item], table: SignatureTable) -> None:
    """Give all that importers have told of the endpoints in question to ``evidence``."""
    items = list(items)
    done: dict[tuple[int, int], m.Completed] = {}
    for x in items:
        if isinstance(x, m.CommInfo):
            line = {"id": x.id, "hash": x.hash, "instance": x.instance, "comm_rank": x.comm_rank}
            evidence.take(x.source, line | {"kind": "comm"})
        elif isinstance(x, m.Completed):
            done[x.source, x.comm] = x
    lines: dict[int, list[dict[str, Any]]] = {}
    for x in items:
        if isinstance(x, m.Batch | m.P2PBatch | m.Call) and (mine := evidence.of(x.source)):
            lines.setdefault(x.source, []).extend(_lines(x, mine, table, done))
    for source, some in lines.items():
        for line in sorted(some, key=lambda x: (x["t"], x["idx"])):
            evidence.take(source, line)


def _lines(
    x: m.Batch | m.P2PBatch | m.Call,
    mine: dict[int, Wanted],
    table: SignatureTable,
    done: _Done,
) -> Iterator[dict[str, Any]]:
    if isinstance(x, m.Call):
        at = -1 if x.idx is None else x.idx
        yield {"kind": "call", "api": x.api, "comm": x.comm, "t": x.t, "idx": at, "rc": x.rc} | {
            "thread": x.thread
        }
        return
    if not len(x):
        return
    w = mine.get(x.comm)
    chosen = np.arange(len(x)) >= len(x) - _NEWEST
    if w is not None:
        if isinstance(x, m.P2PBatch):
            chosen |= np.isin(x.peer, [peer for _, peer in w.asked])
        else:
            chosen |= (x.ord >= w.first) & (x.ord <= w.last)
            chosen[0] = True  # shows where it begins
    until = done.get((x.source, x.comm))
    for i in np.flatnonzero(chosen).tolist():
        s = table[int(x.sig[i])]
        line: dict[str, Any] = {
            "kind": "call",
            "api": s.api,
            "comm": x.comm,
            "ord": int(x.ord[i]),
            "idx": int(x.idx[i]),
            "t": int(x.t_enter[i]),
            "thread": f"{x.comm} {type(x).__name__} {i}",  # each is a call of its own
            "count": s.count,
            "datatype": s.datatype,
            "op": s.op,
            "root": s.root,
        }
        if isinstance(x, m.P2PBatch):
            line |= {"peer": int(x.peer[i]), "api": "ncclSend" if x.send[i] else "ncclRecv"}
        elif x.site is not None and x.site[i]:
            line["site"] = table.sites[int(x.site[i])]
        yield line | {"end": _state(line, until)}


def _state(line: dict[str, Any], until: m.Completed | None) -> str:
    """Whether a call is complete, where the source tells."""
    if until is None:
        return "called"
    if "peer" in line:
        key = (line["api"] == "ncclSend", line["peer"])
        below = next((n for send, peer, n in until.p2p if (send, peer) == key), 0)
    else:
        below = until.calls
    return "complete" if line["ord"] < below else "not complete"
