"""One communicator across processes: agreement, slot by slot.

Healthy calls are closed by comparing columns; only disagreements and long
waits become objects.  Kept: rows of slots that some observed member has not
entered, and nothing else.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match.disagree import Decision, ZeroCall
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.lessons import Lesson, lesson_of, waited_for_root
from nccluprobe.match.options import Options
from nccluprobe.match.place import place
from nccluprobe.match.realign import move
from nccluprobe.match.signature import (
    UNCOUNTED,
    UNSEEN,
    Signature,
    SignatureTable,
    runs_zero_counts,
)
from nccluprobe.match.sitelog import SiteLog
from nccluprobe.nccl.enums import SEQ_NAMES

_KEPT_LATE = 64
_KEPT_FRESH = 4096
_KEPT_LESSONS = 64
_HISTORY = 128


class CommKey(NamedTuple):
    """Identity across processes (design 5)."""

    hash: str
    instance: int
    nranks: int


@dataclass
class LateSlot:
    """A closed slot that its members entered far apart."""

    comm: Communicator
    slot: int
    seq: int
    sig: int
    times: dict[int, int]  # comm rank -> entry
    #: History had taught before that such a wait is idle.
    learned: bool = False

    @property
    def first(self) -> int:
        """Entry of the first member."""
        return min(self.times.values())

    @property
    def last(self) -> int:
        """Entry of the last member."""
        return max(self.times.values())


@dataclass
class Disagreement:
    """The first slot in which members differ, until it is decided."""

    slot: int
    seq: int
    since: int  # newest entry of the slot


@dataclass
class Communicator:
    """State of one communicator instance."""

    key: CommKey
    endpoints: dict[int, Endpoint] = field(default_factory=dict)
    #: Traces that speak for its members.
    sources: set[int] = field(default_factory=set)
    #: Slots before this agreed (or could not be compared) and are forgotten.
    closed: int = 0
    #: Of these, slots in which all passed count 0: NCCL discards such calls.
    zeros: int = 0
    #: Slots of members that came too late to be compared.
    uncompared: int = 0
    #: Members that are not waited for: their collector is silent, or tracing ended.
    unwatched: set[int] = field(default_factory=set)
    ambiguous: bool = False
    #: Whose numbers the slots are, when no member was seen from the start.
    reference: Endpoint | None = None
    #: Slots are numbered from the reference's first call: NCCL's numbers are not known.
    relative: bool = False
    #: NCCL's counters (SEQ_NAMES) before slot ``closed``; None: not known.
    counters: list[int] | None = None
    #: So many of the newest closed slots held calls that are counted.
    clean: int = 0
    #: Whether a slot has been closed.
    begun: bool = False
    #: Whether slots are kept open until late members have their place.
    holding: bool = False
    #: Some member was attached late.
    has_late: bool = False
    #: Place late members by what there is, and wait for no more.
    press: bool = False
    #: Signature and comm_seq of the newest closed slot.
    last_sig: int | None = None
    last_seq: int | None = None
    disagreement: Disagreement | None = None
    #: Call sites of the newest slots, where the trace tells them.
    sites: SiteLog | None = None
    #: comm rank -> its newest call of count 0 that the others did not make: (slot, sig, idx).
    zero_calls: dict[int, ZeroCall] = field(default_factory=dict)
    #: Signatures of the newest closed slots.
    history: m.Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    #: Long waits, for the delay rule to judge.
    fresh_late: deque[LateSlot] = field(default_factory=lambda: deque(maxlen=_KEPT_FRESH))
    late: deque[LateSlot] = field(default_factory=lambda: deque(maxlen=_KEPT_LATE))
    #: Newest closed slot in which all were in time.
    in_time: int = -1
    #: Waits for a root beyond the threshold that ended well, by kind.
    lessons: dict[Lesson, int] = field(default_factory=dict)
    #: The endpoints, sorted, as a scan asks for them many times; empty: not sorted so far.
    _by_rank: list[tuple[int, Endpoint]] = field(default_factory=list)

    @property
    def name(self) -> str | None:
        """config.commName, if a member told."""
        return next((e.info.name for e in self.endpoints.values() if e.info.name), None)

    @property
    def label(self) -> str:
        """For people: name and hash."""
        return f"{self.key.hash}" + (f" ({self.name})" if self.name else "")

    def members(self) -> list[Endpoint]:
        """Endpoints that can be compared, by rank."""
        if not self._by_rank:
            self._by_rank = sorted(self.endpoints.items())
        unwatched = self.unwatched
        if not unwatched:
            return [e for _, e in self._by_rank if e.slotted]
        return [e for rank, e in self._by_rank if e.slotted and rank not in unwatched]

    @property
    def discards_zero(self) -> bool:
        """Whether its library discards calls of count 0 (2.20.5 and later, or not known)."""
        infos = (e.process.info for e in self.endpoints.values())
        return not any(i is not None and runs_zero_counts(i.nccl_versions) for i in infos)

    @property
    def complete_view(self) -> bool:
        """Whether every member is observed."""
        return not self.unwatched and len(self.members()) == self.key.nranks

    def unobserved(self) -> list[int]:
        """Ranks that no comparable trace speaks for."""
        seen = {e.comm_rank for e in self.members()}
        return [r for r in range(self.key.nranks) if r not in seen]

    @property
    def over(self) -> bool:
        """Whether every member that is known has ended it, or itself."""
        return all(e.end is not None or e.process.ended for e in self.endpoints.values())

    def seq(self, slot: int) -> int:
        """comm_seq of an open slot: zero-count slots are not counted by NCCL."""
        return slot - self.zeros

    # -- agreement ---------------------------------------------------------

    def joined(self, rank: int, e: Endpoint) -> None:
        """Take a member."""
        self._take(rank, e)
        self.sources.add(e.info.source)
        self.has_late = self.has_late or e.late
        if e.info.from_start and not self.begun and self.counters is None:
            self.counters = [0] * len(SEQ_NAMES)

    def _take(self, rank: int, e: Endpoint) -> None:
        self.endpoints[rank] = e
        self._by_rank.clear()

    def replaced(self, rank: int, e: Endpoint) -> None:
        """Another tracer speaks for a member from now on."""
        self._take(rank, e)
        self.sources = {x.info.source for x in self.endpoints.values()}
        self.unwatched.discard(rank)
        self.has_late = self.has_late or e.late
        if self.reference not in self.endpoints.values():
            self.reference = None
        if not any(x.slotted for x in self.endpoints.values()):
            # Nobody is left by whose numbers the slots were counted.
            self.relative = False
            self.counters = None
            self.disagreement = None
            self.zeros = 0
            self.in_time = -1

    def settle(self, table: SignatureTable, options: Options, safe_time: int) -> None:
        """Close every slot that all observed members have entered and agree on."""
        if self.ambiguous or self.disagreement is not None:
            return
        self.holding = self.has_late and place(self, table, self.press)
        while not self.holding and self._advance(table, options, safe_time):
            pass

    def _advance(self, table: SignatureTable, options: Options, safe_time: int) -> bool:
        """Close the next slots; returns whether there may be more to close."""
        members = self.members()
        begun = [e for e in members if e.dropped <= self.closed]
        later = [e.dropped for e in members if e.dropped > self.closed]
        if not begun:
            if not later:
                return False
            self.uncompared += min(later) - self.closed
            self.closed = min(later)
            self.counters = None
            return True
        # Whoever was attached later has passed the slots before.
        n = min([e.entered for e in begun] + later) - self.closed
        if n <= 0:
            return False
        for e in begun:
            e.drop_to(self.closed)
        if not self.complete_view:
            n = self._entered_before(begun, n, safe_time)
        if n <= 0:
            return False
        self._close(begun, n, table, options)
        return bool(later) and self.disagreement is None

    def renumber(self, by: int) -> None:
        """Move all slots: somebody began before the first of them."""
        self.closed += by
        for e in self.endpoints.values():
            if e.slotted:
                e.dropped += by
                e.first_slot = None if e.first_slot is None else e.first_slot + by

    @staticmethod
    def _entered_before(members: list[Endpoint], n: int, safe_time: int) -> int:
        """How many of the next ``n`` slots all entered before ``safe_time``.

        Others may still turn up in traces that are not read so far.
        """
        for e in members:
            t = e.rows.t[:n]
            if t[-1] > safe_time:
                n = int(np.argmax(t > safe_time))
                if n == 0:
                    break
        return n

    def _close(
        self, members: list[Endpoint], n: int, table: SignatureTable, options: Options
    ) -> None:
        first = members[0]
        sig = first.rows.sig[:n]
        t_min = first.rows.t[:n].copy()
        t_max = t_min.copy()
        agree = True
        for e in members[1:]:
            t = e.rows.t[:n]
            np.minimum(t_min, t, out=t_min)
            np.maximum(t_max, t, out=t_max)
            if agree and bool((e.rows.sig[:n] != sig).any()):
                agree = False
        start, agreed = self.closed, n
        if not agree:
            sig, agreed = self._first_difference(members, n, table)
        if table.any_zero and self.discards_zero:
            is_zero = np.fromiter((table.is_zero(s) for s in sig[:agreed].tolist()), bool, agreed)
        else:
            is_zero = None
        self._note_waits(members, sig, t_min, t_max, agreed, is_zero, table, options)
        if agreed:
            self.last_sig = int(sig[agreed - 1])
            self.history = np.concatenate((self.history, sig[:agreed][-_HISTORY:]))[-_HISTORY:]
        if agreed and any(e.rows.site is not None for e in members):
            self.sites = self.sites or SiteLog()
            self.sites.note(members, start, self.seq(start), agreed)
        if is_zero is not None:
            self.zeros += int(is_zero.sum())
        self._count(sig[:agreed], table)
        self.closed = start + agreed
        self.last_seq = self.closed - 1 - self.zeros
        if agreed < n:
            self.disagreement = Disagreement(self.closed, self.seq(self.closed), int(t_max[agreed]))
        for e in self.endpoints.values():
            e.drop_to(self.closed)

    def _count(self, sig: m.Int32, table: SignatureTable) -> None:
        """Keep the counters, and how long ago a call was that is not counted."""
        if len(sig) == 0:
            return
        self.begun = True
        functions = table.functions(sig)
        moved = np.bincount(functions - UNSEEN, minlength=len(SEQ_NAMES) - UNSEEN).tolist()
        if moved[0]:
            self.counters = None  # lost on all sides
        if self.counters is not None:
            self.counters = [c + n for c, n in zip(self.counters, moved[-UNSEEN:], strict=True)]
        if not (moved[0] or moved[UNCOUNTED - UNSEEN]):
            self.clean += len(sig)
            return
        self.clean = len(sig) - 1 - int(np.flatnonzero(functions < 0)[-1])

    @staticmethod
    def _first_difference(
        members: list[Endpoint], n: int, table: SignatureTable
    ) -> tuple[m.Int32, int]:
        """The signatures with holes filled from others, and the first real difference."""
        sigs = np.stack([e.rows.sig[:n] for e in members])
        high = sigs.max(axis=0)
        low = np.where(sigs == m.SIG_LOST, np.iinfo(np.int32).max, sigs).min(axis=0)
        for at in np.flatnonzero(low < high).tolist():
            seen = [s for s in set(sigs[:, at].tolist()) if s != m.SIG_LOST]
            if not all(table.compatible(seen[0], s) for s in seen[1:]):
                return high, int(at)
        return high, n

    def realign(self, decision: Decision) -> None:
        """Go on after a disagreement: shifted ranks are moved to where they belong."""
        d = self.disagreement
        self.disagreement = None
        if d is None:
            return
        for verdict in decision.verdicts:
            for rank in verdict.ranks:
                e = self.endpoints[rank]
                if verdict.shift is not None:
                    move(e, d.slot, verdict.shift)
                elif verdict.swapped:
                    at = d.slot - e.dropped
                    pair = [at, at + verdict.swapped]
                    e.rows.sig[pair] = e.rows.sig[pair[::-1]]
        # The slot itself is judged; when all differences were shifts it agrees now.
        self.closed = d.slot + any(v.shift is None and not v.swapped for v in decision.verdicts)
        for e in self.endpoints.values():
            e.drop_to(self.closed)

    def _note_waits(
        self,
        members: list[Endpoint],
        sig: m.Int32,
        t_min: m.Int64,
        t_max: m.Int64,
        n: int,
        is_zero: np.ndarray[tuple[int], np.dtype[np.bool_]] | None,
        table: SignatureTable,
        options: Options,
    ) -> None:
        long = t_max[:n] - t_min[:n] > options.late_after
        if n and not long[-1]:
            self.in_time = self.closed + n - 1
        if not long.any():
            return
        short = np.flatnonzero(~long)
        if len(short):
            self.in_time = self.closed + int(short[-1])
        for at in np.flatnonzero(long).tolist():
            zeros = self.zeros + (0 if is_zero is None else int(is_zero[:at].sum()))
            slot = self.closed + at
            times = {
                e.comm_rank: int(e.rows.t[at])
                for e in members
                if e.comm_rank is not None and e.rows.sig[at] != m.SIG_LOST
            }
            if len(times) < 2:
                continue
            late = LateSlot(self, slot, slot - zeros, int(sig[at]), times)
            self.fresh_late.append(late)
            self.late.append(late)
            last = late.last
            seen = last - late.first > options.late_after  # a lost call has the time of the next
            for e in members if seen else ():
                e.process.note_wait(late.times.get(e.comm_rank or 0), last)
            self._learn(table[late.sig], late, options)

    def _learn(self, s: Signature, late: LateSlot, options: Options) -> None:
        key = lesson_of(s)
        taught = self.lessons.get(key, 0)
        late.learned = taught >= options.idle_lessons
        if not waited_for_root(s, late.times, options.missing_after):
            return
        self.lessons[key] = taught + 1
        if len(self.lessons) > _KEPT_LESSONS:
            del self.lessons[next(iter(self.lessons))]
