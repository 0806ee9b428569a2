"""The sends and receives that a finding is about, pair by pair, the open one marked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nccluprobe.match.finding import Finding
from nccluprobe.plural import counted
from nccluprobe.report.calls import call_text, ended
from nccluprobe.report.evidence import Wanted
from nccluprobe.report.text import wrap

#: Pairs of ranks that are shown.
_PAIRS = 4
#: How the matcher names a send or receive in what it says of a circle of waits.
_LABEL = re.compile(r"nccl(Send|Recv) #(\d+) (?:to|from) rank (\d+)")

#: (rank, is a send, peer, its number)
Marked = tuple[int, bool, int, int]


def marked(f: Finding) -> list[Marked]:
    """The sends and receives that a finding is about."""
    d, found = f.details, list[Marked]()
    for op in (*(d.get("unmatched") or ()), *(d.get("pair") or ())):
        found.append((op["comm_rank"], op["api"] == "ncclSend", op["peer"], op["ord"]))
    for side in d.get("cycle") or ():
        if side["comm_uid_hash"] == f.comm_uid_hash and len(side["entered_comm_ranks"]) == 1:
            found += [
                (side["entered_comm_ranks"][0], kind == "Send", int(peer), int(at))
                for kind, at, peer in _LABEL.findall(side["call"])
            ]
    return list(dict.fromkeys(found))


def asked(ops: Iterable[Marked]) -> dict[int, dict[tuple[bool, int], frozenset[int]]]:
    """Rank -> (is a send, peer) -> numbers: of both ranks of each pair, in both directions."""
    found: dict[int, dict[tuple[bool, int], frozenset[int]]] = {}
    for rank, send, peer, at in ops:
        for who, other, sends in ((rank, peer, send), (peer, rank, not send)):
            of = found.setdefault(who, {})
            of[sends, other] = of.get((sends, other), frozenset()) | {at}
            of.setdefault((not sends, other), frozenset())
    return found


def pairs(ops: list[Marked], wanted: list[Wanted], names: Mapping[int, str]) -> Iterator[str]:
    """A table for each direction between two ranks."""
    directions = dict.fromkeys(d for rank, _, peer, _ in ops for d in ((rank, peer), (peer, rank)))
    starts = {(rank, peer) if send else (peer, rank) for rank, send, peer, _ in ops}
    chosen = sorted(directions, key=lambda d: d not in starts)
    by_rank = {w.rank: w for w in wanted}
    for src, dst in chosen[: 2 * _PAIRS]:
        rows = _rows(src, dst, by_rank, set(ops))
        if rows:
            title = f"from {_name(src, names)} to {_name(dst, names)}:"
            yield from ["", *wrap(title, "    ", "  ")]
            yield from rows
    if len(chosen) > 2 * _PAIRS:
        yield f"  and {counted(len(chosen) // 2 - _PAIRS, 'more pair')}"


def _rows(
    src: int,
    dst: int,
    by_rank: Mapping[int, Wanted],
    ops: set[Marked],
) -> list[str]:
    sides = ((src, True, dst), (dst, False, src))
    known = {
        side: {
            op[2]: line
            for op, line in (by_rank[side[0]].transfers if side[0] in by_rank else {}).items()
            if op[:2] == side[1:]
        }
        for side in sides
    }
    out: list[str] = []
    for at in sorted({*known[sides[0]], *known[sides[1]]}):
        first = f"#{at}"
        for side in sides:
            line = known[side].get(at)
            mark = ">" if (*side, at) in ops else " "
            out += _row(side, line, f"  {mark}{first:<9}", by_rank)
            first = ""
    return out


def _row(
    side: tuple[int, bool, int],
    line: dict[str, Any] | None,
    head: str,
    by_rank: Mapping[int, Wanted],
) -> list[str]:
    what = "send" if side[1] else "receive"
    w = by_rank.get(side[0])
    if w is None:
        return wrap(f"{what}: rank {side[0]} is not observed", " " * 13, head)
    if line is None:
        return wrap(f"no such {what} to be seen", " " * 13, head)
    when = w.when(line)
    return wrap(f"{call_text(line)}: {when}, {ended(line)}", " " * 13, head)


def _name(rank: int, names: Mapping[int, str]) -> str:
    return names.get(rank, f"rank {rank}")
