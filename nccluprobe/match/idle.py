"""Waits that are normal: a follower waits for the root's data until there is work.

From outside, an idle root and one that hangs outside NCCL look the same.  A wait
of which only the root is absent, alive and outside NCCL, is idle when it was
declared so, or when history teaches it; else it is said that nobody can decide.
Whatever shows that the root is no free agent makes it an ordinary absence.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from nccluprobe.match import tense
from nccluprobe.match.finding import Finding
from nccluprobe.match.held_up import HELD
from nccluprobe.match.leaving import gone_under, note_left
from nccluprobe.match.lessons import RECEIVE, ROOTED_FROM, waited_for_root
from nccluprobe.match.model import SIG_LOST
from nccluprobe.match.options import Options
from nccluprobe.match.signature import Signature

if TYPE_CHECKING:
    from nccluprobe.match.absence import Context
    from nccluprobe.match.communicator import CommKey, LateSlot
    from nccluprobe.match.waits import Wait

#: System calls in which a program waits until there is work: for requests, or for a thread
#: of its own that takes them.  In any other a sender is held up by something else.
_FOR_WORK = frozenset(
    {
        "accept", "accept4", "clock_nanosleep", "epoll_pwait", "epoll_wait", "futex", "nanosleep",
        "poll", "ppoll", "pselect6", "recvfrom", "recvmsg", "select", "(unknown)",
    }
)  # fmt: skip
#: Findings of these kinds say that ranks are blocked in something else.
_BLOCKED = frozenset(
    {
        "collective_mismatch",
        "skipped_or_extra_call",
        "collective_all_ranks_stuck",
        "collective_missing_exit",
        "nccl_missing_exit",
        "nccl_error_exit",
        "comm_init_missing_enter",
        "comm_init_rank_conflict",
        "comm_init_stuck",
        "p2p_mismatch",
        "p2p_unmatched",
        "p2p_order_inversion",
    }
)

#: How the note of a wait that may be idle begins.
NOT_DECIDABLE = "waiting, cause not decidable"
DECLARED, LEARNED, UNDECIDED = "declared", "learned", "undecided"


def delay_is_idle(wait: LateSlot, signature: Signature, options: Options) -> bool:
    """Whether a root that came late is what an idle communicator looks like."""
    if not waited_for_root(signature, wait.times, options.late_after):
        return False
    return wait.learned or options.idle_declared(wait.comm.name, wait.comm.key.hash)


def apply(
    waits: list[Wait], current: list[Finding], contexts: Mapping[CommKey, Context]
) -> list[Finding]:
    """Drop or tone down absence findings that are idle waits; returns what remains."""
    open_waits = [w for w in waits if _is_open(w, contexts[w.comm.key])]
    asked = [w for w in open_waits if w.finding is not None and w.finding.for_root is not None]
    kinds: dict[int, str] = {}
    for w in asked:
        if _may_idle(w, contexts[w.comm.key]) and not _hindered(w, current):
            gone = gone_under(w, contexts[w.comm.key])
            if gone:
                served = [e for x in waits if x.absent[:1] == w.absent for e in x.entered]
                if w.absent[0] not in gone and (part := [e for e in gone if e in served]):
                    note_left(w, part)
                continue  # where others have left who lacked nothing, nobody is without work
            kind = _kind(w, contexts[w.comm.key])
            if kind is not None:
                kinds[id(w)] = kind
    # A wait that is no idle one blocks those of the same ranks, and so on.
    changed = True
    while changed:
        changed = False
        for w in asked:
            if id(w) in kinds and any(
                _blocks(x, w, kinds, contexts[x.comm.key]) for x in open_waits
            ):
                del kinds[id(w)]
                changed = True
    dropped: set[int] = set()
    for w in asked:
        f, kind = w.finding, kinds.get(id(w))
        if f is None or kind is None:
            continue
        if kind in (DECLARED, LEARNED):
            dropped.add(id(f))
            w.finding = None
        else:
            _tone_down(f, tense.of(w.absent))
    return [f for f in current if id(f) not in dropped]


def _is_receive(w: Wait) -> bool:
    """Whether it is receives that wait for their sender."""
    lesson = None if w.finding is None else w.finding.for_root
    return lesson is not None and lesson[0] == RECEIVE


def _is_open(w: Wait, ctx: Context) -> bool:
    return w.finding is not None or ctx.now - w.first >= ctx.options.missing_after


def _kind(w: Wait, ctx: Context) -> str | None:
    assert w.finding is not None
    if _is_receive(w):
        return UNDECIDED  # declared and learned ones have no finding
    if ctx.options.idle_declared(w.comm.name, w.comm.key.hash):
        return DECLARED
    lesson = w.finding.for_root
    if lesson is not None and w.comm.lessons.get(lesson, 0) >= ctx.options.idle_lessons:
        return LEARNED
    return UNDECIDED if _only_such_calls(w, ctx) else None


def _only_such_calls(w: Wait, ctx: Context) -> bool:
    """Whether the waiters have gone on to nothing but more data of this root."""
    (slot,), (root,) = w.at, w.absent
    for e in w.entered:
        for sig in np.unique(e.rows.sig[max(0, slot - e.dropped) :]).tolist():
            s = ctx.table[sig]
            if sig != SIG_LOST and (s.api not in ROOTED_FROM or s.root != root.comm_rank):
                return False
    return True


def _may_idle(w: Wait, ctx: Context) -> bool:
    """Whether the root is free to come."""
    (root,) = w.absent
    process = root.process
    inside = process.inside_now()
    if inside is not None and ctx.now - inside.t >= ctx.options.missing_after:
        return False
    c = process.coverage
    if c is None or c.alive is False:
        return False
    if _is_receive(w) and c.main == "syscall" and c.syscall not in (None, *_FOR_WORK):
        return False
    return c.main not in HELD or ctx.now - process.main_since < ctx.options.silent_after


def _hindered(w: Wait, current: Iterable[Finding]) -> bool:
    """Whether something else is wrong with a member since it waits."""
    (root,) = w.absent
    members = _processes(w)
    for f in current:
        if f is w.finding or f.hang_type not in _BLOCKED or f.for_root is not None:
            continue
        if f.hang_type == "nccl_error_exit" and f.severity == "notice":
            continue
        concerned = members & {*f.waiters, *f.culprits}
        if concerned and f.state == "open" and f.since >= root.last_t:
            return True
    return False


def _blocks(x: Wait, w: Wait, kinds: Mapping[int, str], ctx: Context) -> bool:
    """Whether another wait shows that ranks of ``w`` are blocked elsewhere."""
    if x is w or kinds.get(id(x)) in (DECLARED, LEARNED):
        return False
    same = x.absent[:1] and x.absent[0].actor == w.absent[0].actor
    if same and id(x) in kinds and _is_receive(x) and _is_receive(w):
        return False  # one sender serves several
    if x.seq is None and ctx.options.idle_declared(x.comm.name, x.comm.key.hash):
        return False  # a receive on a communicator on which waiting is normal
    return bool(_processes(w) & _processes(x))


def _processes(w: Wait) -> set[Hashable]:
    return {e.process.who for e in (*w.entered, *w.absent)}


def _tone_down(f: Finding, it: tense.Tense) -> None:
    f.severity, f.role, f.culprits = "notice", "unknown", ()
    f.details["idle"] = UNDECIDED
    f.details["confidence"] = "none"
    who = "sender" if f.hang_type == "p2p_unmatched" else "root"
    may = (
        "have nothing to send, or hang"
        if it.fate is None
        else "have had nothing to send, or have hung"
    )
    f.details["note"] = (
        f"{NOT_DECIDABLE}: the {who} {it.be} outside NCCL, and nothing else {it.be} blocked; it "
        f"may {may} (--idle-ok declares that this is normal)"
    )
