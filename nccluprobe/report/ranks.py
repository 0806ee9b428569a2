"""Ranks in the report: by their number in the job, where it is known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nccluprobe.match.finding import Finding
from nccluprobe.match.names import numbers
from nccluprobe.match.tense import Tense, of_fates
from nccluprobe.report.words import escape

_FOLD = 6


def is_other(status: dict[str, Any]) -> bool:
    """Whether its rank in the job is another number than that in the communicator."""
    return status.get("global_rank") not in (None, status["comm_rank"])


def who(status: dict[str, Any]) -> str:
    """One rank: its names and where it runs."""
    more = []
    text = f"rank {status['comm_rank']}"
    if is_other(status):
        text = f"rank {status['global_rank']} of the job"
        more.append(f"rank {status['comm_rank']} of the communicator")
    if status.get("pid") is not None:
        more.append(f"pid {status['pid']} on {escape(status.get('host'))}")
    return text + (f" ({', '.join(more)})" if more else "")


def short(status: dict[str, Any]) -> str:
    """One rank, and which numbering it is."""
    if is_other(status):
        return f"rank {status['global_rank']} of the job"
    known = status.get("global_rank") is not None
    return f"rank {status['comm_rank']}" + ("" if known else " of the communicator")


def members(f: Finding, statuses: list[dict[str, Any]]) -> str:
    """Some ranks of the communicator, with where they run."""
    anonymous = all(s.get("pid") is None for s in statuses)
    if len(statuses) > 1 and anonymous and all(map(is_other, statuses)):
        job = numbers(s["global_rank"] for s in statuses)
        return f"{job} of the job ({numbers(s['comm_rank'] for s in statuses)} of the communicator)"
    text = ", ".join(map(who, statuses[:_FOLD]))
    return text + (f" and {len(statuses) - _FOLD} more" if len(statuses) > _FOLD else "")


def in_job(f: Finding, ranks: Iterable[int]) -> str:
    """Ranks of the communicator by their numbers in the job."""
    some = list(ranks)
    if not some or any(r not in f.job_ranks for r in some):
        return numbers(some)
    if all(f.job_ranks[r] == r for r in some):
        return numbers(some)
    return f"{numbers(f.job_ranks[r] for r in some)} of the job"


def tense_of(f: Finding, ranks: Iterable[int]) -> Tense:
    """The tense of what ranks of the communicator do, all of them."""
    return of_fates([f.past.get(r) for r in ranks])


def blamed(f: Finding, statuses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the ranks that did not come, those that a root cause names."""
    if f.role != "root_cause":
        return []
    named = {(x["host"], x["pid"], x["rank"]) for x in f.named}
    places = {(host, pid) for host, pid, _ in named if pid}
    return [
        s
        for s in statuses
        if (s.get("host"), s.get("pid")) in places
        # Of dumps only ranks are known.
        or (s.get("pid") is None and ("", 0, s.get("global_rank")) in named)
    ]
