"""Hosts whose clocks differ by minutes, in traces that are read afterwards.

Nothing tells how late it is but the clocks of the hosts themselves.  Where the traces
of a whole host end long before those of others, its collector was ended, or its clock
is behind.  The members of a communicator begin to make it at about the same time: when
these times, too, differ by just as much, it is the clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import median

from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.options import SECOND
from nccluprobe.match.process import Process

#: A smaller difference is left alone, ns.
LEAST = 60 * SECOND
#: Ends and beginnings differ by the same, within this, ns.
_ALIKE = 3 * SECOND


def skews(processes: Iterable[Process], endpoints: Iterable[Endpoint]) -> dict[str, int]:
    """Boot id -> how far its clock is ahead of that of most processes, ns, where it is."""
    newest: dict[str, int] = {}
    size: Counter[str] = Counter()
    for p in processes:
        if p.boot_id and p.newest and not p.snapshot:
            newest[p.boot_id] = max(newest.get(p.boot_id, 0), p.newest)
            size[p.boot_id] += 1
    if not newest or max(newest.values()) - min(newest.values()) < LEAST:
        return {}
    first = max(newest, key=lambda boot: (size[boot], boot))
    began = _began(endpoints, first)
    found = {boot: t - newest[first] for boot, t in newest.items() if boot in began}
    return {
        boot: ahead
        for boot, ahead in found.items()
        if abs(ahead) >= LEAST and abs(ahead - began[boot]) <= _ALIKE
    }


def _began(endpoints: Iterable[Endpoint], first: str) -> dict[str, int]:
    """Boot id -> how much later than on ``first`` the making of communicators began, ns."""
    comms: dict[tuple[str, int, int | None], dict[str, int]] = {}
    for e in endpoints:
        boot, info = e.process.boot_id, e.info
        if boot and info.hash is not None and info.from_start:
            times = comms.setdefault((info.hash, info.instance, info.nranks), {})
            times[boot] = min(info.t, times.get(boot, info.t))
    known = {first: 0}
    grown = True
    while grown:  # hosts that share a communicator with those that are known
        told: dict[str, list[int]] = {}
        for times in comms.values():
            near = [known[a] - t for a, t in times.items() if a in known]
            for boot, t in times.items() if near else ():
                if boot not in known:
                    told.setdefault(boot, []).append(t + round(median(near)))
        known |= {boot: round(median(some)) for boot, some in told.items()}
        grown = bool(told)
    return known
