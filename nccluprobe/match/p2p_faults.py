"""What is decided about pairs: facts that stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nccluprobe.match import p2p_finding as make
from nccluprobe.match.absence import Context
from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.p2p_blame import odd_of, orderly
from nccluprobe.match.p2p_habit import odd_one, usual
from nccluprobe.match.p2p_loss import unseen
from nccluprobe.match.p2p_pair import At, Channel, Pair, Pairs
from nccluprobe.match.p2p_queue import ORD, PEER, SEND, SIG, Queue, Side

_KEPT = 1000


class Faults:
    """Pairs that differ, shifted and left over operations of an analysis."""

    def __init__(self, pairs: Pairs, sides: Mapping[At, Side]) -> None:
        self.pairs = pairs
        self.sides = sides
        self.findings: list[Finding] = []
        #: The first fault of a channel, and the position of it.
        self.of_channel: dict[Channel, Finding] = {}
        self.at: dict[Channel, tuple[int, Finding]] = {}
        self._known: dict[tuple[Any, ...], Finding] = {}
        self._types: set[Channel] = set()

    # -- disputes ------------------------------------------------------------

    def disputes(
        self, comm: Communicator, ctx: Context, channels: list[Channel], final: bool
    ) -> list[Finding]:
        """Decide what is due; provisional findings of what is not."""
        found: list[Finding] = []
        for channel in channels:
            while (pair := self.pairs.disputed.get(channel)) is not None:
                queues = self._queues(comm, channel)
                if queues is None or not all(q.n for q in queues):
                    del self.pairs.disputed[channel]
                    break
                since = max(pair.send.t, pair.recv.t)
                if not final and ctx.now - since < ctx.options.decide_after:
                    look = self.pairs.look(pair, *queues)
                    found.append(self._finding(comm, look, ctx))
                    break
                self.pairs.decide(channel, *queues, due=True)
                self.pairs.pair(channel, *queues)
        return found

    def note_decided(
        self,
        comms: Mapping[CommKey, Communicator],
        context: Callable[[Communicator], Context],
    ) -> None:
        """Make findings of what has been decided since."""
        decided, self.pairs.decided = self.pairs.decided, []
        for pair in decided:
            comm = comms.get(pair.channel.comm)
            if comm is not None:
                f = self._finding(comm, pair, context(comm))
                self._note(pair.channel, f)
        for channel, pair in self.pairs.other_type.items():
            comm = comms.get(channel.comm)
            if comm is not None and channel not in self._types:
                self._types.add(channel)
                self._keep(make.differing(comm, pair, context(comm), None, loss=False))

    def _note(self, channel: Channel, f: Finding) -> None:
        known = self._known.get((channel, f.hang_type, f.culprits))
        if known is not None:
            known.details["repeated"] = known.details.get("repeated", 0) + 1
            return
        self._known[channel, f.hang_type, f.culprits] = f
        self.of_channel[channel] = f
        self.at.setdefault(channel, (int(f.details["position"]), f))
        self._keep(f)

    def _keep(self, f: Finding) -> None:
        if len(self.findings) < _KEPT:
            self.findings.append(f)

    def _queues(self, comm: Communicator, channel: Channel) -> tuple[Queue, Queue] | None:
        sides = self._ends(comm, channel)
        if sides is None:
            return None
        return sides[0].queue(True, channel.dst), sides[1].queue(False, channel.src)

    def _ends(self, comm: Communicator, channel: Channel) -> tuple[Side, Side] | None:
        found = []
        for rank in (channel.src, channel.dst):
            e = comm.endpoints.get(rank)
            side = None if e is None else self.sides.get((e.info.source, e.info.id))
            if side is None:
                return None
            found.append(side)
        return found[0], found[1]

    def _finding(self, comm: Communicator, pair: Pair, ctx: Context) -> Finding:
        channel = pair.channel
        ends = self._ends(comm, channel)
        assert ends is not None
        src, dst = ends
        loss = any(q.lost for q in (src.queue(True, channel.dst), dst.queue(False, channel.src)))
        odd = odd_one(src, dst, self.pairs.wires.size)
        if not pair.extra:
            by_peers = None if odd is not None else self._odd_among_peers(comm, pair)
            if pair.swapped and _may_go_on(src, dst):
                odd, by_peers, loss = None, None, True  # it may be one that was left out
            named = odd or by_peers
            f = make.differing(comm, pair, ctx, named.endpoint if named else None, loss)
            if by_peers is not None and not loss:
                f.details["confidence"] = "inferred"  # who of the two, others only suggest
            return f
        has, lacks = (src, dst) if pair.extra[0].send else (dst, src)
        culprit = None if odd is None else odd.endpoint
        if culprit is None:
            culprit = odd_of(comm, self.sides, self.pairs, has, lacks.endpoint, pair.extra[0])
        return make.left_over(
            comm,
            ctx,
            has.endpoint,
            lacks.endpoint,
            pair.extra,
            culprit,
            loss=loss,
            shifted=True,
            provisional=pair.provisional,
            several_fit=pair.several_fit,
            position=pair.position,
        )

    def _odd_among_peers(self, comm: Communicator, pair: Pair) -> Side | None:
        """The side that passed what no other rank passed at this ordinal, when most agree."""
        c = pair.channel
        sent, awaited = (self._bytes(op.sig) for op in (pair.send, pair.recv))
        most = self._usual_at(comm, c, pair.send.ord)
        if most is None or most not in (sent, awaited) or sent == awaited:
            return None
        if pair.swapped:
            # The next one has to say the same: else it is a call left out, and they go on alike.
            then = self._usual_at(comm, c, pair.send.ord + 1)
            if then != (sent if most == awaited else awaited):
                return None
        ends = self._ends(comm, c)
        return None if ends is None else ends[1] if most == sent else ends[0]

    def _usual_at(self, comm: Communicator, c: Channel, order: int) -> int | None:
        """Bytes of most operations of other directions and pairs at an ordinal."""
        own = {(c.src, 1, c.dst), (c.dst, 0, c.src)}
        others: list[int] = []
        for e in comm.endpoints.values():
            side = self.sides.get((e.info.source, e.info.id))
            if side is None or e.comm_rank is None:
                continue
            rows = side.recent()
            rows = rows[rows[:, ORD] == order]
            sizes = self.pairs.wires.size(rows[:, SIG]).tolist()
            for row, n in zip(rows.tolist(), sizes, strict=True):
                if (e.comm_rank, row[SEND], row[PEER]) not in own:
                    others.append(n)
        return usual(others)

    def _bytes(self, sig: int) -> int:
        return int(self.pairs.wires.size(np.array([sig], np.int64))[0])

    # -- left over -----------------------------------------------------------

    def note_left_over(
        self, comm: Communicator, ctx: Context, channels: list[Channel]
    ) -> list[Channel]:
        """Facts of channels whose ends are both done; returns the other channels."""
        left: list[Channel] = []
        for channel in channels:
            ends = self._ends_known(comm, channel)
            done = ends is not None and all(orderly(e) for e in ends)
            if ends is None or not done or not self._left_over(comm, ctx, channel, ends):
                left.append(channel)
        return left

    @staticmethod
    def _ends_known(comm: Communicator, channel: Channel) -> tuple[Endpoint, Endpoint] | None:
        src, dst = (comm.endpoints.get(r) for r in (channel.src, channel.dst))
        if src is None or dst is None or not (src.info.from_start and dst.info.from_start):
            return None
        return src, dst

    def _left_over(
        self, comm: Communicator, ctx: Context, channel: Channel, ends: tuple[Endpoint, Endpoint]
    ) -> bool:
        """One side made more, and nobody was held by it long enough for a finding of its own."""
        sides = [self.sides.get((e.info.source, e.info.id)) for e in ends]
        lanes = ((True, channel.dst), (False, channel.src))
        queues = [
            None if s is None else s.queues.get(lane) for s, lane in zip(sides, lanes, strict=True)
        ]
        at = next((i for i, q in enumerate(queues) if q is not None and q.n), None)
        if at is None:
            return False
        has, queue = sides[at], queues[at]
        assert has is not None and queue is not None
        stop = min(x.t for x in (has.endpoint.end, has.endpoint.process.end) if x is not None)
        first = queue.at(queue.first)
        assert first is not None
        if not first.send and stop - first.t >= ctx.options.missing_after:
            return False
        other, theirs = ends[1 - at], sides[1 - at]
        if theirs is not None and theirs.hole(lanes[1 - at]):
            return False  # it may still be told, or is counted as lost soon
        if unseen(other, sides[1 - at], lanes[1 - at]):
            # Events that were lost explain it, and nobody waited for it.
            queue.give_up()
            self.pairs.open.pop(channel, None)
            return True
        ops = tuple(op for i in range(min(queue.n, 8)) if (op := queue.at(queue.first + i)))
        culprit = odd_of(comm, self.sides, self.pairs, has, other, first)
        f = make.left_over(
            comm, ctx, has.endpoint, other, ops, culprit, loss=False, position=queue.first
        )
        self._note(channel, f)
        queue.give_up()
        self.pairs.open.pop(channel, None)
        return True


def _may_go_on(src: Side, dst: Side) -> bool:
    """Whether more may have been sent or received than is seen."""
    ranks = src.endpoint.comm_rank or 0, dst.endpoint.comm_rank or 0
    lanes = ((src, (True, ranks[1])), (dst, (False, ranks[0])))
    return any(unseen(side.endpoint, side, lane) for side, lane in lanes)
