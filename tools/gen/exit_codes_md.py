"""docs/exit-codes.md."""

from __future__ import annotations

from gen.text import md_page, md_table
from nccluprobe.errors import EXIT_CODES


def render() -> str:
    """One row per exit code."""
    table = md_table(
        ("code", "name", "meaning"),
        [(int(code), code.name, doc) for code, doc in EXIT_CODES.items()],
    )
    return md_page(
        "Exit codes",
        "The same numbers hold for every command; a number never changes its meaning.\n"
        "`preload` ends as its command does: with that one's code, or 127 when it was not\n"
        "found, or by the signal that ended it. `canary` ends with 128 + N when signal N ended a\n"
        "rank, as shells do ([canary.md](canary.md)).\n"
        "On an error the command prints one line to standard error: what, why, what to do.\n\n"
        + table,
    )
