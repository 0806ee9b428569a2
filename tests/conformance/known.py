"""Cases that fail today: patterns of ids, by the rule that is missing.

Strict: a case that is here and passes fails the suite, so that the mark goes.
"""

from __future__ import annotations

import fnmatch

KNOWN: dict[str, tuple[str, ...]] = {}


def reason(case_id: str) -> str | None:
    """Why this case fails today; None: it must pass."""
    for why, patterns in KNOWN.items():
        if any(fnmatch.fnmatchcase(case_id, p) for p in patterns):
            return why
    return None
