"""The evidence of one finding: the slots around it, rank by rank, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nccluprobe.match.finding import Finding
from nccluprobe.match.status import ranks_text
from nccluprobe.plural import counted
from nccluprobe.report.calls import call_text, ended
from nccluprobe.report.counters import counters
from nccluprobe.report.evidence import Evidence, Wanted, op_of
from nccluprobe.report.text import WIDTH, single, wrap
from nccluprobe.report.transfers import Marked, marked, pairs

#: So many ranks are shown one by one: those that the finding names, then others.
RANKS = 8
#: Sends and receives in question that are shown of a rank, beside its newest calls.
_MARKED = 4


def slot_rows(evidence: Evidence, seq: int | None) -> list[str]:
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
    out = ["  slot     call; ranks of the communicator that made it"]
    for at, calls in sorted(rows.items()):
        mark = ">" if at == seq else " "
        came: set[int] = set()
        for text, ranks in sorted(calls.items(), key=lambda c: -len(c[1])):
            came.update(ranks)
            out += wrap(f"{text}: {ranks_text(sorted(ranks))}", " " * 11, f" {mark}#{at:<8}")
            mark = " "
        if missing := sorted(everyone - came):
            begins = {w.rank: w.oldest for w in evidence.wanted}
            later = [r for r in missing if (begins[r] or 0) > at]
            if rest := [r for r in missing if r not in later]:
                out += wrap(f"not made by {ranks_text(rest)}", " " * 13, " " * 11)
            if later:
                text = f"not known of {ranks_text(later)}: what is at hand begins later"
                out += wrap(text, " " * 13, " " * 11)
    return out


def call_line(w: Wanted, line: dict[str, Any], mark: str, letter: str = "") -> list[str]:
    """One call; ``letter``: of its communicator, where several are shown."""
    seq = w.seq(line)
    op = op_of(line)
    slot = f"#{seq}" if seq is not None else ""
    slot = f"{letter} {slot}" if letter else slot
    head = f"  {mark}{slot:<8}{w.when(line)}  {ended(line):<16}"
    # The numbers of sends and receives are those between two ranks: no slots of all.
    which = "" if op is None else f", #{op[2]} {'to' if op[0] else 'from'} rank {op[1]}"
    return wrap(call_text(line) + which, " " * 13, head)


@dataclass(frozen=True)
class Who:
    """A rank of the communicator: its name, where it runs, what its process does now."""

    name: str
    place: str
    state: str
    #: Its rank in the job, if known.
    job: int | None = None


def _rank(w: Wanted, who: Who, seq: int | None, slots: bool, ops: list[Marked]) -> list[str]:
    out = wrap(f"{who.name}: {who.place}", "    ", "")
    lines = sorted(w.around.values(), key=lambda x: x.get("ord", 0)) if slots else []
    if not lines:
        lines = list(w.newest)[-4:]
        in_question = (w.transfers.get(op[1:]) for op in ops if op[0] == w.rank)
        lines = [x for x in in_question if x is not None and x not in lines][:_MARKED] + lines
    for line in lines:
        is_it = seq is not None and w.seq(line) == seq
        op = op_of(line)
        is_it = is_it or (op is not None and (w.rank, *op) in ops)
        out += call_line(w, line, ">" if is_it else " ")
    newest = lines[-1].get("t") if lines else None
    if w.newest and w.newest[-1].get("t") != newest:
        out.append("    newest call on this communicator:")
        out += call_line(w, w.newest[-1], " ")
    if w.elsewhere and w.newest and (w.elsewhere[-1].get("t") or 0) > (w.newest[-1].get("t") or 0):
        out.append("    after it, elsewhere:")
        other = Wanted(w.source, -1, w.rank, 0, -1, 0, w.shift, w.timed)
        out += call_line(other, w.elsewhere[-1] | {"ord": None}, " ")
    return out + wrap(who.state, "    ", "    ") if who.state else out


def named_first(f: Finding) -> list[int]:
    """Ranks of the communicator that the finding speaks of, the blamed ones first."""
    d = f.details
    ranks: list[int] = []
    for key in ("missing_comm_ranks", "minority_comm_ranks", "late_comm_ranks"):
        ranks += d.get(key) or []
    for key in ("not_complete_comm_ranks", "error_comm_ranks", "entered_comm_ranks"):
        ranks += d.get(key) or []
    return list(dict.fromkeys(ranks))


def explain(f: Finding, evidence: Evidence, members: Mapping[int, Who], colour: bool) -> str:
    """The finding and what it rests on; ``members``: by rank of the communicator."""
    out = single(f, colour).splitlines()
    table = list(counters(f))
    if table:
        out += ["", *table]
    elif not evidence.wanted:
        out += ["", "  No calls to show: nothing that was read tells of calls of it."]
    if not evidence.wanted:
        return "\n".join(cut(out)) + "\n"
    ops = marked(f)
    out += pairs(ops, evidence.wanted, {rank: who.name for rank, who in members.items()})
    slots = slot_rows(evidence, f.comm_seq)
    if slots:
        out += ["", *slots]
    by_rank = {w.rank: w for w in evidence.wanted}
    order = [r for r in named_first(f) if r in by_rank]
    order += [r for r in by_rank if r not in order]
    out += [
        "",
        *wrap(
            "Rank by rank. " + about(evidence.wanted),
            "  ",
        ),
    ]
    for rank in order[:RANKS]:
        out.append("")
        who = members.get(rank) or Who(f"rank {rank} of the communicator", "no call of it", "")
        out += _rank(by_rank[rank], who, f.comm_seq, bool(slots), ops)
    if len(order) > RANKS:
        out += ["", f"  and {counted(len(order) - RANKS, 'more rank')}"]
    return "\n".join(cut(out)) + "\n"


def about(wanted: Iterable[Wanted]) -> str:
    """What the times are, and the words for the end of a call, of those that are shown."""
    wanted = list(wanted)
    if wanted and not any(w.timed for w in wanted):
        return "The log has no times."
    lines = [x for w in wanted for x in (*w.around.values(), *w.newest)]
    if any(isinstance(x.get("dur"), int) for x in lines):
        return (
            'Times are UTC; "host": the call returned to its thread after that time, which does '
            "not tell that it is finished on the GPU."
        )
    if any(x.get("end") in ("complete", "not complete") for x in lines):
        return 'Times are UTC; "complete": it is finished on the GPU.'
    return "Times are UTC."


def cut(lines: Iterable[str]) -> list[str]:
    """No line longer than the width; one with colours is left as it is."""
    return [line if len(line) <= WIDTH or "\x1b" in line else line[:WIDTH] for line in lines]
