"""The evidence of a finding that rests on several communicators: the slots of each, rank by rank.

The communicators are called A, B, ...: the calls of a rank on all of them stand in the order in
which it made them, as that is what such a finding is about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nccluprobe.match.finding import Finding
from nccluprobe.plural import counted
from nccluprobe.report.evidence import Evidence, Wanted
from nccluprobe.report.explain import RANKS, Who, about, call_line, cut, slot_rows
from nccluprobe.report.text import single, wrap
from nccluprobe.report.words import escape

#: So many communicators are shown, those of the finding first.
MOST = 4
_LETTERS = "ABCD"
#: So many of the newest calls are shown of a rank on a communicator without slots to show.
_NEWEST = 3


@dataclass(frozen=True)
class Part:
    """One of the communicators: hash, name, number of the call in question."""

    comm_hash: str
    name: str | None
    seq: int | None
    evidence: Evidence
    #: By rank of the communicator.
    members: Mapping[int, Who]

    def title(self, letter: str) -> str:
        """For people."""
        name = f" ({escape(self.name)})" if self.name else ""
        call = "" if self.seq is None else f", the call in question is #{self.seq}"
        return f"{letter}: communicator {self.comm_hash}{name}{call}"


def calls_of(f: Finding) -> list[tuple[str, int, int | None]]:
    """(hash, instance, comm_seq) of the call in question on each communicator of a finding."""
    d = f.details
    found = {(f.comm_uid_hash or "", d.get("instance") or 0): f.comm_seq}
    if d.get("other_comm_uid_hash"):
        other = (d["other_comm_uid_hash"], d.get("other_instance") or 0)
        found.setdefault(other, d.get("other_comm_seq"))
    for side in d.get("cycle") or ():
        found.setdefault((side["comm_uid_hash"], side.get("instance") or 0), side["comm_seq"])
    return [(*comm, seq) for comm, seq in found.items()]


def explain_several(f: Finding, parts: list[Part], unshown: int, colour: bool) -> str:
    """The finding, the slots of each communicator, and the calls of each process on all of them.

    ``unshown``: communicators of the finding beside ``parts``.
    """
    out = [*single(f, colour).splitlines(), ""]
    for letter, part in zip(_LETTERS, parts, strict=False):
        out += wrap(part.title(letter), "     ", "  ")
    if unshown:
        out.append(f"  and {counted(unshown, 'more communicator')}")
    for letter, part in zip(_LETTERS, parts, strict=False):
        if rows := slot_rows(part.evidence, part.seq):
            out += ["", f"  On {letter}:", *rows]
    found = _members(parts)
    if not found:
        out += ["", "  No calls to show: nothing that was read tells of calls of them."]
        return "\n".join(cut(out)) + "\n"
    times = about(w for part in parts for w in part.evidence.wanted)
    out += ["", *wrap(f"Rank by rank, in the order of the calls. {times}", "  ")]
    for one in found[:RANKS]:
        out += ["", *wrap(f"{one.name()}: {one.who.place}", "    ", "")]
        for _, letter, w, line, mark in sorted(one.rows, key=lambda x: x[0]):
            out += call_line(w, line, mark, letter)
        out += wrap(one.who.state, "    ", "    ") if one.who.state else []
    if len(found) > RANKS:
        out += ["", f"  and {counted(len(found) - RANKS, 'more rank')}"]
    return "\n".join(cut(out)) + "\n"


@dataclass
class _Member:
    """A process: what is known of it, its rank in each communicator, its calls on all of them."""

    who: Who
    ranks: dict[str, int] = field(default_factory=dict)
    #: Time, letter of the communicator, endpoint, the call and its mark.
    rows: list[tuple[int, str, Wanted, dict[str, Any], str]] = field(default_factory=list)

    def order(self) -> tuple[bool, bool, int]:
        """Who made a call in question first, then by the rank in the job."""
        made = any(mark == ">" for *_, mark in self.rows)
        return not made, self.who.job is None, self.who.job or 0

    def name(self) -> str:
        """Its rank in the job, and in the communicators where that is another number."""
        places = ", ".join(f"rank {rank} of {letter}" for letter, rank in self.ranks.items())
        if self.who.job is None:
            return places
        if set(self.ranks.values()) == {self.who.job}:
            return f"rank {self.who.job}"
        return f"rank {self.who.job} of the job ({places})"


def _members(parts: list[Part]) -> list[_Member]:
    """The processes that are members of any of them, by their ranks in the job."""
    of: dict[int, _Member] = {}
    for letter, part in zip(_LETTERS, parts, strict=False):
        for w in part.evidence.wanted:
            who = part.members.get(w.rank) or Who("", "no call of it", "")
            one = of.setdefault(w.source, _Member(who))
            one.ranks[letter] = w.rank
            lines = list(w.around.values()) or list(w.newest)[-_NEWEST:]
            for line in lines:
                mark = ">" if part.seq is not None and w.seq(line) == part.seq else " "
                one.rows.append((int(line.get("t") or 0), letter, w, line, mark))
    return sorted(of.values(), key=_Member.order)
