"""Sends and receives: first in, first out per communicator, source and destination."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nccluprobe.match import device_ran
from nccluprobe.match import model as m
from nccluprobe.match.absence import Context
from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.crashed import broken_off_at
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.options import Options
from nccluprobe.match.p2p_behind import halves_behind
from nccluprobe.match.p2p_faults import Faults
from nccluprobe.match.p2p_fill import Filled, fill
from nccluprobe.match.p2p_gone import unreceived
from nccluprobe.match.p2p_judge import Judge
from nccluprobe.match.p2p_misplaced import misplaced
from nccluprobe.match.p2p_pair import Channel, Pairs
from nccluprobe.match.p2p_past import Heads, note_crossed, note_skipped
from nccluprobe.match.p2p_queue import Lane, Side
from nccluprobe.match.program import Programs, out_of_place
from nccluprobe.match.signature import SignatureTable
from nccluprobe.match.stalls import Stalls, stalls_of
from nccluprobe.match.waits import Wait

#: An endpoint by its source and the communicator's id there.
At = tuple[int, int]


class P2P:
    """All sends and receives of an analysis that have no partner so far."""

    def __init__(self, options: Options, table: SignatureTable) -> None:
        self.options, self.table = options, table
        self.sides: dict[At, Side] = {}
        self.pairs = Pairs(options, table)
        self.faults = Faults(self.pairs, self.sides)
        #: What holds now, by the last ``judge``.
        self.findings: list[Finding] = []
        #: The run of the devices, by the last ``judge``.
        self.stalls = Stalls()
        #: Sends that ranks which crashed have not received, by the last ``judge``.
        self.unreceived: list[Wait] = []
        self._of_source: dict[int, list[Side]] = {}
        self._fresh: dict[At, None] = {}

    # -- feeding -----------------------------------------------------------

    def _side(self, e: Endpoint) -> Side:
        at = (e.info.source, e.info.id)
        found = self.sides.get(at)
        if found is None:
            found = self.sides[at] = Side(e)
            self._of_source.setdefault(at[0], []).append(found)
        self._fresh[at] = None
        return found

    def take(self, e: Endpoint, b: m.P2PBatch) -> None:
        """Take finished sends and receives of an endpoint."""
        if len(b):
            self._side(e).take(b)

    def take_inside(self, e: Endpoint, call: m.Enter) -> None:
        """Take one that is still inside."""
        self._side(e).take_inside(call)

    def completed(self, e: Endpoint, c: m.Completed) -> None:
        """Operations are known to be complete on the endpoint's device."""
        for send, peer, order in c.p2p:
            queue = self._side(e).queue(send, peer)
            queue.complete = max(queue.complete, order)

    def groups_ended(self, source: int, closed: dict[int, bool]) -> None:
        """Groups of a process have ended, or are at their end."""
        for side in self._of_source.get(source, ()):
            if closed or side.queued:
                side.groups_ended(closed)
                self._touch(side)

    def covered(self, source: int, through: int) -> None:
        """All calls of a process that entered before ``through`` are known."""
        for side in self._of_source.get(source, ()):
            if side.queued:
                side.covered(through)
                self._touch(side)

    def _touch(self, side: Side) -> None:
        info = side.endpoint.info
        self._fresh[info.source, info.id] = None

    def queued(self, source: int) -> bool:
        """Whether a process has operations whose group's end is not known."""
        return any(s.queued for s in self._of_source.get(source, ()))

    def forget(self, at: At) -> None:
        """Drop an endpoint."""
        side = self.sides.pop(at, None)
        if side is not None:
            self.pairs.forget(side)
            self._of_source[at[0]].remove(side)
            self._fresh.pop(at, None)

    def settle(
        self,
        comms: Mapping[CommKey, Communicator],
        home: Callable[[At], Communicator | None],
        safe_time: int,
    ) -> None:
        """Pair what can be paired."""
        fresh, self._fresh = self._fresh, {}
        for at in fresh:
            side = self.sides.get(at)
            if side is None:
                continue
            comm = home(at)
            if comm is None or comm.ambiguous:
                side.limit()
                continue
            lanes, side.fresh = side.fresh, {}
            self.pairs.pair_all(comm, side, lanes, self.sides, safe_time)
            if any(self._alone(comm, *lane) for lane in lanes):
                # Its peers may turn up: what is older than all that is read is dropped then.
                side.fresh |= {lane: None for lane in lanes if self._alone(comm, *lane)}
                self._fresh[at] = None
        for key, rank, came, last in self.pairs.waited:
            if (waiting := comms.get(key)) is not None and rank in waiting.endpoints:
                waiting.endpoints[rank].process.note_wait(came, last)
        self.pairs.waited.clear()

    @staticmethod
    def _alone(comm: Communicator, send: bool, peer: int) -> bool:
        return 0 <= peer < comm.key.nranks and peer not in comm.endpoints

    # -- judging -----------------------------------------------------------

    def judge(
        self,
        comms: Mapping[CommKey, Communicator],
        context: Callable[[Communicator], Context],
        final: bool,
        known: Sequence[Wait] = (),
        disputed: frozenset[CommKey] = frozenset(),
        orders: Sequence[Finding] = (),
    ) -> list[Wait]:
        """What endpoints wait in; ``findings`` holds what is not one of their findings.

        ``known``: waits in collectives; ``disputed``: communicators whose members
        differ in their calls; ``orders``: inversions that are known.
        """
        filled = self._fill(comms, context)
        by_comm: dict[CommKey, list[Channel]] = {}
        for channel in (*self.pairs.open, *self.pairs.disputed):
            by_comm.setdefault(channel.comm, []).append(channel)
        current: list[Finding] = []
        waits: list[Wait] = []
        for key, channels in sorted(by_comm.items()):
            comm = comms.get(key)
            if comm is None or comm.ambiguous:
                continue
            ctx = context(comm)
            current += self.faults.disputes(comm, ctx, sorted(set(channels)), final)
        self.faults.note_decided(comms, context)
        self.stalls = stalls = self.run_devices(comms, context, known, disputed, orders)
        heads = Heads(stalls.stalls, self.sides, comms.values())
        behind = halves_behind(stalls, context, heads, self.pairs.wires.size)
        current += [*stalls.findings, *behind]
        judges: list[Judge] = []
        self.unreceived = []
        for key, channels in sorted(by_comm.items()):
            comm = comms.get(key)
            if comm is None or comm.ambiguous:
                continue
            ctx = context(comm)
            still = [c for c in sorted(set(channels)) if c in self.pairs.open]
            still = self.faults.note_left_over(comm, ctx, still)
            self.unreceived += unreceived(comm, still, self.sides)
            faults = self.faults.of_channel
            judges.append(
                Judge(comm, ctx, still, self.pairs, self.sides, faults, stalls, heads, filled)
            )
        units = [u for j in judges for u in j.units]
        heads.strays = out_of_place(known, units, Programs(comms.values(), self.sides))
        explained = misplaced(judges)
        for judge in judges:
            judge.run(explained)
            waits += judge.waits
            current += judge.findings
            current += [w.finding for w in judge.waits if w.finding is not None]
        note_skipped(known, waits, heads)
        note_crossed(known, waits)
        self.findings = [*current, *self.faults.findings]
        return waits + stalls.attach([*known, *waits], context)

    def awaited(self, comm: Communicator, e: Endpoint) -> dict[Lane, int]:
        """How many sends and receives of an endpoint its peers have made the other half of."""
        found: dict[Lane, int] = {}
        mine, rank = self.sides.get((e.info.source, e.info.id)), e.comm_rank
        for peer, x in comm.endpoints.items():
            side = self.sides.get((x.info.source, x.info.id))
            if side is None or rank is None:
                continue
            for send in (False, True):
                theirs = side.queues.get((not send, rank))
                own = None if mine is None else mine.queues.get((send, peer))
                n = (0 if theirs is None else theirs.end) - (0 if own is None else own.end)
                if n > 0:
                    found[send, peer] = n
        return found

    def suppose(self, e: Endpoint, awaited: dict[Lane, int], t: int) -> None:
        """Take lost operations of an endpoint that its peers wait for."""
        side = self._side(e)
        for lane, n in awaited.items():
            side.suppose(lane, n, t)

    def _fill(
        self,
        comms: Mapping[CommKey, Communicator],
        context: Callable[[Communicator], Context],
    ) -> Filled:
        """Put in what was lost."""
        by_comm: dict[CommKey, list[Channel]] = {}
        for channel in self.pairs.open:
            by_comm.setdefault(channel.comm, []).append(channel)
        found = Filled()
        for key, channels in sorted(by_comm.items()):
            comm = comms.get(key)
            if comm is None or comm.ambiguous:
                continue
            if not any(e.process.lost for e in comm.endpoints.values()):
                continue
            before = context(comm).now - self.options.missing_after
            here = fill(comm, sorted(channels), self.sides, self.pairs.wires.size, before)
            found.lacking |= here.lacking
            found.short |= here.short
            for channel in dict.fromkeys(here.changed):
                src, dst = (comm.endpoints[r] for r in (channel.src, channel.dst))
                sends = self.sides[src.info.source, src.info.id].queue(True, channel.dst)
                recvs = self.sides[dst.info.source, dst.info.id].queue(False, channel.src)
                self.pairs.pair(channel, sends, recvs)
        return found

    def run_devices(
        self,
        comms: Mapping[CommKey, Communicator],
        context: Callable[[Communicator], Context],
        known: Sequence[Wait],
        disputed: frozenset[CommKey] = frozenset(),
        orders: Sequence[Finding] = (),
    ) -> Stalls:
        """What stands at the heads of streams, when somebody waits or is silent."""
        mine = [c for _, c in sorted(comms.items()) if not c.ambiguous]
        if all(w.finding is None for w in known):
            # Who crashed or aborted may have done so in a call that all have made.
            broken_off = any(
                broken_off_at(e) is not None for c in mine for e in c.endpoints.values()
            )
            if not (broken_off or self._somebody_quiet()):
                if any(
                    2 * (context(w.comm).now - w.first) > self.options.missing_after for w in known
                ):
                    # So that little is left to do when the limit is over.
                    device_ran.note_ended(
                        mine,
                        self.sides,
                        self.pairs.wires.size,
                        self.faults.at,
                        self.table,
                        disputed,
                    )
                return Stalls()
            # A send or receive without its partner may stand behind any other call.
            if not (broken_off or self.pairs.open):
                mine = [c for c in mine if self._has_sides(c)]
        return stalls_of(
            mine,
            context,
            self.pairs,
            self.sides,
            self.faults,
            self.table,
            disputed,
            orders,
        )

    def _somebody_quiet(self) -> bool:
        """Whether a process that sends and receives has not called NCCL for long."""
        processes = [s[0].endpoint.process for s in self._of_source.values() if s]
        newest = max((p.newest for p in processes), default=0)
        limit = newest - self.options.missing_after
        return any(max(p.last_activity, p.last_call) <= limit for p in processes)

    def _has_sides(self, comm: Communicator) -> bool:
        return any((e.info.source, e.info.id) in self.sides for e in comm.endpoints.values())

    def holds(self, comm: Communicator) -> bool:
        """Whether something about a communicator is still told."""
        return any(f.key[2:5] == comm.key and f.state == "open" for f in self.findings) and any(
            c.comm == comm.key for c in self.pairs.open
        )
