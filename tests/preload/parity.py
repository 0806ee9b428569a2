"""What of a trace must be the same under both fronts."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from support.e2e import Line, Trace

#: Times, and what only one front has a way to know.
_TIMES = ("t", "dur", "libs", "lib")


def by_thread(trace: Trace) -> dict[str, list[Line]]:
    """Lines without times, pids, thread ids and front; per thread, in order."""
    threads: dict[int, str] = {}
    groups: dict[int, int] = {}
    for line in sorted(trace.of("call"), key=lambda line: line["t"]):
        threads.setdefault(line["thread"], f"thread {len(threads)}")
    found: dict[str, list[Line]] = defaultdict(list)
    for line in trace.lines:
        kind = line["kind"]
        if kind in ("process", "clock", "coverage", "state", "enter"):
            continue
        plain: dict[str, Any] = {k: v for k, v in line.items() if k not in _TIMES}
        where = kind
        if "thread" in plain:
            where = threads[plain.pop("thread")]
        if plain.get("group"):
            plain["group"] = groups.setdefault(plain["group"], len(groups))
        found[where].append(plain)
    for group_lines in found.values():
        # Threads run at once: the number of a group says nothing across them.
        names: dict[int, int] = {}
        for plain in group_lines:
            if plain.get("group") is not None:
                plain["group"] = names.setdefault(plain["group"], len(names))
    return dict(found)


def differences(a: Trace, b: Trace) -> list[str]:
    """Where two traces differ; empty: they are equal."""
    one, two = by_thread(a), by_thread(b)
    found = [f"only one has {k}" for k in one.keys() ^ two.keys()]
    for where in one.keys() & two.keys():
        left, right = one[where], two[where]
        if len(left) != len(right):
            found.append(f"{where}: {len(left)} and {len(right)} lines")
        for i, (x, y) in enumerate(zip(left, right, strict=False)):
            if x != y:
                keys = sorted(k for k in x.keys() | y.keys() if x.get(k) != y.get(k))
                found.append(f"{where} line {i}: {keys}: {x} / {y}")
                break
    return found
