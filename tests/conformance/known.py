"""Cases that fail today: patterns of ids, by the rule that is missing.

Strict: a case that is here and passes fails the suite, so that the mark goes.
"""

from __future__ import annotations

import fnmatch

KNOWN: dict[str, tuple[str, ...]] = {
    "the same two ranks wait for each other on two communicators": (
        "ncclRecv-wrong_communicator-ahead-*",
        "ncclRecv-wrong_communicator-sync-*",
        "ncclSend-wrong_communicator-ahead-*",
        "ncclSend-wrong_communicator-sync-*",
    ),
    "a pair that never was before: the caller broke its habit": (
        "ncclRecv-asymmetric_pair-wrong_peer_ahead-*",
        "ncclRecv-asymmetric_pair-wrong_peer_sync-*",
        "ncclSend-asymmetric_pair-wrong_peer_ahead-*",
        "ncclSend-asymmetric_pair-wrong_peer_sync-*",
    ),
    "only ranks that are in both may be a minority; device edge behind an open send": (
        "ncclRecv-deadlock_across_communicators-one_ahead-*",
        "ncclRecv-deadlock_across_communicators-sync-n4",
        "ncclRecv-deadlock_across_communicators-sync-n8",
        "ncclSend-deadlock_across_communicators-one_ahead-*",
        "ncclSend-deadlock_across_communicators-sync-n4",
        "ncclSend-deadlock_across_communicators-sync-n8",
    ),
    "two ranks: the round that breaks the habit": (
        "ncclRecv-extra_call-ahead-n2",
        "ncclSend-extra_call-ahead-n2",
        "ncclSend-extra_call-small,_left_over_at_the_end-n2",
    ),
    "as many calls on both sides: no shift": (
        "ncclRecv-swapped_order-ahead-*",
        "ncclSend-swapped_order-ahead-*",
    ),
}


def reason(case_id: str) -> str | None:
    """Why this case fails today; None: it must pass."""
    for why, patterns in KNOWN.items():
        if any(fnmatch.fnmatchcase(case_id, p) for p in patterns):
            return why
    return None
