"""What two ranks made between two collectives, against what they made there before.

A program repeats: where a rank begins an interval as it did in an earlier one, its peer
makes there what it made in that one.
"""

from __future__ import annotations

from itertools import pairwise

from nccluprobe.match import tail
from nccluprobe.match.p2p_queue import IDX, PEER, SEND, TAIL, Op, Side

#: Sends and receives in the order in which they were made: (peer, whether it is a send).
_Made = tuple[tuple[int, bool], ...]


def peer_left_out(own: Side, theirs: Side, op: Op, slot: int) -> bool | None:
    """Whether a peer left out its half of ``op`` in the interval before a collective.

    ``slot``: of that collective.  After an interval as the one before, the two made earlier
    what they made here, and this half; and never only what they made here, as they would if
    the waiting rank had left out a collective.  None: so it was, but not after such a one,
    which says nothing for sure; False: nothing tells.
    """
    rank = own.endpoint.comm_rank
    mine, made = _intervals(own), _intervals(theirs)
    here, there = mine.get(slot), made.get(slot)
    if rank is None or here is None or there is None or (op.peer, bool(op.send)) not in here:
        return False
    without, whole = sorted(there), sorted((*there, (rank, not op.send)))
    both = {s: (mine[s], made[s]) for s in mine.keys() & made.keys() if s < slot}
    after_same = [x for s, x in both.items() if s - 1 in both and both[s - 1] == both.get(slot - 1)]
    if _only_whole(after_same, here, without, whole):
        return True
    return None if _only_whole([*both.values()], here, without, whole) else False


def _only_whole(
    earlier: list[tuple[_Made, _Made]],
    here: _Made,
    without: list[tuple[int, bool]],
    whole: list[tuple[int, bool]],
) -> bool:
    """Whether a peer made the whole where the other began as here, and never less by the one."""
    alike = [sorted(x) for began, x in earlier if began[: len(here)] == here]
    return whole in alike and all(sorted(x) != without for _, x in earlier)


def _intervals(side: Side) -> dict[int, _Made]:
    """What was made before each collective and after the one before it, by slot.

    Only what is remembered whole; nothing where events were lost.  The newest may go on.
    """
    e, rows = side.endpoint, side.recent()
    calls = e.tail.rows()
    if e.process.lost or e.tail.discarded or not e.slotted:
        return {}
    first = int(rows[0, IDX]) if len(rows) >= TAIL else -1
    whole = e.info.from_start and len(calls) == e.next_ord
    ends = [*zip(calls[:, tail.IDX].tolist(), calls[:, tail.ORD].tolist(), strict=True)]
    ends = [*([(-1, -1)] if whole else []), *sorted(ends)]
    last = int(max(rows[:, IDX].max(initial=-1), ends[-1][0] if ends else -1)) + 1
    found: dict[int, _Made] = {}
    for (low, _), (high, order) in pairwise([*ends, (last, e.next_ord)]):
        if low < first:
            continue
        inside = rows[(rows[:, IDX] > low) & (rows[:, IDX] < high)]
        found[order + e.entered - e.next_ord] = tuple(
            (int(r[PEER]), bool(r[SEND])) for r in inside.tolist()
        )
    return found
