"""Counts with their nouns and verbs: "1 process was", "2,000 processes were"."""

from __future__ import annotations

_VERBS = {"is": "are", "was": "were", "has": "have", "does": "do"}
_ES = ("s", "x", "z", "ch", "sh")


def plural(n: int, noun: str) -> str:
    """The noun as it stands after ``n``; of several words the last one changes."""
    if n == 1:
        return noun
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(_ES) else "s")


def verb(n: int, singular: str) -> str:
    """The verb, given as for one, as it stands with ``n``: is or are, waits or wait.

    A verb of several words changes in its first one.
    """
    first, _, rest = singular.partition(" ")
    if n != 1:
        first = _VERBS.get(first, first.removesuffix("s"))
    return f"{first} {rest}" if rest else first


def counted(n: int, noun: str, does: str = "") -> str:
    """``1 file``, ``2 files``; with a verb ``1 file was``, ``2 files were``."""
    text = f"{n:,} {plural(n, noun)}"
    return f"{text} {verb(n, does)}" if does else text
