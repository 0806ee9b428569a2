"""Guesses are not blamed beside a cause that is known.

Some rules of sends and receives reason from habits and order: who seems to have
used the wrong peer, or to have left a call out.  Behind a rank that is really
missing, calls stand half made and look the same.  One fault is far more likely
than two: where a cause of another kind names somebody in the same job, such a
guess stays as what was seen, and names nobody as the cause.
"""

from __future__ import annotations

from collections.abc import Iterable

from nccluprobe.match.finding import Finding

#: Reasons of sends and receives that are worked out, not seen.
_GUESSES = frozenset(
    {"wrong_peer", "wrong_communicator", "partner_gone_past", "call_skipped", "call_extra"}
)


def _is_guess(f: Finding) -> bool:
    return (
        f.hang_type in ("p2p_unmatched", "p2p_mismatch")
        and f.details.get("reason") in _GUESSES
        and f.details.get("confidence") != "observed"
    )


def temper(findings: Iterable[Finding]) -> None:
    """Take the blame out of guesses in jobs that have a cause which is none."""
    causes = [f for f in findings if f.role == "root_cause" and f.state == "open"]
    known: dict[str | None, Finding] = {}
    for f in sorted(causes, key=lambda f: (f.since, f.id)):
        if f.culprits and not _is_guess(f):
            known.setdefault(f.job, f)
    for f in causes:
        cause = known.get(f.job)
        if cause is None or not _is_guess(f) or set(f.culprits) <= set(cause.culprits):
            continue
        f.role, f.culprits = "unknown", ()
        f.details["note"] = f"perhaps a consequence of {cause.id}, which is known for a cause"
