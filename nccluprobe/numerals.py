"""Numbers as people type them, in options and settings.

Python's own ``int`` and ``float`` also read digits of other scripts, underscores, "nan" and
"inf": none of these is meant, and a mistyped limit must not become another one in silence.
"""

from __future__ import annotations

import re

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_DECIMAL = re.compile(
    r"[+-]?(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(?:[eE][+-]?[0-9]{1,2})?"
)


def whole(text: str) -> int | None:
    """A whole number in ASCII digits, of at most 18; None for anything else."""
    return int(text) if _WHOLE.fullmatch(text) else None


def decimal(text: str) -> float | None:
    """A finite number in ASCII digits, such as 2, 0.5 or 1e3; None for anything else."""
    return float(text) if _DECIMAL.fullmatch(text) else None
