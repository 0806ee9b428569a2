"""What has been fed: processes, communicators and their open slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from nccluprobe.match import model as m
from nccluprobe.match import unseen
from nccluprobe.match.children import CHILD_CALLS, Children
from nccluprobe.match.communicator import CommKey, Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.errors import Errors
from nccluprobe.match.inits import GROW, Inits
from nccluprobe.match.jobs import Jobs
from nccluprobe.match.options import Options
from nccluprobe.match.p2p import P2P
from nccluprobe.match.pending import Uses
from nccluprobe.match.process import Process
from nccluprobe.match.signature import SignatureTable
from nccluprobe.match.standing import Standing
from nccluprobe.match.tracers import Tracers
from nccluprobe.match.untraced import Untraced


class State:
    """Everything the matcher knows; ``feed`` keeps it up to date."""

    def __init__(self, options: Options | None = None, table: SignatureTable | None = None) -> None:
        self.options = options or Options()
        self.table = table or SignatureTable()
        self.processes: dict[int, Process] = {}
        self.endpoints: dict[tuple[int, int], Endpoint] = {}
        self.comms: dict[CommKey, Communicator] = {}
        self.jobs = Jobs()
        self.errors = Errors()
        self.p2p = P2P(self.options, self.table)
        self.children = Children()
        self.standing = Standing()
        self.tracers = Tracers()
        self.calls = 0
        self.comms_seen = 0
        #: Of communicators that are over, whose members had waited long before that.
        self.untraced: dict[CommKey, Untraced] = {}
        #: Calls whose communicator has no line.
        self.orphans = 0
        self._home: dict[tuple[int, int], Communicator] = {}
        self.of_source: dict[int, list[Endpoint]] = {}
        self.inits = Inits(
            Uses(self.comms, self.endpoints, self.of_source, self.p2p.sides, self.children)
        )
        self._unread: dict[int, None] = {}
        self._touched: dict[CommKey, None] = {}
        self._take: dict[type[Any], Callable[[Any], None]] = {
            m.SourceOpened: self._source,
            m.Progress: self._progress,
            m.ProcessInfo: self._process,
            m.ClockState: self._clock,
            m.CommInfo: self._comm,
            m.CommEnd: self._comm_end,
            m.Batch: self._batch,
            m.P2PBatch: self._p2p,
            m.Completed: self._completed,
            m.GroupEnds: self._group_ends,
            m.Activity: self._activity,
            m.Call: self._call,
            m.Enter: self._enter,
            m.Returned: self._returned,
            m.Cut: self._cut,
            m.Coverage: self._coverage,
            m.Accounted: self._accounted,
            m.ProcessEnd: self._process_end,
            m.Phase: self._phase,
            m.Looked: self._looked,
        }

    # -- feeding -----------------------------------------------------------

    def feed(self, items: Iterable[m.Item]) -> None:
        """Take items of one source, in file order."""
        take = self._take
        for item in items:
            take[type(item)](item)

    def _of(self, source: int) -> Process:
        found = self.processes.get(source)
        if found is None:
            found = self.processes[source] = Process(source, f"source {source}")
            self._unread[source] = None
        return found

    def _source(self, s: m.SourceOpened) -> None:
        self._of(s.source).name = s.name

    def _progress(self, p: m.Progress) -> None:
        process = self._of(p.source)
        process.read_through = max(process.read_through, p.through)
        process.caught_up = p.caught_up
        if p.caught_up:
            self._unread.pop(p.source, None)
        else:
            self._unread[p.source] = None
        queued = any(e.queued for e in self.of_source.get(p.source, ()))
        queued = queued or self.p2p.queued(p.source)
        process.trim_groups(queued)

    def _process(self, info: m.ProcessInfo) -> None:
        self._of(info.source).tell(info)
        self.jobs.add(info.source, None, 0)

    def _clock(self, c: m.ClockState) -> None:
        self._of(c.source).bound = c.bound

    def _comm(self, info: m.CommInfo) -> None:
        process = self._of(info.source)
        at = (info.source, info.id)
        self.jobs.add(info.source, info.hash, info.t)
        endpoint = self.endpoints.get(at)
        if endpoint is None:
            endpoint = self.endpoints[at] = Endpoint(process, info)
            self.of_source.setdefault(info.source, []).append(endpoint)
        else:
            known = endpoint.info
            if info.comm_rank is None and known.comm_rank is not None:
                info = replace(info, comm_rank=known.comm_rank, nranks=known.nranks)
            endpoint.tell(info)
            if endpoint.before is None and not endpoint.next_ord:
                endpoint.before = info.seqs
        if at not in self._home:
            self._join(at, endpoint)

    def _join(self, at: tuple[int, int], e: Endpoint) -> None:
        info = e.info
        if info.hash is None or info.comm_rank is None or info.nranks is None:
            self.children.wait(at, e)
            return
        if not 0 <= info.comm_rank < info.nranks <= m.MAX_NRANKS:
            return
        key = CommKey(info.hash, info.instance, info.nranks)
        comm = self.comms.get(key)
        if comm is None:
            comm = self.comms[key] = Communicator(key)
            self.comms_seen += 1
        other = comm.endpoints.get(info.comm_rank)
        if other is not None and other is not e:
            if other.process.info and other.process.who == e.process.who:
                self.tracers.wait(key, info.comm_rank, e)
                return
            comm.ambiguous = True
        if info.source in comm.sources:
            e.process.several_ranks = True
        comm.joined(info.comm_rank, e)
        self._home[at] = comm
        self.children.changed = True
        self._touched[key] = None

    def _accounted(self, a: m.Accounted) -> None:
        self._of(a.source).losses.told(a)

    def _batch(self, b: m.Batch) -> None:
        self.calls += len(b)
        e = self.endpoints.get((b.source, b.comm))
        if e is None or e.info.counted:
            self._of(b.source).losses.take(b.comm, b.idx, b.t_enter)
        if e is None:
            self.orphans += len(b)
            return
        if e.info.nranks == 1 or not len(b):
            return
        e.thread = int(b.thread[-1])
        e.process.last_call = max(e.process.last_call, int(b.t_enter[-1]))
        e.take(b)
        self._touch(e)

    def _touch(self, e: Endpoint) -> None:
        comm = self._home.get((e.info.source, e.info.id))
        if comm is None or comm.ambiguous:
            e.limit()
        else:
            self._touched[comm.key] = None

    def _p2p(self, b: m.P2PBatch) -> None:
        self.calls += len(b)
        e = self.endpoints.get((b.source, b.comm))
        if e is None or e.info.counted:
            self._of(b.source).losses.take(b.comm, b.idx, b.t_enter)
        if e is None:
            self.orphans += len(b)
            return
        self.p2p.take(e, b)
        if e.process.sees_completion:
            e.post(b)
        if len(b):
            e.thread = int(b.thread[-1])
            e.process.last_call = max(e.process.last_call, int(b.t_enter[-1]))

    def _completed(self, c: m.Completed) -> None:
        e = self.endpoints.get((c.source, c.comm))
        if e is not None:
            e.complete(c)
            self.p2p.completed(e, c)

    def _group_ends(self, g: m.GroupEnds) -> None:
        closed = self._of(g.source).note_group_ends(g)
        self.p2p.groups_ended(g.source, closed)
        for e in self.of_source.get(g.source, ()):
            if closed:
                e.groups_closed(closed)
            if e.queued:
                e.drain()
                self._touch(e)

    def _activity(self, a: m.Activity) -> None:
        self._of(a.source).note_activity(a, self.options.late_after)

    def _call(self, c: m.Call) -> None:
        process = self._of(c.source)
        self._lifecycle(c, process)
        if m.not_run(c.rc):
            self.errors.note(c)
            if m.had_waited(c.t, c.t_exit):
                process.note_broken_off(c)
            if c.api == "ncclGroupEnd" and not c.group:
                for e in self.of_source.get(c.source, ()):
                    e.unseen_group_failed(c.thread, c.t)

    def _lifecycle(self, call: m.Call | m.Enter, process: Process) -> None:
        if call.comm is not None and call.idx is not None:
            process.losses.one(call.comm, call.idx, call.t)
        if call.comm is not None and call.api in CHILD_CALLS:
            self.children.note(call)
            e = self.endpoints.get((call.source, call.comm))
            if call.api == GROW and e is not None:
                self.inits.note_old(call, e.info.nranks or 0)
        elif call.uid_hash is not None:
            self.inits.note(call, process)
            self.jobs.add(call.source, call.uid_hash, call.t)
        elif call.api == "ncclCommInitAll" and isinstance(call, m.Enter):
            self.inits.note_all(call, process)

    def _enter(self, e: m.Enter) -> None:
        process = self._of(e.source)
        process.note_enter(e)
        self._lifecycle(e, process)
        if e.api == "ncclGroupEnd":
            self.p2p.groups_ended(e.source, {})
            for endpoint in self.of_source.get(e.source, ()):
                if endpoint.queued:
                    endpoint.drain()
                    self._touch(endpoint)
        elif e.comm is not None and e.sig is not None:
            endpoint_ = self.endpoints.get((e.source, e.comm))
            if endpoint_ is not None and e.send is not None:
                self.p2p.take_inside(endpoint_, e)
            elif endpoint_ is not None and endpoint_.info.nranks != 1:
                endpoint_.thread = e.thread
                process.last_call = max(process.last_call, e.t)
                endpoint_.take_inside(e)
                endpoint_.tail.add_inside(e)
                self._touch(endpoint_)

    def _returned(self, r: m.Returned) -> None:
        inside = self._of(r.source).inside
        for call in r.calls:
            inside.pop(call, None)

    def _cut(self, c: m.Cut) -> None:
        process = self._of(c.source)
        for call in c.calls:
            self.calls += call.ord is not None
            process.note_cut(call)

    def _coverage(self, c: m.Coverage) -> None:
        process = self._of(c.source)
        process.note_coverage(c)
        if c.in_flight == 0 and process.inside:
            # The records of their returns were lost.
            process.inside = {k: v for k, v in process.inside.items() if v.t >= c.through}
        self.p2p.covered(c.source, c.through)
        for e in self.of_source.get(c.source, ()):
            if e.queued and e.covered(c.through):
                self._touch(e)

    def _comm_end(self, end: m.CommEnd) -> None:
        if (e := self.endpoints.get((end.source, end.comm))) is None:
            return
        # Who finalizes it, and aborts it then, has broken off what the first had to wait for.
        if e.end is None or (e.end.orderly and not end.orderly):
            e.end = end
            self._touch(e)
            if not end.orderly:
                e.process.note_abort(end.t)

    def _process_end(self, end: m.ProcessEnd) -> None:
        self._of(end.source).note_end(end)

    def _phase(self, p: m.Phase) -> None:
        self._of(p.source).phases.note(p)

    def _looked(self, look: m.Looked) -> None:
        self._of(look.source).snapshot = True
        self.standing.note(look)
        for comm in look.comms:
            self.jobs.look(look.key, comm.hash, look.t)

    def change_speakers(self) -> None:
        """Where several tracers saw one process, hear the one that knows."""
        for key in self.tracers.take_over(
            self.comms, self._home, lambda s: s not in self._unread, self.options.silent_after
        ):
            self._touched[key] = None
        unseen.settle(self.processes.values(), self.jobs.same)

    def settle(self) -> None:
        """Close what can be closed; cheap, to be called after every round of reading."""
        self.children.resolve(self._home.get, self._join)
        self.change_speakers()
        safe = self.safe_time()
        self.p2p.settle(self.comms, self._home.get, safe)
        touched, self._touched = self._touched, {}
        for key in touched:
            comm = self.comms.get(key)
            if comm is None:
                continue
            comm.settle(self.table, self.options, safe)
            if comm.holding or (
                not comm.complete_view and any(e.entered > comm.closed for e in comm.members())
            ):
                self._touched[key] = None

    def comm_of(self, at: tuple[int, int]) -> Communicator | None:
        """The communicator that an endpoint (source, id) belongs to."""
        return self._home.get(at)

    @property
    def all_read(self) -> bool:
        """Whether every source that is known has been read as far as it goes."""
        return not self._unread

    def safe_time(self) -> int:
        """Before this, every trace has been read."""
        if self._unread:
            through = min((self.processes[s].read_through for s in self._unread), default=0)
        else:
            through = max((p.newest for p in self.processes.values()), default=0)
        return through - self.options.silent_after

    def forget(self, key: CommKey) -> None:
        """Drop a communicator that has ended."""
        comm = self.comms.pop(key)
        for e in comm.endpoints.values():
            at = (e.info.source, e.info.id)
            self.endpoints.pop(at, None)
            e.process.losses.forget(e.info.id, e.process.through)
            self._home.pop(at, None)
            self.p2p.forget(at)
            others = self.of_source.get(e.info.source)
            if others is not None and e in others:
                others.remove(e)

    def not_judged(self) -> dict[str, int]:
        """Why endpoints could not be compared -> how many."""
        found: dict[str, int] = {}
        for at, e in self.endpoints.items():
            if e.info.nranks == 1:
                continue
            comm = self.comm_of(at)
            if e.info.hash is None:
                why = "its hash is not known"
            elif comm is None and self.tracers.spoken_for(e):
                continue  # another tracer of the same process tells more
            elif comm is None:
                why = "its rank in it is not known"
            elif comm.ambiguous:
                why = "two processes have the same rank in it"
            elif not e.slotted:
                why = "attached late, its place among the calls of the others is not known"
                if e.placement is not None:
                    why += f" ({e.placement.why})"
            elif e.guessed:
                why = "attached late, and its calls fit in several ways: its place is a guess"
            else:
                continue
            found[why] = found.get(why, 0) + 1
        return found
