"""Functions that returned an error."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from nccluprobe.match import model as m
from nccluprobe.match.absence import Context
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.process import Process, Who
from nccluprobe.match.status import process_facts
from nccluprobe.nccl.api import BY_NAME, Kind
from nccluprobe.nccl.enums import RESULTS

_KEPT = 1000
_GROUP_END = "ncclGroupEnd"
_PENDING = 100_000
#: ncclRemoteError: somebody else is to blame.
_REMOTE = 6
_NOT_FATAL = (Kind.REGISTRATION, Kind.HELPER)


@dataclass
class _Error:
    """The first of equal errors, and all processes that had it."""

    call: m.Call
    process: Process
    endpoint: Endpoint | None
    count: int = 0
    who: dict[Who, int | None] = field(default_factory=dict)  # process -> comm rank

    def add(self, process: Process, endpoint: Endpoint | None, call: m.Call) -> None:
        """Count one more."""
        self.count += 1
        rank = endpoint.comm_rank if endpoint else call.rank
        self.who.setdefault(process.who, rank)


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

    def findings(self, context: Callable[[int], Context]) -> list[Finding]:
        """One finding per communicator (or process), function and code."""
        return [_finding(error, context(error.call.source)) for error in self.known.values()]


def _aborted(call: m.Call, e: Endpoint) -> bool:
    """Whether the call ended because its communicator was being ended."""
    if e.end is None:
        return False
    overlaps = call.t <= e.end.t <= call.t_exit
    return overlaps or (call.comm is not None and call.t >= e.end.t)


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
            "api": call.api,
            "expected_nranks": e.info.nranks if e else call.nranks,
            "entered_comm_ranks": [],
            "missing_comm_ranks": [],
            "missing_rank_status": [],
            "waited_s": 0.0,
            "reason": "call_returned_error",
            "confidence": "observed",
            "trace_event_loss_possible": False,
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
        culprits=tuple(error.who),
    )
