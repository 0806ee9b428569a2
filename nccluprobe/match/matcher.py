"""The matcher: items in, findings out, the clock passed in.

``feed`` takes what a reader yields; ``scan`` judges what is open.  Nothing here
reads a file, a process or a clock.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from nccluprobe.match import (
    absence,
    completion,
    device_hang,
    doubt,
    exits,
    idle,
    inits,
    leaving,
    p2p_held,
    phases,
    roles,
    sites,
    tense,
    untimed,
)
from nccluprobe.match.absence import Context
from nccluprobe.match.book import Book
from nccluprobe.match.clocks import Clocks
from nccluprobe.match.closing import Closing, closing
from nccluprobe.match.communicator import CommKey, Communicator, LateSlot
from nccluprobe.match.delay import Delays, hindered
from nccluprobe.match.finding import Finding
from nccluprobe.match.held import held
from nccluprobe.match.mismatch import CONSEQUENCES, Mismatches
from nccluprobe.match.names import identities, job_ranks
from nccluprobe.match.options import SECOND, Options
from nccluprobe.match.order import Orders
from nccluprobe.match.signature import SignatureTable
from nccluprobe.match.splits import judge_child
from nccluprobe.match.state import State
from nccluprobe.match.status import is_silent
from nccluprobe.match.stuck import judge_level
from nccluprobe.match.suppose import SURE, Supposed, explains
from nccluprobe.match.temper import temper
from nccluprobe.match.untraced import note
from nccluprobe.match.waits import Wait
from nccluprobe.match.zeros import explain_zeros

#: Limits that pass within this time are judged in one scan, ns.
_TOGETHER = SECOND // 4


@dataclass(frozen=True)
class Due:
    """A moment, unix ns, at which more may be found, and the sources that it depends on."""

    at: int
    sources: frozenset[int]


class Matcher(State):
    """One analysis: what is known, and the judging of it."""

    def __init__(self, options: Options | None = None, table: SignatureTable | None = None) -> None:
        super().__init__(options, table)
        self.book = Book()
        self.delays = Delays()
        self.mismatches = Mismatches()
        self.orders = Orders()
        self.clocks = Clocks()
        #: What ranks waited in at the last scan.
        self.waits: list[Wait] = []
        #: process -> when its absence was reported, newest last
        self._missed: dict[Hashable, list[int]] = {}
        self._late: list[LateSlot] = []
        self._nows: dict[Hashable, int] = {}
        self._labels: dict[Hashable, str] = {}
        self._now: int | None = None
        self._contexts: dict[CommKey, Context] = {}  # of the scan that goes on
        self._closing = Closing()

    def scan(self, now: int | None = None) -> list[Finding]:
        """Judge what is open; returns the findings to write, new or changed.

        ``now``: the analyzer's clock (live; each job is judged by its own, as far as
        ``heard`` tells the difference), or None: the newest time in any trace of each
        job (afterwards).
        """
        self._now = now
        self._set_clocks(now)
        self.change_speakers()
        self._press()
        self.settle()
        self.errors.settle(self.processes, self.endpoints, self.of_source, final=now is None)
        self._closing = closing(self, self._nows)
        contexts: dict[CommKey, Context] = {}
        try:
            current = self._judge_all(now, contexts)
            newest = max(self._nows.values(), default=0) if now is None else now
            written = self.book.update(current, newest)
            told = {f.job for f in current}
            keep = {job for job in self._closing.jobs if self._labels.get(job) in told}
        finally:
            self._closing.undo()
        self._clean_up(contexts, keep)
        return written

    def _judge_all(self, now: int | None, contexts: dict[CommKey, Context]) -> list[Finding]:
        """Judge what is open as of the moments that are set; fills ``contexts``."""
        current = self._disagreements(final=now is None)
        supposed = Supposed()
        for key, comm in sorted(self.comms.items()):
            contexts[key] = ctx = self._context(comm)
            self._watch(comm, ctx)
            if supposed.likely(comm, ctx, self.p2p):
                self.p2p.settle(self.comms, self._home.get, self.safe_time())
        supposed.beside(self.comms, contexts, self.p2p)
        current += self._delays(contexts)
        current += self.errors.findings(self._context_of, self.comm_of)
        current += self.inits.findings(self._context_of, self.processes.values())
        current += self.mismatches.findings()
        disputed = {fault.comm.key for fault in self.mismatches.faults}
        disputed |= {c.key for c in self.comms.values() if c.disagreement is not None}
        orders = self.orders.findings(
            self.comms.values(), self._context, self.options.lint, disputed
        )
        current += orders
        current += completion.judge(self.comms.values(), self._context)
        facts, known = current, frozenset(disputed)
        waits, current = self._open(facts, contexts, known, orders)
        added, stalls = len(supposed), self.p2p.stalls
        if explains(current) < SURE and supposed.weak(waits):
            other = self._open(facts, contexts, known, orders)
            if explains(other[1]) > explains(current):
                waits, current = other
            else:
                supposed.undo(added)
                self.p2p.stalls = stalls
        current += self.standing.findings(
            self.comms.values(), self.processes.values(), self._context_of_hash, self.table, current
        )
        explain_zeros(waits, self.table)
        exits.relabel(self, waits, contexts)
        leaving.settle(waits, contexts, self.processes.values())
        current += sites.settle(waits, contexts, current)
        inits.link(current)
        temper(current)
        current += device_hang.settle(
            waits, current, self.comms.values(), self._context, self.p2p.stalls.device
        )
        p2p_held.settle(current)
        doubt.lower(current, self.comms.values(), self.p2p.sides, self._context)
        self.waits = waits
        self._note_missed(waits)
        self._name(current)
        tense.note_ended(current, self.processes.values())
        untimed.settle(current, self.processes.values())
        supposed.undo()
        return current

    def heard(self, source: int, now: int) -> None:
        """A source has been read to its end, at this moment of the analyzer's clock, unix ns."""
        if (p := self.processes.get(source)) is not None and p.newest:
            self.clocks.heard(source, p.newest, now, self.options.silent_after)

    def due(self, now: int) -> Due | None:
        """When what ranks wait in passes its next limit; None: they wait in nothing."""
        limits = (self.options.missing_after, self.options.error_after)
        first = [
            (w.first - self.clocks.shift(self.jobs.same(w.comm.key.hash)), w) for w in self.waits
        ]
        times = [(t, w) for since, w in first for n in limits if (t := since + n) > now]
        if not times:
            return None
        soon = min(t for t, _ in times)
        at = max(t for t, _ in times if t - soon <= _TOGETHER)
        absent = (e for t, w in times if t <= at for e in w.absent)
        return Due(at, frozenset(e.process.source for e in absent))

    def forget_signatures(self) -> None:
        """Give the ids of signatures that nothing refers to any more to others."""
        episodes = (*self.delays.episodes.values(), *self.delays.ended)
        late = (*self._late, *(x.first for x in episodes))
        self.table.keep(held(self.endpoints.values(), self.comms.values(), self.p2p, late))

    # -- parts of a scan ---------------------------------------------------

    def _open(
        self,
        facts: list[Finding],
        contexts: dict[CommKey, Context],
        disputed: frozenset[CommKey],
        orders: list[Finding],
    ) -> tuple[list[Wait], list[Finding]]:
        """Who waits for whom, and all findings with it.  ``facts``: findings that stand."""
        waits: list[Wait] = []
        current: list[Finding] = []
        for key, comm in sorted(self.comms.items()):
            ctx = contexts[key]
            current += self._judge(comm, ctx, waits)
            wait, found = judge_child(comm, self.children, self.inits, ctx)
            waits += [] if wait is None else [wait]
            current += [] if found is None else [found]
        current += facts
        waits += completion.pending_waits(self.comms.values(), waits, current)
        waits += self.p2p.judge(
            self.comms, self._context, self._now is None, waits, disputed, orders
        )
        current += self.p2p.findings
        current += exits.judge(self, waits, contexts, self._context_of)
        current = idle.apply(waits, current, contexts)
        current = phases.apply(waits, current, contexts, self.processes.values(), self._context_of)
        current += roles.assign(
            waits,
            current,
            self.comms.values(),
            {s: self.now_of(s) for s in self.processes},
            self._context,
            self.options.silent_after,
            self.p2p.unreceived,
        )
        return waits, current

    def _press(self) -> None:
        """No more will come on these: late members get their place by what there is."""
        for comm in self.comms.values():
            if comm.has_late:
                newest = max((e.last_t for e in comm.endpoints.values()), default=0)
                now = self._nows.get(self.jobs.same(comm.key.hash), 0)
                comm.press = self._now is None or now - newest > self.options.decide_after

    def _disagreements(self, final: bool) -> list[Finding]:
        """Decide what is due; several disagreements may follow each other."""
        provisional: list[Finding] = []
        for _, comm in sorted(self.comms.items()):
            rounds = 0
            while comm.disagreement is not None and rounds < CONSEQUENCES:
                rounds += 1
                waiting = self.mismatches.judge(comm, self._context(comm), final)
                if comm.disagreement is not None:
                    provisional += waiting
                    break
                comm.settle(self.table, self.options, self.safe_time())
        return provisional

    def _judge(self, comm: Communicator, ctx: Context, waits: list[Wait]) -> list[Finding]:
        o = absence.open_slot(comm, ctx)
        if o is None:
            level = judge_level(comm, ctx)
            return [] if level is None else [level]
        if (fault := self.mismatches.explains(comm, o.slot)) is not None:
            wait = absence.wait_of(comm, o, None)
            wait.cause = fault
            waits.append(wait)
            return []
        finding = absence.judge(comm, o, ctx)
        waits.append(absence.wait_of(comm, o, finding))
        found = self.mismatches.among_entered(comm, o, ctx)
        return found if finding is None else [finding, *found]

    def _delays(self, contexts: dict[CommKey, Context]) -> list[Finding]:
        safe = self.safe_time()
        for comm in self.comms.values():
            self._late += comm.fresh_late
            comm.fresh_late.clear()
        due = [
            w
            for w in self._late
            if (self._now is None or w.last <= safe)
            and not idle.delay_is_idle(w, self.table[w.sig], self.options)
        ]
        self._late = [w for w in self._late if self._now is not None and w.last > safe]
        known = (self.table, self.of_source, self._home, self.children, self.options.late_after)
        self.delays.judge(due, self._missed, self.options, lambda x: hindered(x, *known))
        return self.delays.findings(contexts)

    def _watch(self, comm: Communicator, ctx: Context) -> None:
        """Do not wait for members that nobody watches while the others go far ahead.

        NCCL lets hosts run ahead by about a thousand calls: beyond that the
        unwatched member must have come too.
        """
        opt = self.options
        members = comm.members()
        ahead = max((e.entered for e in members), default=0)
        for e in members:
            p = e.process
            gone = p.end is not None and not p.ended
            if ahead - e.entered <= CONSEQUENCES or e.comm_rank is None or p.ended:
                continue
            if gone or is_silent(p, ctx.now, opt.missing_after):
                comm.unwatched.add(e.comm_rank)
        for rank in list(comm.unwatched):
            e = comm.endpoints[rank]
            if e.entered >= comm.closed and not is_silent(e.process, ctx.now, opt.silent_after):
                comm.unwatched.discard(rank)
        if comm.unwatched:
            comm.settle(self.table, opt, self.safe_time())

    def _note_missed(self, waits: list[Wait]) -> None:
        for w in waits:
            if w.finding is None:
                continue
            for who in w.finding.culprits or [e.process.who for e in w.absent]:
                times = self._missed.setdefault(who, [])
                times.append(w.finding.detected_at)
                del times[:-16]

    def _name(self, findings: list[Finding]) -> None:
        """Say which processes each finding points at, and by which limits."""
        known = identities(self.processes.values(), self.standing.looks.values())
        comms = {(c.key.hash, c.key.instance): c for c in self.comms.values() if findings}
        for f in findings:
            f.limits = self.options.in_seconds()
            f.named = [known[who] for who in dict.fromkeys(f.culprits) if who in known]
            if comm := comms.get((f.comm_uid_hash or "", f.details.get("instance") or 0)):
                f.job_ranks = job_ranks(comm.endpoints.values())
                f.past = tense.fates(comm.endpoints.values())

    def _clean_up(self, contexts: dict[CommKey, Context], keep: set[Hashable]) -> None:
        """Forget communicators that have ended and about which nothing is open.

        ``keep``: jobs that are told of as they were before their end.
        """
        if not self.all_read:
            return
        lasting = {e.comm.key for e in self.delays.episodes.values()}
        lasting |= {w.comm.key for w in self._late}
        for key, comm in list(self.comms.items()):
            if not comm.over or key in lasting or comm.disagreement is not None:
                continue
            if self.p2p.holds(comm) or self.jobs.same(key.hash) in keep:
                continue
            if not comm.ambiguous and absence.open_slot(comm, contexts[key]) is not None:
                continue
            note(self.untraced, comm, self.p2p.sides, self.now_of, self.options.missing_after)
            self.forget(key)

    # -- clocks and labels -------------------------------------------------

    def now_of(self, source: int) -> int:
        """The moment at which this source's job was judged last."""
        return self._nows.get(self.jobs.same(source), 0)

    def _set_clocks(self, now: int | None) -> None:
        self._contexts.clear()
        if now is not None:
            behind = self.options.silent_after
            self._nows = self.clocks.judge(self.processes.values(), self.jobs, now, behind)
        else:
            self._nows = {}
            for source, p in self.processes.items():
                job = self.jobs.same(source)
                self._nows[job] = max(self._nows.get(job, 0), p.newest)
        self._labels = self.jobs.labels()

    def _context(self, comm: Communicator) -> Context:
        known = self._contexts.get(comm.key)
        if known is None:
            known = self._contexts[comm.key] = self._new_context(comm)
        return known

    def _new_context(self, comm: Communicator) -> Context:
        infos = (e.process.info for e in comm.endpoints.values())
        runs = sorted({info.run_id for info in infos if info is not None})
        return self._make_context(comm.key.hash, runs[0] if runs else "")

    def _context_of(self, source: int) -> Context:
        info = self.processes[source].info
        return self._make_context(source, info.run_id if info else "")

    def _context_of_hash(self, comm_hash: str) -> Context:
        runs = sorted(
            {
                p.info.run_id
                for s, p in self.processes.items()
                if p.info is not None and self.jobs.same(s) == self.jobs.same(comm_hash)
            }
        )
        return self._make_context(comm_hash, runs[0] if runs else "")

    def _make_context(self, member: int | str, run_id: str) -> Context:
        job = self.jobs.same(member)
        return Context(
            options=self._limits(job),
            table=self.table,
            now=self._nows.get(job, 0),
            run_id=run_id,
            job=self._labels.get(job),
        )

    def _limits(self, job: Hashable) -> Options:
        """Who has waited long enough to be noticed, and then given up, is in no doubt."""
        if job not in self._closing.given_up:
            return self.options
        return replace(self.options, error_after=self.options.missing_after)
