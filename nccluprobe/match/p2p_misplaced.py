"""A send or receive that went to the wrong peer, or on the wrong communicator.

One rank waits in an operation that nobody answers and that no such pair ever
made before, while another waits for just such an operation of that rank.
"""

from __future__ import annotations

from collections.abc import Iterable

from nccluprobe.match import p2p_finding as make
from nccluprobe.match.absence import waiting_until
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.p2p_blame import count_says
from nccluprobe.match.p2p_habit import break_of
from nccluprobe.match.p2p_judge import Judge
from nccluprobe.match.p2p_queue import GROUP, IDX, Op
from nccluprobe.match.p2p_units import Open, Unit
from nccluprobe.match.process import Actor
from nccluprobe.match.status import last_sign


def misplaced(judges: Iterable[Judge]) -> dict[int, Finding]:
    """id of a unit -> the finding that explains it; each finding stands for two units."""
    judges = list(judges)
    awaited: dict[tuple[Actor, bool], list[tuple[Judge, Unit, Open]]] = {}
    for judge, unit, o in _open(judges):
        assert o.peer is not None
        awaited.setdefault((o.peer.actor, not o.op.send), []).append((judge, unit, o))
    found: dict[int, Finding] = {}
    for judge, unit, o in _open(judges):
        if id(unit) in found or not _is_new(judge, unit, o):
            continue
        for other, waiting, wanted in awaited.get((unit.endpoint.actor, bool(o.op.send)), ()):
            if waiting is unit or id(waiting) in found or not _alike(judge, o, wanted):
                continue
            if not (_stands(judge, unit) and _stands(other, waiting)):
                continue
            if judge.loss(unit) or other.loss(waiting):
                continue  # what seems misplaced may be all that is left
            if _is_behind(judge, unit, o):
                continue
            if _belongs(unit, o) and _belongs(waiting, wanted):
                continue  # each belongs where it is: another one was left out
            if not _same_pair(o, waiting):
                if other is not judge and o.op.peer != waiting.endpoint.comm_rank:
                    continue  # both the peer and the communicator would be wrong
                if not _left_habit(unit, o, waiting):
                    continue
            f = make.misplaced(
                judge.comm,
                judge.ctx,
                unit,
                o,
                (other.comm, waiting, wanted),
                _culprit(unit, o, other, waiting, wanted),
                loss=False,
            )
            judge.findings.append(f)
            found[id(unit)] = found[id(waiting)] = f
            break
    return found


def _open(judges: Iterable[Judge]) -> Iterable[tuple[Judge, Unit, Open]]:
    for judge in judges:
        for unit in judge.units:
            for o in unit.ops:
                if o.counted and o.peer is not None:
                    yield judge, unit, o


def _is_new(judge: Judge, unit: Unit, o: Open) -> bool:
    """Whether the two never did this before."""
    assert o.peer is not None
    theirs = judge.side(o.peer)
    rank = unit.endpoint.comm_rank
    if rank is None or o.position != 0:
        return False
    queue = None if theirs is None else theirs.queues.get((not o.op.send, rank))
    return queue is None or queue.end == 0


def _is_behind(judge: Judge, unit: Unit, o: Open) -> bool:
    """Whether its peer waits for nobody and has not called since: it did not come so far."""
    assert o.peer is not None
    p = o.peer.process
    if p.ended or o.peer.end is not None or last_sign(o.peer) >= unit.t:
        return False
    return p.inside_now() is None and not judge.stalls.holds(o.peer)


def _in_its_place(unit: Unit, o: Open) -> bool:
    """Whether other operations of its group, on its communicator, have been answered."""
    if not o.op.group:
        return False
    rows = unit.side.recent()
    for op in (Op(*r) for r in rows[rows[:, GROUP] == o.op.group].tolist()):
        queue = unit.side.queues.get((bool(op.send), op.peer))
        if op.peer == unit.endpoint.comm_rank or queue is None:
            continue
        if op.idx != o.op.idx and op.idx not in queue.rows()[:, IDX]:
            return True
    return False


def _belongs(unit: Unit, o: Open) -> bool:
    """Whether an operation is in its place, or its group waits for more of that peer than it.

    A call on another communicator is one: who lacks more has not come to the group.
    """
    lacking = [x for x in unit.ops if x.op.peer == o.op.peer]
    return _in_its_place(unit, o) or (bool(o.op.group) and len(lacking) > 1)


def _same_pair(o: Open, waiting: Unit) -> bool:
    """Whether the one that waits is the peer itself, on another communicator."""
    return o.peer is not None and o.peer.process.who == waiting.endpoint.process.who


def _left_habit(unit: Unit, o: Open, waiting: Unit) -> bool:
    """Whether a rank left its habit with this very operation, and the one that waits did not.

    Without that, each of the two may only wait for whom it says.
    """
    if break_of(unit.side) != o.op.idx or break_of(waiting.side) not in (-1, None):
        return False
    rows = unit.side.recent()
    before = rows[rows[:, IDX] < o.op.idx][-1:, GROUP]
    return bool(before.any()) == bool(o.op.group)  # else it is another kind of step


def _alike(judge: Judge, a: Open, b: Open) -> bool:
    table = judge.ctx.table
    x, y = table[a.op.sig], table[b.op.sig]
    return (x.count, x.datatype) == (y.count, y.datatype) and x.count is not None


def _stands(judge: Judge, unit: Unit) -> bool:
    """Whether it has stood still for long."""
    until = waiting_until(unit.endpoint, judge.ctx)
    since = unit.t if unit.hard is not None else max(unit.t, last_sign(unit.endpoint))
    return until - since >= judge.ctx.options.missing_after


def _culprit(unit: Unit, o: Open, other: Judge, waiting: Unit, wanted: Open) -> Endpoint | None:
    if not _same_pair(o, waiting):
        return unit.endpoint  # the wrong peer: it is what the two have in common
    # The wrong communicator: either of two may have taken it.
    lane = (bool(wanted.op.send), wanted.op.peer)
    says = count_says(other.comm, other.sides, waiting.side, lane)
    if says is None:
        return None
    return unit.endpoint if says == "skipped" else waiting.endpoint
