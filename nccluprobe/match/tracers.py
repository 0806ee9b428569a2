"""Which tracer speaks for an endpoint that several have traced.

A daemon that is started again, or a second one beside it, writes a trace of its
own for each process.  The one that saw more speaks, as long as it goes on; when
it has ended or fallen silent, another takes over, as if it had attached late.  One
that saw no call takes over nothing: it tells only what became of the process.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.unseen import adopt

At = tuple[int, int]


class Tracers:
    """Endpoints that wait behind the one that speaks for the same rank."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[CommKey, int], list[Endpoint]] = {}

    def wait(self, key: CommKey, rank: int, e: Endpoint) -> None:
        """A second endpoint of the same process, communicator and rank."""
        waiting = self._waiting.setdefault((key, rank), [])
        if e not in waiting:
            waiting.append(e)

    def spoken_for(self, e: Endpoint) -> bool:
        """Whether another endpoint of the same process and rank speaks."""
        return any(e in waiting for waiting in self._waiting.values())

    def take_over(
        self,
        comms: MutableMapping[CommKey, Communicator],
        home: MutableMapping[At, Communicator],
        is_read: Callable[[int], bool],
        silent_after: int,
    ) -> list[CommKey]:
        """Change the speaker where that is due; the communicators that changed.

        ``is_read`` says whether a source has been read as far as it goes: only
        then is its silence one.
        """
        changed: list[CommKey] = []
        for (key, rank), waiting in list(self._waiting.items()):
            comm = comms.get(key)
            speaker = None if comm is None else comm.endpoints.get(rank)
            if comm is None or speaker is None:
                del self._waiting[key, rank]
                continue
            if speaker.process.last_activity:
                witnesses = [e for e in waiting if not e.process.last_activity]
                for e in witnesses:
                    adopt(speaker.process, e.process)
                waiting = [e for e in waiting if e not in witnesses]
            newest = max(e.process.through for e in (speaker, *waiting))

            def over(e: Endpoint, newest: int = newest) -> bool:
                p = e.process
                read = p.end is not None or is_read(p.source)
                return read and not p.ended and newest - p.through > silent_after

            able = [e for e in waiting if not over(e)]
            if not speaker.process.last_activity and any(e.process.last_activity for e in waiting):
                able = [e for e in waiting if e.process.last_activity]
            elif not over(speaker):
                # Files are read in any order: the one from the start may come second.
                able = [e for e in able if speaker.late and not e.late and not comm.begun]
            if not able:
                continue
            best = min(able, key=lambda e: (e.late, e.process.first_coverage))
            held = self._waiting[key, rank]
            held.remove(best)
            held.append(speaker)
            home.pop((speaker.info.source, speaker.info.id), None)
            home[best.info.source, best.info.id] = comm
            comm.replaced(rank, best)
            changed.append(key)
        return changed
