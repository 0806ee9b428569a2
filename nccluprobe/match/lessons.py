"""What long waits for a root teach: pure functions on signatures and times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nccluprobe.match.signature import Signature
from nccluprobe.nccl.enums import DATATYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nccluprobe.match.absence import OpenSlot
    from nccluprobe.match.endpoint import Endpoint
    from nccluprobe.match.p2p_pair import Channel
    from nccluprobe.match.p2p_units import Unit

#: Calls in which the others can do nothing until the root has come.
ROOTED_FROM = frozenset({"ncclBroadcast", "ncclScatter"})

RECEIVE = "ncclRecv"

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


def wait_for_sender(unit: Unit, peers: list[Endpoint], due: Iterable[Channel]) -> Lesson | None:
    """As ``wait_for_root``, for receives alone from one sender from whom nothing else is due.

    ``due``: channels of the communicator with operations that lack their partner.
    Sends to the sender that it has not received, as the unit itself may be one, are work
    that it has left; who has sent it more than he got back waits for an answer; and a
    group has other parts.
    """
    rank = peers[0].comm_rank if len(peers) == 1 else None
    if rank is None or unit.group or any(c.dst == rank for c in due):
        return None
    sent = unit.side.queues.get((True, rank))
    if sent is not None and sent.end > min(o.position for o in unit.ops):
        return None
    return (RECEIVE, rank, 0)
