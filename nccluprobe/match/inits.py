"""Communicators in the making, by unique id: who came, and with what.

For a new unique id only ranks of the new communicator are known: a rank that did
not come cannot be named as a process.  Processes of the job that are elsewhere
are told as candidates.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from nccluprobe.match import init_text as text
from nccluprobe.match import model as m
from nccluprobe.match.absence import Context
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.pending import Uses, is_quiet, waiting_members
from nccluprobe.match.process import Inside, Process
from nccluprobe.match.status import had_left, is_silent
from nccluprobe.nccl.enums import IN_PROGRESS

_KEPT = 10_000
_FOREVER = 2**63 - 1
GROW = "ncclCommGrow"


@dataclass
class Claim:
    """A rank that a process initialises."""

    process: Process
    rank: int
    nranks: int
    t: int
    api: str
    thread: int
    t_exit: int | None = None  # None: still inside
    rc: int = 0
    group: int = 0
    failed: bool = False
    nonblocking: bool = False
    #: Its call did not block, has returned, and nothing shows that the communicator is there.
    pending: bool = False
    #: It has ended the communicator.
    gave_up: bool = False

    def begun(self) -> bool:
        """Whether its call has returned and goes on by itself (ncclInProgress)."""
        if self.failed or self.t_exit is None:
            return False
        if not self.group:
            return self.rc == IN_PROGRESS
        end = self.process.groups.get(self.group)
        return end is not None and not end.open and end.rc == IN_PROGRESS

    def waits(self, ctx: Context) -> bool:
        """Whether it is inside, or has nothing left to do but to poll."""
        if not self.pending:
            return self.inside()
        return is_quiet(self.process, self.until(ctx.now, ctx.options.silent_after), ctx)

    def inside(self) -> bool:
        """Whether it still waits for the others, as far as the trace tells."""
        if self.failed:
            return self.broken_off()
        if self.t_exit is None:
            at = (self.thread, self.t)
            return at in self.process.inside or (self.process.ended and at in self.process.cut)
        end = self.process.groups.get(self.group) if self.group else None
        return end is not None and end.open

    def broken_off(self) -> bool:
        """Whether it failed when a job gave up, and is judged as of the moment before."""
        return self.failed and self.t < self.process.as_of <= (self.t_exit or 0)

    def returned(self) -> bool:
        """Whether the communicator was made: a blocking init returns when all have come."""
        if self.failed or self.nonblocking or self.begun() or self.t_exit is None:
            return False
        if not self.group:
            return True
        end = self.process.groups.get(self.group)
        return end is not None and not end.open and end.rc == 0

    def until(self, now: int, limit: int) -> int:
        """Until when it is known to have been inside."""
        if self.process.ended and self.process.end is not None:
            return min(now, self.process.end.t)
        return self.process.through if is_silent(self.process, now, limit) else now

    @property
    def ends(self) -> int:
        """When it stopped claiming the rank."""
        if self.inside() or (self.pending and not self.process.ended):
            return _FOREVER
        if self.t_exit is not None:
            return self.t_exit
        end = self.process.end
        return end.t if end is not None else _FOREVER


@dataclass
class Init:
    """All claims that were made with one unique id."""

    uid_hash: str
    claims: list[Claim] = field(default_factory=list)
    done: bool = False
    #: A grow: ranks below this are the old communicator's.
    old: int = 0

    @property
    def nranks(self) -> int:
        """Its size: what most ranks passed."""
        return self.sizes()[0][0]

    def sizes(self) -> list[tuple[int, int]]:
        """(nranks, how many passed it), most first."""
        counted = Counter(c.nranks for c in self.claims)
        return sorted(counted.items(), key=lambda x: (-x[1], x[0]))

    def live(self) -> list[Claim]:
        """Claims that did not fail."""
        return [c for c in self.claims if not c.failed or c.broken_off()]


@dataclass
class Inits:
    """All initialisations by unique id."""

    uses: Uses
    inits: OrderedDict[str, Init] = field(default_factory=OrderedDict)
    #: ncclCommInitAll: one call for all ranks.
    alone: list[tuple[Process, m.Enter]] = field(default_factory=list)
    #: Grows without a unique id: new size -> old size.
    grown: dict[int, int] = field(default_factory=dict)

    def note(self, call: m.Enter | m.Call, process: Process) -> None:
        """Take an init call, entered or finished."""
        if call.uid_hash is None or call.rank is None or call.nranks is None:
            return
        if not 0 < call.nranks <= m.MAX_NRANKS or call.rank < 0:
            return
        init = self.inits.get(call.uid_hash)
        if init is None:
            init = self.inits[call.uid_hash] = Init(call.uid_hash)
            if len(self.inits) > _KEPT:
                self.inits.popitem(last=False)
        claim = next(
            (
                c
                for c in init.claims
                if c.process.who == process.who and c.thread == call.thread and c.t == call.t
            ),
            None,
        )
        if claim is None:
            if len(init.claims) >= 4 * call.nranks + 16:
                return
            claim = Claim(
                process, call.rank, call.nranks, call.t, call.api, call.thread, group=call.group
            )
            init.claims.append(claim)
        claim.nonblocking = call.nonblocking
        if isinstance(call, m.Call) and (call.thread, call.t) not in process.cut:
            claim.t_exit = max(call.t, call.t_exit)
            claim.failed = m.not_run(call.rc)
            claim.rc = call.rc

    def note_old(self, call: m.Enter | m.Call, old: int) -> None:
        """Take a grow called by a rank of the communicator that grows, of size ``old``."""
        if call.nranks is None or not old < call.nranks <= m.MAX_NRANKS:
            return
        self.grown[call.nranks] = old
        if len(self.grown) > _KEPT:
            del self.grown[next(iter(self.grown))]
        if call.uid_hash is not None and call.uid_hash in self.inits:
            self.inits[call.uid_hash].old = old

    def new_ranks(self, uid_hash: str | None, nranks: int, old: int) -> set[int]:
        """New ranks of a grow that have come."""
        inits = [self.inits.get(uid_hash)] if uid_hash is not None else []
        if not inits or inits[0] is None:
            inits = [i for i in self.inits.values() if not i.done and i.nranks == nranks]
        claims = [c for i in inits if i is not None for c in i.live() if c.api == GROW]
        return {c.rank for c in claims if c.rank >= old}

    def note_all(self, call: m.Enter, process: Process) -> None:
        """Take an ncclCommInitAll that is still inside."""
        self.alone.append((process, call))

    def findings(
        self, context: Callable[[int], Context], processes: Iterable[Process]
    ) -> list[Finding]:
        """What is wrong with initialisations now."""
        found: list[Finding] = []
        for init in self.inits.values():
            if not init.claims:
                continue
            init.done = init.done or any(c.returned() for c in init.claims)
            self._note_pending(init)
            ctx = context(init.claims[0].process.source)
            wrong = _sizes(init, ctx) + _conflicts(init, ctx)
            found += wrong
            if not init.old and any(c.api == GROW for c in init.claims):
                init.old = self.grown.get(init.nranks, 0)
            waiting = self._waiting(init, ctx, processes, context)
            if waiting is not None:
                if wrong:
                    waiting.role, waiting.downstream_of = "downstream", wrong[0].id
                found.append(waiting)
        return found + self._all_at_once(context)

    def _note_pending(self, init: Init) -> None:
        """Tell which calls that did not block are not known to be over."""
        begun = [c for c in init.claims if c.begun()]
        if not begun:
            return
        mine = [] if init.done else self.uses.members(init.uid_hash)
        init.done = init.done or any(map(self.uses.is_used, mine))
        ended = {e.process.who for e in mine if e.end is not None}
        for c in begun:
            c.gave_up |= c.process.who in ended
            c.pending = not (init.done or c.gave_up)

    def waiting_members(self, comm: Communicator, ctx: Context) -> list[tuple[Endpoint, Inside]]:
        """Members of a communicator that wait for a child, in a call that did not block."""
        root = next((self.uses.root(e) for e in comm.members()), None)
        init = None if root is None else self.inits.get(root)
        nonblocking = init is not None and any(c.nonblocking or c.begun() for c in init.claims)
        return waiting_members(comm, self.uses, nonblocking, ctx)

    def _waiting(
        self,
        init: Init,
        ctx: Context,
        processes: Iterable[Process],
        context: Callable[[int], Context],
    ) -> Finding | None:
        """Who waits in it, and for whom."""
        limit = ctx.options.silent_after
        claims = init.live()
        waiting = [c for c in claims if c.waits(ctx)]
        polls = all(c.pending for c in waiting)
        if not waiting:
            return None
        # Old ranks of a grow are judged by their own communicator.
        came = {c.rank for c in claims} | set(range(init.old))
        until = max(c.until(ctx.now, limit) for c in waiting)
        if init.done:
            newest = max(c.t for c in claims)
            back = [c for c in claims if c.returned()]
            since = max(newest, *(c.t_exit or 0 for c in back))
            if until - since < ctx.options.missing_after or len(waiting) >= len(back):
                return None
            return text.not_returned(init.uid_hash, waiting, back, ctx, since)
        if len(came) >= init.nranks:
            newest = max(c.t for c in claims)
            still = len(waiting) == len(claims)
            if polls or not still or until - newest < ctx.options.missing_after:
                return None
            return text.stuck(init.uid_hash, waiting, ctx, newest)
        first = min(c.t for c in waiting)
        if until - first < ctx.options.missing_after:
            return None
        inside = {c.process.who for c in claims}
        job: dict[Hashable, Process] = {}
        for p in processes:
            if p.info is None or p.who in inside or had_left(p, until, limit):
                continue
            if p.info.run_id == ctx.run_id or context(p.source).job == ctx.job:
                job.setdefault(p.who, p)
        elsewhere = list(job.values())
        f = text.missing(init.uid_hash, init.nranks, waiting, sorted(came), elsewhere, ctx)
        if polls:
            others = [p for p in elsewhere if self.uses.is_watched(p, first)]
            lack = init.nranks - len(came)
            if not self.uses.are_all_seen([c.process for c in claims], others, lack):
                f.severity = "notice"  # they may have come where nobody looks
        return f

    def _all_at_once(self, context: Callable[[int], Context]) -> list[Finding]:
        self.alone = [(p, c) for p, c in self.alone if (c.thread, c.t) in p.inside]
        found = []
        for p, c in self.alone:
            ctx = context(p.source)
            claim = Claim(p, 0, c.nranks or 0, c.t, c.api, c.thread)
            if claim.inside() and ctx.now - c.t >= ctx.options.missing_after:
                found.append(text.stuck(None, [claim], ctx, c.t))
        return found


def link(current: list[Finding]) -> None:
    """Tell inits and their errors that follow from something else; after roles are set."""
    wrong = {
        f.comm_uid_hash: f
        for f in current
        if f.hang_type == "comm_init_rank_conflict"
        or (f.hang_type == "collective_mismatch" and f.comm_seq is None)
    }
    for f in current:
        if f.hang_type == "nccl_error_exit" and f.role == "root_cause":
            cause = wrong.get(f.comm_uid_hash)
            if cause is not None and str(f.details["api"]).startswith("ncclCommInit"):
                f.role, f.downstream_of = "downstream", cause.id
        if f.hang_type != "comm_init_missing_enter" or f.role != "root_cause" or f.culprits:
            continue
        candidates = set(f.candidates)
        for g in current:
            # All who could come wait in something that is a cause of its own.
            if g is f or g.role != "root_cause" or g.state != "open" or not candidates:
                continue
            if candidates <= set(g.waiters):
                f.role, f.downstream_of = "downstream", g.id
                break


def _sizes(init: Init, ctx: Context) -> list[Finding]:
    """Ranks that passed different sizes for one unique id."""
    sizes = init.sizes()
    if len(sizes) < 2:
        return []
    named = sizes[0][1] > sizes[1][1]
    return [text.sizes(init.uid_hash, init.claims, sizes, named, ctx)]


def _conflicts(init: Init, ctx: Context) -> list[Finding]:
    by_rank: dict[int, list[Claim]] = {}
    for c in init.claims:
        by_rank.setdefault(c.rank, []).append(c)
    found = []
    for rank, claims in sorted(by_rank.items()):
        if len(claims) < 2:
            continue
        claims.sort(key=lambda c: c.t)
        pair = next(
            (
                (a, b)
                for i, a in enumerate(claims)
                for b in claims[i + 1 :]
                if (a.process.who, a.thread) != (b.process.who, b.thread) and b.t < a.ends
            ),
            None,
        )
        if pair is not None:
            wrong = _wrong_one(init, rank, pair)
            found.append(text.conflict(init.uid_hash, init.nranks, init.claims, pair, wrong, ctx))
    return found


def _wrong_one(init: Init, rank: int, pair: tuple[Claim, Claim]) -> Claim | None:
    """Which of two claims is wrong, where all others claim their rank in the job.

    One at least has to tell it from ranks that are given from the last to the first.
    """
    others = [c for c in init.claims if c not in pair]
    if not all(c.process.rank == c.rank for c in others):
        return None
    if all(2 * c.rank == init.nranks - 1 for c in others):
        return None
    right = [c for c in pair if c.process.rank == rank]
    wrong = [c for c in pair if c.process.rank != rank]
    return wrong[0] if len(right) == len(wrong) == 1 else None
