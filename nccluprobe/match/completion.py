"""What completion tells, where a source sees it (flight recorder, Inspector).

A call that others have completed long ago and one rank has not: its device, or
its view of it, is broken.  A call that all have entered and nobody has completed
holds its members as much as one that lacks somebody.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from nccluprobe.match import tense
from nccluprobe.match.absence import Context
from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.details import lost_any, on_communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding, seconds
from nccluprobe.match.names import capital, everyone, in_job, named, unobserved_text
from nccluprobe.match.process import Actor, Who
from nccluprobe.match.signature import SignatureTable
from nccluprobe.match.status import coverage_of, rank_status
from nccluprobe.match.waits import Wait, entry_of
from nccluprobe.plural import plural

#: Every member needs every other: nobody can complete a later one without all.
_SYNCHRONIZING = frozenset(
    {"ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclAlltoAll", "barrier"}
)


#: First of ``Wait.at``: a send and its receive that are both posted.
_POSTED = -2


class _Behind(NamedTuple):
    comm: Communicator
    endpoint: Endpoint
    by: int  # completed calls that its peers are ahead
    slot: int
    since: int
    peers: tuple[int, ...]


def _seen(comm: Communicator) -> list[Endpoint]:
    if comm.ambiguous:
        return []
    members = [e for e in comm.members() if e.done is not None]
    for e in members:
        e.note_oldest()
    return members


def _furthest(members: Iterable[Endpoint]) -> int:
    return max((e.done for e in members if e.done is not None), default=0)


def pending_waits(
    comms: Iterable[Communicator], waits: list[Wait], findings: list[Finding]
) -> list[Wait]:
    """Calls that all have entered and nobody has completed, as nodes of the graph.

    That they are not complete is seen, or all members are still inside (findings
    that say so).  They lack the members whose stream is held up by something
    older; when there is none, they lack nobody.
    """
    inside = {
        CommKey(f.comm_uid_hash or "", f.details["instance"], f.details["expected_nranks"]): f
        for f in findings
        if f.hang_type == "collective_all_ranks_stuck"
    }
    found: list[_Pending] = []
    for comm in comms:
        finding = inside.get(comm.key)
        since = _inside_since(comm) if finding is not None else _pending_since(comm)
        if since is not None:
            members = comm.members()
            slot = _furthest(members) if finding is None else members[0].entered - 1
            w = Wait(
                comm=comm,
                label=f"call #{comm.seq(slot)}, which all have entered",
                first=min(since),
                entered=tuple(members),
                absent=(),
                finding=finding,
                at=(slot, 1),
                seq=comm.seq(slot),
            )
            found.append(_Pending(w, since))
        found += _pending_transfers(comm)
    sits: dict[Actor, list[tuple[int, Wait]]] = {}
    for w in waits:
        for e in w.entered:
            sits.setdefault(e.actor, []).append((entry_of(w, e), w))
    for p in found:
        for e, t in zip(p.wait.entered, p.since, strict=True):
            sits.setdefault(e.actor, []).append((t, p.wait))
    for p in found:
        w = p.wait
        w.absent = tuple(
            e
            for e, own in zip(w.entered, p.since, strict=True)
            if any(t < own and x is not w for t, x in sits[e.actor])
        )
    return [p.wait for p in found]


class _Pending(NamedTuple):
    wait: Wait
    since: list[int]  # entry per member


def _pending_transfers(comm: Communicator) -> list[_Pending]:
    """Sends that meet a receive, of which neither is complete: the oldest per pair."""
    found: list[_Pending] = []
    for rank, e in comm.endpoints.items():
        for (send, peer), lane in e.posted.items():
            other = comm.endpoints.get(peer)
            if not send or not lane or other is None or other is e:
                continue
            back = other.posted.get((False, rank), {})
            order = min(lane)
            if order in back:
                since = [lane[order], back[order]]
                label = f"ncclSend #{order} from rank {rank} to rank {peer}, which both have posted"
                at = (_POSTED, rank, peer, order)
                w = Wait(comm, label, min(since), (e, other), (), at=at, api="ncclSend")
                found.append(_Pending(w, since))
    return found


def _pending_since(comm: Communicator) -> list[int] | None:
    """Per member, since when the next call that nobody has completed is pending."""
    members = _seen(comm)
    if len(members) < 2 or len(members) < len(comm.members()):
        return None
    if min(e.entered for e in members) <= _furthest(members):
        return None
    since = [e.oldest[1] for e in members if e.oldest is not None]
    return since if len(since) == len(members) else None


def _inside_since(comm: Communicator) -> list[int] | None:
    times = [e.inside(other=False) for e in comm.members()]
    return None if None in times else [t for t in times if t is not None]


def judge(
    comms: Iterable[Communicator], context: Callable[[Communicator], Context]
) -> list[Finding]:
    """Ranks on which calls do not complete that others have gone far past."""
    behind: dict[Who, list[_Behind]] = {}
    for comm in comms:
        members = _seen(comm)
        done = _furthest(members)
        short = [e for e in members if (e.done or 0) < min(done, e.entered)]
        if 2 * len(short) > len(members) > 2 and len({e.done for e in short}) == 1:
            continue  # level, and more: it is the others that stand out, seen later or aborted
        for e in short:
            own = e.done
            if own is None or e.oldest is None:
                continue
            ctx = context(comm)
            # Of all that others have completed, what they could not complete without it.
            by = _took_part(e, min(done, e.entered), ctx.table) - own
            if by <= 0 or ctx.now - e.oldest[1] < ctx.options.missing_after:
                continue
            peers = tuple(
                x.comm_rank for x in members if x.comm_rank is not None and x.done == done
            )
            behind.setdefault(e.process.who, []).append(
                _Behind(comm, e, by, own, e.oldest[1], peers)
            )
    found = []
    for cases in behind.values():
        worst = max(cases, key=lambda b: (b.by, -b.since, b.comm.key))
        # One call behind in one place may be a victim of a member that died in its midst:
        # not if all others have completed the call.
        alone = worst.comm.complete_view and len(worst.peers) == worst.comm.key.nranks - 1
        if worst.by >= 2 or len(cases) >= 2 or alone:
            found.append(_finding(worst, len(cases), context(worst.comm)))
    return found


def _took_part(e: Endpoint, bound: int, table: SignatureTable) -> int:
    """The slot after the newest synchronizing call below ``bound`` that it has not completed."""
    held = [(i, e.sig_at(i)) for i in range(max(e.done or 0, e.dropped), bound)]
    slots = [i for i, sig in (*e.undone, *held) if sig is not None and _is_sync(sig, table)]
    return max((i for i in slots if (e.done or 0) <= i < bound), default=-1) + 1


def _is_sync(sig: int, table: SignatureTable) -> bool:
    return sig >= 0 and table[sig].api in _SYNCHRONIZING


def not_complete(w: Wait, ctx: Context) -> Finding | None:
    """A finding for a call that all have entered long ago and nobody has completed.

    None where completion is not seen, or it has not been long.
    """
    comm, members = w.comm, list(w.entered)
    oldest = [e.oldest for e in members if e.done is not None and e.oldest is not None]
    newest = max((t for _, t, _ in oldest), default=0)
    waited = ctx.now - newest
    if w.seq is None or len(oldest) < len(members) or waited < ctx.options.missing_after:
        return None
    if len(members) < len(comm.members()):
        return None  # some of them stand in something else
    signature = ctx.table[oldest[0][2]]
    n, they = len(members), tense.of(members)
    one = they.one
    f = _stuck_finding(("not complete", *comm.key, w.seq), w, members, signature.api, newest, ctx)
    f.details["signature"] = signature.text()
    f.details["summary"] = (
        f"{everyone(n, comm.label, comm.complete_view)} entered {signature.api} #{w.seq}, and "
        f"{f'{one.have} not' if n == 1 else f'none of them {one.have}'} completed it for "
        f"{seconds(waited):.1f} s{they.until}: {_why_not(comm, they)}."
    )
    return f


def _stuck_finding(
    key: tuple[Hashable, ...],
    w: Wait,
    members: Sequence[Endpoint],
    api: str | None,
    newest: int,
    ctx: Context,
) -> Finding:
    """``members`` have all come, the last at ``newest``, unix ns; it lacks its summary."""
    comm, waited = w.comm, ctx.now - newest
    ranks = [e.comm_rank for e in members if e.comm_rank is not None]
    return Finding(
        key=key,
        hang_type="collective_all_ranks_stuck",
        run_id=ctx.run_id,
        comm_uid_hash=comm.key.hash,
        comm_seq=w.seq,
        detected_at=ctx.now,
        details={
            **on_communicator(
                comm,
                api,
                ranks,
                "all_inside",
                "observed" if comm.complete_view else "reduced",
                waited_s=seconds(waited),
                lossy=lost_any(members),
            ),
            "signature": None,
            "first_entered_unix_ns": w.first,
            "unobserved_comm_ranks": len(comm.unobserved()),
        },
        severity="error" if waited >= ctx.options.error_after else "notice",
        role="root_cause",
        job=ctx.job,
        coverage=coverage_of(comm, ctx.now, ctx.options.silent_after),
        since=newest,
        waiters=tuple(e.process.who for e in members),
    )


def transfers_not_complete(
    waits: Iterable[Wait], context: Callable[[Communicator], Context]
) -> list[Finding]:
    """A finding for the oldest send that its receive meets, with nothing before either of them.

    Both have been there for long, as their dumps show, and are not complete.
    """
    mine = [w for w in waits if w.at[:1] == (_POSTED,) and len(w.at) == 4 and not w.absent]
    if not mine:
        return []
    w = min(mine, key=lambda w: w.order)
    comm, ctx = w.comm, context(w.comm)
    _, sender, receiver, order = w.at
    they = tense.of(w.entered)
    newest = max(e.posted[x][order] for e, x in zip(w.entered, _lanes(w), strict=True))
    waited = ctx.now - newest
    if waited < ctx.options.missing_after:
        return []
    key = ("not complete", *comm.key, sender, receiver, order)
    f = _stuck_finding(key, w, w.entered, w.api, newest, ctx)
    f.details["summary"] = (
        f"{capital(named(w.entered))} {they.have} both posted {w.api} #{order} from rank {sender} "
        f"to rank {receiver} of communicator {comm.label}, and it {they.one.be} not complete for "
        f"{seconds(waited):.1f} s{they.until}: {_why_not(comm, they)}."
    )
    return [f]


def _lanes(w: Wait) -> tuple[tuple[bool, int], tuple[bool, int]]:
    """Which lane of each end of a send it is in."""
    return (True, w.at[2]), (False, w.at[1])


def _why_not(comm: Communicator, they: tense.Tense) -> str:
    """What keeps a call that all observed members have entered, as far as is known."""
    others = len({*comm.unobserved(), *comm.unwatched})
    if not others:
        return f"nobody {they.one.be} missing; {they.not_going_on}"
    return (
        f"{unobserved_text(others, comm.key.nranks)}, and may not have come; "
        f"if all have, {they.not_going_on}"
    )


def _finding(b: _Behind, places: int, ctx: Context) -> Finding:
    comm, e = b.comm, b.endpoint
    rank = e.comm_rank if e.comm_rank is not None else -1
    waited = max(0, ctx.now - b.since)
    signature = ctx.table[e.oldest[2]] if e.oldest is not None else None
    api = signature.api if signature else None
    peers = [x for x in comm.members() if x.comm_rank in b.peers]
    also = f", and so on {places} communicators" if places > 1 else ""
    details: dict[str, Any] = {
        **on_communicator(
            comm,
            api,
            [x.comm_rank for x in comm.members() if x.entered > b.slot],
            "not_complete_here",
            "inferred",
            waited_s=seconds(waited),
            lossy=False,
        ),
        "signature": signature.text() if signature else None,
        "first_entered_unix_ns": b.since,
        "not_complete_comm_ranks": [rank],
        "not_complete_rank_status": [
            rank_status(comm, rank, e, ctx.now, ctx.options.silent_after, "not_complete_here")
        ],
        "complete_comm_ranks": sorted(b.peers),
        "calls_behind": b.by,
        "summary": (
            f"{capital(named([e]))}, {e.process.place()}, has not completed {api} "
            f"#{comm.seq(b.slot)} of communicator {comm.label}, while {in_job(peers)} "
            f"completed {b.by} "
            f"{plural(b.by, 'call')} more{also}: its GPU has failed, or does not report."
        ),
    }
    return Finding(
        key=("completion", e.process.who, *comm.key),
        hang_type="collective_missing_exit",
        run_id=ctx.run_id,
        comm_uid_hash=comm.key.hash,
        comm_seq=comm.seq(b.slot),
        detected_at=ctx.now,
        details=details,
        severity="error",
        role="root_cause",
        job=ctx.job,
        coverage=coverage_of(comm, ctx.now, ctx.options.silent_after),
        since=b.since,
        culprits=(e.process.who,),
        waiters=(e.process.who,),
    )
