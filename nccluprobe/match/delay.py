"""Ranks that came late, by episode.

A rank is late when it came last by more than the threshold *and* was silent on
all its communicators that long by its own clock.  A rank that could not come
because it waited itself for a late one is not late.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, NamedTuple

from nccluprobe.match.absence import Context
from nccluprobe.match.children import Children
from nccluprobe.match.communicator import CommKey, Communicator, LateSlot
from nccluprobe.match.details import on_communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding, seconds
from nccluprobe.match.lessons import waited_for_root
from nccluprobe.match.names import capital, in_job, named
from nccluprobe.match.options import SECOND, Options
from nccluprobe.match.p2p_pair import At
from nccluprobe.match.phases import of_process
from nccluprobe.match.process import Process
from nccluprobe.match.signature import SignatureTable
from nccluprobe.match.status import coverage_of, ended_abruptly, rank_status
from nccluprobe.plural import verb

_IDLE = (
    "cause not decidable: the others could do nothing before the root had come, and it may have "
    "had nothing to send (--idle-ok declares that this is normal)"
)
#: Of those who came late, so many are remembered from one scan to the next.
_KEPT = 256


@dataclass
class Episode:
    """A rank that is late in slot after slot."""

    comm: Communicator
    rank: int
    first: LateSlot
    last_slot: int
    worst: int
    bound: int
    in_time: list[int]
    #: Others waited for more than data of it, or it was held up: it did not wait for work.
    hindered: bool = False
    #: Who came late just before it: it may have waited for that one.
    behind: Process | None = None
    slots: int = 1
    closed: bool = False


class Late(NamedTuple):
    """A rank that came late to a slot."""

    wait: LateSlot
    endpoint: Endpoint
    in_time: list[int]
    spread: int
    bound: int
    #: Its absence was reported before it came.
    told: bool
    silence: tuple[int, int]

    @property
    def came(self) -> int:
        return self.silence[1]


@dataclass
class Delays:
    """All episodes that last, and the long waits still to be judged."""

    episodes: dict[tuple[CommKey, int], Episode] = field(default_factory=dict)
    #: Episodes that were followed by another of the same rank before a scan.
    ended: list[Episode] = field(default_factory=list)
    #: Who came late, and when, newest last.
    came: list[tuple[int, Process]] = field(default_factory=list)

    def judge(
        self,
        waits: list[LateSlot],
        missed: dict[Hashable, list[int]],
        options: Options,
        hindered: Callable[[Late], bool],
    ) -> None:
        """Judge long waits, oldest first.

        ``missed``: process -> times at which its absence was reported: a wait
        that was an absence finding is not a delay finding as well.  ``hindered``: the function of
        that name.
        """
        all_late: list[Late] = []
        for wait in sorted(waits, key=lambda w: (w.first, w.comm.key, w.slot)):
            found = late_ranks(wait, options.late_after)
            if found is None:
                continue
            in_time, late = found
            for rank in late:
                if (one := self._judge_rank(wait, rank, in_time, missed, options)) is not None:
                    all_late.append(one)
        came = [*self.came, *((x.came, x.endpoint.process) for x in all_late)]
        came.sort(key=lambda x: x[0])
        for one in all_late:
            if not one.told:
                self._note(one, hindered(one), self._just_before(one, came))
        self.came = came[-_KEPT:]

    @staticmethod
    def _just_before(late: Late, known: list[tuple[int, Process]]) -> Process | None:
        """Who else came late, and just before it: what it set free may have held this one."""
        mine = late.endpoint.process
        first = bisect_left(known, late.came - SECOND, key=lambda x: x[0])
        for came, p in islice(known, first, None):
            if came >= late.came:
                break
            bound = clock_bound(p, mine)
            if p is not mine and bound is not None and bound < late.came - came:
                return p
        return None

    def _judge_rank(
        self,
        wait: LateSlot,
        rank: int,
        in_time: list[int],
        missed: dict[Hashable, list[int]],
        options: Options,
    ) -> Late | None:
        comm = wait.comm
        e = comm.endpoints.get(rank)
        last = max(in_time, key=lambda r: wait.times[r])
        other = comm.endpoints.get(last)
        if e is None or other is None or e.guessed or other.guessed:
            return None
        t = wait.times[rank]
        spread = t - wait.times[last]
        bound = clock_bound(e.process, other.process)
        if bound is None or 2 * bound > spread:
            return None
        silence = e.process.silence_before(t, t - spread)
        if silence is None or silence[1] - silence[0] <= options.late_after:
            return None
        excused = of_process(e.process, silence[0], silence[1], options)
        if silence[1] - max(silence[0], excused) <= options.late_after:
            return None
        if waited_itself(e, silence, options.late_after):
            return None
        told = any(silence[0] <= at <= silence[1] for at in missed.get(e.process.who, ()))
        return Late(wait, e, in_time, spread, bound, told, silence)

    def _note(self, late: Late, hindered: bool, behind: Process | None) -> None:
        wait, spread = late.wait, late.spread
        rank = late.endpoint.comm_rank
        assert rank is not None
        key = (wait.comm.key, rank)
        episode = self.episodes.get(key)
        if episode is not None and not episode.closed:
            between = _in_time_between(wait.comm, episode.last_slot, wait.slot)
            if not between:
                episode.slots += 1
                episode.last_slot = wait.slot
                episode.worst = max(episode.worst, spread)
                return
            episode.closed = True
        if episode is not None:
            self.ended.append(episode)
        self.episodes[key] = Episode(
            wait.comm, rank, wait, wait.slot, spread, late.bound, late.in_time, hindered, behind
        )

    def findings(self, ctx_of: dict[CommKey, Context]) -> list[Finding]:
        """Findings of all episodes; those that have ended come as resolved, once."""
        found = []
        ended, self.ended = self.ended, []
        for e in [*ended, *self.episodes.values()]:
            ctx = ctx_of.get(e.comm.key)
            if ctx is None:
                continue
            if e.comm.in_time > e.last_slot or (e.comm.over and not _was_the_end(e)):
                e.closed = True
            f = _finding(e, ctx)
            found.append(f.resolved(ctx.now) if e.closed else f)
        self.episodes = {k: e for k, e in self.episodes.items() if not e.closed}
        return found


def _in_time_between(comm: Communicator, before: int, after: int) -> bool:
    """Whether a slot between two late ones was entered in time by all."""
    late = {w.slot for w in comm.late}
    return any(slot not in late for slot in range(before + 1, min(after, before + 300)))


def late_ranks(wait: LateSlot, late_after: int) -> tuple[list[int], list[int]] | None:
    """(ranks in time, late ranks), split at the largest gap; None when no one is late."""
    order = sorted(wait.times, key=lambda r: (wait.times[r], r))
    gaps = [wait.times[b] - wait.times[a] for a, b in pairwise(order)]
    largest = max(gaps)
    if largest <= late_after:
        return None
    at = gaps.index(largest) + 1
    in_time, late = order[:at], order[at:]
    # One rank far ahead of all others is not the others' fault.
    if len(late) * 2 > len(order):
        return None
    return in_time, late


def clock_bound(a: Process, b: Process) -> int | None:
    """How far the clocks of two processes may be apart; None: not known."""
    if a.boot_id == b.boot_id:
        return 0
    if a.bound is None or b.bound is None:
        return None
    return a.bound + b.bound


def hindered(
    late: Late,
    table: SignatureTable,
    of_source: Mapping[int, Sequence[Endpoint]],
    home: Mapping[At, Communicator],
    children: Children,
    least: int,
) -> bool:
    """Whether, where a slot was a long wait for its root, a silence was no wait for work.

    Who came late was held up that long (``least``, ns), or all other members of a communicator
    waited that long for it to come to a split: nobody is kept there for want of data.
    ``of_source``: endpoints by source; ``home``: source and communicator's id -> communicator.
    """
    if not waited_for_root(table[late.wait.sig], late.wait.times, least):
        return False
    p, (start, end) = late.endpoint.process, late.silence
    if p.held_up.longest(start, end) > least:
        return True
    for e in of_source.get(p.source, ()):
        comm = home.get((e.info.source, e.info.id))
        waits = [] if comm is None else children.others_inside(comm, e, end)
        bounds = [clock_bound(p, other) for other, _ in waits]
        if waits and None not in bounds:
            came = max(t + (bound or 0) for (_, t), bound in zip(waits, bounds, strict=True))
            if end - max(start, came) > least:
                return True
    return False


def waited_itself(e: Endpoint, silence: tuple[int, int], late_after: int) -> bool:
    """Whether its silence was a wait for somebody who was late elsewhere, and not much longer.

    By another host's clock the late one may have come just after what it set free.
    """
    start, end = silence
    since = max(start, end - late_after - 1)
    clocks = 2 * (e.process.bound or 0)
    return any(
        since < last <= end if came is None else came <= start and since < last <= end + clocks
        for came, last in e.process.waits.values()
    )


def _gave_up(e: Endpoint, until: int) -> bool:
    """Whether a member aborted the communicator, or crashed, before the late one came."""
    end = e.process.end
    aborted = e.end is not None and not e.end.orderly and e.end.t <= until
    return aborted or (end is not None and ended_abruptly(e.process) and end.t <= until)


def _broken_off(e: Episode) -> bool:
    """Whether all that waited had given up when the late one came."""
    came = e.first.times[e.rank]
    return all(_gave_up(e.comm.endpoints[r], came) for r in e.in_time)


def _was_the_end(e: Episode) -> bool:
    """Whether the job went down with it: nothing has gone on since."""
    return _broken_off(e) and e.comm.endpoints[e.rank].process.ended


def _finding(e: Episode, ctx: Context) -> Finding:
    limit = ctx.options.silent_after
    comm, wait = e.comm, e.first
    endpoint = comm.endpoints[e.rank]
    signature = ctx.table[wait.sig]
    status = rank_status(comm, e.rank, endpoint, ctx.now, limit, "rank_late")
    broken_off = _broken_off(e)
    gave_up = f", and {verb(len(e.in_time), 'has')} given up" if broken_off else ""
    details: dict[str, Any] = {
        **on_communicator(
            comm,
            signature.api,
            sorted(e.in_time),
            "rank_late",
            "observed" if endpoint.base == "exact" else "reduced",
            waited_s=seconds(wait.times[e.rank] - wait.first),
            lossy=bool(endpoint.process.lost),
        ),
        "late_comm_ranks": [e.rank],
        "late_rank_status": [status],
        "spread_s": seconds(wait.times[e.rank] - max(wait.times[r] for r in e.in_time)),
        "worst_spread_s": seconds(e.worst),
        "clock_bound_s": seconds(e.bound),
        "late_slots": e.slots,
        "signature": signature.text(),
        "first_entered_unix_ns": wait.first,
        "summary": (
            f"{capital(named([endpoint]))}, {endpoint.process.place()}, came "
            f"{seconds(e.worst):.1f} s late to {signature.api} #{wait.seq} of communicator "
            f"{comm.label}; "
            f"{in_job(comm.endpoints[r] for r in e.in_time)} waited{gave_up}."
        ),
    }
    idle = waited_for_root(signature, wait.times, ctx.options.late_after) and not e.hindered
    if idle:
        details |= {"idle": "undecided", "confidence": "none", "note": _IDLE}
    elif e.behind is not None:
        details |= {
            "confidence": "none",
            "note": f"{e.behind.label()} was late, too, and came just before: this rank may have "
            "waited for that one",
        }
    unsure = idle or e.behind is not None
    return Finding(
        key=("delay", *comm.key, e.rank, wait.slot),
        hang_type="delayed_collective_enter",
        run_id=ctx.run_id,
        comm_uid_hash=comm.key.hash,
        comm_seq=wait.seq,
        detected_at=ctx.now,
        details=details,
        # What the others have broken off does not go on when the late one comes.
        severity="error" if broken_off and not unsure else "notice",
        role="unknown" if unsure else "root_cause",
        job=ctx.job,
        coverage=coverage_of(comm, ctx.now, limit),
        since=wait.first,
        culprits=() if unsure else (endpoint.process.who,),
        waiters=tuple(comm.endpoints[r].process.who for r in e.in_time),
    )
