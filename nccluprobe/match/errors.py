"""Functions that returned an error."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from nccluprobe.match import model as m
from nccluprobe.match.absence import Context
from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding, required
from nccluprobe.match.options import SECOND
from nccluprobe.match.process import Process, Who
from nccluprobe.match.status import how_ended, left_at, process_facts
from nccluprobe.nccl.api import BY_NAME, Kind
from nccluprobe.nccl.enums import RESULTS

_KEPT = 1000
_GROUP_END = "ncclGroupEnd"
_PENDING = 100_000
#: ncclRemoteError: somebody else is to blame.
_REMOTE = 6
#: Codes of CUDA, the system, NCCL itself and a peer: one rank's fault makes them on others.
_SPREADS = frozenset({1, 2, 3, _REMOTE})
#: Who has an error so much later than the first has an echo of it.
_ECHO = 1 * SECOND
_NOT_FATAL = (Kind.REGISTRATION, Kind.HELPER)


@dataclass
class _Error:
    """The first of equal errors, and all processes that had it."""

    call: m.Call
    process: Process
    endpoint: Endpoint | None
    count: int = 0
    who: dict[Who, int | None] = field(default_factory=dict)  # process -> comm rank
    when: dict[Who, int] = field(default_factory=dict)  # process -> first return

    def add(self, process: Process, endpoint: Endpoint | None, call: m.Call) -> None:
        """Count one more."""
        self.count += 1
        rank = endpoint.comm_rank if endpoint else call.rank
        self.who.setdefault(process.who, rank)
        at = max(call.t, call.t_exit)
        self.when[process.who] = min(at, self.when.get(process.who, at))

    @property
    def first(self) -> int:
        """Its first return on any rank."""
        return min(self.when.values())

    @property
    def spreads(self) -> bool:
        """Whether it may be the echo of what happened on another rank."""
        return self.call.rc in _SPREADS

    def culprits(self) -> tuple[Who, ...]:
        """Where it began: an error that spreads comes to the others later."""
        if self.call.rc == _REMOTE:
            return ()
        return tuple(w for w, t in self.when.items() if not self.spreads or t - self.first < _ECHO)


@dataclass
class Errors:
    """Error returns: one per communicator (or process), function and code."""

    pending: deque[m.Call] = field(default_factory=lambda: deque(maxlen=_PENDING))
    known: dict[tuple[Hashable, str, int], _Error] = field(default_factory=dict)

    def note(self, call: m.Call) -> None:
        """Take a failed call; it is judged when what came with it is known."""
        self.pending.append(call)

    def settle(
        self,
        processes: dict[int, Process],
        endpoints: dict[tuple[int, int], Endpoint],
        of_source: dict[int, list[Endpoint]],
        final: bool,
    ) -> None:
        """Judge failed calls whose surroundings are on record."""
        waiting: list[m.Call] = []
        # A call inside says more than the end of its group.
        explained = {(c.source, c.group) for c in self.pending if c.group and c.api != _GROUP_END}
        for call in sorted(self.pending, key=lambda c: (c.t, c.source)):
            process = processes[call.source]
            if not final and not process.ended and process.through <= call.t_exit:
                waiting.append(call)
                continue
            endpoint = None if call.comm is None else endpoints.get((call.source, call.comm))
            concerned = [endpoint] if endpoint else of_source.get(call.source, [])
            if any(_aborted(call, e) for e in concerned):
                continue
            if call.api == _GROUP_END and (call.source, call.group) in explained:
                continue
            comm_hash = endpoint.info.hash if endpoint else call.uid_hash
            key = (comm_hash or process.who, call.api, call.rc)
            if key not in self.known:
                if len(self.known) >= _KEPT:
                    continue
                self.known[key] = _Error(call, process, endpoint)
            self.known[key].add(process, endpoint, call)
        self.pending.clear()
        self.pending.extend(waiting)

    def findings(
        self,
        context: Callable[[int], Context],
        comm_of: Callable[[tuple[int, int]], Communicator | None],
    ) -> list[Finding]:
        """One finding per communicator (or process), function and code."""
        found: list[Finding] = []
        first: dict[str, tuple[_Error, Finding]] = {}
        for error in sorted(self.known.values(), key=lambda x: (x.call.rc == _REMOTE, x.first)):
            f = _finding(error, context(error.call.source))
            found.append(f)
            if f.severity != "error" or f.comm_uid_hash is None:
                continue
            if error.spreads and (gone := _gone(error, comm_of)) is not None:
                _after(f, gone)
            f.failed = {w: t for w, t in error.when.items() if w not in f.culprits}
            before = first.setdefault(f.comm_uid_hash, (error, f))
            if before[1] is f or not error.spreads or before[0].first > error.first:
                continue
            # Another rank's error, some time before: it is what they failed of.
            if error.call.rc == _REMOTE or not set(f.culprits) <= set(before[0].who):
                f.role, f.downstream_of = "downstream", before[1].id
        return found


def _gone(
    error: _Error, comm_of: Callable[[tuple[int, int]], Communicator | None]
) -> Endpoint | None:
    """A member that had left when the call failed."""
    e = error.endpoint
    comm = None if e is None else comm_of((e.info.source, e.info.id))
    if comm is None:
        return None
    left = []
    for x in comm.endpoints.values():
        at = left_at(x)
        if at is not None and x.process.who not in error.who and at <= error.first:
            left.append((at, x))
    return min(left, key=lambda item: item[0])[1] if left else None


def _after(f: Finding, gone: Endpoint) -> None:
    """The one that left is the cause."""
    f.role, f.culprits = "root_cause", (gone.process.who,)
    facts = process_facts(gone.process)
    how = f"ended the communicator ({gone.end and gone.end.how})"
    if gone.process.ended:
        how = f"ended{how_ended(facts)}"
    f.details["after_end_of"] = {"comm_rank": gone.comm_rank, **facts}
    f.details["confidence"] = "inferred"
    f.details["summary"] += f" Before that, {gone.process.label()} had {how}."


def _aborted(call: m.Call, e: Endpoint) -> bool:
    """Whether the call ended because its communicator was being ended."""
    if e.end is None:
        return False
    if call.t <= e.end.t <= call.t_exit:
        return True
    api = BY_NAME.get(call.api)
    ends = api is not None and api.ends_comm is not None  # be it finalized, and aborted since
    return call.comm is not None and (ends or call.t >= e.end.t)


def _finding(error: _Error, ctx: Context) -> Finding:
    call, e, p = error.call, error.endpoint, error.process
    code = RESULTS.get(call.rc, str(call.rc))
    api = BY_NAME.get(call.api)
    kind = api.kind if api else Kind.HELPER
    fatal = kind not in _NOT_FATAL and not (api and api.ends_comm)
    comm_hash = e.info.hash if e else call.uid_hash
    where = f" of communicator {comm_hash}" if comm_hash else ""
    ranks = sorted({r for r in error.who.values() if r is not None})
    others = len(error.who) - 1
    also = f" and {others} more" if others else ""
    return Finding(
        key=("error", comm_hash or p.who, call.api, call.rc),
        hang_type="nccl_error_exit",
        run_id=ctx.run_id,
        comm_uid_hash=comm_hash,
        comm_seq=None,
        detected_at=ctx.now,
        details={
            **required(
                call.api,
                e.info.nranks if e else call.nranks,
                [],
                "call_returned_error",
                "observed",
                waited_s=0.0,
                lossy=False,
            ),
            "comm_rank": e.comm_rank if e else call.rank,
            "error_comm_ranks": ranks,
            "global_rank": p.rank,
            "call_idx": call.idx,
            "rc": call.rc,
            "result": code,
            "times": error.count,
            "returned_unix_ns": call.t_exit,
            **process_facts(p),
            "summary": (
                f"{call.api}{where} returned {code} ({call.rc}) to {p.label()}{also}"
                + (f", {error.count} times." if error.count > 1 else ".")
            ),
        },
        severity="error" if fatal else "notice",
        role="unknown" if call.rc == _REMOTE or not fatal else "root_cause",
        job=ctx.job,
        since=call.t,
        culprits=error.culprits(),
    )
