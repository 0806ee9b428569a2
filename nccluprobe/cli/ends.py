"""What a report says of ends that nobody saw, and of traces that stop."""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection

from nccluprobe.match.process import Process
from nccluprobe.plural import counted, plural, verb

#: Fronts whose traces have closing lines.
TRACERS = ("ebpf", "preload")
#: A collector writes every second: whose trace is so much older has none any more, ns.
_STOPPED = 10_000_000_000


def end_notes(
    processes: Collection[Process], boot_id: str, now: int, out: str = "DIR"
) -> list[str]:
    """``boot_id`` and ``now`` (unix ns) are this machine's: only its own traces are old by it.

    ``out``: the folder that the traces were written to, as --out names it.
    """
    notes = []
    gone = {p.who: p for p in processes if p.found_gone and p.alive_until}
    if gone:
        last = max(p.end.t for p in gone.values() if p.end is not None)
        found = min(p.found_gone for p in gone.values())
        notes.append(
            f"{counted(len(gone), 'process', 'was')} found gone at {_clock(found)} UTC, nobody "
            f"saw when: what is said of {'it' if len(gone) == 1 else 'them'} is counted to "
            f"{_clock(last)} UTC, the last sign of life"
        )
    seen = {p.who for p in processes if p.alive_until}
    if unread := {p.who for p in processes if p.found_gone} - seen:
        notes.append(
            f"{counted(len(unread), 'process', 'was')} found gone, and the calls were read by an "
            "earlier collector: give its folder, too"
        )
    told = {p.who for p in processes if p.end is not None and p.end.how != "detached"}
    stopped = {
        p.who: p
        for p in processes
        if p.end is None and p.boot_id == boot_id and 0 < p.newest < now - _STOPPED
    }
    known = told | {p.who for p in processes if p.end is None}
    detached = {p.who: p.end.t for p in processes if p.end is not None and p.who not in known}
    if detached:
        notes.append(
            f"{counted(len(detached), 'process', 'was')} there when tracing ended, at "
            f"{_clock(max(detached.values()))} UTC: what came after is not seen"
        )
    fresh = {p.who for p in processes if p.newest >= now - _STOPPED}
    left = [p for who, p in stopped.items() if who not in told | fresh]
    if left:
        preload = any(p.info is not None and p.info.front == "preload" for p in left)
        rest = (
            f"`nccluprobe collect --once --out {shlex.quote(out)}` writes the rest, if it is left"
        )
        more = f": {rest}" if preload else ""
        notes.append(
            f"the {plural(len(left), 'trace')} of {counted(len(left), 'process')} "
            f"{verb(len(left), 'stops')} at {_clock(max(p.newest for p in left))} UTC without an "
            f"end: {'its' if len(left) == 1 else 'their'} tracer was killed, or could not write "
            f"{'it' if len(left) == 1 else 'them'} to the end{more}"
        )
    return notes


def without_end(processes: Collection[Process], now: int) -> int:
    """Of how many processes no trace is closed, and none was just written to.

    What these have lost after their last line nobody has counted.  ``now``: unix ns, of this
    machine; where the clock of a host is another one, at worst a trace that goes on is among them.
    """
    traced = [p for p in processes if p.info is not None and p.info.front in TRACERS]
    closed = {p.who for p in traced if p.end is not None or p.newest >= now - _STOPPED}
    return len({p.who for p in traced} - closed)


def _clock(unix_ns: int) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(unix_ns // 10**9))
