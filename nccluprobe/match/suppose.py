"""Calls that were made and not seen: supposed for as long as a scan judges.

A lost record that has a place (losses) was a call; where others miss a rank in
collectives only, it was one of these.  Of one that has no place nobody knows; that
it was the call that others wait for is supposed where nothing else explains more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match.absence import Context, open_slot
from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.p2p import P2P
from nccluprobe.match.p2p_holes import transfers_of
from nccluprobe.match.process import Process
from nccluprobe.match.status import last_sign, unseen
from nccluprobe.match.waits import Wait

SURE = 3
_LOST = "probe_event_loss_possible"


class Supposed:
    """Calls that are supposed to have been made; ``undo`` takes them back."""

    def __init__(self) -> None:
        self._added: list[tuple[Endpoint, int, int]] = []

    def likely(self, comm: Communicator, ctx: Context, p2p: P2P) -> bool:
        """Calls at known places, and those that others more surely have not made.

        Returns whether sends or receives are among them: these stay.
        """
        if not any(e.process.lost for e in comm.endpoints.values()):
            return False
        transfers = False
        for e in comm.members():
            if ctx.now - e.process.last_activity < ctx.options.missing_after:
                continue
            losses, at = e.process.losses, (e.info.source, e.info.id)
            here = losses.after(e.info.id, -1) if e.process.lost else 0
            side = p2p.sides.get(at)
            if here and side is not None:
                losses.transfers[e.info.id] = transfers_of(e, side)
            here -= e.lost + (0 if side is None else side.lost)
            if here <= 0 or e.queued or (side is not None and side.queued):
                continue
            awaited = p2p.awaited(comm, e)
            missing = min(behind(comm, e), _places(e))
            if sum(awaited.values()) + missing > here and awaited and missing:
                # It has come as far as all have who are ahead, or nobody knows how far.
                missing = min(missing, least_behind(comm, e))
                if sum(awaited.values()) + missing > here:
                    continue
            if awaited and sum(awaited.values()) <= here:
                p2p.suppose(e, awaited, losses.newest(e.info.id))
                transfers = True
            self._add(comm, e, min(missing, here))
        return transfers

    def beside(
        self, comms: Mapping[CommKey, Communicator], of: Mapping[CommKey, Context], p2p: P2P
    ) -> None:
        """Suppose that those came who may have, beside others that surely have not.

        First come the calls that lack nobody for sure, as sends and receives do: a lost event
        is one call, not several.
        """
        lossy = [c for c in comms.values() if any(e.process.lost for e in c.endpoints.values())]
        alone: Counter[int] = Counter()
        here: dict[Endpoint, int] = {}
        for comm in lossy:
            o = open_slot(comm, of[comm.key])
            if o is not None:
                lacks = min(e.entered for e in o.entered) - o.slot
                if all(unseen(e) >= lacks for e in o.absent):
                    alone.update({e.process.source: lacks for e in o.absent})
            for e in comm.endpoints.values() if p2p.sides else ():
                if e.process.lost:
                    halves = sum(p2p.awaited(comm, e).values())
                    here[e] = min(halves, _places(e))
                    alone[e.process.source] += halves - here[e]
        for comm in lossy:
            for _ in comm.endpoints:
                o, known = open_slot(comm, of[comm.key]), len(self)
                for e in () if o is None else o.perhaps:
                    kept = min(alone[e.process.source], e.process.unplaced())
                    self._add(comm, e, unseen(e) - kept - here.get(e, 0))
                if len(self) == known:
                    break

    def weak(self, waits: Iterable[Wait]) -> bool:
        """Suppose that all came who may have; returns whether there are such."""
        lacks: dict[int, list[tuple[Communicator, Endpoint]]] = {}
        of: dict[int, Process] = {}
        for w in waits:
            if not w.weak or w.seq is None or len(w.at) != 1:
                continue
            for e in w.absent:
                lacks.setdefault(e.process.source, []).append((w.comm, e))
                of[e.process.source] = e.process
        added = False
        for source, mine in lacks.items():
            p = of[source]
            free = p.unplaced()
            free += sum(_places(e) for _, e in mine)
            least = sum(least_behind(comm, e) for comm, e in mine)
            if least != free < sum(behind(comm, e) for comm, e in mine):
                continue  # it has not made all of them, or nobody knows how many
            for comm, e in mine:
                self._add(comm, e, min(unseen(e), least_behind(comm, e)))
                added = True
        return added

    def _add(self, comm: Communicator, e: Endpoint, most: int) -> None:
        n = min(most, behind(comm, e))
        if n <= 0 or (e.queued and not e.queued_in_group):
            return
        # As late as it may be: what waits for others since then does not wait longer.
        t = last_sign(e)
        minus = np.full(n, -1, np.int64)
        order = np.arange(e.next_ord, e.next_ord + n, dtype=np.int64)
        e.rows.extend(np.full(n, m.SIG_LOST, np.int32), np.full(n, t, np.int64), minus, order)
        e.next_ord += n
        e.lost += n
        grouped = e.in_group if e.queued_in_group else 0
        beyond = min(e.process.unplaced(), max(n - _places(e) - grouped, int(grouped > 0)))
        e.process.supposed += beyond
        self._added.append((e, n, beyond))

    def __len__(self) -> int:
        return len(self._added)

    def undo(self, since: int = 0) -> None:
        """Take them back, but for the first so many."""
        while len(self._added) > since:
            e, n, beyond = self._added.pop()
            e.process.supposed -= beyond
            e.rows.delete(len(e.rows) - n, n)
            e.next_ord -= n
            e.lost -= n


def behind(comm: Communicator, e: Endpoint) -> int:
    """How many collectives the furthest member is ahead."""
    return max(0, max(x.entered for x in comm.members()) - e.entered)


def least_behind(comm: Communicator, e: Endpoint) -> int:
    """How many collectives all are ahead of it who are ahead: had it come, it had made these."""
    return min((x.entered for x in comm.members() if x.entered > e.entered), default=0) - e.entered


def _places(e: Endpoint) -> int:
    """How many calls are known to be missing after the last collective that is seen."""
    return e.process.losses.calls_after(e.info.id, -1 if e.last_idx is None else e.last_idx)


def explains(found: Sequence[Finding]) -> int:
    """How well findings explain, 0: not at all.

    SURE: a rank is a cause beyond doubt of loss; 1: one is that may have come as well.
    """
    causes = [f for f in found if f.role == "root_cause" and f.state == "open"]
    named = [f for f in causes if f.culprits]
    if any(_is_plain(f) and not _is_doubtful(f) for f in named):
        return SURE
    return 1 if any(map(_is_doubtful, named)) else 2 * bool(causes)


def _is_doubtful(f: Finding) -> bool:
    """Whether it names who may have come, or who is free only if others have come."""
    if f.details.get("reason") == _LOST or f.supposes:
        return True
    return f.hang_type == "p2p_unmatched" and f.details.get("confidence") == "reduced"


def _is_plain(f: Finding) -> bool:
    return f.hang_type != "p2p_unmatched" or f.details.get("confidence") == "observed"
