"""Findings for people: the cause first, in one sentence."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from nccluprobe.match.finding import Finding
from nccluprobe.match.idle import NOT_DECIDABLE
from nccluprobe.match.names import numbers
from nccluprobe.report.words import ago, doubts, escape, why

WIDTH = 80
_FOLD = 6


@dataclass
class Summary:
    """What was read, for the coverage part of the report."""

    jobs: int = 0
    processes: int = 0
    calls: int = 0
    communicators: int = 0
    lost: int = 0
    silent: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _Paint:
    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def __call__(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text


def _who(status: dict[str, Any]) -> str:
    """One rank: its names and where it runs."""
    more = []
    text = f"rank {status['comm_rank']}"
    if _is_other(status):
        text = f"rank {status['global_rank']} of the job"
        more.append(f"rank {status['comm_rank']} of the communicator")
    if status.get("pid") is not None:
        more.append(f"pid {status['pid']} on {escape(status.get('host'))}")
    return text + (f" ({', '.join(more)})" if more else "")


def _is_other(status: dict[str, Any]) -> bool:
    """Whether its rank in the job is another number than that in the communicator."""
    return status.get("global_rank") not in (None, status["comm_rank"])


def _blamed(f: Finding, statuses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the ranks that did not come, those that a root cause names."""
    if f.role != "root_cause":
        return []
    named = {(who["host"], who["pid"]) for who in f.named}
    return [s for s in statuses if (s.get("host"), s.get("pid")) in named]


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
        named = _blamed(f, statuses) or [s for s in statuses if s not in waiting] or statuses
        waiting = [s for s in statuses if s not in named]
        who = ", ".join(_who(s) for s in named[:_FOLD])
        if len(named) > _FOLD:
            who += f" and {len(named) - _FOLD} more"
        also = ""
        if len(named) < len(statuses):
            ranks = [s["comm_rank"] for s in waiting]
            elsewhere = all(s["reason"] == "rank_waiting_elsewhere" for s in waiting)
            they = "it waits" if len(ranks) == 1 else "they wait"
            also = f"; {numbers(ranks)} did not come" + (f" as {they} elsewhere" * elsewhere)
        verb = "waits" if len(entered) == 1 else "wait"
        # Of the communicator, where the sentence has begun with a rank of the job.
        its = "its " if any(map(_is_other, statuses)) else ""
        who = who if undecided else f"{who[:1].upper()}{who[1:]}"
        return undecided + (
            f"{who} did not enter {call}: {its}{numbers(entered)} {verb} in it "
            f"for {ago(d['waited_s'])}{also}."
        )
    text = d.get("summary")
    if text:
        return escape(str(text))
    return f"{f.hang_type.replace('_', ' ')}: {call}."


def _details(f: Finding) -> Iterable[str]:
    d = f.details
    if f.role == "root_cause":
        shown = ", ".join(_named(who) for who in f.named[:_FOLD]) or "no single rank"
        more = "" if len(f.named) <= _FOLD else f" and {len(f.named) - _FOLD} more"
        yield f"to blame: {shown}{more}"
    if where := _where(f):
        yield where
    for status in (d.get("missing_rank_status") or [])[:_FOLD]:
        yield f"rank {status['comm_rank']}: {why(status)}"
    if d.get("signature"):
        yield f"call: {d['signature']}"
    if d.get("queued_behind"):
        n = d["queued_behind"]
        yield f"{n} later call{' is' if n == 1 else 's are'} queued behind it"
    for key in ("note", "explanation"):
        if d.get(key):
            yield str(d[key]).removeprefix(f"{NOT_DECIDABLE}: ")  # the sentence has said it
    for text in d.get("hypotheses") or ():
        yield f"perhaps: {text}"
    if d.get("several_shifts_fit"):
        yield "the calls repeat, so other shifts fit as well"
    if d.get("repeated"):
        yield f"the same again in {d['repeated']} later call{'s' * (d['repeated'] != 1)}"
    yield from _alignment(f)
    sure = {
        "observed": "seen directly",
        "inferred": "inferred",
        "reduced": "with reduced confidence",
        "none": "not known",
    }.get(d.get("confidence", ""), "")
    reasons = "; ".join(doubts(f))
    # Of an open cause or consequence the heading says which it is.
    role = "" if f.role != "unknown" else "; cause or consequence: not known"
    yield f"how sure: {sure}{f' ({reasons})' if reasons else ''}{role}; severity {f.severity}"


def _named(who: dict[str, Any]) -> str:
    rank = "a process" if who["rank"] is None else f"rank {who['rank']} of the job"
    return rank + (f" (pid {who['pid']} on {escape(who['host'])})" if who["pid"] else "")


def _where(f: Finding) -> str | None:
    """Since when, and how many of the communicator's ranks are seen."""
    parts = []
    since = f.details.get("first_entered_unix_ns") or f.since
    if since:
        parts.append(time.strftime("since %Y-%m-%d %H:%M:%S UTC", time.gmtime(since // 10**9)))
    size, seen = f.coverage.get("expected_nranks"), f.coverage.get("observed_ranks")
    if size:
        all_of_them = "all observed" if seen == size else f"{seen} observed"
        parts.append(f"the communicator has {size} ranks, {all_of_them}")
    return "; ".join(parts) or None


def _alignment(f: Finding) -> Iterable[str]:
    """How ranks that were attached late were placed, when that is not certain."""
    placed = [a for a in f.coverage.get("alignment", ()) if a["base"] != "exact"]
    for a in placed[:_FOLD]:
        yield f"rank {a['comm_rank']} was attached late, its place is {a['base']}: {a['why']}"
    if len(placed) > _FOLD:
        yield f"and {len(placed) - _FOLD} more ranks that were attached late"


#: What a process that was there is blamed for: whoever killed it, it did not come before.
_OF_THE_LIVING = ("rank_alive_but_not_entered", "rank_inside_other_call")


def _next_step(f: Finding) -> str | None:
    reason = f.details.get("reason")
    statuses: list[dict[str, Any]] = []
    for key in ("missing_rank_status", "minority_rank_status", "late_rank_status"):
        statuses += f.details.get(key) or []
    known = _blamed(f, statuses) or [s for s in statuses if s.get("pid") is not None]
    # Of several ranks the one that the finding is about, not one that waits itself.
    where = next((s for s in known if s.get("reason") == reason), None) or next(iter(known), None)
    if f.named and f.role == "root_cause" and not _blamed(f, statuses):
        where = f.named[0]  # the statuses are those of others
    if where is None or not where.get("pid"):  # 0: a source that does not tell
        return _step_of_ranks(f) or _general_step(f)
    pid, host = where["pid"], escape(where.get("host"))
    if where.get("heartbeat") == "absent" and reason in _OF_THE_LIVING:
        return (
            f"pid {pid} on {host} has ended since: look at the end of its log, and next time at "
            "its stack (py-spy dump) before it is killed"
        )
    if reason in _OF_THE_LIVING:
        return f"look at the stack of pid {pid} on {host} (py-spy dump --pid {pid})"
    if reason in ("rank_exit_or_crash_suspected", "rank_exited"):
        text = f"look at the end of the log of pid {pid} on {host}"
        return text + (", and at dmesg for an OOM kill" if where.get("exit_code") is None else "")
    if reason == "rank_not_observed":
        return f"see whether the collector on {host} runs"
    if reason == "probe_event_loss_possible":
        return f"look at the stack of pid {pid}; enlarge the ring buffer"
    if reason in ("arguments_differ", "call_skipped", "call_extra"):
        return f"compare the code path of pid {pid} on {host} with that of another rank"
    if f.hang_type == "nccl_error_exit":
        return f"look at NCCL's warnings of pid {pid} on {host} (NCCL_DEBUG=WARN)"
    if f.hang_type == "collective_missing_exit":
        return f"look at the GPU of pid {pid} on {host} (dmesg for Xid, nvidia-smi)"
    return f"look at pid {pid} on {host} (py-spy dump --pid {pid})"


def _step_of_ranks(f: Finding) -> str | None:
    """What to look at of ranks whose processes are not told, as in dumps."""
    ranks = sorted(n["rank"] for n in f.named if n["rank"] is not None and not n["pid"])
    if f.role != "root_cause" or not ranks:
        return None
    who = f"{numbers(ranks)} of the job"
    if f.hang_type in ("collective_mismatch", "skipped_or_extra_call", "p2p_mismatch"):
        return f"compare the code path of {who} with that of another rank"
    if f.hang_type == "collective_missing_exit":
        return f"look at the GPU of {who} (dmesg for Xid, nvidia-smi)"
    return f"look at {who}: the stack of its process (py-spy dump), or else the end of its log"


def _general_step(f: Finding) -> str | None:
    """What to do next where no process stands out."""
    if f.hang_type in ("collective_mismatch", "skipped_or_extra_call", "p2p_mismatch"):
        return f"nccluprobe explain RUN {f.id} shows the calls rank by rank"
    if f.hang_type in ("collective_all_ranks_stuck", "comm_init_stuck"):
        return "look at the GPUs and the network of these ranks (dmesg for Xid, NIC counters)"
    if f.hang_type in ("cross_comm_order_inversion", "p2p_order_inversion"):
        return (
            f"make these calls in one order on all ranks; nccluprobe explain RUN {f.id} shows them"
        )
    if f.hang_type == "comm_init_missing_enter":
        return "see that a process with each missing rank runs, and which unique id it got"
    if f.hang_type == "waiting_for_unobserved":
        return "trace the nodes of the other ranks too"
    if f.role == "root_cause":
        return f"nccluprobe explain RUN {f.id} shows the calls rank by rank"
    return None


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
        out.append(paint("32", "No finding."))
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
    shown = [f for f in ranked if f not in folded]
    for f in shown:
        out += _one(f, paint)
        mine = [c for c in folded if _cause_of(c, folded) == f.id]
        if mine:
            out.append(f"  {len(mine)} consequence{'s' if len(mine) > 1 else ''}:")
            out += [_wrap(sentence(c), "      ", "    . ") for c in mine[:_FOLD]]
            if len(mine) > _FOLD:
                out.append(f"    . and {len(mine) - _FOLD} more (see findings.jsonl)")
        out.append("")
    ids = {f.id for f in shown}
    others = [c for c in folded if _cause_of(c, folded) not in ids]
    return out + [_wrap(sentence(c), "    ", "  . ") for c in others]


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


def _one(f: Finding, paint: _Paint) -> list[str]:
    """One finding: the sentence, what is known, what to look at next."""
    head = {"root_cause": "CAUSE", "downstream": "CONSEQUENCE"}.get(f.role, "FINDING")
    if f.state == "resolved":
        head = "RESOLVED"
    code = "31;1" if f.severity == "error" and f.state == "open" else "33"
    out = [paint(code, f"{head}  {f.hang_type}  [{f.id}]"), _wrap(sentence(f), "  ")]
    out += [_wrap(line, "    ", "  - ") for line in _details(f)]
    if f.state == "open" and (step := _next_step(f)):
        out.append(_wrap(f"next: {step}", "    ", "  - "))
    return out


def _coverage(s: Summary) -> list[str]:
    def count(n: int, what: str) -> str:
        return f"{n:,} {what}{'' if n == 1 else 's'}"

    out = [
        _wrap(
            "Coverage: "
            + ", ".join(
                (
                    count(s.jobs, "job"),
                    count(s.processes, "process"),
                    count(s.communicators, "communicator"),
                    count(s.calls, "call"),
                )
            )
            + f"; {s.lost:,} events lost."
        ).replace("processs", "processes")
    ]
    for text in s.silent[:_FOLD]:
        out.append(_wrap(f"not observed, collector silent: {escape(text)}", "    ", "  - "))
    if len(s.silent) > _FOLD:
        out.append(f"  - and {len(s.silent) - _FOLD} more collectors are silent")
    out += [_wrap(escape(note), "    ", "  - ") for note in s.notes]
    return out
