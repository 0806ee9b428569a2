"""What long waits for a root teach: pure functions on signatures and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from nccluprobe.match.p2p_open import GROUP, IDX, PEER, SEND, SIG
from nccluprobe.match.signature import Signature
from nccluprobe.nccl.enums import DATATYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nccluprobe.match import model as m
    from nccluprobe.match.absence import OpenSlot
    from nccluprobe.match.endpoint import Endpoint
    from nccluprobe.match.p2p_pair import Channel
    from nccluprobe.match.p2p_queue import Side
    from nccluprobe.match.p2p_units import Unit

#: Calls in which the others can do nothing until the root has come.
ROOTED_FROM = frozenset({"ncclBroadcast", "ncclScatter"})

RECEIVE = "ncclRecv"
#: So many messages that it passed on show what a rank does.
_PASSED = 3

Lesson = tuple[str, int | None, int]


def lesson_of(s: Signature) -> Lesson:
    """What a long wait teaches about: (api, root, size class by powers of two of bytes)."""
    size = (s.count or 0) * DATATYPE_BYTES.get(s.datatype or "", 1)
    return (s.api, s.root, size.bit_length())


def waited_for_root(s: Signature, times: Mapping[int, int], longer_than: int) -> bool:
    """Whether a slot that all have entered was a long wait for its root alone."""
    if s.api not in ROOTED_FROM or s.root is None or s.root not in times:
        return False
    others = [t for r, t in times.items() if r != s.root]
    return bool(others) and times[s.root] - max(others) > longer_than


def wait_for_root(o: OpenSlot) -> Lesson | None:
    """What history may have taught, when all that is absent is the root with its data."""
    s = o.signature
    if s is None or s.api not in ROOTED_FROM or s.root is None:
        return None
    return lesson_of(s) if [e.comm_rank for e in o.absent] == [s.root] else None


def wait_for_sender(
    unit: Unit,
    peers: list[tuple[Endpoint, Side | None]],
    due: Iterable[Channel],
    size: Callable[[m.Int64], m.Int64],
) -> Lesson | None:
    """As ``wait_for_root``, for receives alone from one sender from whom nothing else is due.

    ``due``: channels of the communicator with operations that lack their partner;
    ``size``: bytes by signature.
    Sends to the sender that it has not received, as the unit itself may be one, are work
    that it has left; who has sent it more than he got back waits for an answer; and a
    group has other parts.  Nor does who has got more than it has passed on want for work.
    """
    (sender, side) = peers[0]
    rank = sender.comm_rank if len(peers) == 1 else None
    if rank is None or unit.group or any(c.dst == rank for c in due):
        return None
    if side is not None and _has_more_to_pass(side, unit, size):
        return None
    sent = unit.side.queues.get((True, rank))
    if sent is not None and sent.end > min(o.position for o in unit.ops):
        return None
    return (RECEIVE, rank, 0)


def _has_more_to_pass(side: Side, unit: Unit, size: Callable[[m.Int64], m.Int64]) -> bool:
    """Whether a sender has received more since its last collective than it has passed on.

    Before, it has sent on each message, to whomever, before it took the next one, some of them
    to who waits: it is a stage of a pipeline.
    """
    rows, last = side.recent(), side.endpoint.last_idx
    if last is None or side.endpoint.process.lost:
        return False
    sends, single, now = rows[:, SEND] > 0, rows[:, GROUP] == 0, rows[:, IDX] > last
    before = rows[single & ~now]
    got, passed = before[::2], before[1::2]
    if len(got) != len(passed) or (got[:, SEND] > 0).any() or (passed[:, SEND] == 0).any():
        return False
    if (size(got[:, SIG]) != size(passed[:, SIG])).any():
        return False
    if (passed[:, PEER] == unit.endpoint.comm_rank).sum() < _PASSED:
        return False
    alike = now & (size(rows[:, SIG]) == size(np.array([unit.ops[0].op.sig], np.int64)))
    return bool((alike & single & ~sends).sum() > (alike & sends).sum())
