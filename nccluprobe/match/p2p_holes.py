"""Which lost calls were sends or receives, by the calls beside them.

A hole in the ordinals of a communicator's calls may be any call.  Those of one
direction and peer are numbered as well: what is missing there fills holes.  And a
call between two sends or receives of one group is another one, unless the program
puts collectives in such groups.
"""

from __future__ import annotations

import numpy as np

from nccluprobe.match import p2p_queue as q
from nccluprobe.match import tail
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.p2p_fill import holes_of
from nccluprobe.match.p2p_queue import Side


def transfers_of(e: Endpoint, side: Side) -> set[int]:
    """Ordinals after its newest collective at which an endpoint has made sends or receives."""
    last = -1 if e.last_idx is None else e.last_idx
    holes = holes_of(e, side)
    found = {i for i in holes.known if i > last}
    rows, calls = side.recent(), e.tail.rows()
    grouped = calls[calls[:, tail.GROUP] != 0, tail.GROUP]
    if np.isin(grouped, rows[:, q.GROUP]).any():
        return found
    for i in holes.places:
        at = int(np.searchsorted(rows[:, q.IDX], i))
        beside = rows[max(0, at - 1) : at + 1, q.GROUP].tolist()
        if i > last and len(beside) == 2 and beside[0] == beside[1] != 0:
            found.add(i)
    return found
