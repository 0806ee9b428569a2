"""A device that does not go on, told from a rank that does not come.

Two signs exclude that all wait for one rank that stays away.  Another process is
outside NCCL, silent, and has nothing of its own that lacks anybody: what keeps it
is not that rank.  Or a host is held inside a call that does not hold it: an
operation for which all connections were made returns at once, unless the queue of
its stream is full, and a few operations do not fill one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nccluprobe.match.absence import Context
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.crashed import beside_stall
from nccluprobe.match.device import Device
from nccluprobe.match.device_ops import Node, Part, Stream
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.hosts import BLOCKING, Host, host_of
from nccluprobe.match.process import Process
from nccluprobe.match.status import is_silent, unseen
from nccluprobe.match.stuck import hung_finding
from nccluprobe.match.tail import IDX, SIG
from nccluprobe.match.waits import Wait

#: So few operations, and kernels between them, do not fill the queue of a stream.
_FEW = 4
#: Findings that blame a rank for not coming, or for not coming back.
_PLAIN = frozenset(
    {
        "collective_missing_enter",
        "p2p_unmatched",
        "nccl_missing_exit",
        "collective_missing_exit",
    }
)
#: What a rank that waits for its device may look like.
_MAY_WAIT = frozenset(
    {
        "rank_alive_but_not_entered",
        "rank_inside_other_call",
        "rank_waiting_elsewhere",
        "probe_event_loss_possible",
        "partner_gone_past",
        "call_not_returned",
    }
)


@dataclass
class Signs:
    """Processes of a job that no absence of others explains."""

    #: Silent, and nothing of theirs lacks anybody.
    idle: dict[Hashable, list[Endpoint]] = field(default_factory=dict)
    #: Held inside a call by something that was queued before.
    held: dict[Hashable, list[Endpoint]] = field(default_factory=dict)


def settle(
    waits: Sequence[Wait],
    findings: list[Finding],
    comms: Iterable[Communicator],
    context: Callable[[Communicator], Context],
    device: Device | None,
) -> list[Finding]:
    """Take the blame from ranks that are only held up; the findings of hung calls.

    Of who crashed beside them, where nobody else is to blame.
    """
    comms = list(comms)
    now = [w for w in waits if not w.gone_on]
    hung = _hung(now, _of_now(findings, waits, comms), comms, context, device)
    return hung + beside_stall([*findings, *hung], comms, context)


def _hung(
    waits: Sequence[Wait],
    findings: list[Finding],
    comms: Iterable[Communicator],
    context: Callable[[Communicator], Context],
    device: Device | None,
) -> list[Finding]:
    open_ = [f for f in findings if f.state == "open"]
    inits = [f for f in open_ if _is_missed_in_init(f)]
    if not any(_is_blame(f) or _is_undecided(f) for f in open_) and not inits:
        return []
    jobs: dict[str | None, list[Communicator]] = {}
    for comm in comms:
        if not comm.ambiguous and not comm.over:
            jobs.setdefault(context(comm).job, []).append(comm)
    made = []
    for job, theirs in jobs.items():
        mine = [f for f in open_ if f.job == job]
        _lower([f for f in inits if f.job == job], waits, mine, theirs, context, device)
        f = _judge(waits, mine, theirs, context, device)
        made += [] if f is None else [f]
    return made


def _is_plain(f: Finding) -> bool:
    if f.hang_type not in _PLAIN or f.details.get("reason") not in _MAY_WAIT:
        return False
    if "explanation" in f.details:
        return False  # a call of count 0 of its own: why it does not come is known
    reasons = {s["reason"] for s in f.details.get("missing_rank_status") or ()}
    return reasons <= _MAY_WAIT


def _is_blame(f: Finding) -> bool:
    return f.role == "root_cause" and bool(f.culprits) and _is_plain(f)


def _is_missed_in_init(f: Finding) -> bool:
    """Whether it blames a rank, by its absence alone, for not coming to a new communicator."""
    known = f.hang_type == "comm_init_missing_enter" and f.role == "root_cause" and f.culprits
    return bool(known) and f.details.get("reason") in _MAY_WAIT


def _lower(
    inits: list[Finding],
    waits: Sequence[Wait],
    findings: list[Finding],
    comms: list[Communicator],
    context: Callable[[Communicator], Context],
    device: Device | None,
) -> None:
    """Who is missed in the making of a communicator may wait for its device, as may the idle."""
    inits = [f for f in inits if f.details["confidence"] == "observed"]
    if not inits:
        return
    ends = _ends(comms)
    blamed: set[Hashable] = {who for f in inits for who in f.culprits}
    if any(_is_away(e.process, e) for who in blamed for e in ends.get(who, ())[:1]):
        return
    waiting = _waiting(waits, findings)
    if set(_signs(ends, waiting, Counter(), context(comms[0]), device).idle) - blamed:
        _make_inferred(inits)


def _make_inferred(found: Iterable[Finding]) -> None:
    for f in found:
        if f.details["confidence"] == "observed":
            f.details["confidence"] = "inferred"


def _ends(comms: Iterable[Communicator]) -> dict[Hashable, list[Endpoint]]:
    """Process -> its endpoints."""
    ends: dict[Hashable, list[Endpoint]] = {}
    for comm in comms:
        for e in comm.endpoints.values():
            ends.setdefault(e.process.who, []).append(e)
    return ends


def _waiting(waits: Sequence[Wait], findings: Iterable[Finding]) -> set[Hashable]:
    """Processes that wait for others, as far as is known."""
    waiting: set[Hashable] = {e.process.who for w in waits for e in w.entered if not w.over}
    init = (f for f in findings if f.hang_type.startswith("comm_init"))
    return waiting | {who for f in init for who in f.waiters}


def _is_undecided(f: Finding) -> bool:
    return f.role == "unknown" and _is_plain(f)


def _judge(
    waits: Sequence[Wait],
    findings: list[Finding],
    comms: list[Communicator],
    context: Callable[[Communicator], Context],
    device: Device | None,
) -> Finding | None:
    causes = [f for f in findings if f.role == "root_cause"]
    if any(not _is_blame(f) for f in causes):
        return None  # it is explained
    plain = [f for f in findings if _is_blame(f) or _is_undecided(f)]
    if not plain or not any(w.finding is not None and w.absent for w in waits):
        return None  # nobody waits for anybody
    ends = _ends(comms)
    blamed: set[Hashable] = {who for f in causes for who in f.culprits}
    if any(_is_away(e.process, e) for who in blamed for e in ends.get(who, ())[:1]):
        return None
    waiting = _waiting(waits, findings)
    came: Counter[Hashable] = Counter(e.process.who for w in waits if w.over for e in w.absent)
    signs = _signs(ends, waiting, came, context(comms[0]), device)
    idle = set(signs.idle) - blamed
    if (busy := _busy(ends, waits)) >= blamed and idle & busy:
        idle -= busy
        _make_inferred(causes)
    # Of a rank that is outside NCCL the others' kernels may have filled their queues.
    inside = all(ends[who][0].process.inside_now() for who in blamed if who in ends)
    inside = inside and not blamed & waiting
    held = set(signs.held) - blamed if inside else set()
    # One that is inside a call that all made, and that nobody blames, is held by its device.
    alone = any(ends[who][0].process.inside_now() for who in idle)
    # Of two that nobody explains the one by the other, one fault explains both.
    apart = len({f.culprits for f in causes}) > 1 and not blamed & waiting
    apart = apart and all(_may_be_held(ends[who]) for who in blamed if who in ends)
    if not (held or apart or (idle and (blamed or alone or len(idle) > 1))):
        return None
    everyone = set(signs.idle) | held
    wanted = everyone | (blamed if idle or apart else set())
    hung = _common(wanted, comms)
    in_transfers = all(f.hang_type == "p2p_unmatched" for f in causes)
    if hung is None and in_transfers and len(idle | held) > 1:
        # Those who are blamed may wait for the others over sends and receives only.
        hung = _common(idle | held, comms)
    if hung is None:
        # They share nothing by which one of them could tell of it: those may be held all the same.
        _make_inferred(causes)
        return None
    kept = [e for e in hung.members() if e.process.who in wanted]
    f = hung_finding(hung, kept, plain, context(hung))
    for g in plain:
        g.role, g.downstream_of = "downstream", f.id
    return f


def _of_now(
    findings: list[Finding], waits: Sequence[Wait], comms: Iterable[Communicator]
) -> list[Finding]:
    """The findings but those that all gave up and went on from: signs are of now."""
    over = {id(w.finding) for w in waits if w.gone_on}
    left = {(c.key.hash, c.key.instance) for c in comms if _is_left(c)}
    return [
        f
        for f in findings
        if id(f) not in over and (f.comm_uid_hash, f.details.get("instance")) not in left
    ]


def _is_left(comm: Communicator) -> bool:
    """Whether all who are known have ended a communicator, and some have called NCCL after that."""
    ends = [e.end.t for e in comm.endpoints.values() if e.end is not None]
    if not ends or len(ends) < len(comm.endpoints):
        return False
    return any(e.process.last_call > max(ends) for e in comm.endpoints.values())


def _busy(ends: Mapping[Hashable, list[Endpoint]], waits: Sequence[Wait]) -> set[Hashable]:
    """Processes that run, where all that wait for their devices sleep in a system call.

    Ranks of one job are set up to wait in one way: these wait for no device.
    """
    sleep, run = set[Hashable](), set[Hashable]()
    for who, mine in ends.items():
        p = mine[0].process
        if p.ended or p.coverage is None or p.inside_now() is not None:
            continue
        if p.coverage.main == "running":
            run.add(who)
        elif p.coverage.main == "syscall" and host_of(mine[0]) is Host.OUTSIDE:
            sleep.add(who)
    sure = (w for w in waits if not (w.over or w.weak or w.doubtful))
    wait = {e.process.who for w in sure for e in w.entered} & (sleep | run)
    return run if wait and wait <= sleep else set()


def _may_be_held(mine: list[Endpoint]) -> bool:
    """Whether a process was watched, and is not seen to have nothing open on its device.

    Of dumps two ranks may well be stuck at once, and what has left none shows no call at all.
    """
    coverage = mine[0].process.coverage
    watched = coverage is not None and coverage.alive is not None
    return watched and not _all_complete(mine)


def _is_away(p: Process, e: Endpoint) -> bool:
    return p.ended or p.in_phase or host_of(e) is Host.AWAY


def _signs(
    ends: dict[Hashable, list[Endpoint]],
    waiting: set[Hashable],
    came: Counter[Hashable],
    ctx: Context,
    device: Device | None,
) -> Signs:
    found = Signs()
    queues = None if device is None else _Queues(device)
    for who, mine in ends.items():
        p = mine[0].process
        if p.several_ranks or _is_away(p, mine[0]):
            continue
        if p.coverage is None or p.coverage.alive is None:
            continue  # nobody watched it: that no more is written of it is no silence
        if not p.last_call:
            continue  # its device was given nothing
        if any(e.base != "exact" for e in mine):
            continue  # attached late: it may lack somebody at a place that is not known
        if is_silent(p, ctx.now, ctx.options.silent_after):
            continue
        quiet = p.through - max(p.last_activity, p.last_call, *(e.last_t for e in mine))
        if quiet < ctx.options.missing_after:
            continue
        call = p.inside_now()
        if call is not None and call.api not in BLOCKING:
            continue
        unsure = _may_wait_unseen(mine, came[who])
        if who not in waiting and not unsure and not _all_complete(mine):
            found.idle[who] = mine
        if call is not None and queues is not None and queues.is_held(who):
            found.held[who] = mine
    return found


def _all_complete(mine: list[Endpoint]) -> bool:
    """Whether completion is seen, and its device has done all that it was given."""
    return all(e.done is not None and e.done >= e.entered for e in mine) and not any(
        lane for e in mine for lane in e.posted.values()
    )


def _may_wait_unseen(mine: list[Endpoint], came: int) -> bool:
    """Whether a process may have made a call, unseen, that lacks somebody.

    ``came``: in so many unseen calls nobody is lacked any more.
    """
    return max(mine[0].process.without_place(), *map(unseen, mine)) > came


class _Queues:
    """What stands in the streams of processes by the run of the device."""

    def __init__(self, device: Device) -> None:
        self._left: dict[Hashable, Counter[Stream]] = {}
        self._inside: dict[Hashable, list[Node]] = {}
        for node in device.nodes:
            if node.inside:
                self._inside.setdefault(node.parts[0].endpoint.process.who, []).append(node)
        for node in device.nodes if self._inside else ():
            who = node.parts[0].endpoint.process.who
            if who in self._inside and not node.done:
                self._left.setdefault(who, Counter()).update(node.streams)

    def is_held(self, who: Hashable) -> bool:
        """Whether a host is inside a call that does not hold it, with room in its streams."""
        inside = self._inside.get(who, [])
        left = max(self._left.get(who, Counter()).values(), default=0)
        return bool(inside) and left <= _FEW and all(_is_warm(p) for n in inside for p in n.parts)


def _is_warm(part: Part) -> bool:
    """Whether all connections that an operation needs were made by one before."""
    if part.message is not None:
        return part.message[2] > 0
    rows = part.endpoint.tail.rows()
    before = rows[(rows[:, SIG] == part.sig) & (rows[:, IDX] < part.idx)]
    return len(before) > 0


def _common(who: set[Hashable], comms: list[Communicator]) -> Communicator | None:
    """The smallest communicator that all of these are in, and that was used."""
    fit = [
        c
        for c in comms
        if c.closed and who <= {e.process.who for e in c.endpoints.values() if e.end is None}
    ]
    return min(fit, key=lambda c: (len(c.endpoints), c.key), default=None)
