"""Findings for people: the cause first, in one sentence."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from nccluprobe.match.finding import Finding
from nccluprobe.match.idle import NOT_DECIDABLE
from nccluprobe.plural import counted, plural, verb
from nccluprobe.report.grounds import grounds
from nccluprobe.report.next_step import next_step
from nccluprobe.report.ranks import blamed, in_job, is_other, members, short, tense_of
from nccluprobe.report.words import MAYBE_UNTRACED, ago, doubts, escape, why

WIDTH = 80
_FOLD = 6


@dataclass(frozen=True)
class Looked:
    """What was read of NCCL's counters, by ``inspect`` or RAS, which show no call."""

    #: How often, at most, one process was looked at.
    times: int
    #: Of which a pid is known.
    processes: int
    ranks: int
    communicators: int

    def what(self) -> str:
        """Whom was looked at."""
        ranks = (
            f"{counted(self.ranks, 'rank')} of {counted(self.communicators, 'communicator')}"
            if self.ranks
            else ""
        )
        processes = counted(self.processes, "process") if self.processes else ""
        return ", ".join(filter(None, (processes, ranks))) or "no rank"

    def often(self) -> str:
        """How often they were looked at."""
        return "once" if self.times == 1 else f"{self.times} times"


@dataclass
class Summary:
    """What was read, for the coverage part of the report."""

    jobs: int = 0
    processes: int = 0
    calls: int = 0
    communicators: int = 0
    lost: int = 0
    #: Processes of which no trace has a closing line.
    unclosed: int = 0
    #: Communicators are not judged, as processes of several jobs may be in them.
    collided: bool = False
    silent: list[str] = field(default_factory=list)
    looked: Looked | None = None
    notes: list[str] = field(default_factory=list)


class _Paint:
    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def __call__(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text


def sentence(f: Finding) -> str:
    """What happened, in one sentence."""
    d = f.details
    call = f"{d.get('api') or 'call'} #{f.comm_seq} of communicator {f.comm_uid_hash}"
    if d.get("comm_name"):
        call += f" ({escape(d['comm_name'])})"
    statuses = d.get("missing_rank_status") or []
    entered = d.get("entered_comm_ranks") or []
    undecided = f"{NOT_DECIDABLE.capitalize()}: " if d.get("idle") else ""
    by_calls = d.get("evidence") != "inspect"
    if by_calls and f.hang_type in ("collective_missing_enter", "comm_ended_under_waiters"):
        waiting = [s for s in statuses if s["reason"] == "rank_waiting_elsewhere"]
        named = blamed(f, statuses) or [s for s in statuses if s not in waiting] or statuses
        waiting = [s for s in statuses if s not in named]
        absent = members(f, named)
        also = ""
        if len(named) < len(statuses):
            ranks = [s["comm_rank"] for s in waiting]
            elsewhere = all(s["reason"] == "rank_waiting_elsewhere" for s in waiting)
            pronoun = "it" if len(ranks) == 1 else "they"
            where = f" as {pronoun} {tense_of(f, ranks).wait} elsewhere" if elsewhere else ""
            also = f"; {in_job(f, ranks)} did not come{where}"
        # Of the communicator, where the sentence has begun with a rank of the job.
        its = "its " if any(map(is_other, statuses)) and not f.job_ranks else ""
        absent = absent if undecided else f"{absent[:1].upper()}{absent[1:]}"
        return undecided + (f"{absent} did not enter {call}: {its}{_waiting(f, entered)}{also}.")
    text = d.get("summary")
    if text:
        return escape(str(text))
    return f"{f.hang_type.replace('_', ' ')}: {call}."


def _waiting(f: Finding, entered: list[int]) -> str:
    """Who waits in the call, or did so until it ended, and for how long."""
    now = [r for r in entered if r not in f.past]
    they = tense_of(f, now or entered)
    wait = "waited" if _over(f) else they.wait
    text = f"{in_job(f, now or entered)} {wait} in it{_lasted(f)}"
    left = [r for r in entered if now and r in f.past]
    if left:
        has = verb(len(left), "has")
        text += f", and {in_job(f, left)} waited there and {has} {tense_of(f, left).gone}"
    return text + they.until


def _lasted(f: Finding) -> str:
    """For how long they have waited, where that is in what was read."""
    by_timeout = f.details.get("assumed_by") is not None
    if "waited_s" in (f.details.get("assumed") or ()) and not by_timeout:
        return ""
    return f" for {ago(f.details['waited_s'])}{' (PyTorch timeout)' * by_timeout}"


def _details(f: Finding) -> Iterable[str]:
    d = f.details
    if f.role == "root_cause":
        shown = ", ".join(_named(who) for who in f.named[:_FOLD]) or "no single rank"
        more = "" if len(f.named) <= _FOLD else f" and {len(f.named) - _FOLD} more"
        yield f"to blame: {shown}{more}"
    if where := _where(f):
        yield where
    for status in _told_of(f)[:_FOLD]:
        text = why(status)
        if d.get("candidates"):  # who is traced and not in it is named, and may be that rank
            text = text.removesuffix(MAYBE_UNTRACED)
        yield f"{short(status)}: {text}"
    if d.get("signature"):
        yield f"call: {d['signature']}"
    yield from _sites(f)
    if d.get("queued_behind"):
        n = d["queued_behind"]
        yield f"{counted(n, 'later call', 'is')} queued behind it"
    for key in ("note", "explanation"):
        if d.get(key):
            text = str(d[key]).removeprefix(f"{NOT_DECIDABLE}: ")  # the sentence has said it
            yield _with_limit(text, f)
    for text in d.get("hypotheses") or ():
        yield f"perhaps: {text}"
    if d.get("several_shifts_fit"):
        yield "the calls repeat, so other shifts fit as well"
    if d.get("repeated"):
        yield f"the same again in {counted(d['repeated'], 'later call')}"
    yield from _alignment(f)
    sure = {
        "observed": "seen directly",
        "inferred": "inferred",
        "reduced": "with reduced confidence",
        "none": "not known",
    }.get(d.get("confidence", ""), "")
    reasons = "; ".join(doubts(f))
    if because := grounds(f):
        sure = f"{sure}: {because}"
    # Of an open cause or consequence the heading says which it is.
    role = "" if f.role != "unknown" else "; cause or consequence: not known"
    yield f"how sure: {sure}{f' ({reasons})' if reasons else ''}{role}; severity {f.severity}"


def _with_limit(text: str, f: Finding) -> str:
    """With how long "a while" was, where a text names the limit alone."""
    limit = f.limits.get("missing_after_s")
    if limit is None:
        return text
    return text.replace("(--missing-after)", f"({limit:g} s: --missing-after)")


def _told_of(f: Finding) -> list[dict[str, Any]]:
    """The ranks that did not come.

    Of those that have no other half for a send or receive none where the one that made it is to
    blame, or nobody is: their reason is that of the finding, and not what they did.
    """
    statuses: list[dict[str, Any]] = f.details.get("missing_rank_status") or []
    to_blame = blamed(f, statuses)
    waits = f.hang_type != "p2p_unmatched" or "inside" in f.details
    of_both = ("call_extra",) if waits else ("call_extra", "call_skipped")
    return [s for s in statuses if s["reason"] not in of_both or s in to_blame]


def _named(who: dict[str, Any]) -> str:
    rank = "a process" if who["rank"] is None else f"rank {who['rank']} of the job"
    return rank + (f" (pid {who['pid']} on {escape(who['host'])})" if who["pid"] else "")


def _where(f: Finding) -> str | None:
    """Since when, and how many of the communicator's ranks are seen."""
    parts = []
    since = f.details.get("first_entered_unix_ns") or f.since
    assumed = f.details.get("assumed") or ()
    if "first_entered_unix_ns" in assumed:
        parts.append("since when is not in the log")
    elif since:
        text = time.strftime("since %Y-%m-%d %H:%M:%S UTC", time.gmtime(since // 10**9))
        no_end = assumed and f.details.get("assumed_by") is None
        parts.append(f"{text}, until when is not in the log" if no_end else text)
    size, seen = f.coverage.get("expected_nranks"), f.coverage.get("observed_ranks")
    if size:
        all_of_them = "all observed" if seen == size else f"{seen} observed"
        parts.append(f"the communicator has {counted(size, 'rank')}, {all_of_them}")
    return "; ".join(parts) or None


def _sites(f: Finding) -> Iterable[str]:
    """Where the calls of the slot came from, a line for each side."""
    d = f.details
    groups = [(c["comm_ranks"], c.get("sites") or []) for c in d.get("calls") or ()]
    for g in d.get("sites") or ():
        groups.append((g["comm_ranks"], [g["site"]] if g["site"] else []))
    if not any(sites for _, sites in groups):
        return
    groups.sort(key=lambda g: len(g[0]))
    for ranks, sites in groups[:_FOLD]:
        known = " or ".join(sites[:_FOLD]) or "one that is not known"
        yield f"call site: {in_job(f, ranks)} from {known}"


def _alignment(f: Finding) -> Iterable[str]:
    """How ranks that were attached late were placed, when that is not certain."""
    placed = [a for a in f.coverage.get("alignment", ()) if a["base"] != "exact"]
    for a in placed[:_FOLD]:
        who = in_job(f, [a["comm_rank"]])
        yield f"{who} was attached late, its place is {a['base']}: {a['why']}"
    if len(placed) > _FOLD:
        n = len(placed) - _FOLD
        yield f"and {counted(n, 'more rank')} that {verb(n, 'was')} attached late"


def wrap(text: str, indent: str = "", first: str | None = None) -> list[str]:
    """A paragraph as lines of at most WIDTH characters; ``first``: indent of the first.

    Much of what is said comes from traces: nothing in it gets at the terminal.
    """
    return textwrap.wrap(
        escape(text),
        WIDTH,
        initial_indent=indent if first is None else escape(first),
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def _wrap(text: str, indent: str = "", first: str | None = None) -> str:
    return "\n".join(wrap(text, indent, first))


def _order(f: Finding) -> tuple[object, ...]:
    return (
        f.state != "open",
        ("root_cause", "unknown", "downstream").index(f.role),
        f.severity != "error",
        f.since,
        f.id,
    )


def report(findings: list[Finding], summary: Summary, colour: bool = False) -> str:
    """The whole report: each job apart, causes first, then what was seen."""
    paint = _Paint(colour)
    out: list[str] = []
    if not findings:
        some = ", but not all could be judged: see below" if summary.collided else ""
        out.append(paint("33" if some else "32", f"No finding{some}."))
    ranked = sorted(findings, key=_order)
    jobs = list(dict.fromkeys(f.job for f in ranked))
    for job in jobs:
        mine = [f for f in ranked if f.job == job]
        if len(jobs) > 1:
            runs = ", ".join(sorted({escape(f.run_id) for f in mine if f.run_id}))
            which = (
                "whose communicators are not known" if job is None else f"first communicator {job}"
            )
            out += [_wrap(f"Job{f' of run {runs}' if runs else ''} ({which}):"), ""]
        out += _job(mine, paint)
    if out and out[-1] == "":
        out.pop()
    out += ["", *_coverage(summary)]
    return "\n".join(out) + "\n"


def _job(ranked: list[Finding], paint: _Paint) -> list[str]:
    """Findings of one job, consequences folded under their cause."""
    out: list[str] = []
    folded = [f for f in ranked if f.role == "downstream" and f.state == "open"]
    # Of these it is not known; they are shown under the cause that is.
    causes = {f.id for f in ranked if f.role == "root_cause" and f.state == "open"}
    perhaps = [
        f
        for f in ranked
        if f.role == "unknown" and f.state == "open" and f.details.get("perhaps_of") in causes
    ]
    shown = [f for f in ranked if f not in folded and f not in perhaps]
    for f in shown:
        out += _one(f, paint)
        mine = [c for c in folded if _cause_of(c, folded) == f.id]
        out += _folded(mine, plural(len(mine), "consequence"))
        may_be = [c for c in perhaps if c.details["perhaps_of"] == f.id]
        out += _folded(
            may_be, f"that may be {'consequences' if len(may_be) > 1 else 'a consequence'}"
        )
        out.append("")
    ids = {f.id for f in shown}
    others = [c for c in folded if _cause_of(c, folded) not in ids]
    return out + [_wrap(sentence(c), "    ", "  . ") for c in others]


def _folded(some: list[Finding], what: str) -> list[str]:
    """Findings of which the cause above is the reason, or may be."""
    if not some:
        return []
    out = [f"  {len(some)} {what}:"]
    out += [_wrap(sentence(c), "      ", "    . ") for c in some[:_FOLD]]
    if len(some) > _FOLD:
        out.append(f"    . and {len(some) - _FOLD} more (see findings.jsonl)")
    return out


def _cause_of(f: Finding, folded: list[Finding]) -> str | None:
    """The finding at the end of the chain."""
    by_id = {c.id: c for c in folded}
    cause = f.downstream_of
    for _ in folded:
        if cause not in by_id:
            break
        cause = by_id[cause].downstream_of
    return cause


def single(f: Finding, colour: bool = False) -> str:
    """One finding by itself, as it comes."""
    return "\n".join(_one(f, _Paint(colour))) + "\n"


def _over(f: Finding) -> int | None:
    """When it was seen that a finding does not hold any more, unix ns; None: it tells of the past,
    or holds."""
    return f.details.get("resolved_at_unix_ns") if f.state == "resolved" else None


def _one(f: Finding, paint: _Paint) -> list[str]:
    """One finding: the sentence, what is known, what to look at next."""
    head = {"root_cause": "CAUSE", "downstream": "CONSEQUENCE"}.get(f.role, "FINDING")
    if f.state == "resolved":
        head = "RESOLVED"
    code = "31;1" if f.severity == "error" and f.state == "open" else "33"
    out = [paint(code, f"{head}  {f.hang_type}  [{f.id}]")]
    if over := _over(f):
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(over // 10**9))
        out.append(_wrap(f"It is over, by {at}. What was found before that:", "  "))
    out.append(_wrap(sentence(f), "  "))
    out += [_wrap(line, "    ", "  - ") for line in _details(f)]
    if f.state == "open" and (step := next_step(f)):
        out.append(_wrap(f"next: {step}", "    ", "  - "))
    return out


def _seen(s: Summary) -> str:
    """How much was read: of counters alone no count of calls is known."""
    if not s.processes and s.looked is not None:
        jobs = f"{counted(s.jobs, 'job')}, " if s.jobs else ""
        return f"{jobs}{s.looked.what()}, looked at {s.looked.often()}: NCCL's counters, no calls"
    if not s.processes and s.notes:
        return "no rank is named in what was read"
    counts = {"job": s.jobs, "process": s.processes, "communicator": s.communicators}
    counts["call"] = s.calls
    text = ", ".join(counted(n, what) for what, n in counts.items())
    if not s.unclosed:
        return f"{text}; {counted(s.lost, 'event')} lost"
    n = s.unclosed
    return (
        f"{text}; {counted(s.lost, 'event')} lost as far as was written, and what was lost after "
        f"that is not known: the {plural(n, 'trace')} of {counted(n, 'process')} "
        f"{verb(n, 'has')} no closing line"
    )


def _coverage(s: Summary) -> list[str]:
    out = [_wrap(f"Coverage: {_seen(s)}.")]
    for text in s.silent[:_FOLD]:
        out.append(_wrap(f"not observed, collector silent: {escape(text)}", "    ", "  - "))
    if len(s.silent) > _FOLD:
        more = counted(len(s.silent) - _FOLD, "more collector", "is")
        out.append(f"  - and {more} silent")
    out += [_wrap(escape(note), "    ", "  - ") for note in s.notes]
    return out
