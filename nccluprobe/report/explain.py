"""The evidence of one finding: the slots around it, rank by rank, in 80 columns."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from nccluprobe.match.finding import Finding
from nccluprobe.match.status import ranks_text
from nccluprobe.report.evidence import Evidence, Wanted
from nccluprobe.report.text import WIDTH, single, wrap
from nccluprobe.report.words import escape

#: So many ranks are shown one by one: those that the finding names, then others.
_RANKS = 8
_SHOWN = ("count", "datatype", "op", "root", "peer", "site")


def clock(unix_ns: int) -> str:
    """UTC time of day with milliseconds."""
    return time.strftime("%H:%M:%S", time.gmtime(unix_ns // 10**9)) + (
        f".{unix_ns // 10**6 % 1000:03d}"
    )


def call_text(line: dict[str, Any]) -> str:
    """A call with its arguments."""
    parts = [
        f"{k} {line[k]}" if k in ("count", "root", "peer", "site") else str(line[k])
        for k in _SHOWN
        if line.get(k) is not None
    ]
    if line.get("group"):
        parts.append(f"group {line['group']}")
    return escape(f"{line.get('api')}({', '.join(parts)})")


def _ended(line: dict[str, Any]) -> str:
    if line.get("kind") == "enter":
        return "inside"
    if line.get("rc") not in (0, None):
        return f"returned {line['rc']}"
    took = line.get("dur")
    if not isinstance(took, int):
        return str(line.get("end") or "no return")
    return f"host {took / 1e9:.3f} s" if took >= 10**8 else f"host {took / 1e3:.1f} us"


def _slots(evidence: Evidence, seq: int | None) -> list[str]:
    """One row per slot and call: who made it, who did not."""
    rows: dict[int, dict[str, list[int]]] = {}
    for w in evidence.wanted:
        for line in w.around.values():
            at = w.seq(line)
            if at is not None:
                rows.setdefault(at, {}).setdefault(call_text(line), []).append(w.rank)
    if not rows:
        return []
    everyone = {w.rank for w in evidence.wanted}
    out = ["  slot     call; ranks that made it"]
    for at, calls in sorted(rows.items()):
        mark = ">" if at == seq else " "
        came: set[int] = set()
        for text, ranks in sorted(calls.items(), key=lambda c: -len(c[1])):
            came.update(ranks)
            out += wrap(f"{text}: {ranks_text(sorted(ranks))}", " " * 11, f" {mark}#{at:<8}")
            mark = " "
        if missing := sorted(everyone - came):
            out += wrap(f"not made by {ranks_text(missing)}", " " * 13, " " * 11)
    return out


def _line(w: Wanted, line: dict[str, Any], mark: str) -> list[str]:
    seq = w.seq(line)
    slot = "" if seq is None else f"#{seq}"
    head = f"  {mark}{slot:<8}{clock(int(line.get('t') or 0) + w.shift)}  {_ended(line):<16}"
    return wrap(call_text(line), " " * 13, head)


def _rank(w: Wanted, name: str, state: str, seq: int | None, slots: bool) -> list[str]:
    out = wrap(name, "    ", "")
    lines = sorted(w.around.values(), key=lambda x: x.get("ord", 0)) if slots else []
    if not lines:
        lines = list(w.newest)[-4:]
    for line in lines:
        out += _line(w, line, ">" if seq is not None and w.seq(line) == seq else " ")
    newest = lines[-1].get("t") if lines else None
    if w.newest and w.newest[-1].get("t") != newest:
        out.append("    newest call on this communicator:")
        out += _line(w, w.newest[-1], " ")
    if w.elsewhere and w.newest and (w.elsewhere[-1].get("t") or 0) > (w.newest[-1].get("t") or 0):
        out.append("    after it, elsewhere:")
        out += _line(
            Wanted(w.source, -1, w.rank, 0, -1, 0, w.shift), w.elsewhere[-1] | {"ord": None}, " "
        )
    return out + wrap(state, "    ", "    ") if state else out


def named_first(f: Finding) -> list[int]:
    """Ranks of the communicator that the finding speaks of, the blamed ones first."""
    d = f.details
    ranks: list[int] = []
    for key in ("missing_comm_ranks", "minority_comm_ranks", "late_comm_ranks"):
        ranks += d.get(key) or []
    for key in ("not_complete_comm_ranks", "error_comm_ranks", "entered_comm_ranks"):
        ranks += d.get(key) or []
    return list(dict.fromkeys(ranks))


def explain(
    f: Finding, evidence: Evidence, names: dict[int, str], states: dict[int, str], colour: bool
) -> str:
    """The finding and what it rests on.

    ``names``, ``states``: per rank of the communicator, who it is and what its
    process does now.
    """
    out = single(f, colour).splitlines()
    if not evidence.wanted:
        out += ["", "  No calls to show: no trace of the communicator is at hand."]
        return "\n".join(out) + "\n"
    slots = _slots(evidence, f.comm_seq)
    if slots:
        out += ["", *slots]
    by_rank = {w.rank: w for w in evidence.wanted}
    order = [r for r in named_first(f) if r in by_rank]
    order += [r for r in by_rank if r not in order]
    out += [
        "",
        *wrap(
            'Rank by rank. Times are UTC; "host": the call returned to its thread after that '
            "time, which does not tell that it is finished on the GPU.",
            "  ",
        ),
    ]
    for rank in order[:_RANKS]:
        out.append("")
        state = states.get(rank, "")
        out += _rank(by_rank[rank], names.get(rank, f"rank {rank}"), state, f.comm_seq, bool(slots))
    if len(order) > _RANKS:
        out += ["", f"  and {len(order) - _RANKS} more ranks"]
    return "\n".join(_cut(out)) + "\n"


def _cut(lines: Iterable[str]) -> list[str]:
    return [line if len(line) <= WIDTH or "\x1b" in line else line[:WIDTH] for line in lines]
