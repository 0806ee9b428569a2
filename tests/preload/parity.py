"""What of a trace must be the same under both fronts."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from support.traces import Line, Trace

#: Times, and what names the front's own numbering.
_DROPPED = ("t", "dur", "libs", "lib")
_NOT_COMPARED = ("process", "clock", "coverage", "state", "enter")


def _names(trace: Trace) -> dict[int, str]:
    """Communicators by what they are: ids go by who was first, also among threads."""
    found = {}
    for comm in trace.of("comm"):
        known = comm["hash"] is not None and not comm["instance"]
        found[comm["id"]] = f"{comm['hash']} {comm['comm_rank']}" if known else str(comm["id"])
    return found


def by_thread(trace: Trace) -> dict[str, list[Line]]:
    """Lines without times, pids, thread ids and front; per thread, in order."""
    comms = _names(trace)
    found: dict[int | str, list[Line]] = defaultdict(list)
    for line in trace.lines:
        if line["kind"] in _NOT_COMPARED:
            continue
        plain: dict[str, Any] = {k: v for k, v in line.items() if k not in _DROPPED}
        for key in ("comm", "new_comm", "parent", "id"):
            if plain.get(key) is not None and (key != "id" or line["kind"] != "call"):
                plain[key] = comms.get(plain[key], plain[key])
        found[plain.pop("thread", line["kind"])].append(plain)
    threads = []
    for where, plains in found.items():
        # Threads run at once: the number of a group says nothing across them.
        groups: dict[int, int] = {}
        for plain in plains:
            if plain.get("group") is not None:
                plain["group"] = groups.setdefault(plain["group"], len(groups))
        if isinstance(where, int):
            threads.append(plains)
    threads.sort(key=lambda plains: (-len(plains), json.dumps(plains, sort_keys=True)))
    kinds = {where: plains for where, plains in found.items() if isinstance(where, str)}
    for plains in kinds.values():
        plains.sort(key=lambda plain: json.dumps(plain, sort_keys=True))
    return {**kinds, **{f"thread {i}": plains for i, plains in enumerate(threads)}}


def differences(ebpf: Trace, preload: Trace) -> list[str]:
    """Where two traces differ; empty: they are equal."""
    one, two = by_thread(ebpf), by_thread(preload)
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
