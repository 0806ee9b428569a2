"""Hosts that stopped because they may not queue more work, where completion is seen.

A host runs ahead of its device by so many operations at most (32 or about 1000, as the
driver has it).  Behind one operation that hangs, all hosts that were free to go on stop at
that depth, each at another place of its program: who has stopped there is held by its
device, however far its peers went.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from nccluprobe.match.communicator import Communicator
from nccluprobe.match.process import Who

#: Fewer operations fill no queue.
_LEAST = 16
#: So many hosts at one depth, which no host has gone beyond, are no accident.
_SEVERAL = 4


def at_launch_depth(comms: Iterable[Communicator]) -> frozenset[Who]:
    """Processes that have queued as much as any, where several have queued that much."""
    queued: Counter[Who] = Counter()
    for comm in comms:
        for e in comm.endpoints.values():
            if e.done is not None:
                open_ = max(e.entered - e.done, 0) + sum(map(len, e.posted.values()))
                queued[e.process.who] += open_
    depth = max(queued.values(), default=0)
    # The newest operations are one group, or have just ended: the depths differ by a few.
    near = frozenset(who for who, n in queued.items() if n >= depth - max(1, depth // 16))
    return near if depth >= _LEAST and len(near) >= _SEVERAL else frozenset()
