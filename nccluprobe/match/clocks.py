"""How far the clocks of traces are from the analyzer's, by when their lines arrive.

A live job is judged by the analyzer's clock, and waits are told by the clocks of the
job's hosts.  What a file tells cannot be of later than when it is read, and a file that
grows tells of what was just before: so the newest time that is told, less the time at
which it was read, is the difference of the two clocks, if it stays the same while the
file grows.  A collector that lags still stamps its lines with the time they are written
at; one that is silent writes none, and then the last difference holds.

Until it is told, who has just been read, and was behind, is judged as of the newest
time of its job: it may be silent, or its clock behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

from nccluprobe.match.jobs import Jobs
from nccluprobe.match.options import SECOND
from nccluprobe.match.process import Process

#: A clock that is ahead by no more than this is not ahead, ns.
AHEAD = 1 * SECOND
#: So many arrivals are compared ...
_KEPT, _NEEDED = 4, 3
#: ... those within this time are one, ns ...
_APART = SECOND // 2
#: ... over at least this long ...
_SPAN = 3 * SECOND // 2
#: ... and their differences agree within this, ns.
_STABLE = 2 * SECOND


class _Arrivals:
    """When lines of one source were read, and how far ahead of that they told."""

    def __init__(self, newest: int, now: int) -> None:
        self.newest = newest
        self.grown = now  # when it was first read, or last grew
        self.kept: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        self.settled: int | None = None

    def add(self, now: int, offset: int) -> None:
        if self.kept and 0 <= now - self.kept[-1][0] < _APART:
            now, before = self.kept.pop()
            offset = max(offset, before)
        self.kept.append((now, offset))
        found = [offset for _, offset in self.kept]
        long = len(found) >= _NEEDED and now - self.kept[0][0] >= _SPAN
        if long and max(found) - min(found) <= _STABLE:
            self.settled = max(found)  # one that is read late does not change it

    def offset(self, behind: int) -> int | None:
        """The trace's clock less the analyzer's, ns; 0 when they agree; None: not known.

        ``behind``: a trace that is behind by less than this may just be read late.
        """
        if not self.kept:
            return None
        last = self.kept[-1][1]
        if -behind <= last <= AHEAD:
            return 0
        if self.settled is None:
            return last if last > AHEAD else None
        return 0 if -behind <= self.settled <= AHEAD else self.settled


class Clocks:
    """The clocks of all sources of one live analysis."""

    def __init__(self) -> None:
        self._sources: dict[int, _Arrivals] = {}
        #: Host -> its clock less the analyzer's, ns, where they differ; by the last scan.
        self.hosts: dict[str, int] = {}
        self._shifts: dict[Hashable, int] = {}

    def heard(self, source: int, newest: int, now: int, behind: int) -> None:
        """A source has been read to its end at ``now``, and tells of ``newest``, unix ns.

        What was there at first may be old: only that it is of later than now says something.
        """
        known = self._sources.get(source)
        if known is None:
            known = self._sources[source] = _Arrivals(newest, now)
            if newest and newest - now >= -behind:
                known.add(now, newest - now)
        elif newest > known.newest:
            known.newest, known.grown = newest, now
            known.add(now, newest - now)

    def judge(
        self, processes: Iterable[Process], jobs: Jobs, now: int, behind: int
    ) -> dict[Hashable, int]:
        """Now by the clock of each job, unix ns."""
        boots: dict[Hashable, int] = {}
        members: dict[Hashable, set[Hashable]] = {}
        newest: dict[Hashable, int] = {}
        names: dict[Hashable, str] = {}
        undecided: set[Hashable] = set()
        for p in processes:
            # Times of one boot compare exactly: its clock is one.
            boot = p.boot_id or p.source
            job = jobs.same(p.source)
            members.setdefault(job, set()).add(boot)
            newest[job] = max(newest.get(job, 0), p.newest)
            known = self._sources.get(p.source)
            offset = None if known is None else known.offset(behind)
            if known is not None and offset is None and now - known.grown < behind:
                undecided.add(job)
            if offset is not None:
                boots[boot] = max(offset, boots.get(boot, offset))
                names[boot] = p.name if p.info is None else p.info.host
        self.hosts = {names[boot]: offset for boot, offset in boots.items() if offset}
        self._shifts, nows = {}, dict[Hashable, int]()
        for job, some in members.items():
            shift = _shift([boots[b] for b in some if b in boots])
            nows[job] = now + shift
            if job in undecided:
                nows[job] = min(nows[job], newest[job])
            if shift < 0:  # never before what is told, as far as that is no later than now
                nows[job] = max(nows[job], min(now, newest[job]))
            if shift:
                self._shifts[job] = shift
        return nows

    def shift(self, job: Hashable) -> int:
        """What its clock is ahead of the analyzer's, ns, by the last scan."""
        return self._shifts.get(job, 0)


def _shift(offsets: list[int]) -> int:
    """One difference for all hosts of a job: by no more than that of each of them.

    Where some are ahead and others are not, a wait of those others would seem as long
    as the clocks differ.
    """
    if offsets and min(offsets) > 0:
        return min(offsets)
    if offsets and max(offsets) < 0:
        return max(offsets)
    return 0
