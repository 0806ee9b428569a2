"""docs/conformance.md, from the conformance suite in tests/conformance."""

from __future__ import annotations

import sys
from pathlib import Path

from gen.text import md_page, md_table

TESTS = Path(__file__).resolve().parents[2] / "tests"


def render() -> str:
    """What is tried, on which operation, and what has to be said of it."""
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    from conformance import faults, page, pairs  # they are found only now

    legend = ", ".join(f"{letter} `{kind}`" for kind, letter in page.LETTERS.items())
    two_sided = [api.name for api in pairs.P2P]
    collectives = [api.name for api in faults.COLLECTIVES]
    parts = [
        page.INTRO,
        "## Operation and kind of fault\n",
        f"Findings that are right, and how many programs. {legend}.\n",
        md_table(*page.matrix()),
        "\n## Verdicts: collectives\n",
        page.BLAMED,
        md_table(*page.verdicts(collectives)),
        "\n## Verdicts: sends and receives\n",
        md_table(*page.verdicts(two_sided)),
        "\n## Correct twins\n",
        "Nothing is said of them at all: no finding, not even a notice.\n",
        md_table(*page.twins()),
    ]
    return md_page(page.TITLE, "\n".join(parts))
