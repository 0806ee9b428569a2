"""Counts verdicts on made-up incidents, for the table in docs/importers.md.

    PYTHONPATH=.:tests python -m importers.fr_table KIND,... FIRST LAST [FORM]

Prints each incident that is not exact, and a line for each kind.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from importers.fr_incidents import FORMS, Incident, make
from importers.reading import Result


def verdict(incident: Incident, blamed: set[int]) -> str:
    """How a verdict compares with the truth."""
    if incident.culprits <= blamed <= incident.culprits | incident.masked:
        return "exact"
    if blamed - incident.culprits - incident.masked:
        return "an innocent named"
    return "a part named" if blamed else "nobody"


def main(kinds: str, first: str, last: str, form: str = "active") -> None:
    """Print the counts."""
    for kind in kinds.split(","):
        count: Counter[str] = Counter()
        for seed in range(int(first), int(last) + 1):
            incident = make(kind, seed)
            if incident is None:
                continue
            with tempfile.TemporaryDirectory() as folder:
                blamed = Result(incident.write(Path(folder), FORMS[form]())).blamed
            found = verdict(incident, blamed)
            count[found] += 1
            if found != "exact":
                print(f"{kind} {seed}: {found}: {sorted(incident.culprits)}, {sorted(blamed)}")
        print(kind, form, count.total(), dict(count), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
