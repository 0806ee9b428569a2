"""Who does less, or more, than the others in one step of a program.

Ranks of a communicator run the same code with other peers: in one step most of
them make as many sends and as many receives.  Steps are the groups that pair
with each other, and what lies between two collectives of the communicator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from nccluprobe.match import tail
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.p2p_fill import epoch_of
from nccluprobe.match.p2p_pair import At
from nccluprobe.match.p2p_queue import GROUP, IDX, ORD, SEND, TAIL, WIDTH, Op, Side, Table
from nccluprobe.match.p2p_steps import Steps

#: Sends and receives of one rank in one step.
Shape = tuple[int, int]
#: So many groups of one rank make a habit.
_GROUPS = 3
#: So many others show what all make in a step.
_SEVERAL = 3
EXTRA, SKIPPED = "extra", "skipped"


def shape_says(
    comm: Communicator, sides: Mapping[At, Side], has: Side, lacks: Endpoint, op: Op
) -> str | None:
    """Whether one side made an operation too many, or its peer left one out; None: not told."""
    other = sides.get((lacks.info.source, lacks.info.id))
    steps = Steps(comm, sides)
    said = set()
    if op.group and other is not None:
        said.add(_in_groups(steps, has, other, op))
    said.add(_between_collectives(comm, sides, has, lacks, op))
    said.discard(None)
    return said.pop() if len(said) == 1 else None


def _verdict(
    op: Op, has: Shape, lacks: Shape, usual: Shape | None, own: Shape | None
) -> str | None:
    """``usual``: what ``lacks`` should have made; ``own``: what ``has`` should have."""
    if usual is None or own is None:
        return None
    sends = 1 if op.send else 0
    wanted = (lacks[0] + 1 - sends, lacks[1] + sends)
    if has == own and wanted[0] <= usual[0] and wanted[1] <= usual[1]:
        return SKIPPED  # this one, and others perhaps
    if lacks == usual and has == (own[0] + sends, own[1] + 1 - sends):
        return EXTRA
    return None


def _shape(rows: Table) -> Shape:
    sends = int(rows[:, SEND].sum())
    return sends, len(rows) - sends


def _most(shapes: Iterable[Shape]) -> Shape | None:
    """What more than half of at least two others did."""
    count = Counter(shapes)
    if count.total() < 2:
        return None
    shape, times = count.most_common(1)[0]
    return shape if 2 * times > count.total() else None


# -- groups ------------------------------------------------------------------


def _in_groups(steps: Steps, has: Side, other: Side, op: Op) -> str | None:
    a, b = has.endpoint.comm_rank, other.endpoint.comm_rank
    if a is None or b is None:
        return None
    of: dict[int, set[int]] = {}
    for rank, group in steps.groups(a, op.group):
        of.setdefault(rank, set()).add(group)
    if len(of.get(b, ())) != 1:
        return None
    mine, theirs = (_group(x, g) for x, g in ((has, op.group), (other, min(of[b]))))
    if mine is None or theirs is None:
        return None
    shapes = [
        s
        for rank, groups in of.items()
        if rank not in (a, b) and len(groups) == 1
        if (side := steps.side(rank)) is not None
        if (s := _group(side, min(groups))) is not None
    ]
    usual = _most(shapes)
    if usual is not None:
        return _verdict(op, mine, theirs, usual, usual)
    return _verdict(op, mine, theirs, _habit(other, min(of[b])), _habit(has, op.group))


def _group(side: Side, group: int) -> Shape | None:
    """What a side made in one group; None: not all of it is remembered, or some was lost."""
    rows = side.recent()
    at = rows[:, GROUP] == group
    if not at.any() or (len(rows) >= TAIL and at[0]):
        return None
    # The first and the last one may be those that are missing.
    low, high = int(rows[at][0, IDX]) - 2, int(rows[at][-1, IDX]) + 2
    return None if _lost_some(side.endpoint, low, high) else _shape(rows[at])


def _lost_some(e: Endpoint, low: int, high: int) -> bool:
    """Whether calls between two are missing, and nobody knows what they were."""
    return e.process.losses.between(e.info.id, low, high) > 0


def _habit(side: Side, but: int) -> Shape | None:
    """What a side made in all its other groups, if these are alike."""
    rows = side.recent()
    groups = set(rows[:, GROUP].tolist()) - {0, but}
    shapes = [s for g in groups if (s := _group(side, g)) is not None]
    return shapes[0] if len(shapes) >= _GROUPS and len(set(shapes)) == 1 else None


# -- between two collectives ---------------------------------------------------


def _between_collectives(
    comm: Communicator, sides: Mapping[At, Side], has: Side, lacks: Endpoint, op: Op
) -> str | None:
    found = _of_step(comm, sides, has, op)
    mine = found.pop(has.endpoint.comm_rank or 0, None)
    theirs = found.pop(lacks.comm_rank or 0, None)
    if mine is None or theirs is None:
        return None
    rest = [rows for rows in found.values() if rows is not None]
    if not len(theirs) and len(rest) > 1 and all(map(len, rest)):
        return SKIPPED  # alone it made none there: all of the step, or one collective too many
    send = bool(op.send)
    own, peers, *others = _steps_alike([mine, theirs, *rest], _firsts(mine, send), rest, send)
    usual = _most(others)
    said = _verdict(op, own, peers, usual, usual)
    if said is None and len(others) >= _SEVERAL and set(others) == {peers}:
        # Alone it made more there, by several: so does who left out a collective between.
        more = (own[0] - peers[0], own[1] - peers[1])
        said = EXTRA if min(more) >= 0 and more[0 if op.send else 1] > 0 else None
    return said


def _firsts(rows: Table, send: bool) -> int:
    """How many sends, or receives, are the first ones of their pair."""
    return int(((rows[:, ORD] == 0) & (rows[:, SEND] == send)).sum())


def _steps_alike(steps: list[Table], firsts: int, rest: list[Table], send: bool) -> list[Shape]:
    """What each made, without the first ones of a pair where one made more of these than the rest.

    They may only connect the two, as other pairs have been connected before.
    ``firsts``: how many it made of the direction ``send``.
    """
    usual = Counter(_firsts(rows, send) for rows in rest).most_common(1)
    if usual and firsts > usual[0][0]:
        steps = [rows[rows[:, ORD] > 0] for rows in steps]
    return [_shape(rows) for rows in steps]


def left_one_out(
    comm: Communicator, sides: Mapping[At, Side], has: Side, lacks: Endpoint, op: Op
) -> bool | None:
    """Whether a peer that has gone on to the next collective made less than others before it.

    ``has``: the side that stands before that collective, in ``op``.  False: it made as
    much as they did; None: not told.
    """
    found = _of_step(comm, sides, has, op)
    found.pop(has.endpoint.comm_rank or 0, None)
    made = found.pop(lacks.comm_rank or 0, None)
    if made is None:
        return None
    rest, other = [rows for rows in found.values() if rows is not None], not op.send
    theirs, *others = _steps_alike([made, *rest], _firsts(made, other), rest, other)
    usual = _most(others)
    if usual is None:
        return None
    if theirs == usual:
        return False
    sends = 1 if op.send else 0
    short = theirs[0] + 1 - sends <= usual[0] and theirs[1] + sends <= usual[1]
    return True if short else None


def _of_step(
    comm: Communicator, sides: Mapping[At, Side], has: Side, op: Op
) -> dict[int, Table | None]:
    """What each rank made between the two collectives that an operation is between."""
    epoch = epoch_of(has.endpoint, op.idx)
    if epoch is None or epoch[0] != epoch[1]:
        return {}
    return {
        rank: _in_epoch(e, sides.get((e.info.source, e.info.id)), epoch[0])
        for rank, e in comm.endpoints.items()
        if e.info.from_start
    }


def _in_epoch(e: Endpoint, side: Side | None, at: int) -> Table | None:
    """What an endpoint made between two collectives; None: not over, or not all is known."""
    rows = e.tail.rows()
    end = rows[rows[:, tail.ORD] == at]
    start = rows[rows[:, tail.ORD] == at - 1]
    if not len(end) or (at and not len(start)):
        return None
    low = int(start[0, tail.IDX]) if at else -1
    high = int(end[0, tail.IDX])
    if _lost_some(e, low, high):
        return None
    if side is None:
        return np.empty((0, WIDTH), np.int64)
    rows = side.recent()
    if len(rows) >= TAIL and int(rows[0, IDX]) > low:
        return None
    return rows[(rows[:, IDX] > low) & (rows[:, IDX] < high)]
