"""The phase that a process declares in its heartbeat file, as ``state`` lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from nccluprobe.collect import lines
from nccluprobe.collect.clock import Reading
from nccluprobe.collect.ports import Clock, ProcInfo
from nccluprobe.trace import heartbeat
from nccluprobe.trace.heartbeat import Heartbeat, NotAHeartbeat


class Phases:
    """Reads one process's heartbeat file; ``problem`` is told of each refused one once."""

    def __init__(self, pid: int, info: ProcInfo, problem: Callable[[str], None]) -> None:
        self._info = info
        self._pids = (pid, info.ns_pid)
        self._problem = problem
        self._said: set[str] = set()
        self._last: Heartbeat | None = None
        self._since = 0  # of the phase, unix ns
        #: The line of the phase that it is in: every part of the trace begins with it.
        self.line: str | None = None

    def look(self, run: int, rank: int | None, clock: Clock, put: Callable[[str], None]) -> None:
        """Hand a ``state`` line to ``put`` where the file says something new.

        ``run``: descriptor of the run's folder, -1 when there is none so far.
        """
        folder = None if run < 0 else heartbeat.open_folder(run)
        if folder is None and self._last is None:
            return
        now = clock.reading()
        found = None
        if folder is not None:
            try:
                found = self._find(folder, rank, now.unix)
            finally:
                os.close(folder)
        if found == self._last:
            return
        before, self._last = self._last, found
        if found is None or found.phase is None:
            self.line = None
            if before is not None and before.phase is not None:
                ended = now.unix if found is None else found.since or found.time
                put(lines.phase(now.mono, None, _mono(ended, now)))
            return
        if before is None or before.phase != found.phase:
            self._since = found.time
        self.line = lines.phase(
            now.mono,
            found.phase,
            _mono(self._since if found.since is None else found.since, now),
            beat=_mono(found.time, now),
            every=found.every,
            limit=found.limit,
            step=found.step,
            detail=found.progress,
        )
        put(self.line)

    def _find(self, folder: int, rank: int | None, now: int) -> Heartbeat | None:
        info = self._info
        start = now - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - info.start_ns)
        for name in heartbeat.names_of(rank, self._pids):
            try:
                found = heartbeat.read(folder, name, now)
                if found is None:
                    continue
                why = found.mismatch(info.host, self._pids, rank, start)
            except NotAHeartbeat as error:
                why = str(error)
            if why is None:
                return found
            self._refused(f"{heartbeat.FOLDER}/{name}: not used: {why}")
        return None

    def _refused(self, text: str) -> None:
        if text not in self._said and len(self._said) < 16:
            self._said.add(text)
            self._problem(text)


def _mono(unix: int, now: Reading) -> int:
    return min(now.mono, max(0, now.mono - (now.unix - unix)))
