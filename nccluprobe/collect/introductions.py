"""Processes that were announced before their first record.

A job's process may be over milliseconds after its first NCCL call returned:
when its first record is read, /proc knows it no more.  Discovery, which sees it
when it maps the library, announces it; so who it is and how it ends is known.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from nccluprobe.collect.ports import Exit, ExitWatcher, ProcInfo, Procs

#: How long the end of a process without a file is remembered: its records may come yet.
_REMEMBER_NS = 10_000_000_000
_MOST = 65536


@dataclass
class Introduced:
    """What is known of an announced process."""

    info: ProcInfo
    exit: Exit | None = None


class Introductions:
    """Announced processes by pid; ended ones are forgotten after a while."""

    def __init__(self, procs: Procs, watcher: ExitWatcher | None) -> None:
        self._procs = procs
        self._watcher = watcher
        self._known: OrderedDict[int, Introduced] = OrderedDict()
        self._ended: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def introduce(self, pid: int) -> bool:
        """Look at a process now; False when it is gone already."""
        try:
            info = self._procs.read(pid)
        except (OSError, ValueError):
            return False
        known = self._known.get(pid)
        if known is not None and known.info.start_ticks == info.start_ticks:
            known.info = info
            return True
        self._known[pid] = Introduced(info)
        self._ended.pop(pid, None)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        if self._watcher is not None:
            self._watcher.watch(pid, info.start_ticks)
        return True

    def get(self, pid: int) -> Introduced | None:
        """What is known of it."""
        return self._known.get(pid)

    def at(self, pid: int, t: int) -> Introduced | None:
        """What is known of it, unless it had ended by then: then another has the pid."""
        known = self._known.get(pid)
        if known is not None and known.exit is not None and known.exit.t_ns < t:
            return None
        return known

    def is_over(self, pid: int) -> bool:
        """Whether the announced process ended, and no other has its pid (a zombie counts)."""
        known = self._known.get(pid)
        if known is None:
            return False
        try:
            state = self._procs.read_state(pid)
        except (OSError, ValueError):
            return True
        return not state.alive and state.start_ticks in (0, known.info.start_ticks)

    def ended(self, end: Exit, now: int) -> None:
        """An announced process ended."""
        known = self._known.get(end.pid)
        if known is not None and known.exit is None:
            known.exit = end
            self._ended[end.pid] = now

    def expire(self, now: int) -> None:
        """Forget those that ended a while ago."""
        while self._ended:
            pid, at = next(iter(self._ended.items()))
            if at + _REMEMBER_NS > now:
                return
            del self._ended[pid]
            self._known.pop(pid, None)
