"""Calls of count 0 that one rank made and the others did not: NCCL discards them.

All that such a rank calls afterwards on this communicator takes the place of the
call before it, so that it lacks one in the end, while it has gone on by itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from nccluprobe.match.communicator import Communicator
from nccluprobe.match.disagree import Decision
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.signature import SignatureTable
from nccluprobe.match.waits import Wait

#: A call of count 0 explains an absence so many slots later: hosts run ahead that far.
_RECENT = 1100


def note_zeros(comm: Communicator, slot: int, decision: Decision) -> None:
    """Remember who passed count 0 where the others made no such call."""
    for v in decision.verdicts:
        for rank in v.ranks if v.legal and v.shift is not None and not v.shift.skip else ():
            e = comm.endpoints[rank]
            sig = e.sig_at(slot)
            if sig is not None:
                comm.zero_calls[rank] = (slot, sig, e.idx_at(slot))


def zero_before(comm: Communicator, e: Endpoint, slot: int) -> tuple[int, int, int | None] | None:
    """An absent member's call of count 0 that explains why it lacks a call at ``slot``."""
    zero = comm.zero_calls.get(-1 if e.comm_rank is None else e.comm_rank)
    return None if zero is None or not 0 <= slot - zero[0] <= _RECENT else zero


def shifted_by_zero(w: Wait) -> list[Endpoint]:
    """Of those who are absent from a collective, those who made a call of count 0 before."""
    if w.seq is None or not w.at or not w.comm.zero_calls:
        return []
    return [e for e in w.absent if zero_before(w.comm, e, w.at[0]) is not None]


def explain_zeros(waits: Iterable[Wait], table: SignatureTable) -> None:
    """Tell of absent ranks that passed count 0 before: that may be why they do not come."""
    for w in waits:
        for e in shifted_by_zero(w) if w.finding is not None else ():
            zero = zero_before(w.comm, e, w.at[0])
            if zero is None or w.finding is None:
                continue
            w.finding.details["explanation"] = (
                f"rank {e.comm_rank} called {table[zero[1]].text()} (call_idx {zero[2]}): NCCL "
                f"discards a call of count 0, so it takes no part in what the others wait in"
            )
