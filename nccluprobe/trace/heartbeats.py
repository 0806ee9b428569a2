"""Heartbeat files of a run folder, for analyses of traces that do not hold them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from nccluprobe.trace import heartbeat
from nccluprobe.trace.heartbeat import Heartbeat, NotAHeartbeat

_MOST_REFUSED = 10_000


class Wanted(NamedTuple):
    """A process whose heartbeat is looked for.

    ``pids``: its numbers in pid namespaces; ``start``: unix ns, 0: not known; ``now``: unix
    ns by its host's clock, which need not be this machine's.
    """

    source: int
    host: str
    pids: tuple[int | None, ...]
    rank: int | None
    start: int
    now: int


class HeartbeatReader:
    """Reads what changed since the last look; ``refused`` counts what is no heartbeat."""

    def __init__(self) -> None:
        #: Path of a file that is not used -> why.
        self.refused: dict[str, str] = {}
        self._last: dict[int, Heartbeat] = {}

    def look(self, folder: str, wanted: Iterable[Wanted]) -> Iterator[tuple[int, Heartbeat]]:
        """(source, heartbeat) of processes that say something new."""
        try:
            run = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            beats = heartbeat.open_folder(run)
        finally:
            os.close(run)
        if beats is None:
            return
        try:
            for process in wanted:
                found = self._find(beats, folder, process)
                if found is not None and found != self._last.get(process.source):
                    self._last[process.source] = found
                    yield process.source, found
        finally:
            os.close(beats)

    def _find(self, beats: int, folder: str, process: Wanted) -> Heartbeat | None:
        for name in heartbeat.names_of(process.rank, process.pids):
            try:
                found = heartbeat.read(beats, name, process.now)
                if found is None:
                    continue
                why = found.mismatch(process.host, process.pids, process.rank, process.start)
            except NotAHeartbeat as error:
                why = str(error)
            if why is None:
                return found
            if len(self.refused) < _MOST_REFUSED:
                self.refused[f"{folder}/{heartbeat.FOLDER}/{name}"] = why
        return None
