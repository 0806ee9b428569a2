"""One fault is far more likely than two: what is sure takes the blame from what is not.

Some rules of sends and receives reason from habits and order: who seems to have
used the wrong peer, or to have left a call out.  Behind a rank that is really
missing, calls stand half made and look the same.  And a rank that is alive and
outside NCCL may wait for its device, which nothing shows.  Where a cause that
is none of these names somebody in the same job, they stay as what was seen, and
name nobody as the cause.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from nccluprobe.match import p2p_supposed
from nccluprobe.match.finding import Finding
from nccluprobe.match.hosts import may_wait
from nccluprobe.match.options import SECOND
from nccluprobe.match.tense import NOT_GOING_ON

#: Reasons of sends and receives that are worked out, not seen.
_GUESSES = frozenset(
    {"wrong_peer", "wrong_communicator", "partner_gone_past", "call_skipped", "call_extra"}
)
#: Reasons with which a rank may wait for its device, or for room in its queue.
_NOT_SHOWN = frozenset(
    {"rank_alive_but_not_entered", "rank_inside_other_call", "call_not_returned"}
)


def _is_guess(f: Finding) -> bool:
    return (
        f.hang_type in ("p2p_unmatched", "p2p_mismatch")
        and f.details.get("reason") in _GUESSES
        and f.details.get("confidence") != "observed"
    )


def _sure(f: Finding) -> set[Hashable]:
    """Culprits that are shown not to come: ended, stopped, or busy with something else."""
    sure: set[int] = set()
    unsure: set[int] = set()  # two hosts, or two containers, may have one pid
    for status in f.details.get("missing_rank_status") or ():
        alive = status["reason"] in _NOT_SHOWN
        main, syscall = status.get("main_thread"), status.get("syscall")
        if status.get("pid"):
            shown = not alive or not may_wait(main, syscall)
            (sure if shown else unsure).add(status["pid"])
    return {who for who in f.culprits if getattr(who, "pid", None) in sure - unsure}


#: Calls that cannot be one: whatever comes after them may stand still.
_DIFFERENCES = frozenset(
    {
        "collective_mismatch",
        "skipped_or_extra_call",
        "p2p_mismatch",
        "p2p_order_inversion",
        "cross_comm_order_inversion",
    }
)
#: A difference explains a wait that began so much later at most: hosts run ahead.
_AFTER = 60 * SECOND


def _is_plain(f: Finding) -> bool:
    """Whether it says only that ranks have not come."""
    return f.hang_type in (
        "collective_missing_enter",
        "p2p_unmatched",
        "comm_ended_under_waiters",
        "comm_init_missing_enter",
    )


def _is_held(f: Finding) -> bool:
    """Whether it says only that a collective does not return, as any does on a full stream."""
    collective = f.hang_type == "collective_missing_exit" or f.comm_seq is not None
    return collective and f.details.get("reason") == "call_not_returned"


def _does_not_return(f: Finding) -> bool:
    """Whether it is of one collective that does not return, whatever its type."""
    return f.comm_seq is not None and f.details.get("reason") == "call_not_returned"


def _is_over_before(f: Finding, cause: Finding) -> bool:
    """Whether all who waited had given it up before a cause came about: it is none of that."""
    states = cause.details.get("missing_rank_status") or ()
    ends = [s["ended_unix_ns"] for s in states if s.get("ended_unix_ns")]
    return f.until is not None and f.until < min([cause.since, *ends])


def _demote(f: Finding, cause: Finding) -> None:
    if _is_over_before(f, cause):
        return
    f.role, f.culprits = "unknown", ()
    f.details["perhaps_of"] = cause.id
    f.details["note"] = f"perhaps a consequence of {cause.id}, which is known for a cause"
    for plain, held_up in NOT_GOING_ON.items():
        if plain in (text := f.details.get("summary") or ""):
            f.details["summary"] = text.replace(plain, held_up)


def temper(findings: Iterable[Finding]) -> None:
    """Take the blame from what is less sure, job by job."""
    findings = list(findings)
    p2p_supposed.settle(findings)
    jobs: dict[str | None, list[Finding]] = {}
    for f in findings:
        # Who came late has come: it is the cause of nothing that stands still.
        late = f.hang_type == "delayed_collective_enter"
        if f.role == "root_cause" and f.state == "open" and not late:
            jobs.setdefault(f.job, []).append(f)
    for causes in jobs.values():
        causes.sort(key=lambda f: (f.since, f.id))
        _gone_past_by_several(causes)
        _at_odds_with_several(causes)
        _guesses(causes)
        _behind_difference(causes)
        _circles_beside_difference(causes)
        _alive_beside_gone(causes)
        _alive_beside_difference(causes)
        _named_by_others(causes)
        _held_before_full_queues(causes)
        _nameless(causes)


def _gone_past_by_several(causes: list[Finding]) -> None:
    """One that several others have gone past is out of step itself: these are not all wrong."""
    peers: dict[tuple[Hashable, ...], set[tuple[Hashable, ...]]] = {}
    past = [f for f in causes if f.details.get("reason") == "partner_gone_past" and _is_guess(f)]
    for f in past:
        peers.setdefault(f.waiters, set()).update(
            (s["host"], s["pid"])
            for s in f.details.get("missing_rank_status") or ()
            if s["reason"] == "partner_gone_past" and s.get("pid")
        )
    for f in past:
        if len(f.waiters) == 1 and len(peers[f.waiters]) > 1:
            f.culprits = f.waiters
            if f.waiter_first is not None:
                f.details["summary"] = f.waiter_first
            f.details["note"] = "several ranks have gone past it: it is the one that is out of step"


def _at_odds_with_several(causes: list[Finding]) -> None:
    """Of pairs of which one rank is wrong in each, the rank that is in all of them."""
    odds = [
        f
        for f in causes
        if f.hang_type == "p2p_unmatched"
        and f.details.get("reason") in ("call_skipped", "call_extra")
        and not f.culprits
        and len(f.waiters) == 2
    ]
    common = set.intersection(*(set(f.waiters) for f in odds)) if odds else set()
    if len(common) != 1:
        return
    for f in odds:
        f.culprits = tuple(common)
        f.details["note"] = "it is at odds with several ranks: it is the one that is out of step"


def _guesses(causes: list[Finding]) -> None:
    known = [f for f in causes if f.culprits and not _is_guess(f)]
    left_out = [f for f in causes if f.culprits and _is_left_out(f)]
    for f in causes:
        if not _is_guess(f):
            continue
        # Who waits behind a half that was left out of a group goes past others' halves, too.
        past = f.details.get("reason") == "partner_gone_past" and f.culprits
        if past and left_out and not set(f.culprits) <= set(left_out[0].culprits):
            _demote(f, left_out[0])
            continue
        # A half that was left out of a group is not explained by one who may only wait.
        sure = [g for g in known if not (_is_left_out(f) and _may_wait(g))]
        if sure and not set(f.culprits) <= set(sure[0].culprits):
            _demote(f, sure[0])


def _is_left_out(f: Finding) -> bool:
    """Whether one is seen to have left out a send or receive, and nothing was lost."""
    sure = f.details.get("confidence") in ("inferred", "observed")
    return f.hang_type == "p2p_unmatched" and f.details.get("reason") == "call_skipped" and sure


def _may_wait(f: Finding) -> bool:
    """Whether whom it blames may only wait for the device."""
    return (_is_plain(f) or _is_held(f)) and not _is_guess(f) and not _sure(f)


def _behind_difference(causes: list[Finding]) -> None:
    """A call that does not complete, and whose members passed different things, or did before."""
    seen = [f for f in causes if f.hang_type in ("collective_mismatch", "skipped_or_extra_call")]
    for f in causes:
        if f.comm_seq is None or f.details.get("reason") not in ("all_inside", "not_complete_here"):
            continue
        for g in seen:
            if g.comm_seq is None or g.comm_uid_hash != f.comm_uid_hash:
                continue
            # The one may have completed it, as it moved less (measured: 2.28), the next not.
            if 0 <= f.comm_seq - g.comm_seq <= 1:
                f.role, f.downstream_of, f.culprits = "downstream", g.id, g.culprits
                break


def _circles_beside_difference(causes: list[Finding]) -> None:
    """Who is named by the shape of a circle of waits is not, beside calls seen to differ."""
    seen = [
        f
        for f in causes
        if f.hang_type in ("collective_mismatch", "skipped_or_extra_call")
        and f.details.get("confidence") == "observed"
        and f.culprits
    ]
    for f in causes:
        confidence = f.details.get("confidence")
        # An absence is inferred where its rank waits itself (or stands beside a crash):
        # lost events would make it reduced.
        inferred = f.hang_type == "collective_missing_enter" and confidence == "inferred"
        if not inferred and ("cycle" not in f.details or confidence == "observed"):
            continue
        near = [g for g in seen if abs(f.since - g.since) <= _AFTER]
        if near and f.culprits and not set(f.culprits) <= set(near[0].culprits):
            _demote(f, near[0])


def _alive_beside_gone(causes: list[Finding]) -> None:
    """Who is gone or held up for sure is the cause, not who is alive and may wait."""
    sure = {f.id: _sure(f) for f in causes if _is_plain(f)}
    first = next((f for f in causes if sure.get(f.id)), None)
    if first is None:
        return
    for f in causes:
        if not f.culprits or f.id not in sure:
            continue
        if sure[f.id]:
            f.culprits = tuple(who for who in f.culprits if who in sure[f.id])
        else:
            _demote(f, first)


def _alive_beside_difference(causes: list[Finding]) -> None:
    """Who may wait for the device is no cause beside calls that keep devices from going on."""
    differences = [f for f in causes if f.hang_type in _DIFFERENCES and _is_fact(f)]
    differences += [f for f in causes if _is_left_out(f) and f.culprits]
    for f in causes:
        if not _may_wait(f) or not f.culprits or f.role != "root_cause":
            continue
        # On one communicator the slots tell: who is missing before the difference is missing.
        near = [
            g
            for g in differences
            if abs(f.since - g.since) <= _AFTER
            and (
                g.comm_uid_hash != f.comm_uid_hash
                or _is_proven(g)
                or _is_left_out(g)
                or (_is_held(f) and _is_before(g, f))
            )
        ]
        if near and not set(f.culprits) <= set(near[0].culprits):
            _demote(f, near[0])


def _held_before_full_queues(causes: list[Finding]) -> None:
    """Who is held in a call is not blamed beside another whose queue may be full.

    What that one has queued hangs for others, too, and their queues fill as well.
    """
    full = [f for f in causes if _does_not_return(f) and not f.culprits]
    for f in causes:
        near = [g for g in full if g.comm_uid_hash != f.comm_uid_hash]
        if near and f.culprits and _does_not_return(f) and f.role == "root_cause":
            _demote(f, near[0])


def _is_before(g: Finding, f: Finding) -> bool:
    return g.comm_seq is not None and f.comm_seq is not None and g.comm_seq < f.comm_seq


def _is_proven(f: Finding) -> bool:
    """Whether it is a circle of hosts that are inside their calls: nobody else made it."""
    return "cycle" in f.details and f.details.get("confidence") == "observed"


def _is_fact(f: Finding) -> bool:
    if f.hang_type == "p2p_order_inversion":
        return f.details.get("confidence") == "observed"
    return not _is_guess(f)


def _nameless(causes: list[Finding]) -> None:
    """What only stands still, beside a cause that names somebody, is no cause of its own."""
    _unsure_beside_orders(causes)
    named = next((f for f in causes if f.role == "root_cause" and f.culprits), None)
    for f in causes:
        if named is None or f.culprits or f.role != "root_cause":
            continue
        inferred = f.details.get("confidence") != "observed"
        if f.hang_type == "collective_all_ranks_stuck" or (
            f.hang_type == "p2p_order_inversion" and inferred
        ):
            _demote(f, named)


def _unsure_beside_orders(causes: list[Finding]) -> None:
    """Who may wait for the device, and is named only if lost calls were made, beside two orders.

    That streams hold up each other is seen of these without a loss.
    """
    orders = [
        f
        for f in causes
        if f.hang_type == "p2p_order_inversion" and f.details.get("confidence") != "reduced"
    ]
    for f in causes if orders else ():
        if f.culprits and f.supposes and f.role == "root_cause" and _may_wait(f):
            _demote(f, orders[0])


def _named_by_others(causes: list[Finding]) -> None:
    """Of several that did not come, those that others miss for themselves.

    Who is free to come stays named: what keeps its peers does not keep it.
    """
    for f in causes:
        if len(f.culprits) < 2 or not _is_plain(f) or f.role != "root_cause":
            continue
        for g in causes:
            if g is f or g.role != "root_cause" or not g.culprits:
                continue
            if not set(g.culprits) < set(f.culprits):
                continue
            if free := tuple(who for who in f.culprits if who in f.free - set(g.culprits)):
                f.culprits = free
            else:
                f.role, f.downstream_of, f.culprits = "downstream", g.id, g.culprits
                break
