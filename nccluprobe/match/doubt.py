"""How sure it is that a rank does not come, where events were lost.

A rank that is alive and outside NCCL may wait for its device: for a send or receive
of which the record was lost, or behind one, through the streams of others.  While
anybody in the job may have made such a call, unseen, it is not shown to be free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from nccluprobe.match.absence import Context
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.hosts import may_wait
from nccluprobe.match.p2p_loss import hidden
from nccluprobe.match.p2p_pair import At
from nccluprobe.match.p2p_queue import Side

#: How the members of a communicator were learnt, when nobody told them.
ASSUMED = "assumed"
NOT_TOLD = "nobody told who is in this communicator: it is taken to have all that were seen"


def lower(
    findings: Collection[Finding],
    comms: Iterable[Communicator],
    sides: Mapping[At, Side],
    context: Callable[[Communicator], Context],
) -> None:
    """Lower the confidence in causes that lost events may stand behind.

    So too on communicators whose members nobody has told.
    """
    comms = list(comms)
    told = {f.comm_uid_hash for f in findings}
    shown = [c for c in comms if c.key.hash in told]
    assumed = {c.key.hash for c in shown if any(map(_is_assumed, c.endpoints.values()))}
    for f in findings if assumed else ():
        if f.comm_uid_hash in assumed:
            f.details["confidence"] = _lowered(f.details.get("confidence"))
            known = f.details.get("note")
            f.details["note"] = NOT_TOLD if known is None else f"{known}; {NOT_TOLD}"
    causes = [f for f in findings if _may_wait(f)]
    if not causes:
        return
    blind = {
        context(comm).job
        for comm in comms
        if any(hidden(e, _side(e, sides)) for e in comm.endpoints.values())
    }
    for f in causes:
        if f.job in blind:
            f.details["confidence"] = "reduced"


def _is_assumed(e: Endpoint) -> bool:
    return e.info.learnt == ASSUMED


def _lowered(confidence: str | None) -> str | None:
    return "reduced" if confidence in ("observed", "inferred") else confidence


def _side(e: Endpoint, sides: Mapping[At, Side]) -> Side | None:
    return sides.get((e.info.source, e.info.id))


def _may_wait(f: Finding) -> bool:
    """Whether it blames, as observed, somebody who may only wait for the device."""
    if f.role != "root_cause" or f.state != "open" or f.details.get("confidence") != "observed":
        return False
    pids = {getattr(who, "pid", None) for who in f.culprits}
    return any(
        status.get("pid") in pids
        and status["reason"] == "rank_alive_but_not_entered"
        and may_wait(status.get("main_thread"), status.get("syscall"))
        for status in f.details.get("missing_rank_status") or ()
    )
