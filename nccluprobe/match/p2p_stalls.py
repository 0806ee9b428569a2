"""Waits in operations that both hosts have queued: streams that hold up each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nccluprobe.match import p2p_orders as make
from nccluprobe.match.absence import Context, waiting_until
from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.hosts import Host, host_of
from nccluprobe.match.p2p_device import Device, Stall
from nccluprobe.match.p2p_faults import Faults
from nccluprobe.match.p2p_habit import odd_one
from nccluprobe.match.p2p_pair import At, Pairs
from nccluprobe.match.p2p_queue import Side
from nccluprobe.match.waits import Wait


@dataclass
class Stalls:
    """What stands at the heads of the streams of ranks that have fallen silent."""

    #: id of a side -> call_idx of operations at the head of a stream; None: nobody is silent.
    heads: dict[int, frozenset[int]] | None = None
    #: id of an endpoint -> endpoints that its streams stand behind.
    behind: dict[int, list[Endpoint]] = field(default_factory=dict)
    #: ids of endpoints with operations at a head that somebody has not made.
    lacking: set[int] = field(default_factory=set)
    waits: list[Wait] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def only_behind(self, e: Endpoint, own: Endpoint) -> bool:
        """Whether an endpoint's streams stand behind another's, at last, and behind no more."""
        seen: set[int] = {id(e)}
        edge, reached = [e], False
        while edge:
            at = edge.pop()
            if at is own:
                reached = True
                continue
            if id(at) in self.lacking:
                return False
            for x in self.behind.get(id(at), ()):
                if id(x) not in seen:
                    seen.add(id(x))
                    edge.append(x)
        return reached


def quiet_for(e: Endpoint, ctx: Context) -> int:
    """How long an endpoint's process has not called NCCL, ns."""
    return waiting_until(e, ctx) - max(e.process.last_activity, e.last_t)


def stalls_of(
    comms: Sequence[Communicator],
    context: Callable[[Communicator], Context],
    pairs: Pairs,
    sides: Mapping[At, Side],
    faults: Faults,
) -> Stalls:
    """Run the streams when somebody is silent."""
    contexts = {c.key: context(c) for c in comms}
    if not any(_is_quiet(e, contexts[c.key]) for c in comms for e in c.endpoints.values()):
        return Stalls()
    device = Device(comms, sides, pairs.wires.size, faults.at)
    found = Stalls(heads={})
    assert found.heads is not None
    stalls = device.stalls()
    for stall in stalls:
        mine = frozenset(op.idx for side, op, _ in stall.node.ops if side is stall.side)
        key = id(stall.side)
        found.heads[key] = found.heads.get(key, frozenset()) | mine
        if stall.missing or stall.fault is not None:
            found.lacking.add(id(stall.side.endpoint))
        found.behind.setdefault(id(stall.side.endpoint), []).extend(stall.behind)
    of = {e: c for c in comms for e in map(id, c.endpoints.values())}
    causes: dict[int, Finding] = {}
    for members in device.deadlocks():
        f = _deadlock(members, of, contexts, pairs)
        if f is not None:
            found.findings.append(f)
            causes |= {id(s.node): f for s in members}
    for stall in stalls:
        e = stall.side.endpoint
        comm = of[id(e)]
        cause = stall.fault or causes.get(id(stall.node))
        if stall.missing or not _is_quiet(e, contexts[comm.key]):
            continue
        if stall.behind or cause is not None:
            found.waits.append(_wait(comm, stall, cause))
    return found


def _is_quiet(e: Endpoint, ctx: Context) -> bool:
    return quiet_for(e, ctx) >= ctx.options.missing_after


def _wait(comm: Communicator, stall: Stall, cause: Finding | None) -> Wait:
    e, node = stall.side.endpoint, stall.node
    return Wait(
        comm=comm,
        label=make.stalled(stall),
        first=node.t,
        entered=(e,),
        absent=tuple(stall.behind) or (e,),
        at=(-2, e.comm_rank or 0, node.idx),
        cause=cause,
    )


def _deadlock(
    members: list[Stall],
    of: Mapping[int, Communicator],
    contexts: Mapping[CommKey, Context],
    pairs: Pairs,
) -> Finding | None:
    comm = of[id(members[0].side.endpoint)]
    ctx = contexts[comm.key]
    ends = [s.side.endpoint for s in members]
    if any(e.process.ended or e.end is not None or host_of(e) is Host.AWAY for e in ends):
        return None
    quiet = min(quiet_for(e, contexts[of[id(e)].key]) for e in ends)
    if quiet < ctx.options.missing_after:
        return None
    odd = None
    if len(members) == 2:
        a, b = (s.side for s in members)
        odd = odd_one(a, b, pairs.wires.size)
    return make.deadlock(comm, ctx, members, odd.endpoint if odd else None, quiet)
