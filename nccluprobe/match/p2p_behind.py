"""A send or receive whose other half stands behind a call that its rank has not made.

The halves of one channel are counted: where a rank leaves one out, its next one takes
that place, and both ends look as if nothing was missing.  But it stands behind a
collective to which the waiting rank comes, or came, only after its own half, in one stream.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match import p2p_finding as make
from nccluprobe.match.absence import Context, waiting_until
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.device_lack import Stall
from nccluprobe.match.device_ops import Part
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.hosts import Host, host_of
from nccluprobe.match.p2p_fill import epoch_of
from nccluprobe.match.p2p_intervals import peer_left_out
from nccluprobe.match.p2p_past import Heads, stream_of
from nccluprobe.match.p2p_queue import IDX, ORD, PEER, SEND, SIG, Op, Side
from nccluprobe.match.p2p_shape import left_one_out
from nccluprobe.match.stalls import Stalls
from nccluprobe.match.status import last_sign
from nccluprobe.match.tail import IDX as CALL_IDX
from nccluprobe.match.tail import ORD as CALL_ORD


def halves_behind(
    stalls: Stalls,
    context: Callable[[Communicator], Context],
    heads: Heads,
    size: Callable[[m.Int64], m.Int64],
) -> list[Finding]:
    """Findings of such halves; they become the causes of what stands still because of them.

    ``size``: bytes by signature.
    """
    found = []
    for s in stalls.stalls:
        if id(s.node) in stalls.causes or s.lack.missing or s.lack.gone or s.lack.fault:
            continue
        for part in s.parts:
            f = None if part.message is None else _judge(s, part, context(part.comm), heads, size)
            if f is not None:
                stalls.causes[id(s.node)] = f
                found.append(f)
                break
    return found


def _judge(
    s: Stall,
    part: Part,
    ctx: Context,
    heads: Heads,
    size: Callable[[m.Int64], m.Int64],
) -> Finding | None:
    own, comm, sides = s.endpoint, part.comm, heads.sides
    e, mine = comm.endpoints.get(part.peer), sides.get(s.side_key)
    theirs = None if e is None else sides.get((e.info.source, e.info.id))
    if e is None or theirs is None or mine is None or not _both_watched(own, e, comm):
        return None
    quiet = min(waiting_until(x, ctx) - last_sign(x) for x in (own, e))
    half = _half(part, theirs)
    if half is None or quiet < ctx.options.missing_after:
        return None
    epoch = epoch_of(own, part.idx)
    if epoch is None or epoch[0] != epoch[1] or len(s.node.streams) != 1:
        return None
    slot = epoch[0] + own.entered - own.next_ord  # of the call that it comes to afterwards
    call = _call_at(e, slot)
    if call is None or half.idx < call:
        return None
    stream = stream_of(own, mine)
    if stream is None or s.node.streams != {(own.process.who, stream)}:
        return None  # its next call may not stand behind it
    op = next((Op(*r) for r in mine.recent().tolist() if r[IDX] == part.idx), None)
    if op is None or not _may_be_next(mine, op, theirs, half, size):
        return None
    before = peer_left_out(mine, theirs, op, slot)
    left = slot == own.entered and (_may_come_before(own) or heads.left_out(comm, own))
    if before is False and left:
        return None
    says = before or left_one_out(comm, sides, mine, e, op)
    if says is False and before is False:
        return None  # it is the waiting rank that has left out the call
    culprit = e if says else None
    f = make.left_over(comm, ctx, own, e, (op,), culprit, loss=False, shifted=True, position=op.ord)
    f.details["confidence"] = "inferred"
    f.severity = "error" if quiet >= ctx.options.error_after else "notice"
    return f


def _may_come_before(own: Endpoint) -> bool:
    """Whether it may have made collectives since the last one seen, and others after them.

    Places are known by the calls that follow: what has none came after all that is seen.
    """
    last = -1 if own.last_idx is None else own.last_idx
    return own.process.losses.calls_after(own.info.id, last) > 0


def _both_watched(own: Endpoint, e: Endpoint, comm: Communicator) -> bool:
    if comm.disagreement is not None or not (own.slotted and e.slotted):
        return False
    if own.comm_rank in comm.zero_calls or e.comm_rank in comm.zero_calls:
        return False  # it may be a call ahead
    if own.guessed or e.guessed or own.queued:
        return False
    if any(x.process.ended or x.end is not None for x in (own, e)):
        return False
    return host_of(own) is not Host.AWAY


def _half(part: Part, theirs: Side) -> Op | None:
    """The peer's half of a send or receive."""
    assert part.message is not None
    _, send, order = part.message
    for row in theirs.recent().tolist():
        if (row[PEER], row[ORD], bool(row[SEND])) == (part.rank, order, not send):
            return Op(*row)
    return None


def _may_be_next(
    mine: Side, op: Op, theirs: Side, half: Op, size: Callable[[m.Int64], m.Int64]
) -> bool:
    """Whether a half, and those after it, fit the operations after the one that they stand for.

    They are these if the half before them was left out.
    """
    own, others = (
        {
            row[ORD]: row[SIG]
            for row in side.recent().tolist()
            if (row[PEER], bool(row[SEND])) == (x.peer, bool(x.send)) and row[ORD] >= x.ord
        }
        for side, x in ((mine, op), (theirs, half))
    )
    both = [(own[n + 1], sig) for n, sig in others.items() if n + 1 in own]
    if not both:
        return True
    a, b = (size(np.array(x, np.int64)) for x in zip(*both, strict=True))
    return bool(((a == b) | (a < 0) | (b < 0)).all())


def _call_at(e: Endpoint, slot: int) -> int | None:
    """call_idx of a collective; None: not remembered."""
    order = slot - (e.entered - e.next_ord)
    rows = e.tail.rows()
    at = rows[rows[:, CALL_ORD] == order]
    return int(at[-1, CALL_IDX]) if len(at) else None
