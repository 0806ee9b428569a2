"""Findings of orders that exclude each other, in hosts and in streams."""

from __future__ import annotations

from nccluprobe.match import tense
from nccluprobe.match.absence import Context
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.device_lack import Stall
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.names import capital, named
from nccluprobe.match.p2p_finding import WORD, base, made
from nccluprobe.match.p2p_units import Unit


def inversion(
    comm: Communicator, ctx: Context, u: Unit, v: Unit, odd: Endpoint | None, loss: bool
) -> Finding:
    """Two peers that each wait in what the other must answer first."""
    hard = u.held is not None and v.held is not None
    sides = [_side(x) for x in (u, v)]
    details = base(
        comm,
        max(u.t, v.t),
        ctx.now,
        loss,
        api="ncclGroupEnd" if u.group else u.ops[0].text.split()[0],
        entered_comm_ranks=sorted(r for x in (u, v) if (r := x.endpoint.comm_rank) is not None),
        reason="orders_exclude",
        confidence="reduced" if loss else "observed" if hard else "inferred",
        cycle=[
            {
                "comm_uid_hash": comm.key.hash,
                "instance": comm.key.instance,
                "comm_seq": None,
                "call": x.label,
                "entered_comm_ranks": [x.endpoint.comm_rank],
                "missing_comm_ranks": [y.endpoint.comm_rank],
            }
            for x, y in ((u, v), (v, u))
        ],
    )
    text = f"On communicator {comm.label}, {sides[0]} and {sides[1]}: each needs the other first."
    if odd is not None:
        text += f" {capital(named([odd]))} did it in another order before."
    details["summary"] = text
    return made(
        comm,
        ctx,
        "p2p_order_inversion",
        (u.endpoint.comm_rank, u.ops[0].position, v.endpoint.comm_rank, v.ops[0].position),
        details,
        error=hard and not loss,
        role="root_cause",
        culprits=() if odd is None else (odd,),
        waiters=(u.endpoint, v.endpoint),
    )


def _side(u: Unit) -> str:
    it = tense.of([u.endpoint])
    held = f"{it.be} inside" if u.held is not None else f"{it.wait} in"
    return f"{named([u.endpoint])} {held} {u.label}"


def deadlock(
    comm: Communicator, ctx: Context, stalls: list[Stall], odd: Endpoint | None, quiet: int
) -> Finding:
    """Ranks whose streams hold up each other: all calls are made, in orders that exclude."""
    members = [s.endpoint for s in stalls]
    ranks = sorted({r for e in members if (r := e.comm_rank) is not None})
    first = max(s.node.t for s in stalls)
    details = base(
        comm,
        first,
        first + quiet,
        loss=False,
        api=next(WORD[p.send][0] for s in stalls for p in s.parts if p.message is not None),
        entered_comm_ranks=ranks,
        reason="orders_exclude",
        confidence="inferred",
        cycle=[
            {
                "comm_uid_hash": s.parts[0].comm.key.hash,
                "instance": s.parts[0].comm.key.instance,
                "comm_seq": None,
                "call": stalled(s),
                "entered_comm_ranks": [s.endpoint.comm_rank],
                "missing_comm_ranks": sorted({p.rank for n in s.lack.behind for p in n.parts}),
            }
            for s in stalls[:16]
        ],
    )
    sides = "; ".join(f"{named([s.endpoint])} in {stalled(s)}" for s in stalls[:4])
    more = "" if len(stalls) <= 4 else f"; and {len(stalls) - 4} more"
    hold = "hold" if tense.of(members).fate is None else "held"
    text = (
        f"The streams of {len(ranks)} ranks of communicator {comm.label} {hold} up each other: "
        f"{sides}{more}. Each has queued what the next one needs behind it."
    )
    if odd is not None:
        text += f" {capital(named([odd]))} did it in another order before."
    details["summary"] = text
    return made(
        comm,
        ctx,
        "p2p_order_inversion",
        ("streams", *((s.endpoint.comm_rank, s.node.idx) for s in stalls[:4])),
        details,
        error=quiet >= ctx.options.error_after,
        role="root_cause",
        culprits=() if odd is None else (odd,),
        waiters=members,
    )


def stalled(s: Stall) -> str:
    """For people: what stands at the head of a stream."""
    one = s.parts[0]
    if one.message is None:
        return f"call #{one.comm.seq(one.slot)}"
    name, word = WORD[one.send]
    more = f" and {len(s.parts) - 1} more in a group" if len(s.parts) > 1 else ""
    return f"{name} #{one.message[2]} {word} rank {one.peer}{more}"
